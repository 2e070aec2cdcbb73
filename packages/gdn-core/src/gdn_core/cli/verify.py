# SPDX-License-Identifier: Apache-2.0
"""Check every operation of every backend against float64 on this machine.

Each cell of the tables is the largest relative error of a case, the worst sequence and head counting, with its
tolerance. Sizes are those of released models and odd ones; layouts, pools, padding rows and hard inputs vary.
Exit status 1: something exceeded its tolerance, wrote where it must not, or raised.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

import gdn_core

from .. import _registry
from ..testing import oracle, to_float64
from . import CommandError, output
from .timing import torch_threads
from .verify_cases import BF16, F16, F32, F64, Case, Error, all_cases

_NAMES = {F64: "float64", F32: "float32", BF16: "bfloat16", F16: "float16"}
_REFERENCE_DTYPES = (F64, F32, BF16)
_NATIVE_DTYPES = (F32, BF16, F16)


@dataclass(frozen=True)
class Target:
    """A backend at one instruction-set level (None: its own choice, or it has none)."""

    backend: str
    level: str | None
    ops: frozenset[str]
    dtypes: tuple[torch.dtype, ...]

    @property
    def name(self) -> str:
        return f"{self.backend} at {self.level}" if self.level else self.backend

    def active(self) -> AbstractContextManager[Any]:
        """Put the level in force."""
        if self.backend != "cpu" or self.level is None:
            return nullcontext()
        level: AbstractContextManager[Any] = importlib.import_module("gdn_cpu").isa_level(self.level)
        return level


@dataclass(frozen=True)
class Result:
    """One cell: the error closest to its tolerance, or beyond it, or what went wrong."""

    case: Case
    target: Target
    dtype: torch.dtype
    error: Error | None
    message: str = ""
    declined: bool = False

    @property
    def passed(self) -> bool:
        return self.declined or (self.error is not None and self.error.error <= self.error.tolerance)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op",
        nargs="*",
        metavar="OP",
        help="operations to check, by any part of their name, separated by spaces or commas (default: all)",
    )
    parser.add_argument("--backend", action="append", metavar="NAME", help="only this backend; may be given again")
    parser.add_argument(
        "--levels",
        choices=("active", "all"),
        default="active",
        help="instruction-set levels of gdn-cpu: the active one, or all that this machine runs (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help='also write the results as JSON ("-": to stdout)')


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    output.check_json_path(args.json)
    parts = output.words(args.op)
    every = all_cases()
    ops = tuple(dict.fromkeys(case.op for case in every))
    cases = [case for case in every if not parts or any(part in case.op for part in parts)]
    if not cases:
        raise CommandError(f"no operation is called like {' or '.join(parts)}; there are {', '.join(ops)}")
    targets = _targets(args, frozenset(ops))
    if not any(case.op in target.ops for case in cases for target in targets):
        raise CommandError(f"{', '.join(args.backend)}: has no kernel for that; see gdn info")
    # Inputs, oracle and errors are small operations, where waking threads costs more than it saves.
    threads = torch.get_num_threads()
    with output.steps(len(cases)) as steps, torch_threads(1):
        results = list(_check(cases, targets, threads, steps))
    console = output.console_for(args.json)
    for target in targets:
        _show(console, target, [result for result in results if result.target is target])
    failures = [result for result in results if not result.passed]
    for result in failures:
        where = f"{result.case.op}, {result.case.label}, {_NAMES[result.dtype]}, {result.target.name}"
        console.print(f"FAILED: {where}: {result.message or _cell(result)}", style="red", markup=False)
    for backend in gdn_core.backends():
        if reason := _why_not_checked(backend, targets):
            console.print(f"Not checked: {reason}", markup=False)
    declined = sum(result.declined for result in results)
    console.print(f"{len(results) - len(failures)} of {len(results)} checks passed, {declined} of them declined.")
    if args.json:
        output.write_json(args.json, {"passed": not failures, "results": [_as_json(result) for result in results]})
    return 1 if failures else 0


def _why_not_checked(backend: gdn_core.BackendInfo, targets: Sequence[Target]) -> str | None:
    """Return why a backend was left out though nobody asked for that, or None."""
    if not backend.available:
        return f"{backend.name}: {backend.reason}" + (f"; {backend.install}" if backend.install else "")
    provider = _registry.provider(backend.name)
    if provider is None or any(target.backend == backend.name for target in targets):
        return None
    if not provider.ops:
        return f"{backend.name} has no kernel here"
    devices = ", ".join(provider.device_types)
    return None if "cpu" in provider.device_types else f"{backend.name} runs {devices} tensors, and these are on cpu"


def _targets(args: argparse.Namespace, ops: frozenset[str]) -> list[Target]:
    available = {backend.name: backend for backend in gdn_core.backends()}
    for name in args.backend or ():
        if name not in available:
            raise CommandError(f"--backend {name}: there are {', '.join(available)}")
        if not available[name].available:
            raise CommandError(
                f"--backend {name}: {available[name].reason}; {available[name].install or 'see gdn info'}"
            )
    targets = []
    for name, backend in sorted(available.items(), key=lambda item: item[0] != _registry.REFERENCE):
        provider = _registry.provider(name)
        if args.backend and name not in args.backend:
            continue
        if name == _registry.REFERENCE:
            targets.append(Target(name, None, ops, _REFERENCE_DTYPES))
        elif provider is not None and "cpu" in provider.device_types:
            for level in _levels(name, backend.level, args.levels):
                targets.append(Target(name, level, frozenset(provider.ops), _NATIVE_DTYPES))
    return targets


def _levels(backend: str, active: str | None, wanted: str) -> list[str | None]:
    if backend != "cpu" or wanted == "active":
        return [active]
    return [level.name for level in importlib.import_module("gdn_cpu").levels() if level.supported]


def _check(cases: Sequence[Case], targets: Sequence[Target], threads: int, steps: output.Steps) -> Iterator[Result]:
    for case in cases:
        steps.step(case.op, case.label)
        for dtype in case.dtypes:
            concerned = [target for target in targets if case.op in target.ops and dtype in target.dtypes]
            if not concerned:
                continue
            # The oracle's answer serves every backend.
            wanted = to_float64(case.make(dtype)[0])
            expected = getattr(oracle, case.op)(**wanted)
            for target in concerned:
                yield _check_one(case, target, dtype, wanted, expected, threads)


def _check_one(
    case: Case, target: Target, dtype: torch.dtype, wanted: dict[str, Any], expected: Any, threads: int
) -> Result:
    arguments, guard = case.make(dtype)
    try:
        with target.active(), gdn_core.use_backend(target.backend), torch_threads(threads):
            result = getattr(gdn_core, case.op)(**arguments)
        if guard is not None:
            guard.check()
    except NotImplementedError as error:
        return Result(case, target, dtype, None, str(error), declined=True)
    except Exception as error:
        return Result(case, target, dtype, None, f"{type(error).__name__}: {error}")
    worst = max(case.errors(arguments, result, wanted, expected), key=lambda error: error.error / error.tolerance)
    return Result(case, target, dtype, worst)


def _show(console: Console, target: Target, results: Sequence[Result]) -> None:
    """Print a table for each operation, under its name, which would need more than a column on a narrow terminal."""
    names = [_NAMES[dtype] for dtype in target.dtypes]
    cells = {(id(result.case), result.dtype): result for result in results}
    cases = list(dict.fromkeys(result.case for result in results))
    widths = [max([len(name), *(len(_cell(r)) for r in results if _NAMES[r.dtype] == name)]) for name in names]
    # Two spaces before a label, and two between columns.
    label = min(max((len(case.label) for case in cases), default=0), console.width - sum(widths) - 2 * len(names) - 2)
    if cases:
        console.print(f"\n[bold]{target.name}: error (tolerance)[/]")
    for op, group in groupby(cases, key=lambda case: case.op):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=op == cases[0].op)
        table.add_column("", width=label + 2, overflow="fold")
        for name, width in zip(names, widths, strict=True):
            table.add_column(name, width=width, justify="right", no_wrap=True)
        for case in group:
            found = (cells.get((id(case), dtype)) for dtype in target.dtypes)
            row = ("" if result is None else _styled_cell(result) for result in found)
            table.add_row(Padding(case.label, (0, 0, 0, 2)), *row)
        console.print(f"\n[bold]{op}[/]")
        console.print(table)


def _cell(result: Result) -> str:
    if result.declined:
        return "declined"
    if result.error is None:
        return "error"
    return f"{result.error.error:.1e} ({result.error.tolerance:.0e})"


def _styled_cell(result: Result) -> str:
    text = _cell(result)
    if not result.passed:
        return f"[bold red]{text}[/]"
    return f"[yellow]{text}[/]" if result.declined else text


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "op": result.case.op,
        "case": result.case.label,
        "backend": result.target.backend,
        "level": result.target.level,
        "dtype": _NAMES[result.dtype],
        "error": None if result.error is None else result.error.error,
        "tolerance": None if result.error is None else result.error.tolerance,
        "message": result.message,
        "passed": result.passed,
    }
