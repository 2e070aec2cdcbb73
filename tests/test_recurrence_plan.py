# SPDX-License-Identifier: Apache-2.0
"""How the recurrence is shared out to threads: the plan alone, for more threads than a test machine has."""

from __future__ import annotations

import heapq
import random

import pytest

gdn_cpu = pytest.importorskip("gdn_cpu")

V = 128
SMALLEST_TILE = 32


def plan(lengths, heads, value_dim, threads):
    return gdn_cpu._C.recurrence_plan(list(lengths), heads, value_dim, threads)


def loads(lengths, heads, value_dim, threads):
    """Return the tile and the work of each thread that the plan wakes: tokens times columns."""
    tile, woken, is_ragged = plan(lengths, heads, value_dim, threads)
    widths = [min(tile, value_dim - v) for v in range(0, value_dim, tile)]
    order = sorted(lengths, reverse=True) if is_ragged else lengths
    items = [length * width for length in order for _ in range(heads) for width in widths]
    if not is_ragged:
        return tile, [sum(items[len(items) * i // woken : len(items) * (i + 1) // woken]) for i in range(woken)]
    # Whoever is free takes the next item: the thread with the least work so far.
    work = [0] * woken
    for item in items:
        heapq.heapreplace(work, work[0] + item)
    return tile, work


def ragged(batch, longest, seed):
    draw = random.Random(seed)
    return [draw.randint(1, longest) for _ in range(batch)]


ROWS = {
    **{f"decode, batch {batch}": [1] * batch for batch in (1, 16, 64, 256)},
    **{f"5 drafts, batch {batch}": [5] * batch for batch in (1, 4, 16)},
    **{f"ragged, batch {batch}, draw {seed}": ragged(batch, 5, seed) for batch in (4, 16, 64) for seed in range(3)},
    "two long rows among short ones": [4096, 2000, *[1] * 30],
}


@pytest.mark.parametrize("threads", [1, 2, 8, 64, 192])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_no_thread_has_much_more_than_its_share(rows, heads, threads):
    tile, work = loads(rows, heads, V, threads)
    assert len(work) <= threads
    assert sum(work) == sum(rows) * heads * V
    ideal = sum(work) / threads
    if tile > SMALLEST_TILE:
        assert max(work) <= 1.15 * ideal
    else:
        # The finest cut: no other one would end before the longest item, or in fewer turns.
        longest = max(rows) * SMALLEST_TILE
        items = len(rows) * heads * (V // SMALLEST_TILE)
        turns = -(-items // threads)
        assert max(work) <= max(1.15 * ideal, turns * longest)
    if len(set(rows)) == 1:
        assert max(work) <= 1.15 * sum(work) / len(work)


@pytest.mark.parametrize("value_dim", [1, 16, 31, 32, 33, 48, 100, 128, 250, 256])
@pytest.mark.parametrize("threads", [1, 3, 16, 192])
def test_tiles_cover_all_columns(value_dim, threads):
    for rows in ([1], [0], [0, 0, 3], [7, 1, 2], [2] * 9):
        tile, woken, _ = plan(rows, 2, value_dim, threads)
        assert tile == value_dim or (tile < value_dim and tile % 16 == 0)
        assert 1 <= woken <= threads


def test_whole_heads_where_there_are_enough():
    """Narrow tiles prepare each token again and read memory in pieces."""
    assert plan([1] * 16, 32, V, 8) == (V, 8, False)
    assert plan([1, 5] * 8, 32, V, 8)[0] == V
    assert plan([1], 32, V, 2) == (V, 2, False)
