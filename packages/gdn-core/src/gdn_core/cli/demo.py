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
from .timing import torch_threads

_UNSTEADY = "~ unsteady: the cores are shared with something else; run again on an idle machine"
SHAPES = {"small": demo_model.Shape(), "0.8b": demo_model.FULL}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH_OR_ID", help="a real checkpoint instead of the seeded model")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="small", help="of the seeded model; 0.8b is Qwen3.5-0.8B's"
    )
    parser.add_argument("--dtype", choices=list(models.DTYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=output.positive, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=output.positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=output.positive, default=3, metavar="N", help="timed runs each, in turn (default: 3)"
    )
    parser.add_argument("--threads", type=output.positive, metavar="N", help="default: torch's own choice")
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
    try:
        with torch_threads(args.threads):
            return _run(args, shape or SHAPES[args.shape])
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CommandError("out of memory; use fewer --prompt-tokens or a smaller model") from error


@dataclass
class _Results:
    description: str
    before: list[Generation]
    after: list[Generation]
    calls: dict[str, Calls]
    comparison: Comparison
    text: str
    speculation: list[speculation.Row]


def _run(args: argparse.Namespace, shape: demo_model.Shape) -> int:
    notes = _Notes()
    logger = logging.getLogger("gdn_core")
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gdn-demo-") as directory,
            output.steps(2 * args.rounds + 6 + args.speculate) as steps,
        ):
            results = _measure(args, shape, Path(directory), steps)
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)
    misplaced = _native_ops_on_reference(results.calls)
    passed = results.comparison.passed and not misplaced
    _show(args, results, misplaced, notes)
    if args.json:
        report: dict[str, Any] = {"model": results.description, "transformers": _figures(results.before, args)}
        report |= {"gdn": _figures(results.after, args), "operations": _operations(results.calls)}
        report |= {"speculation": [row.as_json() for row in results.speculation]}
        report |= {"comparison": asdict(results.comparison), "notes": notes.lines, "passed": passed}
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


def _measure(args: argparse.Namespace, shape: demo_model.Shape, directory: Path, steps: output.Steps) -> _Results:
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
    description = _describe(model, layers, args)
    before: list[Generation] = []
    after: list[Generation] = []
    steps.step("warm-up", "transformers alone")
    generate(model, layers, ids, 2)
    steps.step("warm-up", "with gdn")
    with integration.patched():
        calls = count_calls(model, ids)
    for number in range(1, args.rounds + 1):
        steps.step(f"round {number} of {args.rounds}", "transformers alone")
        before.append(generate(model, layers, ids, args.new_tokens))
        steps.step(f"round {number} of {args.rounds}", "with gdn")
        with integration.patched():
            after.append(generate(model, layers, ids, args.new_tokens))
    rows = []
    if args.speculate:
        steps.step("speculating")
        rows = [
            speculation.measure(name, model, ids, text, args.rounds)
            for name, text in demo_model.continuations(ids, args.new_tokens).items()
        ]
    comparison = _compare(model, ids, before[0], after[0], dtype, steps)
    return _Results(description, before, after, calls, comparison, tokenizer.decode(after[0].tokens), rows)


def _prompt(args: argparse.Namespace, tokenizer: Any) -> torch.Tensor:
    """Return the prompt [1, prompt_tokens]: its text where one is given, as `gdn generate` does."""
    text = getattr(args, "prompt", None)
    if text is None:
        return demo_model.prompt_ids(tokenizer, args.prompt_tokens)
    ids: torch.Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    args.prompt_tokens = ids.shape[1]
    return ids


def _compare(
    model: Any, ids: torch.Tensor, before: Generation, after: Generation, dtype: torch.dtype, steps: output.Steps
) -> Comparison:
    """Compare the runs along the first one's tokens. Leaves `model` in float32 where memory allows."""
    steps.step("comparing", "with gdn along the same tokens")
    logits_after = after.logits
    if after.tokens != before.tokens:
        with integration.patched():
            logits_after = follow(model, ids, before.tokens)
    steps.step("comparing", "in float32")
    exact = None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if dtype != torch.float32 and 3 * weights < models.available_memory():
        exact = follow_at_once(model.float(), ids, before.tokens)
    return compare(before.tokens, after.tokens, before.logits, logits_after, exact, dtype)


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
    unsteady = [any(run.is_unsteady for run in runs) for runs in (results.before, results.after)]
    console.print(_timing_table(_figures(results.before, args), _figures(results.after, args), unsteady))
    if results.speculation:
        console.print(speculation.table("Decode with drafts from the text, along a given text", results.speculation))
    if any(unsteady) or any(row.is_unsteady for row in results.speculation):
        console.print(_UNSTEADY, style="yellow")
    console.print(_operations_table(results.calls, misplaced))
    console.print(_verdict(results.comparison, models.DTYPES[args.dtype]), markup=False)
    if args.model is not None:
        console.print(f"\nText: {results.text}", markup=False)
    if misplaced:
        names = ", ".join(misplaced)
        console.print(f"FAILED: a native kernel is here, but these ran on the reference: {names}", markup=False)
    for note in notes.lines if misplaced else notes.warnings:
        console.print(f"  {note}", markup=False)


def _describe(model: Any, layers: Sequence[Any], args: argparse.Namespace) -> str:
    layer, config = layers[0], model.config.get_text_config()
    name = f"{args.model} ({config.model_type})" if args.model else "Random weights in Qwen3.5's architecture"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    threads, runs = output.count(torch.get_num_threads(), "thread"), output.count(args.rounds, "run")
    return (
        f"{name}: {parameters / 1e6:.0f} M parameters, hidden {config.hidden_size}\n"
        f"{config.num_hidden_layers} layers, {len(layers)} of them Gated DeltaNet: {layer.num_k_heads} key heads, "
        f"{layer.num_v_heads} value heads, K = {layer.head_k_dim}, V = {layer.head_v_dim}\n"
        f"{args.dtype}, {threads}; prompt {args.prompt_tokens} tokens, {args.new_tokens} new, greedy; "
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


def _timing_table(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], unsteady: Sequence[bool]
) -> Table:
    columns = ("transformers", "with gdn", "gain")
    table = output.table("Time", "", *columns, right=columns)
    marks = ["~ " * is_unsteady for is_unsteady in unsteady]

    def add(name: str, digits: int, values: Sequence[float], gain: float) -> None:
        cells = (f"{mark}{value:.{digits}f}" for mark, value in zip(marks, values, strict=True))
        table.add_row(name, *cells, f"{max(marks)}{gain:.2f} x")

    for phase, unit in ((PREFILL, "ms"), (DECODE, "ms a token")):
        a, b = before[phase], after[phase]
        speeds, whole, core = ((a[name], b[name]) for name in ("tokens_per_second", "step_ms", "core_ms"))
        add(f"{phase}, tokens/s", 1, speeds, speeds[1] / speeds[0])
        add(f"{phase}, {unit}", 2, whole, whole[0] / whole[1])
        add("  of it in the GDN core", 2, core, core[0] / core[1])
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
