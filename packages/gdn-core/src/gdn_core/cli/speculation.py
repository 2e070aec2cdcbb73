# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding beside plain decoding, for `gdn generate` and `gdn demo`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from rich.table import Table

from gdn_core.integrations import transformers as integration
from gdn_core.speculate import Engine, Pace, PromptLookup, Sampler

from . import CommandError, output
from .demo_compare import explains_difference
from .demo_generate import DECODE, generate
from .timing import Others

# Most tokens that a pass verifies: on a CPU, a pass over 8 takes about 1.3 times as long as one over 1.
COLUMNS = 8


def engine_for(
    model: Any, prompt_tokens: int, draft: Any = None, *, speculates: bool = True, exact: bool = False
) -> Engine:
    """Make the engine of one request; `draft` is a smaller model, None looks drafts up in the text."""
    try:
        target = integration.TransformersTarget(model, S=COLUMNS if speculates else 1)
        drafter = PromptLookup() if draft is None else integration.ModelDrafter(draft)
    except ValueError as error:
        raise CommandError(f"--speculate: {error}") from error
    vocabularies = [other.get_output_embeddings().weight.shape[0] for other in (model, draft) if other is not None]
    if len(set(vocabularies)) > 1:
        raise CommandError(
            f"--draft: expected a model of the same vocabulary, got {vocabularies[1]} tokens and not {vocabularies[0]}"
        )
    return Engine(
        target, drafter if speculates else None, prefill_tokens=max(512, prompt_tokens), exact=exact, pace=Pace()
    )


@dataclass
class Run:
    """A text that was generated, and what its tokens after the first one took."""

    tokens: list[int]
    seconds: float
    passes: int  # for the tokens after the first one
    drafted: int = 0
    accepted: int = 0
    logits: torch.Tensor | None = None  # [tokens, vocabulary], of plain decoding

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0


def run_engine(engine: Engine, ids: torch.Tensor, new_tokens: int, sampler: Sampler | None = None) -> Run:
    """Generate from the prompt `ids` [1, T]."""
    request = engine.add(ids[0].tolist(), new_tokens, sampler=sampler)
    while not request.generated:
        engine.step()
    started, passes = perf_counter(), engine.num_passes
    engine.run()
    seconds = perf_counter() - started
    return Run(request.generated, seconds, engine.num_passes - passes, request.num_drafted, request.num_accepted)


def run_plain(model: Any, ids: torch.Tensor, new_tokens: int, text: Sequence[int] | None = None) -> Run:
    """Generate as transformers does on gdn; along `text`, where it is given, and otherwise keep the logits."""
    with integration.patched():
        run = generate(model, (), ids, new_tokens, text)
    return Run(run.tokens, run.seconds[DECODE], len(run.tokens) - 1, logits=run.logits if text is None else None)


@dataclass
class Row:
    """Plain and speculative runs of one text, in turn, with one number of threads."""

    name: str
    threads: int
    plain: list[Run]
    speculative: list[Run]
    is_unsteady: bool

    @property
    def speeds(self) -> tuple[float, float]:
        """Return the medians, in tokens a second."""
        plain, speculative = (
            statistics.median(run.tokens_per_second for run in runs) for runs in (self.plain, self.speculative)
        )
        return plain, speculative

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        last, (plain, speculative) = self.speculative[-1], self.speeds
        return {
            "text": self.name, "threads": self.threads, "plain_tokens_per_second": plain,
            "speculative_tokens_per_second": speculative, "steps": len(last.tokens) - 1, "passes": last.passes,
            "drafted": last.drafted, "accepted": last.accepted, "unsteady": self.is_unsteady,
        }  # fmt: skip


def measure(name: str, model: Any, ids: torch.Tensor, text: list[int], rounds: int) -> Row:
    """Time plain and speculative decoding along a given text, whatever the model would choose."""

    def given(logits: torch.Tensor, place: int) -> list[int]:
        logits.argmax(-1)  # choosing is part of what is timed
        return text[place : place + len(logits)]

    row = Row(name, torch.get_num_threads(), [], [], False)
    with Others() as others, integration.patched():
        for _ in range(rounds):
            row.plain.append(run_plain(model, ids, len(text), text))
            engine = engine_for(model, ids.shape[1])
            row.speculative.append(run_engine(engine, ids, len(text), given))
    row.is_unsteady = others.disturb
    return row


def verdict(plain: Run, speculative: Run, exact: torch.Tensor | None, dtype: torch.dtype) -> tuple[bool, str]:
    """Say whether the two texts agree as far as the dtype can tell; without logits they must be equal."""
    if plain.tokens == speculative.tokens:
        return True, f"Greedy tokens: {len(plain.tokens)} of {len(plain.tokens)} equal."
    if plain.logits is None:
        return False, "FAILED: with --exact the tokens must be equal."
    step, gap, rounding = explains_difference(plain.tokens, speculative.tokens, plain.logits, exact, dtype)
    text = (
        f"Greedy tokens: {step} of {len(plain.tokens)} equal before the first difference, where the two best logits "
        f"are {gap:.3g} apart and rounding explains up to {rounding:.3g}."
    )
    return gap <= rounding, text if gap <= rounding else f"{text}\nFAILED: rounding does not explain where they part."


def table(title: str, rows: Sequence[Row]) -> Table:
    """Show what speculation brings on each text."""
    columns = ("plain,\ntokens/s", "with\ndrafts", "gain", "passes", "steps\nsaved", "drafts\nright")
    result = output.table(title, "threads", "text", *columns, right=("threads", *columns))
    for row in rows:
        (plain, speculative), last = row.speeds, row.speculative[-1]
        mark, steps = "~ " * row.is_unsteady, len(last.tokens) - 1
        result.add_row(
            str(row.threads),
            row.name,
            f"{mark}{plain:.1f}",
            f"{mark}{speculative:.1f}",
            f"{mark}{speculative / plain:.2f} x" if plain else "",
            str(last.passes),
            f"{1 - last.passes / steps:.0%}" if steps else "",
            f"{last.accepted} of {last.drafted}",
        )
    return result
