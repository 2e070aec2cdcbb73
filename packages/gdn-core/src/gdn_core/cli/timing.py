# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: contenders take turns in every round, so that drift of the machine meets them all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

# Below this a clock reading and a loop iteration would be part of the result.
_SHORTEST_SAMPLE = 200e-6
# One of these needs no second call to be sure that it is long enough.
_LONG_CALL = 20e-3
_LARGEST_BATCH = 4096
# Seconds that the rounds of a case may take, once there are a few of them.
_LONGEST_CASE = 8.0
_FEWEST_ROUNDS = 3


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
    """Seconds a call over the rounds: the median, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float


def time_in_turn(contenders: Sequence[Timed], rounds: int) -> list[Timing]:
    """Time each contender in every one of `rounds` rounds, fewer where calls take seconds."""
    batches = [_batch_size(contender) for contender in contenders]
    samples: list[list[float]] = [[] for _ in contenders]
    started = perf_counter()
    for done in range(rounds):
        if done >= _FEWEST_ROUNDS and perf_counter() - started > _LONGEST_CASE:
            break
        for contender, batch, seconds in zip(contenders, batches, samples, strict=True):
            seconds.append(_sample(contender, batch))
    return [_summary(seconds) for seconds in samples]


def _batch_size(contender: Timed) -> int:
    """Return how many calls make one sample long enough. Also warms up."""
    if _sample(contender, 1) > _LONG_CALL:
        return 1
    batch = 1
    while batch < _LARGEST_BATCH and _sample(contender, batch) * batch < _SHORTEST_SAMPLE:
        batch *= 2
    return batch


def _sample(contender: Timed, batch: int) -> float:
    call = contender.call
    with contender.active():
        if batch > 1:
            call()  # what the contender before it left in the caches is not this one's to pay for
        started = perf_counter()
        for _ in range(batch):
            call()
        return (perf_counter() - started) / batch


def _summary(seconds: list[float]) -> Timing:
    if len(seconds) < 2:
        return Timing(seconds[0], seconds[0], seconds[0])
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Timing(statistics.median(seconds), tenths[0], tenths[-1])
