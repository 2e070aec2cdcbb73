# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: contenders take turns in every round, so that drift of the machine meets them all alike."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from . import CommandError

# Below this a clock reading would be part of the result, and so would the first calls after another contender's.
_SHORTEST_SAMPLE = 1e-3
# One of these is long enough for a sample by itself, and for what it finds in the caches not to matter.
_LONG_CALL = 20e-3
_LARGEST_BATCH = 4096
# Seconds that the rounds of a case may take, once there are a few of them.
_LONGEST_CASE = 8.0
_FEWEST_ROUNDS = 3
_SURE_BUSY = 0.05
# In use elsewhere, above which times are unsteady.
_FEW_CORES = 0.1


def thread_counts(text: str) -> list[int]:
    """Parse numbers of threads, "1,all", from the fewest to the most; all: torch's own choice."""
    try:
        counts = [torch.get_num_threads() if part == "all" else int(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f'--threads {text}: expected numbers or "all", such as 1,all') from error
    if min(counts) < 1:
        raise CommandError(f"--threads {text}: must be 1 or more")
    return sorted(set(counts))


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set torch's number of threads for a block; None leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Timed:
    """What is called, and what must be in force meanwhile, entered outside the measured time."""

    call: Callable[[], object]
    active: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Timing:
    """Seconds a call over the rounds: the median, and the 10th and 90th percentile.

    `others` is how many cores other processes, or other machines on the same host, used meanwhile; `times_first` how
    many times as long a call took as the first contender's in the same round, the median again.
    """

    median: float
    low: float
    high: float
    others: float = 0.0
    times_first: float = 1.0


@dataclass(frozen=True)
class _Plan:
    """How one sample is taken: of so many calls, after another one that is not timed.

    What the contender before it left in the caches is not this one's to pay for. Long calls make no difference of it.
    """

    batch: int
    warm_up: bool = True


def time_in_turn(contenders: Sequence[Timed], rounds: int) -> list[Timing]:
    """Time each contender in every one of `rounds` rounds, fewer where calls take seconds."""
    plans = [_plan(contender) for contender in contenders]
    samples: list[list[float]] = [[] for _ in contenders]
    started, busy = perf_counter(), _busy_elsewhere()
    for done in range(rounds):
        if done >= _FEWEST_ROUNDS and perf_counter() - started > _LONGEST_CASE:
            break
        for contender, plan, seconds in zip(contenders, plans, samples, strict=True):
            seconds.append(_sample(contender, plan))
    # The kernel counts in ticks: less than a few of them say nothing.
    busy = _busy_elsewhere() - busy
    others = busy / (perf_counter() - started) if busy > _SURE_BUSY else 0.0
    return [_summary(seconds, samples[0], others) for seconds in samples]


class Others:
    """How many cores other processes, or other machines on the same host, used while the block ran."""

    cores = 0.0

    def __enter__(self) -> Others:
        self._started, self._busy = perf_counter(), _busy_elsewhere()
        return self

    def __exit__(self, *_: object) -> None:
        busy = _busy_elsewhere() - self._busy
        self.cores = busy / (perf_counter() - self._started) if busy > _SURE_BUSY else 0.0

    @property
    def disturb(self) -> bool:
        """Say whether times that were taken meanwhile are not to be trusted."""
        return self.cores > _FEW_CORES


def _busy_elsewhere(stat: Path = Path("/proc/stat")) -> float:
    """Return the seconds that cores were busy, less those of this process; always 0 where nobody counts them."""
    try:
        ticks = [int(number) for number in stat.read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, interrupts, soft_interrupts, stolen = ticks
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy / os.sysconf("SC_CLK_TCK") - process_time()


def _plan(contender: Timed) -> _Plan:
    """Find how many calls make one sample long enough. Also warms up."""
    if _sample(contender, _Plan(1, warm_up=False)) > _LONG_CALL:
        return _Plan(1, warm_up=False)
    batch = 1
    while batch < _LARGEST_BATCH and _sample(contender, _Plan(batch)) * batch < _SHORTEST_SAMPLE:
        batch *= 2
    return _Plan(batch)


def _sample(contender: Timed, plan: _Plan) -> float:
    call = contender.call
    with contender.active():
        if plan.warm_up:
            call()
        started = perf_counter()
        for _ in range(plan.batch):
            call()
        return (perf_counter() - started) / plan.batch


def _summary(seconds: list[float], of_first: list[float], others: float) -> Timing:
    ratio = statistics.median(own / first for own, first in zip(seconds, of_first, strict=True))
    if len(seconds) < 2:
        return Timing(seconds[0], seconds[0], seconds[0], others, ratio)
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Timing(statistics.median(seconds), tenths[0], tenths[-1], others, ratio)
