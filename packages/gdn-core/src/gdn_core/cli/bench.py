# SPDX-License-Identifier: Apache-2.0
"""Time operations at the sizes of released models, beside what the machine needs at least and beside other libraries.

Each contender is first checked against the float64 reference; a wrong one is not timed. Then they take turns in every
round, and medians are shown: of gdn, with the floor as a share of it; of each contender it is held against, with how
many times as long that took as gdn in the same round. The floor is the longer of the state's way through memory and the
arithmetic, at the limits printed below the table. "cold" states come from memory, "hot" ones from the caches.
Activations are bfloat16 and states float32 unless the case says otherwise.

A figure marked ~ is not to be trusted: something else was using the cores. A peer's marked ! is void: it is more than
15 % above what the peer is known to take on this kind of machine, so that nothing follows from the comparison.
"""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gdn_core

from .. import _registry
from ..testing import inputs
from . import CommandError, output
from .bench_case import Build, Case, Plan, Sizes
from .bench_cases import OPS, plans
from .known_machines import PEER_SLACK, Known, at_threads, this_machine
from .machine import Limits, keep_freed_memory, limits
from .peers import NAMES, VLLM_BEST, Peers
from .timing import Timed, Timing, thread_counts, time_in_turn, torch_threads

HOST_COST_BUDGET_US = 3.5

# Peers round beta to bfloat16; a wrong result is off by far more.
_PEER_TOLERANCE = 2e-2

_ROUNDS, _QUICK_ROUNDS = 20, 5
_OTHERS = 0.1  # cores in use elsewhere
_BF16_LEVELS = ("x86_v4_bf16", "x86_amx", "arm_bf16")
_OURS = "gdn"

Active = Callable[[], AbstractContextManager[Any]]

_UNSTEADY = "~ unsteady: the cores are shared with something else; run again on an idle machine"
_VOID = "! void: a peer is more than 15 % slower than it is known to be; run again on an idle machine"


@dataclass(frozen=True)
class Row:
    """One contender on one case."""

    op: str
    label: str
    value_heads: int
    threads: int
    contender: str
    backend: str | None  # that ran it, where it is gdn's
    error: float | None
    tolerance: float
    failure: str | None  # why there is no timing
    timing: Timing | None
    floor: float  # seconds
    known: float | None  # seconds that the peer is known to take

    @property
    def share(self) -> float:
        """The floor as a share of the time."""
        return 0.0 if self.timing is None else self.floor / self.timing.median

    @property
    def unsteady(self) -> bool:
        """Whether the machine was not this process's own: cores in use, faster than its limits, or rounds far apart."""
        if self.timing is None:
            return False
        is_shared = self.timing.others > _OTHERS or self.share > 1.05
        return is_shared or self.timing.high - self.timing.low > 2 * self.timing.median

    @property
    def void(self) -> bool:
        """Whether a peer was so slow that it must have been disturbed."""
        return self.timing is not None and self.known is not None and self.timing.median > PEER_SLACK * self.known


@dataclass(frozen=True)
class _Checked:
    """A contender whose first result was compared with float64."""

    timed: Timed
    backend: str | None
    error: float | None
    failure: str | None


@dataclass(frozen=True)
class _Run:
    """What holds for all cases of a run."""

    peers: Peers
    backends: Sequence[str]
    rounds: int
    known: Known | None
    level: str | None

    def limits(self, threads: int) -> Limits:
        return limits(threads, self.known, self.level in _BF16_LEVELS)

    def known_seconds(self, case: Case, peer: str, threads: int) -> float | None:
        """Return what the peer is known to take here, in the build that those times are of."""
        is_other_build = peer == "vllm" and self.peers.vllm_build != VLLM_BEST
        if self.known is None or case.known_as is None or self.peers.are_held or is_other_build:
            return None
        pair = self.known.peer_us.get(case.known_as, {}).get(peer)
        figure = at_threads(pair, threads) if pair else None
        return 1e-6 * case.scale * figure if figure and case.scale else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = f"{', '.join(OPS)}, separated by spaces or commas (default: all)"
    parser.add_argument("op", nargs="*", metavar="OP", help=which)
    parser.add_argument("--vs", default="", metavar="PEERS", help=f"other libraries to time: {','.join(NAMES)}")
    parser.add_argument(
        "--case",
        action="append",
        metavar="WORDS",
        help='only cases whose names have all these words, as "B16 cold"; may be given again',
    )
    parser.add_argument("--quick", action="store_true", help="a few small cases, and fewer rounds")
    parser.add_argument("--threads", default="1,all", metavar="N,...", help="default: %(default)s")
    parser.add_argument(
        "--shape", default="16,32,128,128", metavar="H,HV,K,V", help="heads and head dims (default: %(default)s)"
    )
    parser.add_argument("--hv", metavar="HV,...", help="these numbers of value heads, in place of that of --shape")
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="not what gdn picks, but this; given again, each in turn"
    )
    parser.add_argument(
        "--level",
        metavar="LEVEL",
        help="cap gdn-cpu at this instruction-set level, torch too, and take vllm's build for it",
    )
    parser.add_argument("--rounds", type=output.positive, metavar="N", help=f"default: {_ROUNDS}")
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
    sizes = _sizes(args.shape, args.hv)
    threads = thread_counts(args.threads)
    backends = _backends(args.backend)
    _check_cases(args, ops, sizes)
    with _level(args.level):
        active = next((backend.level for backend in gdn_core.backends() if backend.name == "cpu"), None)
        rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
        peers = Peers(names, active, active if _is_capped(active) else None)
        setting = _Run(peers, backends, rounds, this_machine(), active)
        keep_freed_memory()
        return _run(setting, ops, sizes, threads, args)


def _run(
    setting: _Run, ops: Sequence[str], sizes: Sequence[Sizes], threads: Sequence[int], args: argparse.Namespace
) -> int:
    console = output.console_for(args.json)
    rows: list[Row] = []
    machine = {}
    for number in threads:
        with torch_threads(number):
            machine[number] = setting.limits(number)
            for size in sizes:
                new = _run_at(setting, number, ops, size, args)
                if new:
                    console.print(_table(new, number, size))
                rows += new
    host_cost = _host_cost_us(setting.rounds) if "decode" in ops and not args.case else None
    _print_notes(console, setting, rows, machine, host_cost)
    if args.json:
        report = {"system": _system(setting), "limits": {number: asdict(limit) for number, limit in machine.items()}}
        as_json = [asdict(row) | {"unsteady": row.unsteady, "void": row.void} for row in rows]
        output.write_json(args.json, report | {"host_cost_us": host_cost, "rows": as_json})
    return 1 if any(row.failure and row.contender not in NAMES for row in rows) else 0


def _check_cases(args: argparse.Namespace, ops: Sequence[str], sizes: Sequence[Sizes]) -> None:
    """Say at once, before the machine's limits are measured, that no case is wanted."""
    found = [plan for op in ops for size in sizes for plan in _selected(op, plans(op, size, Peers([], None)), args)]
    if not found:
        raise CommandError(f"--case {args.case[0]}: no case is called like that; names are as in the table")


def _sizes(shape: str, value_heads: str | None) -> list[Sizes]:
    try:
        H, HV, K, V = (int(part) for part in shape.split(","))
    except ValueError as error:
        raise CommandError(f"--shape {shape}: expected four numbers H,HV,K,V such as 16,32,128,128") from error
    try:
        several = [int(part) for part in value_heads.split(",")] if value_heads else [HV]
    except ValueError as error:
        raise CommandError(f"--hv {value_heads}: expected numbers such as 16,32,64") from error
    if min(H, *several, K, V) < 1 or any(number % H for number in several):
        raise CommandError(f"--shape {shape}: all must be positive, and HV a multiple of H")
    return [Sizes(H, number, K, V) for number in several]


def _backends(wanted: Sequence[str] | None) -> list[str]:
    available = [backend.name for backend in gdn_core.backends() if backend.available]
    for name in wanted or ():
        if name not in available:
            raise CommandError(f"--backend {name}: available here are {', '.join(available)}; see gdn info")
    return list(wanted or ())


def _level(name: str | None) -> AbstractContextManager[Any]:
    if name is None:
        return nullcontext()
    if _registry.provider("cpu") is None:
        raise CommandError("--level: gdn-cpu is not available; see gdn info")
    gdn_cpu = importlib.import_module("gdn_cpu")
    known = [level.name for level in gdn_cpu.levels() if level.supported]
    if name not in known:
        raise CommandError(f"--level {name}: this machine runs {', '.join(known)}")
    level: AbstractContextManager[Any] = gdn_cpu.isa_level(name)
    return level


def _is_capped(active: str | None) -> bool:
    """Tell whether this CPU has more than gdn-cpu's level `active`."""
    if active is None:
        return False
    *_, most = (level.name for level in importlib.import_module("gdn_cpu").levels() if level.supported)
    return active != most


def _run_at(setting: _Run, threads: int, ops: Sequence[str], sizes: Sizes, args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with output.steps(len(ops)) as steps:
        for op in ops:
            steps.step(f"{op}, {output.count(threads, 'thread')}", "building inputs")
            for plan in _selected(op, plans(op, sizes, setting.peers), args):
                steps.detail(plan.label)
                rows += _measure(setting, plan.build(), threads, sizes)
    return rows


def _selected(op: str, all_plans: Sequence[Plan], args: argparse.Namespace) -> Iterator[Plan]:
    wanted = [text.split() for text in args.case or ()]
    for plan in all_plans:
        words = [op, *plan.label.split()]
        is_wanted = any(all(word in words for word in each) for each in wanted) if wanted else True
        if is_wanted and (plan.quick or not args.quick):
            yield plan


def _measure(setting: _Run, case: Case, threads: int, sizes: Sizes) -> list[Row]:
    """Check every contender, then time those that are right."""
    floor = case.floor(setting.limits(threads))
    checked = {name: _check(case, name, *entry) for name, entry in _contenders(case, setting.backends).items()}
    right = [name for name, each in checked.items() if each.failure is None]
    timings = dict(zip(right, time_in_turn([checked[name].timed for name in right], setting.rounds), strict=True))
    return [
        Row(
            op=case.op,
            label=case.label,
            value_heads=sizes.value_heads,
            threads=threads,
            contender=name,
            backend=each.backend,
            error=each.error,
            tolerance=_tolerance(case, name),
            failure=each.failure,
            timing=timings.get(name),
            floor=floor,
            known=setting.known_seconds(case, name, threads),
        )
        for name, each in checked.items()
    ]


def _contenders(case: Case, backends: Sequence[str]) -> dict[str, tuple[Build, Active]]:
    """Return gdn first, as it picks its backend or with the first wanted one; then all that it is held against."""
    wanted = [name for name in backends if name == _registry.REFERENCE or case.function in _native_ops(name)]
    if backends and not wanted:
        return {}
    ours: Active = partial(gdn_core.use_backend, wanted[0]) if wanted else nullcontext
    contenders: dict[str, tuple[Build, Active]] = {_OURS: (case.ours, ours)}
    for name in wanted[1:]:
        contenders[name] = case.ours, partial(gdn_core.use_backend, name)
    for name, build in case.variants.items():
        contenders[name] = build, ours
    for name, build in case.peers.items():
        contenders[name] = build, nullcontext
    return contenders


def _native_ops(backend: str) -> Mapping[str, Any]:
    provider = _registry.provider(backend)
    return provider.ops if provider else {}


def _tolerance(case: Case, contender: str) -> float:
    return _PEER_TOLERANCE if contender in NAMES else case.tolerance


def _check(case: Case, name: str, build: Build, active: Active) -> _Checked:
    """Build a contender and compare its first result. One that raises fails alone."""
    error, backend, contender = None, None, None
    with active(), gdn_core.record_calls() as calls:
        try:
            contender = build()
            error = case.error(contender)
            failure = None
        except (RuntimeError, ValueError, TypeError) as raised:
            failure = f"{type(raised).__name__}: {raised}"
    if error is not None and not error <= _tolerance(case, name):
        failure = f"error {error:.1e}, tolerance {_tolerance(case, name):.0e}"
    if name not in NAMES:
        backend = "+".join(sorted({used for _, used in calls})) or None
    return _Checked(Timed(contender.call if contender else _nothing, active), backend, error, failure)


def _nothing() -> None:
    """Stand for the call of a contender that could not be built, and is not timed."""


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


def _table(rows: Sequence[Row], threads: int, sizes: Sizes) -> Table:
    title = f"{output.count(threads, 'thread')}, H HV K V = {' '.join(map(str, sizes.heads))}"
    table = output.table(title, "", "gdn us", "floor us", "against", "us", right=("gdn us", "floor us", "us"))
    for _, group in groupby(rows, lambda row: (row.op, row.label)):
        ours, *others = group
        name = f"{ours.op} {ours.label}"
        first = [name, _time(ours), f"{_us(ours.floor)} ({ours.share:.0%})" if ours.timing else _us(ours.floor)]
        if not others:
            table.add_row(*first, "", "")
        for number, other in enumerate(others):
            table.add_row(*(first if number == 0 else ("", "", "")), other.contender, _time(other, ours))
    return table


def _time(row: Row, ours: Row | None = None) -> str:
    """Return the time with its marks, and as a multiple of that of `ours`."""
    if row.timing is None:
        return "[bold red]wrong[/]" if row.error is not None else "[bold red]failed[/]"
    text = "! " * row.void + "~ " * row.unsteady + _us(row.timing.median)
    return text if ours is None or ours.timing is None else f"{text} ({row.timing.times_first:.2f}x)"


def _us(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _print_notes(
    console: Console, setting: _Run, rows: Sequence[Row], machine: dict[int, Limits], host_cost: float | None
) -> None:
    if any(row.unsteady for row in rows):
        console.print(_UNSTEADY, style="yellow")
    if any(row.void for row in rows):
        console.print(_VOID, style="yellow")
    if any(row.known is not None for row in rows) and setting.known is not None:
        console.print(f"Peers are held against their known times on this kind of machine: {setting.known.name}.")
    if setting.peers.are_held:
        console.print(f"Peers, and torch for them, do without what a CPU of level {setting.level} does not have.")
    for threads, limit in machine.items():
        exponentials = f", {limit.exp_g_s:.1f} G exp/s" if limit.exp_g_s else ""
        bf16 = f", {limit.bf16_gflop_s:.0f} in bf16" if limit.bf16_gflop_s else ""
        console.print(
            f"Limits at {output.count(threads, 'thread')}: {limit.cold_gb_s:.1f} GB/s updating memory in place, "
            f"{limit.read_gb_s:.1f} reading, {limit.write_gb_s:.1f} writing; "
            f"{limit.gflop_s:.0f} GFLOP/s in fp32{bf16}{exponentials}."
        )
    slow = sorted({row.op for row in rows if row.contender == _OURS and row.backend == _registry.REFERENCE})
    if slow and not setting.backends:
        console.print(f"Without a native kernel here, on the reference: {', '.join(slow)}.")
    if host_cost is not None:
        console.print(f"Host cost of an eager decode call: {host_cost:.2f} us (budget {HOST_COST_BUDGET_US}).")
    for row in rows:
        if row.failure:
            console.print(f"WRONG, not timed: {row.op} {row.label}, {row.contender}: {row.failure}", style="red")


def _system(setting: _Run) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "known_machine": setting.known.name if setting.known else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "gdn_core": gdn_core.__version__,
        "backends": {backend.name: backend.level for backend in gdn_core.backends() if backend.available},
    }
