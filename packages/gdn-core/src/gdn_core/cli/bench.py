# SPDX-License-Identifier: Apache-2.0
"""Time operations: every backend, at the sizes of a released model, against the machine's own limits.

Each contender is first checked against the float64 reference; a wrong one is not timed. Then they take turns, each on
states of its own. The last column is the work done per second as a share of what this machine reaches on plain memory
updates or fp32 matrix products, measured in the same run. Activations are bfloat16, states float32. A row marked ~ is
not to be trusted: something else was using the cores.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table

import gdn_core

from .. import _registry
from ..testing import inputs
from . import CommandError, output
from .bench_cases import OPS, Contender, Sizes, Workload, workloads
from .machine import keep_freed_memory, limits
from .peers import NAMES, Peers
from .timing import Timed, Timing, time_in_turn, torch_threads

HOST_COST_BUDGET_US = 3.5

# Peers round beta to bfloat16; a wrong result is off by far more.
_PEER_TOLERANCE = 2e-2

_UNSTEADY = "~ unsteady: the cores are shared with something else; run again on an idle machine"


@dataclass(frozen=True)
class Row:
    """One contender on one workload. Without a timing, its result was wrong."""

    op: str
    label: str
    threads: int
    contender: str
    error: float
    tolerance: float
    timing: Timing | None
    rate: float | None  # in `unit`
    unit: str
    limit: float

    @property
    def share(self) -> float:
        """The rate as a share of the limit, to a percent."""
        return 0.0 if self.rate is None else round(self.rate / self.limit, 2)

    @property
    def unsteady(self) -> bool:
        """Whether the machine was not this process's own: beyond its limit, or the rounds far apart."""
        if self.timing is None:
            return False
        return self.share > 1 or self.timing.high - self.timing.low > 2 * self.timing.median


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = f"{', '.join(OPS)}, separated by spaces or commas (default: all)"
    parser.add_argument("op", nargs="*", metavar="OP", help=which)
    parser.add_argument("--vs", default="", metavar="PEERS", help=f"other libraries to time: {','.join(NAMES)}")
    parser.add_argument("--backend", action="append", metavar="NAME", help="only this backend; may be given again")
    parser.add_argument("--threads", default="1,all", metavar="N,...", help="default: %(default)s")
    parser.add_argument("--rounds", type=output.positive, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--shape", default="16,32,128,128", metavar="H,HV,K,V", help="heads and head dims (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="more sizes: batch 64, 4096 tokens, ragged prefill")
    parser.add_argument("--json", metavar="FILE", help='also write the results as JSON ("-": to stdout)')


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Run the command."""
    output.check_json_path(args.json)
    ops = output.words(args.op) or OPS
    for op in ops:
        if op not in OPS:
            raise CommandError(f"{op}: there are {', '.join(OPS)}")
    names = [name for name in args.vs.split(",") if name]
    for name in names:
        if name not in NAMES:
            raise CommandError(f"--vs {name}: there are {', '.join(NAMES)}")
    sizes = _sizes(args.shape)
    backends = _backends(args.backend)
    peers = Peers(names)
    keep_freed_memory()
    console = output.console_for(args.json)
    rows: list[Row] = []
    machine = {}
    for threads in _thread_counts(args.threads):
        with torch_threads(threads):
            new = _run_at(threads, ops, sizes, peers, backends, args)
            machine[threads] = limits(threads)
        console.print(_table(new, threads))
        rows += new
    if any(row.unsteady for row in rows):
        console.print(_UNSTEADY, style="yellow")
    host_cost = _host_cost_us(args.rounds) if "decode" in ops else None
    for threads, limit in machine.items():
        console.print(
            f"Limits at {output.count(threads, 'thread')}: {limit.cold_gb_s:.1f} GB/s updating memory in place, "
            f"{limit.gflop_s:.0f} GFLOP/s in fp32 matrix products."
        )
    if host_cost is not None:
        console.print(f"Host cost of an eager decode call: {host_cost:.2f} us (budget {HOST_COST_BUDGET_US}).")
    wrong = [row for row in rows if row.timing is None]
    for row in wrong:
        console.print(
            f"WRONG, not timed: {row.op}, {row.label}, {row.contender}: "
            f"error {row.error:.1e}, tolerance {row.tolerance:.0e}",
            style="red",
        )
    if args.json:
        report = {"system": _system(), "limits": {threads: asdict(limit) for threads, limit in machine.items()}}
        as_json = [asdict(row) | {"unsteady": row.unsteady} for row in rows]
        output.write_json(args.json, report | {"host_cost_us": host_cost, "rows": as_json})
    return 1 if any(row.contender not in NAMES for row in wrong) else 0


def _sizes(text: str) -> Sizes:
    try:
        key_heads, value_heads, key_dim, value_dim = (int(part) for part in text.split(","))
    except ValueError as error:
        raise CommandError(f"--shape {text}: expected four numbers H,HV,K,V such as 16,32,128,128") from error
    if min(key_heads, value_heads, key_dim, value_dim) < 1 or value_heads % key_heads:
        raise CommandError(f"--shape {text}: all must be positive, and HV a multiple of H")
    return Sizes(key_heads, value_heads, key_dim, value_dim)


def _thread_counts(text: str) -> list[int]:
    try:
        counts = [torch.get_num_threads() if part == "all" else int(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f'--threads {text}: expected numbers or "all", such as 1,all') from error
    if min(counts) < 1:
        raise CommandError(f"--threads {text}: must be 1 or more")
    return sorted(set(counts))


def _backends(wanted: Sequence[str] | None) -> list[str]:
    available = [backend.name for backend in gdn_core.backends() if backend.available]
    for name in wanted or ():
        if name not in available:
            raise CommandError(f"--backend {name}: available here are {', '.join(available)}; see gdn info")
    return [name for name in available if not wanted or name in wanted]


def _run_at(
    threads: int, ops: Sequence[str], sizes: Sizes, peers: Peers, backends: Sequence[str], args: argparse.Namespace
) -> list[Row]:
    rows: list[Row] = []
    with output.steps(len(ops)) as steps:
        for op in ops:
            steps.step(f"{op}, {output.count(threads, 'thread')}", "building inputs")
            for workload in workloads(op, sizes, peers, full=args.full):
                steps.detail(workload.label)
                rows += _measure(workload, threads, backends, args.rounds)
    return rows


def _measure(workload: Workload, threads: int, backends: Sequence[str], rounds: int) -> list[Row]:
    """Check every contender, then time those that are right."""
    contenders = _contenders(workload, backends)
    errors = {}
    for name, (contender, active) in contenders.items():
        with active():
            errors[name] = workload.error(contender)
    tolerances = {name: _PEER_TOLERANCE if name in NAMES else workload.tolerance for name in contenders}
    right = [name for name in contenders if errors[name] <= tolerances[name]]
    timings = dict(
        zip(right, time_in_turn([Timed(contenders[n][0].call, contenders[n][1]) for n in right], rounds), strict=True)
    )
    limit = workload.limit(limits(threads), threads)
    rows = []
    for name in contenders:
        timing = timings.get(name)
        rate = None if timing is None else workload.work / timing.median * 1e-9
        rows.append(
            Row(
                op=workload.op,
                label=workload.label,
                threads=threads,
                contender=name,
                error=errors[name],
                tolerance=tolerances[name],
                timing=timing,
                rate=rate,
                unit=workload.unit,
                limit=limit,
            )
        )
    return rows


def _contenders(
    workload: Workload, backends: Sequence[str]
) -> dict[str, tuple[Contender, Callable[[], AbstractContextManager[Any]]]]:
    contenders: dict[str, tuple[Contender, Callable[[], AbstractContextManager[Any]]]] = {}
    for name in backends:
        provider = _registry.provider(name)
        if name == _registry.REFERENCE or (provider and workload.function in provider.ops):
            contenders[name] = workload.ours(), partial(gdn_core.use_backend, name)
    for name, build in workload.peers.items():
        contenders[name] = build(), nullcontext
    return contenders


def _host_cost_us(rounds: int) -> float | None:
    """Time a whole decode call whose states are so small that its kernel takes next to nothing, at 1 thread."""
    if _registry.provider("cpu") is None:
        return None
    arguments, _ = inputs.decode_arguments([1], 1, 1, 8, 8, dtype=torch.bfloat16, spare_slots=0)
    names = ("A_log", "dt_bias", "q", "k", "v", "a", "b", "initial_state_source", "initial_state_indices")
    A_log, dt_bias, q, k, v, a, b, pool, slots = (arguments[name] for name in names)
    decode = gdn_core.fused_sigmoid_gating_delta_rule_update
    timed = Timed(lambda: decode(A_log, dt_bias, q, k, v, a, b, pool, slots, use_qk_l2norm_in_kernel=True), nullcontext)
    with torch_threads(1):
        return 1e6 * time_in_turn([timed], max(rounds, 50))[0].median


# What is printed


def _table(rows: Sequence[Row], threads: int) -> Table:
    columns = ("us", "10-90 %", "rate", "of limit", "x gdn", "error")
    table = output.table(output.count(threads, "thread"), "", "contender", *columns, right=columns)
    fastest_of_ours: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.timing is not None and row.contender not in NAMES:
            key = row.op, row.label
            fastest_of_ours[key] = min(fastest_of_ours.get(key, row.timing.median), row.timing.median)
    previous = None
    for row in rows:
        key = row.op, row.label
        name = f"{row.op}, {row.label}" if key != previous else ""
        previous = key
        if row.timing is None or row.rate is None:
            table.add_row(name, row.contender, "[bold red]wrong[/]", "", "", "", "", f"{row.error:.0e}")
            continue
        spread = f"{_us(row.timing.low)}-{_us(row.timing.high)}"
        table.add_row(
            name,
            row.contender,
            "~ " * row.unsteady + _us(row.timing.median),
            spread,
            f"{row.rate:.3g} {row.unit}",
            f"{row.share:.0%}",
            f"{row.timing.median / fastest_of_ours[key]:.2f}" if key in fastest_of_ours else "",
            f"{row.error:.0e}",
        )
    return table


def _us(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _system() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gdn_core": gdn_core.__version__,
        "backends": {backend.name: backend.level for backend in gdn_core.backends() if backend.available},
    }
