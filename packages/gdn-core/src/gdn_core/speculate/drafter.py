# SPDX-License-Identifier: Apache-2.0
"""What proposes tokens: the interface, the context that a drafter keeps, and drafts looked up in the text itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Drafter(Protocol):
    """Propose the next tokens of requests, a whole block at once.

    A request is known by its slot. After each pass of the target the drafter gets the tokens that went in with the
    target's hidden states, then how many of its tokens stay: those of rejected drafts are to be forgotten.
    """

    def start(self, slot: int) -> None:
        """Forget the slot's last request: a new one has it now."""
        ...

    def extend(self, slot: int, tokens: Sequence[int], hidden_states: Tensor) -> None:
        """Take over tokens that the target has seen, and its hidden states [len(tokens), hidden] for them."""
        ...

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of the request and forget the others."""
        ...

    def propose(self, slots: Sequence[int], last_tokens: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """Return up to ``limits[i]`` tokens to follow ``last_tokens[i]``, which the target has not seen yet."""
        ...


class ContextCache:
    """Keep a growing tensor for each slot, for a drafter that attends to what the target computed.

    Args:
        width: size of the last dimension.
        dtype: of what is kept.
        device: where it is kept.

    Example:
        >>> import torch
        >>> from gdn_core.speculate import ContextCache
        >>> cache = ContextCache(8)
        >>> cache.extend(3, torch.ones(5, 8))
        >>> cache.truncate(3, 2)
        >>> cache.length(3), cache.get(3).shape
        (2, torch.Size([2, 8]))
    """

    def __init__(
        self, width: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        self._empty = torch.empty(0, width, dtype=dtype, device=device)
        self._values: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    def length(self, slot: int) -> int:
        """Return how many entries a slot has."""
        return self._lengths.get(slot, 0)

    def get(self, slot: int) -> Tensor:
        """Return the entries of a slot, [length, width], as a view."""
        return self._values.get(slot, self._empty)[: self.length(slot)]

    def extend(self, slot: int, values: Tensor) -> None:
        """Append entries [n, width]."""
        start = self.length(slot)
        end = start + len(values)
        held = self._values.get(slot, self._empty)
        if end > len(held):
            grown = held.new_empty(max(2 * len(held), end, 16), held.shape[1])
            grown[:start] = held[:start]
            self._values[slot] = held = grown
        held[start:end] = values
        self._lengths[slot] = end

    def truncate(self, slot: int, length: int) -> None:
        """Drop all entries from ``length`` on."""
        if not 0 <= length <= self.length(slot):
            raise ValueError(f"length: expected a value in [0, {self.length(slot)}], got {length}")
        self._lengths[slot] = length


class PromptLookup:
    """Propose what followed the last tokens where they stood before in the same text.

    Costs nothing and pays off where text repeats: code that is edited, documents that are quoted.

    Args:
        most: longest sequence of last tokens to look for.
        least: shortest one.

    Example:
        >>> from gdn_core.speculate import PromptLookup
        >>> drafter = PromptLookup()
        >>> drafter.extend(0, [5, 6, 7, 8, 5], None)
        >>> drafter.propose([0], [6], [2])
        [[7, 8]]
    """

    def __init__(self, most: int = 3, least: int = 2) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"least: expected a value in [1, {most}], got {least}")
        self._most, self._least = most, least
        self._texts: dict[int, list[int]] = {}

    def start(self, slot: int) -> None:
        """Forget the slot's last request."""
        self._texts[slot] = []

    def extend(self, slot: int, tokens: Sequence[int], hidden_states: Tensor | None) -> None:
        """Take over tokens; hidden states do not matter here."""
        self._texts.setdefault(slot, []).extend(tokens)

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Keep the first ``num_tokens``."""
        del self._texts[slot][num_tokens:]

    def propose(self, slots: Sequence[int], last_tokens: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """Look the last tokens up, the longest sequence first and the latest place first."""
        return [
            self._follow([*self._texts[slot], last], limit)
            for slot, last, limit in zip(slots, last_tokens, limits, strict=True)
        ]

    def _follow(self, text: list[int], limit: int) -> list[int]:
        for size in range(self._most, self._least - 1, -1):
            last = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == last:
                    return text[start + size : start + size + limit]
        return []
