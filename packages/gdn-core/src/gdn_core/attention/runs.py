# SPDX-License-Identifier: Apache-2.0
"""Runs: consecutive rows of one kind, which one call of an operation can take as views of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

# What happens to the tokens of a run. A run of SKIP holds padding rows that are too long for a decode step.
PREFILL, STEP, REPLAY, SKIP = range(4)


class Run(NamedTuple):
    """Consecutive rows that one call of an operation can take, as views of the batch's tensors.

    Rows and tokens are those of the batch; ``cu_seqlens`` counts from the run's own first token.
    """

    kind: int
    first_row: int
    end_row: int
    first_token: int
    end_token: int
    cu_seqlens: Tensor
    table: Tensor
    slots: Tensor
    num_accepted_tokens: Tensor
    has_initial_state: Tensor


def cut_runs(
    bounds: Iterable[Sequence[int]],
    cu_seqlens: Tensor,
    slots: Tensor,
    num_accepted_tokens: Tensor,
    has_initial_state: Tensor,
) -> tuple[Run, ...]:
    """Cut a batch into its runs; run i has ``cu_seqlens[first_row + i : end_row + i + 1]``."""
    runs = []
    for number, (kind, first_row, end_row, first_token, end_token) in enumerate(bounds):
        rows = slice(first_row, end_row)
        table = slots[rows]
        runs.append(
            Run(
                kind,
                first_row,
                end_row,
                first_token,
                end_token,
                cu_seqlens[first_row + number : end_row + number + 1],
                table,
                table[:, 0],
                num_accepted_tokens[rows],
                has_initial_state[rows],
            )
        )
    return tuple(runs)
