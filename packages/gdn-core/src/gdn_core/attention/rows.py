# SPDX-License-Identifier: Apache-2.0
"""Single rows: what their properties make of them, and how they come in as sequences or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._validate import MAX_SPEC_COLUMNS, describe, tensor
from .groups import PREFILL, REPLAY, STEP

Integers = Sequence[int] | Tensor
Booleans = Sequence[bool] | Tensor


class Row(NamedTuple):
    number: int
    length: int
    slots: list[int]
    has_initial_state: bool
    is_speculative: bool
    accepted: int
    is_prefill: bool | None

    @property
    def is_padding(self) -> bool:
        return self.slots[0] < 0

    def check(self, columns: int | None) -> None:
        """Raise where the row's properties contradict each other; ``columns`` is None for the replay form."""
        if self.is_padding:
            return
        if not self.is_speculative:
            if self.is_prefill is False and self.length > 1:
                raise ValueError(
                    f"is_prefill: expected True for row {self.number}, which has {self.length} tokens and is not "
                    "speculative, got False"
                )
            if self.accepted > 1 or self.accepted < 0:
                raise ValueError(
                    f"num_accepted_tokens: expected 1 for row {self.number}, which is not speculative, got "
                    f"{self.accepted}; GDNStateCache.commit() ends the speculation of a request"
                )
            return
        most = MAX_SPEC_COLUMNS if columns is None else columns
        if not self.has_initial_state:
            raise ValueError(f"is_speculative: expected False for row {self.number}, which has no initial state")
        if self.is_prefill:
            raise ValueError(f"is_prefill: expected False for row {self.number}, which is speculative")
        if self.length > most:
            raise ValueError(
                f"query_start_loc: expected at most {most} tokens in row {self.number}, which is speculative, got "
                f"{self.length}"
            )
        if not 0 <= self.accepted <= most:
            raise ValueError(
                f"num_accepted_tokens: expected a value in [0, {most}] for row {self.number}, got {self.accepted}"
            )

    def kind(self, is_replay: bool) -> int:
        """Return what happens to the tokens of the row; those of padding become 0 in any kind of step."""
        if self.is_padding or self.is_speculative:
            return REPLAY if is_replay else STEP
        is_prefill = self.is_prefill
        if is_prefill is None:
            is_prefill = self.length > 1
        # A row without an initial state must not read its slot, as a step would.
        return PREFILL if is_prefill or not self.has_initial_state else STEP


def integers(name: str, values: Integers, count: int | None) -> list[int]:
    if isinstance(values, Tensor):
        tensor(name, values, [count if count is not None else "N+1"], (torch.int32, torch.int64))
        return [int(value) for value in values.tolist()]
    if not isinstance(values, Sequence) or not all(isinstance(value, int) for value in values):
        raise TypeError(f"{name}: expected integers, got {describe(values)}")
    if count is not None and len(values) != count:
        raise ValueError(f"{name}: expected {count} values, one a row, got {len(values)}")
    return list(values)


def flags(name: str, values: Booleans | None, count: int, default: bool) -> list[bool]:
    if values is None:
        return [default] * count
    if isinstance(values, Tensor):
        tensor(name, values, [count], (torch.bool,))
        return [bool(value) for value in values.tolist()]
    if not isinstance(values, Sequence) or not all(isinstance(value, bool) for value in values):
        raise TypeError(f"{name}: expected booleans, got {describe(values)}")
    if len(values) != count:
        raise ValueError(f"{name}: expected {count} values, one a row, got {len(values)}")
    return list(values)


def is_one_slot(slots: Integers | Sequence[Sequence[int]]) -> bool:
    if isinstance(slots, Tensor):
        return slots.dim() == 1
    return not any(isinstance(row, (Sequence, Tensor)) for row in slots)


def slot_table(slots: Integers | Sequence[Sequence[int]], count: int, null_slot: int | None) -> Tensor:
    """Return the slots as a table [N, S] on the host, null slots as -1."""
    if not isinstance(slots, Tensor):
        try:
            slots = torch.tensor(slots, dtype=torch.int64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"slots: expected [N] or [N, S] integers, got {describe(slots)}: {error}") from None
        if slots.numel() == 0 and count == 0:
            slots = slots.reshape(0, 1)
    tensor("slots", slots, [count] if slots.dim() == 1 else [count, "S"], (torch.int32, torch.int64))
    table = slots.cpu().reshape(count, -1 if count else 1) if slots.dim() == 1 else slots.cpu()
    if not 1 <= table.shape[1] <= MAX_SPEC_COLUMNS:
        raise ValueError(f"slots: expected 1 to {MAX_SPEC_COLUMNS} columns, got {describe(slots)}")
    return table if null_slot is None else table.masked_fill(table == null_slot, -1)
