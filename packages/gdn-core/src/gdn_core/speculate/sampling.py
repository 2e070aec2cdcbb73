# SPDX-License-Identifier: Apache-2.0
"""How the next token is chosen from logits: the likeliest one, or drawn at a temperature, drafts or not.

A draft is a certain token, not a distribution. The acceptance rule of speculative sampling (Leviathan et al., Fast
Inference from Transformers via Speculative Decoding, 2023) then reads: accept it with the probability p that the target
gives it, and otherwise draw from p without it. Drawing a token from p and accepting the draft if it is that token is
the same thing: both accept with probability p(draft), and both leave p without the draft, normalised, for the rest.

So a place in the text has one random number, whatever was drafted there, and what is drawn depends on the seed and on
the target's logits alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """Choose tokens from logits."""

    def __call__(self, logits: Tensor, place: int) -> list[int]:
        """Return a token for each row of ``logits`` [n, vocabulary], for the n places of the text from ``place`` on."""
        ...


def greedy(logits: Tensor, place: int) -> list[int]:
    """Choose the likeliest token at each place."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


class TemperatureSampler:
    """Draw from ``softmax(logits / temperature)``, with one random number for each place of a text.

    Args:
        temperature: above 0.
        seed: of the random numbers.

    Example:
        >>> import torch
        >>> from gdn_core.speculate import TemperatureSampler
        >>> logits = torch.zeros(2, 50)
        >>> a, b = TemperatureSampler(1.0, seed=3), TemperatureSampler(1.0, seed=3)
        >>> a(logits, 0) == [*b(logits[:1], 0), *b(logits[1:], 1)]
        True
    """

    def __init__(self, temperature: float, seed: int = 0) -> None:
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature: expected a number above 0, got {temperature}")
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.empty(0, dtype=torch.float64)

    def __call__(self, logits: Tensor, place: int) -> list[int]:
        """Return a token for each row of ``logits`` [n, vocabulary], for the n places of the text from ``place`` on."""
        end = place + len(logits)
        while len(self._numbers) < end:
            more = torch.rand(max(64, len(self._numbers)), dtype=torch.float64, generator=self._generator)
            self._numbers = torch.cat([self._numbers, more])
        # In float64, so that the sum of a large vocabulary's probabilities is 1 for all that the numbers can tell.
        sums = (logits.double() / self._temperature).softmax(-1).cumsum(-1)
        numbers = self._numbers[place:end].to(sums.device)[:, None] * sums[:, -1:]
        tokens: list[int] = torch.searchsorted(sums, numbers, right=True)[:, 0].tolist()
        return tokens
