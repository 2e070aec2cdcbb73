# SPDX-License-Identifier: Apache-2.0
"""What a plan of the chunked rule has to be: complete, and with work for every thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# (lengths, H, HV, K, V, threads) -> work of each thread, and (sequence, heads, columns, length) of each chain.
Plan = Callable[[list[int], int, int, int, int, int], tuple[Sequence[float], Sequence[tuple[int, ...]]]]

PACKS = ((4096,), (17, 64, 129, 1000), (8192, *(100,) * 20), tuple(range(1, 2000, 37)), (32768,), (500,) * 3)
HEADS = ((16, 16), (16, 32), (16, 64))
THREADS = (8, 64, 192)
K, V, FINEST = 128, 128, 16


def check(plan: Plan, lengths: Sequence[int], heads: tuple[int, int], threads: int) -> None:
    H, HV = heads
    work, chains = plan(list(lengths), H, HV, K, V, threads)
    covered = torch.zeros(len(lengths), HV, V, dtype=torch.int64)
    for sequence, head_begin, head_end, v_begin, v_end, length in chains:
        covered[sequence, head_begin:head_end, v_begin:v_end] += length
    assert torch.equal(covered, torch.tensor(lengths)[:, None, None].expand_as(covered))
    assert len(work) == threads
    assert sum(work) > 0
    # Nothing is faster than the longest sequence's tokens one after the other, in the fewest columns of a head: with 16
    # heads, 192 threads cannot all be busy.
    longest_chain = plan([max(lengths)], 1, 1, K, FINEST, 1)[0][0]
    is_bound_by_it = threads > HV * V // FINEST
    assert max(work) <= (
        max(1.15 * sum(work) / threads, longest_chain) if is_bound_by_it else 1.15 * sum(work) / threads
    )
