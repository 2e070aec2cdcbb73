# SPDX-License-Identifier: Apache-2.0
"""Groups: the rows of a batch that one call of each operation can take together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# What happens to the tokens of a row.
PREFILL, STEP, REPLAY = range(3)


class Group(NamedTuple):
    """Rows that one call of each operation takes, on the batch's own tensors.

    Steps of a batch that has other rows too are named by ``row_indices``: nothing is gathered. Prefills are a span of
    the batch, in which other rows are padding; whoever these belong to writes their outputs afterwards.

    Attributes:
        kind: PREFILL, STEP or REPLAY.
        first_token, end_token: the tokens of the batch that the operations are given.
        cu_seqlens: [n + 1], from the first of these tokens.
        table: [n, S], and slots [n], its first column.
        num_accepted_tokens, has_initial_state: [n].
        row_indices: which of the n rows it is about; None for all.
    """

    kind: int
    first_token: int
    end_token: int
    cu_seqlens: Tensor
    table: Tensor
    slots: Tensor
    num_accepted_tokens: Tensor
    has_initial_state: Tensor
    row_indices: Tensor | None


class RowTensors(NamedTuple):
    """The rows of a batch: offsets [N + 1], slots [N, S], accepted tokens [N] and flags [N], where the layers run."""

    query_start_loc: Tensor
    slots: Tensor
    num_accepted_tokens: Tensor
    has_initial_state: Tensor

    def group(self, kind: int, num_tokens: int, row_indices: Tensor | None = None) -> Group:
        """Return rows that are given all tokens."""
        return Group(
            kind, 0, num_tokens, self.query_start_loc, self.slots, self.slots[:, 0], self.num_accepted_tokens,
            self.has_initial_state, row_indices,
        )  # fmt: skip


def group_rows(layout: Sequence[Sequence[int]], rows: RowTensors) -> tuple[Group, ...]:
    """Divide a batch into groups, prefills first.

    Args:
        layout: kind, first and end token of each row, on the host.
        rows: the same rows.
    """
    if not layout:
        return ()
    kinds = sorted({kind for kind, start, end in layout if end > start})
    if len(kinds) <= 1:
        return (rows.group(kinds[0] if kinds else STEP, layout[-1][2]),)
    return tuple(_span(layout, rows) if kind == PREFILL else _steps(kind, layout, rows) for kind in kinds)


def _span(layout: Sequence[Sequence[int]], rows: RowTensors) -> Group:
    """Return the rows from the first prefill to the last."""
    members = [n for n, (kind, start, end) in enumerate(layout) if kind == PREFILL and end > start]
    first, last = members[0], members[-1]
    start, end, span = layout[first][1], layout[last][2], slice(first, last + 1)
    table = rows.slots[span]
    if len(members) < last + 1 - first:
        is_foreign = torch.tensor([kind != PREFILL for kind, *_ in layout[span]], device=table.device)
        table = table.masked_fill(is_foreign[:, None], -1)
    offsets = rows.query_start_loc[first : last + 2] - start
    return Group(
        PREFILL, start, end, offsets, table, table[:, 0], rows.num_accepted_tokens[span], rows.has_initial_state[span],
        None,
    )  # fmt: skip


def _steps(kind: int, layout: Sequence[Sequence[int]], rows: RowTensors) -> Group:
    """Return the rows of one kind of step, wherever they are."""
    members = [n for n, (of_row, start, end) in enumerate(layout) if of_row == kind and end > start]
    return rows.group(kind, layout[-1][2], torch.tensor(members, dtype=torch.int32).to(rows.slots.device))
