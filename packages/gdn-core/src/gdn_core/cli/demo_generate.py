# SPDX-License-Identifier: Apache-2.0
"""Greedy generation that is timed: prefill, decode, and the Gated DeltaNet core apart from the projections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

import gdn_core

from .timing import Others

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)

Calls = Counter[tuple[str, str]]


@dataclass
class Generation:
    """One run, with seconds by phase, all of the Gated DeltaNet layers together."""

    tokens: list[int]
    logits: torch.Tensor  # [new_tokens, vocabulary], float32
    seconds: dict[str, float] = field(default_factory=dict)
    core_seconds: dict[str, float] = field(default_factory=dict)
    is_unsteady: bool = False  # something else was using the cores


class _Clock:
    """Times phases from hooks on the model, and the GDN layers less the linear modules inside them.

    Everything in such a layer that is not a projection counts as its core: convolution, gating, recurrence, norm, and
    the reshaping and cache handling between them. The rule is the same whoever runs the layer.
    """

    def __init__(self) -> None:
        self.phase = PREFILL
        self.core = dict.fromkeys(PHASES, 0.0)
        self.started = self.prefilled = self.ended = 0.0

    def step_begins(self, *_: Any) -> None:
        self.started = self.started or perf_counter()

    def step_ends(self, *_: Any) -> None:
        self.ended = perf_counter()
        if self.phase == PREFILL:
            self.prefilled, self.phase = self.ended, DECODE

    @contextmanager
    def watch(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            hooks = [model.register_forward_pre_hook(self.step_begins), model.register_forward_hook(self.step_ends)]
            for layer in layers:
                hooks += self._time(layer, +1)
                for projection in layer.modules():
                    if isinstance(projection, torch.nn.Linear):
                        hooks += self._time(projection, -1)
            for hook in hooks:
                stack.callback(hook.remove)
            yield

    def _time(self, module: torch.nn.Module, sign: int) -> list[Any]:
        def begins(*_: Any) -> None:
            self.core[self.phase] -= sign * perf_counter()

        def ends(*_: Any) -> None:
            self.core[self.phase] += sign * perf_counter()

        return [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]


def generate(
    model: Any,
    layers: Sequence[torch.nn.Module],
    ids: torch.Tensor,
    new_tokens: int,
    text: Sequence[int] | None = None,
) -> Generation:
    """Generate `new_tokens` tokens after the prompt `ids` [1, T], greedily or along a given text; time `layers`."""
    clock = _Clock()
    with clock.watch(model, layers), Others() as others:
        tokens, logits = _generate(model, ids, new_tokens, text)
    return Generation(
        tokens=tokens,
        logits=logits,
        seconds={PREFILL: clock.prefilled - clock.started, DECODE: clock.ended - clock.prefilled},
        core_seconds=clock.core,
        is_unsteady=others.disturb,
    )


def count_calls(model: Any, ids: torch.Tensor) -> dict[str, Calls]:
    """Count, by (operation, backend), the calls that one prefill and one decoded token make."""
    counts: dict[str, Calls] = {}
    with gdn_core.record_calls() as calls:
        _generate(model, ids, 1)
        counts[PREFILL] = Counter(calls)
        calls.clear()
        _generate(model, ids, 2)
        counts[DECODE] = calls - counts[PREFILL]
    return counts


def follow(model: Any, ids: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    """Decode along the given tokens and return the logits before each [len(text), vocabulary]."""
    return _generate(model, ids, len(text), text)[1]


def _generate(
    model: Any, ids: torch.Tensor, new_tokens: int, text: Sequence[int] | None = None
) -> tuple[list[int], torch.Tensor]:
    def only_the_given(so_far: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert text is not None
        forced = torch.full_like(scores, float("-inf"))
        forced[:, text[so_far.shape[1] - ids.shape[1]]] = 0
        return forced

    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[] if text is None else [only_the_given],
    )
    return result.sequences[0, ids.shape[1] :].tolist(), torch.cat(result.logits).float()


@torch.no_grad()
def follow_at_once(model: Any, ids: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits before each of the given tokens, from one pass over prompt and tokens."""
    whole = torch.cat([ids, torch.tensor([tokens[:-1]], dtype=ids.dtype)], dim=1)
    return model(whole, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
