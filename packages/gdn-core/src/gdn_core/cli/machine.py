# SPDX-License-Identifier: Apache-2.0
"""What this machine can do: the limits that `gdn bench` holds operations against, measured or known."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

import torch

from .known_machines import Known, at_threads

# A pool this large lies in no cache that a CPU has for a few cores.
COLD_BYTES = 192 << 20

_MM_SIZE = 1024
_FEWEST_ROUNDS, _SHORTEST_MEASUREMENT = 15, 0.1


@dataclass(frozen=True)
class Limits:
    """The best of several rounds, at the current number of torch threads.

    The rates of instructions are those of `known_machines` where it has them: a matrix product does not quite reach
    them, and nothing in torch reaches that of the exponential.
    """

    threads: int
    cold_gb_s: float  # a buffer of COLD_BYTES updated in place; each byte counts once, though it is read and written
    read_gb_s: float  # of the same buffer
    write_gb_s: float  # written past the caches
    gflop_s: float  # fp32
    bf16_gflop_s: float | None  # products of bf16 operands, where there are instructions for them
    exp_g_s: float | None  # 10^9 exponentials a second

    def update_seconds(self, num_bytes: float, working_set: float | None = None) -> float:
        """Return the time of an in-place update, in a working set of that size (`num_bytes` when None)."""
        size = int(num_bytes if working_set is None else working_set)
        return 1e-9 * num_bytes / update_gb_s(min(max(size, 1 << 20), COLD_BYTES), self.threads)


@lru_cache(maxsize=8)
def limits(threads: int, known: Known | None, has_bf16: bool) -> Limits:
    """Measure the machine at `threads`, which must be torch's current number."""
    fp32 = at_threads(known.fp32_gflop_s, threads) if known else None
    bf16 = at_threads(known.bf16_gflop_s, threads) if known else None
    return Limits(
        threads=threads,
        cold_gb_s=update_gb_s(COLD_BYTES, threads),
        read_gb_s=_read_gb_s(),
        write_gb_s=_write_gb_s(threads),
        gflop_s=fp32 or _product_gflop_s(torch.float32),
        bf16_gflop_s=(bf16 or _product_gflop_s(torch.bfloat16)) if has_bf16 else None,
        exp_g_s=at_threads(known.exp_g_s, threads) if known else None,
    )


@lru_cache(maxsize=32)
def update_gb_s(num_bytes: int, threads: int) -> float:
    """Measure an in-place update, again and again, of a buffer of `num_bytes`: from the caches where it fits."""
    buffer = torch.ones(num_bytes // 4)
    repeats = max(1, (8 << 20) // num_bytes)

    def update() -> None:
        for _ in range(repeats):
            buffer.mul_(1.0)

    return 1e-9 * num_bytes * repeats / _best(update)


def _product_gflop_s(dtype: torch.dtype) -> float:
    matrix = torch.randn(_MM_SIZE, _MM_SIZE).to(dtype)
    product = torch.empty_like(matrix)
    return 2e-9 * _MM_SIZE**3 / _best(lambda: torch.mm(matrix, matrix, out=product))


def _read_gb_s() -> float:
    buffer = torch.ones(COLD_BYTES // 4)
    return 1e-9 * COLD_BYTES / min(_best(buffer.sum), _best(buffer.amax))


def _write_gb_s(threads: int) -> float:
    # The C library's memset goes past the caches for a buffer of this size; torch's fill reads what it overwrites. Not
    # zeros: lines of them cross some processors' fabric without their bytes, two to three times as fast as any others.
    buffer = torch.ones(COLD_BYTES // 4)
    share = COLD_BYTES // threads
    addresses = [buffer.data_ptr() + i * share for i in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(lambda address: ctypes.memset(address, 1, share), addresses)))
    return 1e-9 * share * threads / seconds


def _best(run: Callable[[], object]) -> float:
    """Return the shortest of several rounds, of the more the shorter they are."""
    run()
    seconds: list[float] = []
    while len(seconds) < _FEWEST_ROUNDS or sum(seconds) < _SHORTEST_MEASUREMENT:
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
        trim_threshold, mmap_max = -1, -4
        mallopt(mmap_max, 0)  # no allocation gets pages of its own, which it would give back
        mallopt(trim_threshold, -1)  # nor does the heap give any back
