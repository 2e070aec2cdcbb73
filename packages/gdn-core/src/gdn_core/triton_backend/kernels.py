# SPDX-License-Identifier: Apache-2.0
"""Decode steps that verify draft tokens, in Triton.

Per row n and value head h, with the state M [K, V] of the slot that the row resumes from, for each token t in order:

    M   = decay_t M                       decay_t = exp(-exp(A_log) softplus(a_t + dt_bias))
    u_t = beta_t (v_t - k_t M)            beta_t = sigmoid(b_t)
    M   = M + k_t^T u_t
    o_t = scale q_t M

Operands: q, k [T, H, K], v, o [T, HV, V], a, b [T, HV], each by its strides, the last of q, k, v and o being 1;
A_log, dt_bias [HV]; state [P, HV, V, K] or [P, HV, K, V], the inside of a slot packed; slots [N, S] or [N];
records k [P, S, H, K], u [P, S, HV, V], decay [P, S, HV], live [P].

`decode_kernel`: a program has one row, one value head and BLOCK_V of its columns, and keeps their part of M, fp32
[BLOCK_V, BLOCK_K], in registers. Tokens are rows of BLOCK_K, beyond K zeros. M is read once, and written once a token
(several slots) or once in all (replay, single slots): bound by memory, small batches by the chain of tokens.

Replayed records change M by the same expression as tokens do, so that replay has the bits of several slots. New records
go to memory of their own, since other programs may still read the old ones; `renew_records_kernel` moves them.

`norm_kernel`: out_t = o_t rsqrt(mean(o_t^2) + eps) weight act(gate_t), a program a row and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How a row's slots are used.
SEVERAL_SLOTS = tl.constexpr(0)
REPLAY = tl.constexpr(1)
SINGLE_SLOT = tl.constexpr(2)

# The activations of a gate.
NO_GATE = tl.constexpr(0)
SILU = tl.constexpr(1)
SIGMOID = tl.constexpr(2)


@triton.jit
def is_slot(slot, num_slots, null_slot, HAS_NULL_SLOT: tl.constexpr):
    """Tell padding from slots of the pool."""
    found = (slot >= 0) & (slot < num_slots)
    if HAS_NULL_SLOT:
        found = found & (slot != null_slot)
    return found


@triton.jit
def read_row(
    n, cu_seqlens, cu_stride, accepted_tokens, accepted_stride, row_indices,
    row_stride, slots, slots_row_stride, slots_column_stride, num_rows, num_tokens,
    num_columns, num_slots, null_slot, HAS_NULL_SLOT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return the row's index in the tables, its first token, its length (0: nothing to do), its slot and the accepted
    tokens. Whatever is out of range makes it padding."""
    index = n
    if row_indices is not None:
        index = tl.load(row_indices + n * row_stride).to(tl.int64)
    exists = (index >= 0) & (index < num_rows)
    row = tl.where(exists, index, 0)
    start, end = row, row + 1
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + row * cu_stride, mask=exists, other=0).to(tl.int64)
        end = tl.load(cu_seqlens + (row + 1) * cu_stride, mask=exists, other=0).to(tl.int64)
    accepted = row * 0 + 1
    if accepted_tokens is not None:
        accepted = tl.load(accepted_tokens + row * accepted_stride, mask=exists, other=0).to(tl.int64)
        accepted = tl.where(accepted == 0, 1, accepted)
    exists = exists & (start >= 0) & (start <= end) & (end <= num_tokens) & (accepted > 0)
    column = row * 0
    if FORM != SINGLE_SLOT:
        exists = exists & (end - start <= num_columns) & (accepted <= num_columns)
    if FORM == SEVERAL_SLOTS:
        column = accepted - 1
    slot = tl.load(slots + row * slots_row_stride + column * slots_column_stride, mask=exists, other=-1).to(tl.int64)
    exists = exists & is_slot(slot, num_slots, null_slot, HAS_NULL_SLOT)
    return row, start, tl.where(exists, end - start, 0), slot, accepted


@triton.jit
def decay_of(a, A_log, dt_bias, softplus_beta, softplus_threshold):
    x = a + dt_bias
    scaled = softplus_beta * x
    y = tl.exp(tl.minimum(scaled, softplus_threshold))
    # log(1 + y), right also where 1 + y is rounded.
    w = 1.0 + y
    log_w = tl.where(w == 1.0, y, tl.log(w) * (y / tl.where(w == 1.0, 1.0, w - 1.0)))
    softplus = tl.where(scaled > softplus_threshold, x, log_w / softplus_beta)
    # Where softplus is 0 there is no decay, however large A_log: infinity times 0 must not come up.
    return tl.exp(tl.where(softplus == 0.0, 0.0, -(tl.exp(A_log) * softplus)))


@triton.jit
def update(state, decay, k, u):
    """Return decay M + u k^T. A decay of 0 is a reset: what the state held, NaN too, ends here."""
    kept = tl.where(decay == 0.0, 0.0, state * decay)
    return tl.fma(tl.broadcast_to(u[:, None], state.shape), tl.broadcast_to(k[None, :], state.shape), kept)


@triton.jit
def normalized(x, NORMALIZE: tl.constexpr):
    if NORMALIZE:
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + 1e-6))
    return x


# Sizes of a batch: a kernel for each would be compiled in the middle of serving.
_SIZES = ("num_rows", "num_tokens", "num_columns", "num_slots", "null_slot")


@triton.jit(do_not_specialize=_SIZES)
def decode_kernel(
    q, k, v, a, b, A_log, dt_bias, o, state, slots,
    accepted_tokens, cu_seqlens, row_indices, records_k, records_u, records_decay,
    records_live, new_u, new_decay,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, a_head,
    b_token, b_head, o_token, o_head, A_log_stride, dt_bias_stride, state_slot,
    slots_row, slots_column, accepted_stride, cu_stride, row_stride, rk_slot,
    rk_record, rk_head, ru_slot, ru_record, ru_head, rd_slot, rd_record,
    rd_head, live_stride, num_rows, num_tokens, num_columns, num_slots, null_slot,
    scale, softplus_beta, softplus_threshold,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    FORM: tl.constexpr, HAS_NULL_SLOT: tl.constexpr, NORMALIZE: tl.constexpr, STATE_V_FIRST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    NUM_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tile = program % NUM_TILES
    hv = program // NUM_TILES % HV
    h = hv // (HV // H)
    row, start, length, source, accepted = read_row(
        program // NUM_TILES // HV, cu_seqlens, cu_stride, accepted_tokens, accepted_stride, row_indices, row_stride,
        slots, slots_row, slots_column, num_rows, num_tokens, num_columns, num_slots, null_slot, HAS_NULL_SLOT, FORM,
    )  # fmt: skip
    if length > 0:
        at_k = tl.arange(0, BLOCK_K)
        at_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        has_k, has_v = at_k < K, at_v < V
        inside = has_v[:, None] & has_k[None, :]
        if STATE_V_FIRST:
            at_state = hv * K * V + at_v[:, None] * K + at_k[None, :]
        else:
            at_state = hv * K * V + at_k[None, :] * V + at_v[:, None]
        M = tl.load(state + source * state_slot + at_state, mask=inside, other=0.0).to(tl.float32)
        if FORM == REPLAY:
            live = tl.load(records_live + source * live_stride).to(tl.int64)
            replayed = tl.minimum(live, accepted)
            for i in range(0, replayed):
                old_k = tl.load(
                    records_k + source * rk_slot + i * rk_record + h * rk_head + at_k, mask=has_k, other=0.0
                )
                old_u = tl.load(
                    records_u + source * ru_slot + i * ru_record + hv * ru_head + at_v, mask=has_v, other=0.0
                )
                decay = tl.load(records_decay + source * rd_slot + i * rd_record + hv * rd_head)
                M = update(M, decay, normalized(old_k.to(tl.float32), NORMALIZE), old_u)
            if replayed > 0:
                stored = M.to(state.dtype.element_ty)
                tl.store(state + source * state_slot + at_state, stored, mask=inside)
                M = stored.to(tl.float32)
        head_A_log = tl.load(A_log + hv * A_log_stride).to(tl.float32)
        head_dt_bias = tl.load(dt_bias + hv * dt_bias_stride).to(tl.float32)
        for t in range(0, length):
            token = start + t
            q_t = tl.load(q + token * q_token + h * q_head + at_k, mask=has_k, other=0.0).to(tl.float32)
            k_t = tl.load(k + token * k_token + h * k_head + at_k, mask=has_k, other=0.0).to(tl.float32)
            v_t = tl.load(v + token * v_token + hv * v_head + at_v, mask=has_v, other=0.0).to(tl.float32)
            a_t = tl.load(a + token * a_token + hv * a_head).to(tl.float32)
            beta = tl.sigmoid(tl.load(b + token * b_token + hv * b_head).to(tl.float32))
            decay = decay_of(a_t, head_A_log, head_dt_bias, softplus_beta, softplus_threshold)
            q_t, k_t = normalized(q_t, NORMALIZE), normalized(k_t, NORMALIZE)
            kept = tl.where(decay == 0.0, 0.0, M * decay)
            u = beta * (v_t - tl.sum(kept * k_t[None, :], 1))
            M = update(M, decay, k_t, u)
            o_t = scale * tl.sum(M * q_t[None, :], 1)
            tl.store(o + token * o_token + hv * o_head + at_v, o_t.to(o.dtype.element_ty), mask=has_v)
            if FORM == SEVERAL_SLOTS:
                slot = tl.load(slots + row * slots_row + t * slots_column).to(tl.int64)
                if is_slot(slot, num_slots, null_slot, HAS_NULL_SLOT):
                    tl.store(state + slot * state_slot + at_state, M.to(state.dtype.element_ty), mask=inside)
            if FORM == REPLAY:
                tl.store(new_u + (token * HV + hv) * V + at_v, u, mask=has_v)
                if tile == 0:
                    tl.store(new_decay + token * HV + hv, decay)
        if FORM == SINGLE_SLOT:
            tl.store(state + source * state_slot + at_state, M.to(state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def renew_records_kernel(
    k, slots, accepted_tokens, cu_seqlens, row_indices, records_k, records_u,
    records_decay, records_live, new_u, new_decay,
    k_token, k_head, slots_row, accepted_stride, cu_stride, row_stride, rk_slot,
    rk_record, rk_head, ru_slot, ru_record, ru_head, rd_slot, rd_record,
    rd_head, live_stride, num_rows, num_tokens, num_columns, num_slots, null_slot,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_NULL_SLOT: tl.constexpr,
):  # fmt: skip
    """Move what a row's tokens left to the records of its slot: a program a row and value head."""
    program = tl.program_id(0).to(tl.int64)
    hv = program % HV
    _row, start, length, slot, _accepted = read_row(
        program // HV, cu_seqlens, cu_stride, accepted_tokens, accepted_stride, row_indices, row_stride, slots,
        slots_row, 0, num_rows, num_tokens, num_columns, num_slots, null_slot, HAS_NULL_SLOT, REPLAY,
    )  # fmt: skip
    at_k, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    for t in range(0, length):
        token = start + t
        u = tl.load(new_u + (token * HV + hv) * V + at_v, mask=at_v < V)
        tl.store(records_u + slot * ru_slot + t * ru_record + hv * ru_head + at_v, u, mask=at_v < V)
        decay = tl.load(new_decay + token * HV + hv)
        tl.store(records_decay + slot * rd_slot + t * rd_record + hv * rd_head, decay)
        if hv < H:
            k_t = tl.load(k + token * k_token + hv * k_head + at_k, mask=at_k < K)
            tl.store(records_k + slot * rk_slot + t * rk_record + hv * rk_head + at_k, k_t, mask=at_k < K)
    if (length > 0) & (hv == 0):
        tl.store(records_live + slot * live_stride, length.to(tl.int32))


@triton.jit(do_not_specialize=_SIZES)
def norm_kernel(
    o, gate, weight, out, slots, accepted_tokens, cu_seqlens, row_indices,
    gate_token, gate_head, weight_stride, out_token, out_head, slots_row,
    slots_column, accepted_stride, cu_stride, row_stride, num_rows, num_tokens,
    num_columns, num_slots, null_slot, eps,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, FORM: tl.constexpr, HAS_NULL_SLOT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Norm and gate o [T, HV, V], fp32 and packed, of the rows that are no padding."""
    program = tl.program_id(0).to(tl.int64)
    hv = program % HV
    _row, start, length, _slot, _accepted = read_row(
        program // HV, cu_seqlens, cu_stride, accepted_tokens, accepted_stride, row_indices, row_stride, slots,
        slots_row, slots_column, num_rows, num_tokens, num_columns, num_slots, null_slot, HAS_NULL_SLOT, FORM,
    )  # fmt: skip
    at_v = tl.arange(0, BLOCK_V)
    has_v = at_v < V
    scale = tl.load(weight + at_v * weight_stride, mask=has_v, other=0.0).to(tl.float32)
    for t in range(0, length):
        token = start + t
        x = tl.load(o + (token * HV + hv) * V + at_v, mask=has_v, other=0.0)
        y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / V + eps)) * scale
        if ACTIVATION != NO_GATE:
            g = tl.load(gate + token * gate_token + hv * gate_head + at_v, mask=has_v, other=0.0).to(tl.float32)
            factor = tl.sigmoid(g)
            if ACTIVATION == SILU:
                factor = factor * g
            y = y * factor
        tl.store(out + token * out_token + hv * out_head + at_v, y.to(out.dtype.element_ty), mask=has_v)
