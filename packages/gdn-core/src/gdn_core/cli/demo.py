# SPDX-License-Identifier: Apache-2.0
"""Generate text with transformers alone, then with gdn's operations in place, and compare.

Without --model it builds a model of Qwen3.5's architecture with random weights (seeded), saves it and loads it as any
checkpoint. Fails when an operation that has a native kernel ran on the reference, or when the greedy tokens differ by
more than rounding explains: in float32 they must be equal, in bfloat16 they may part where the two best logits are
closer than bfloat16 rounds them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import gdn_core
from gdn_core.integrations import transformers as integration

from .. import _registry
from . import CommandError, demo_model, models, output, speculation
from .demo_compare import Comparison, compare
from .demo_generate import DECODE, PHASES, PREFILL, Calls, Generation, count_calls, follow, follow_at_once, generate
from .timing import thread_counts, torch_threads

_UNSTEADY = "~ unsteady: the cores are shared with something else; run again on an idle machine"
SHAPES = {"small": demo_model.Shape(), "0.8b": demo_model.FULL}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH_OR_ID", help="a real checkpoint instead of the seeded model")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="small", help="of the seeded model; 0.8b is Qwen3.5-0.8B's"
    )
    parser.add_argument("--dtype", choices=list(models.DTYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=output.positive, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=output.positive, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=output.positive, default=3, metavar="N", help="timed runs each, in turn (default: 3)"
    )
    parser.add_argument(
        "--threads",
        default="all",
        metavar="N,...",
        help="as 1,2: one after the other (default: all, torch's own choice)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights (default: 0)")
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="also decode with drafts, along a text that repeats and one that does not",
    )
    parser.add_argument("--json", metavar="FILE", help='also write the results as JSON ("-": to stdout)')


def run(args: argparse.Namespace, shape: demo_model.Shape | None = None) -> int:
    """Run the command. `shape` sizes the seeded model."""
    output.check_json_path(args.json)
    models.import_transformers()
    if args.new_tokens < 2:
        raise CommandError("--new-tokens: decode is timed from the second token on; give 2 or more")
    threads = thread_counts(args.threads)
    with models.memory_errors("use fewer --prompt-tokens or a smaller model"):
        return _run(args, threads, shape or SHAPES[args.shape])


@dataclass
class _Runs:
    """What was timed with one number of threads, and how the two ways to run agree."""

    threads: int
    before: list[Generation]
    after: list[Generation]
    speculation: list[speculation.Row]
    logits_after: torch.Tensor  # along the tokens of the first run before
    comparison: Comparison | None = None

    @property
    def is_unsteady(self) -> list[bool]:
        """Say of which of both something disturbed."""
        return [any(run.is_unsteady for run in runs) for runs in (self.before, self.after)]


@dataclass
class _Results:
    description: str
    runs: list[_Runs]
    calls: dict[str, Calls]
    text: str


def _run(args: argparse.Namespace, threads: Sequence[int], shape: demo_model.Shape) -> int:
    notes = _Notes()
    logger = logging.getLogger("gdn_core")
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    count = (args.model is None) + 4 + len(threads) * (2 * args.rounds + 1 + args.speculate)
    try:
        with tempfile.TemporaryDirectory(prefix="gdn-demo-") as directory, output.steps(count) as steps:
            results = _measure(args, threads, shape, Path(directory), steps)
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)
    misplaced = _native_ops_on_reference(results.calls)
    passed = all(runs.comparison is not None and runs.comparison.passed for runs in results.runs) and not misplaced
    _show(args, results, misplaced, notes)
    if args.json:
        report: dict[str, Any] = {"model": results.description, "runs": [_as_json(runs, args) for runs in results.runs]}
        report |= {"operations": _operations(results.calls), "notes": notes.lines, "passed": passed}
        output.write_json(args.json, report)
    return 0 if passed else 1


class _Notes(logging.Handler):
    """Keeps what gdn_core says about its choice of backends."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def _measure(
    args: argparse.Namespace, threads: Sequence[int], shape: demo_model.Shape, directory: Path, steps: output.Steps
) -> _Results:
    dtype = models.DTYPES[args.dtype]
    if args.model is None:
        steps.step("building the model")
        demo_model.save_seeded_model(directory, shape, args.seed, dtype)
    steps.step("loading the model")
    model, tokenizer = models.load(args.model or str(directory), dtype)
    layers = integration.gated_delta_net_layers(model)
    # Plain greedy decoding to the asked length, whatever the checkpoint recommends for a conversation.
    model.generation_config = type(model.generation_config)(do_sample=False)
    ids = _prompt(args, tokenizer)
    description = _describe(model, layers, args, threads)
    with torch_threads(threads[-1]):
        steps.step("warm-up", "transformers alone")
        generate(model, layers, ids, 2)
        steps.step("warm-up", "with gdn")
        with integration.patched():
            calls = count_calls(model, ids)
    results = []
    for number in threads:
        with torch_threads(number):
            results.append(_time(args, model, layers, ids, steps))
    with torch_threads(threads[-1]):
        steps.step("comparing in float32")
        _compare(model, ids, results, dtype)
    return _Results(description, results, calls, tokenizer.decode(results[0].after[0].tokens))


def _time(args: argparse.Namespace, model: Any, layers: Sequence[Any], ids: torch.Tensor, steps: output.Steps) -> _Runs:
    """Time both ways to run in turn, with the threads that are set; follow the first text with gdn."""
    before: list[Generation] = []
    after: list[Generation] = []
    threads = torch.get_num_threads()
    name = output.count(threads, "thread")
    for number in range(1, args.rounds + 1):
        steps.step(f"{name}, round {number} of {args.rounds}", "transformers alone")
        before.append(generate(model, layers, ids, args.new_tokens))
        steps.step(f"{name}, round {number} of {args.rounds}", "with gdn")
        with integration.patched():
            after.append(generate(model, layers, ids, args.new_tokens))
    rows = []
    if args.speculate:
        steps.step(f"{name}, speculating")
        rows = [
            speculation.measure(text_name, model, ids, text, args.rounds)
            for text_name, text in demo_model.continuations(ids, args.new_tokens).items()
        ]
    steps.step(f"{name}, along the same tokens")
    logits_after = after[0].logits
    if after[0].tokens != before[0].tokens:
        with integration.patched():
            logits_after = follow(model, ids, before[0].tokens)
    return _Runs(threads, before, after, rows, logits_after)


def _prompt(args: argparse.Namespace, tokenizer: Any) -> torch.Tensor:
    """Return the prompt [1, prompt_tokens]: its text where one is given, as `gdn generate` does."""
    text = getattr(args, "prompt", None)
    if text is None:
        return demo_model.prompt_ids(tokenizer, args.prompt_tokens)
    ids = models.token_ids(tokenizer, text)
    args.prompt_tokens = ids.shape[1]
    return ids


def _compare(model: Any, ids: torch.Tensor, results: Sequence[_Runs], dtype: torch.dtype) -> None:
    """Compare the runs along the tokens of transformers' own. Leaves `model` in float32 where memory allows."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    has_exact = dtype != torch.float32 and 3 * weights < models.available_memory()
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for runs in results:
        before, after = runs.before[0], runs.after[0]
        text = tuple(before.tokens)
        if has_exact and text not in known:
            known[text] = follow_at_once(model.float(), ids, text)
        runs.comparison = compare(before.tokens, after.tokens, before.logits, runs.logits_after, known.get(text), dtype)


def _native_ops_on_reference(calls: dict[str, Calls]) -> list[str]:
    """List the operations that ran on the reference though an available backend for the CPU has a kernel for them."""
    if _registry.settings().backend == _registry.REFERENCE:
        return []
    providers = [_registry.provider(backend.name) for backend in gdn_core.backends() if backend.available]
    native = {op for provider in providers if provider and "cpu" in provider.device_types for op in provider.ops}
    return sorted(op for op, backend in _operations_called(calls) if backend == _registry.REFERENCE and op in native)


def _operations_called(calls: dict[str, Calls]) -> list[tuple[str, str]]:
    return sorted(set().union(*calls.values()))


# What is printed


def _show(args: argparse.Namespace, results: _Results, misplaced: Sequence[str], notes: _Notes) -> None:
    console = output.console_for(args.json)
    console.print(f"\n{results.description}\n", markup=False)
    console.print(_timing_table(results.runs, args))
    rows = [row for runs in results.runs for row in runs.speculation]
    if rows:
        console.print(speculation.table("Decode with drafts from the text, along a given text", rows))
    if any(any(runs.is_unsteady) for runs in results.runs) or any(row.is_unsteady for row in rows):
        console.print(_UNSTEADY, style="yellow")
    console.print(_operations_table(results.calls, misplaced))
    for runs in results.runs:
        if len(results.runs) > 1:
            console.print(f"{output.count(runs.threads, 'thread')}:", style="bold")
        assert runs.comparison is not None
        console.print(_verdict(runs.comparison, models.DTYPES[args.dtype]), markup=False)
    if args.model is not None:
        console.print(f"\nText: {results.text}", markup=False)
    if misplaced:
        names = ", ".join(misplaced)
        console.print(f"FAILED: a native kernel is here, but these ran on the reference: {names}", markup=False)
    for note in notes.lines if misplaced else notes.warnings:
        console.print(f"  {note}", markup=False)


def _as_json(runs: _Runs, args: argparse.Namespace) -> dict[str, Any]:
    assert runs.comparison is not None
    report: dict[str, Any] = {"threads": runs.threads, "transformers": _figures(runs.before, args)}
    report |= {"gdn": _figures(runs.after, args), "speculation": [row.as_json() for row in runs.speculation]}
    return report | {"unsteady": any(runs.is_unsteady), "comparison": asdict(runs.comparison)}


def _describe(model: Any, layers: Sequence[Any], args: argparse.Namespace, threads: Sequence[int]) -> str:
    layer, config = layers[0], model.config.get_text_config()
    name = f"{args.model} ({config.model_type})" if args.model else "Random weights in Qwen3.5's architecture"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    counts = output.count(threads[0], "thread") if len(threads) == 1 else f"{' and '.join(map(str, threads))} threads"
    runs = output.count(args.rounds, "run")
    return (
        f"{name}: {parameters / 1e6:.3g} M parameters, hidden {config.hidden_size}\n"
        f"{config.num_hidden_layers} layers, {len(layers)} of them Gated DeltaNet: {layer.num_k_heads} key heads, "
        f"{layer.num_v_heads} value heads, K = {layer.head_k_dim}, V = {layer.head_v_dim}\n"
        f"{args.dtype}, {counts}; prompt {args.prompt_tokens} tokens, {args.new_tokens} new, greedy; "
        f"medians of {runs} each, in turn"
    )


def _figures(runs: Sequence[Generation], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    counts = {PREFILL: args.prompt_tokens, DECODE: args.new_tokens - 1}
    steps = {PREFILL: 1, DECODE: args.new_tokens - 1}
    figures = {}
    for phase in PHASES:
        seconds = statistics.median(run.seconds[phase] for run in runs)
        core = statistics.median(run.core_seconds[phase] for run in runs)
        figures[phase] = {
            "tokens_per_second": counts[phase] / seconds,
            "step_ms": 1e3 * seconds / steps[phase],
            "core_ms": 1e3 * core / steps[phase],
        }
    return figures


def _operations(calls: dict[str, Calls]) -> list[dict[str, Any]]:
    return [
        {"op": op, "backend": backend} | {phase: calls[phase][op, backend] for phase in PHASES}
        for op, backend in _operations_called(calls)
    ]


def _timing_table(results: Sequence[_Runs], args: argparse.Namespace) -> Table:
    columns = ("transformers", "with gdn", "gain")
    table = output.table("Time", "threads", "", *columns, right=("threads", *columns))
    for runs in results:
        before, after = _figures(runs.before, args), _figures(runs.after, args)
        marks = ["~ " * is_unsteady for is_unsteady in runs.is_unsteady]
        threads = str(runs.threads)
        for phase, unit in ((PREFILL, "ms"), (DECODE, "ms a token")):
            for figure, name, digits in (
                ("tokens_per_second", f"{phase}, tokens/s", 1),
                ("step_ms", f"{phase}, {unit}", 2),
                ("core_ms", "  of it in the GDN core", 2),
            ):
                values = before[phase][figure], after[phase][figure]
                gain = values[1] / values[0] if digits == 1 else values[0] / values[1]
                cells = (f"{mark}{value:.{digits}f}" for mark, value in zip(marks, values, strict=True))
                table.add_row(threads, name, *cells, f"{max(marks)}{gain:.2f} x")
                threads = ""
        table.add_section()
    return table


def _operations_table(calls: dict[str, Calls], misplaced: Sequence[str]) -> Table:
    columns = ("prefill", "token")
    title = "Operations, and their calls in one prefill and for one decoded token"
    table = output.table(title, "operation", "backend", *columns, "", right=columns)
    levels = {backend.name: backend.level for backend in gdn_core.backends()}
    for row in _operations(calls):
        op, backend = row["op"], row["backend"]
        name = f"{backend} ({levels[backend]})" if levels.get(backend) else backend
        remark = "no native kernel" if backend == _registry.REFERENCE else ""
        remark = "FAILED: has a native kernel" if op in misplaced else remark
        table.add_row(op, name, str(row[PREFILL]), str(row[DECODE]), remark)
    return table


def _verdict(result: Comparison, dtype: torch.dtype) -> str:
    first = "" if result.equal_tokens == result.tokens else " before the first difference"
    lines = [f"Greedy tokens: {result.equal_tokens} of {result.tokens} equal{first}."]
    differing = result.tokens - result.equal_choices
    if dtype != torch.float32 and differing:
        lines.append(
            f"Along the same tokens: {result.equal_choices} of {result.tokens} choices equal, {differing} different, "
            f"{result.open_choices} of these within rounding:\nthe two best logits are {result.worst_gap:.3g} apart, "
            f"rounding explains up to {result.worst_gap_rounding:.3g}."
        )
    lines.append(f"Largest difference of a logit: {result.logit_difference:.2g}.")
    if result.distance_before is not None and result.distance_after is not None:
        lines.append(
            f"Distance of the logits from the same model in float32: transformers {result.distance_before:.2%}, "
            f"with gdn {result.distance_after:.2%}."
        )
    demand = "rounding does not explain where they part"
    if dtype == torch.float32:
        demand = "in float32 the tokens must be equal"
    lines.append("The runs agree." if result.passed else f"FAILED: {demand}.")
    return "\n".join(lines)
