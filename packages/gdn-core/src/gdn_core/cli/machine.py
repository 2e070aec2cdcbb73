# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, measured: the limits that `gdn bench` holds operations against."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

import torch

# A pool this large lies in no cache that a CPU has for a few cores.
COLD_BYTES = 192 << 20

_MM_SIZE = 1024
_ROUNDS = 15


@dataclass(frozen=True)
class Limits:
    """The best of several rounds, at the current number of torch threads."""

    cold_gb_s: float  # a buffer of COLD_BYTES updated in place; each byte counts once, though it is read and written
    gflop_s: float  # fp32 matrix product


@lru_cache(maxsize=8)
def limits(threads: int) -> Limits:
    """Measure the machine at `threads`, which must be torch's current number."""
    matrix = torch.randn(_MM_SIZE, _MM_SIZE)
    product = torch.empty_like(matrix)
    seconds = _best(lambda: torch.mm(matrix, matrix, out=product))
    return Limits(cold_gb_s=update_gb_s(COLD_BYTES, threads), gflop_s=2e-9 * _MM_SIZE**3 / seconds)


@lru_cache(maxsize=32)
def update_gb_s(num_bytes: int, threads: int) -> float:
    """Measure an in-place update, again and again, of a buffer of `num_bytes`: from the caches where it fits."""
    buffer = torch.ones(num_bytes // 4)
    repeats = max(1, (8 << 20) // num_bytes)

    def update() -> None:
        for _ in range(repeats):
            buffer.mul_(1.0)

    return 1e-9 * num_bytes * repeats / _best(update)


def _best(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(_ROUNDS):
        started = perf_counter()
        run()
        seconds.append(perf_counter() - started)
    return min(seconds)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep what is freed, so that no contender pays for fresh pages at every call."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc accepts
        mallopt(trim_threshold, 1 << 30)
