# SPDX-License-Identifier: Apache-2.0
"""Decode steps that verify draft tokens, with two ways to resume after the tokens that were accepted.

*Several slots* stores the state after every token in a slot of its own. *Replay* keeps one state per request and
records of what each token did to it; the next step applies the accepted ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..records import ReplayRecords
from ._common import (
    Pieces,
    deliver,
    expand_heads,
    is_live,
    l2_normalize,
    load_states,
    put,
    store_states,
    take,
)
from .recurrent import Tokens, add_outer, decay_state, decode_tokens, run_recurrence


def run_several_slots(
    tokens: Tokens,
    scale: float,
    pool: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    state_v_first: bool,
    null_slot: int | None,
) -> tuple[Pieces, Tensor]:
    """Resume row n at slot `[n, accepted - 1]`, store the state after its token t at slot `[n, t]`."""
    table = spec_state_indices.to(torch.int64)
    accepted = accepted_tokens(num_accepted_tokens, table)
    source = table.gather(1, accepted.clamp(max=table.shape[1])[:, None] - 1)[:, 0]
    live = is_live(source, pool.shape[0], null_slot) & fits(accepted, cu_seqlens, table.shape[1])
    pieces = Pieces(cu_seqlens, len(table), len(tokens.v), live, width=1, device=pool.device)
    table = table[pieces.live]

    def store(t: int, rows: Tensor | None, state: Tensor, u: Tensor) -> None:
        slots = take(table, rows)[:, t]
        stored = is_live(slots, pool.shape[0], null_slot)
        store_states(pool, slots[stored], state[stored], state_v_first)

    state = load_states(pool, source[pieces.live], tokens.q.dtype, state_v_first)
    outputs, _ = run_recurrence(pieces, tokens, scale, state, on_step=store)
    return pieces, outputs


def run_replay(
    tokens: Tokens,
    raw_k: Tensor,
    normalize: bool,
    scale: float,
    pool: Tensor,
    slot_indices: Tensor,
    records: ReplayRecords,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    state_v_first: bool,
    null_slot: int | None,
) -> tuple[Pieces, Tensor]:
    """Replay the accepted records of a row's slot into its state, store that once, and record the new tokens.

    Records keep the raw keys, `raw_k [T, H, K]`.
    """
    accepted = accepted_tokens(num_accepted_tokens, slot_indices)
    num_columns = records.k.shape[1]
    live = is_live(slot_indices, pool.shape[0], null_slot) & fits(accepted, cu_seqlens, num_columns)
    pieces = Pieces(cu_seqlens, len(slot_indices), len(tokens.v), live, width=1, device=pool.device)
    slots = slot_indices.to(torch.int64)[pieces.live]

    state = load_states(pool, slots, tokens.q.dtype, state_v_first)
    num_replayed = torch.minimum(accepted[pieces.live], records.live[slots])
    for i in range(num_columns):
        rows = (num_replayed > i).nonzero()[:, 0]
        state = put(state, rows, replay_record(state[rows], records, slots[rows], i, normalize))
    store_states(pool, slots, state, state_v_first)

    new_k, new_decay = pieces.split(raw_k), pieces.split(tokens.decay)

    def record(t: int, rows: Tensor | None, state: Tensor, u: Tensor) -> None:
        row_slots = take(slots, rows)
        records.k[row_slots, t] = new_k[t].squeeze(1)
        records.u[row_slots, t] = u.to(records.u.dtype)
        records.decay[row_slots, t] = new_decay[t].squeeze(1).to(records.decay.dtype)

    # The new tokens run from the state as it was stored: rounded, with a pool in half precision.
    state = state.to(pool.dtype).to(state.dtype)
    outputs, _ = run_recurrence(pieces, tokens, scale, state, on_step=record)
    records.live[slots] = pieces.lengths.to(records.live.dtype)
    return pieces, outputs


def replay_record(state: Tensor, records: ReplayRecords, slots: Tensor, i: int, normalize: bool) -> Tensor:
    """Apply record i of each slot to its state, as the token itself did."""
    k = records.k[slots, i].to(state.dtype)
    k = expand_heads(l2_normalize(k) if normalize else k, state.shape[1])
    state = decay_state(state, records.decay[slots, i].to(state.dtype))
    return add_outer(state, k, records.u[slots, i].to(state.dtype))


def accepted_tokens(num_accepted_tokens: Tensor | None, rows: Tensor) -> Tensor:
    """Return the accepted tokens of each row, at least 1 (a row with no history of drafts has 0 or None)."""
    if num_accepted_tokens is None:
        return torch.ones(len(rows), dtype=torch.int64, device=rows.device)
    return num_accepted_tokens.to(torch.int64).clamp(min=1)


def fits(accepted: Tensor, cu_seqlens: Tensor, num_columns: int) -> Tensor:
    """Return which rows have no more tokens, and accept no more, than there are columns; the others are padding."""
    return (accepted <= num_columns) & (cu_seqlens.diff() <= num_columns)


def fused_sigmoid_gating_delta_rule_update_spec(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode rows of draft tokens with a table of slots `[N, S]`; shapes as in the plain decode."""
    tokens = decode_tokens(
        A_log, dt_bias, q[0], k[0], v[0], a, b, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold
    )
    pieces, outputs = run_several_slots(
        tokens, q.shape[-1] ** -0.5 if scale is None else scale, initial_state_source, spec_state_indices,
        num_accepted_tokens, cu_seqlens, state_v_first, null_slot,
    )  # fmt: skip
    return deliver(pieces.join(outputs, like=tokens.v).view(v.shape), out, q.dtype)


def fused_sigmoid_gating_delta_rule_update_replay(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    slot_indices: Tensor,
    records: ReplayRecords,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode rows of draft tokens with one slot each, `[N]`, and records; shapes as in the plain decode."""
    tokens = decode_tokens(
        A_log, dt_bias, q[0], k[0], v[0], a, b, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold
    )
    pieces, outputs = run_replay(
        tokens, k[0], use_qk_l2norm_in_kernel, q.shape[-1] ** -0.5 if scale is None else scale, state, slot_indices,
        records, num_accepted_tokens, cu_seqlens, state_v_first, null_slot,
    )  # fmt: skip
    return deliver(pieces.join(outputs, like=tokens.v).view(v.shape), out, q.dtype)
