# SPDX-License-Identifier: Apache-2.0
"""What a plan of the chunked rule has to be: complete, and with work for every thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# (lengths, H, HV, K, V, threads) -> time, work of each thread, (sequence, heads, columns, length) of each chain, and
# how many chains share what does not depend on their states.
Plan = Callable[[list[int], int, int, int, int, int], tuple[float, Sequence[float], Sequence[tuple[int, ...]], int]]

PACKS = (
    (4096,),
    (17, 64, 129, 1000),
    (8192, *(100,) * 20),
    tuple(range(1, 2000, 37)),
    (32768,),
    (500,) * 3,
    (700,) * 5,
)
HEADS = ((16, 16), (16, 32), (16, 64))
THREADS = (8, 64, 192)
K, V = 128, 128


def check(plan: Plan, lengths: Sequence[int], heads: tuple[int, int], threads: int) -> None:
    H, HV = heads
    time, work, chains, _ = plan(list(lengths), H, HV, K, V, threads)
    covered = torch.zeros(len(lengths), HV, V, dtype=torch.int64)
    for sequence, head_begin, head_end, v_begin, v_end, length in chains:
        covered[sequence, head_begin:head_end, v_begin:v_end] += length
    assert torch.equal(covered, torch.tensor(lengths)[:, None, None].expand_as(covered))
    assert len(work) == threads
    assert sum(work) > 0
    assert max(work) <= time <= 1.15 * sum(work) / threads
