# SPDX-License-Identifier: Apache-2.0
"""Every operation in float64, token by token and head by head: slow, independent of the reference, for small shapes.

The functions take the arguments of the public operations (`out` is not written), convert every operand to float64 and
return float64. Pools and records are updated in place and rounded to their own dtype where they are stored: pass
float64 copies (`gdn_core.testing.to_float64`) to get states that were never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..attention import GDNLayerParams, GDNMetadata, GDNStateCache
from ..attention.groups import PREFILL, REPLAY
from ..records import ReplayRecords

_CHUNK = 64


def _gate(A_log: Tensor, a: Tensor, dt_bias: Tensor, softplus_beta: float, softplus_threshold: float) -> Tensor:
    x = a.double() + dt_bias.double()
    g = torch.empty_like(x)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).reshape(-1, x.dim()).tolist():
        value = x[tuple(index)].item()
        if softplus_beta * value > softplus_threshold:
            softplus = value
        else:
            softplus = math.log1p(math.exp(softplus_beta * value)) / softplus_beta
        rate = A_log[index[-1]].double().exp().item()
        g[tuple(index)] = -0.0 if softplus == 0 else -rate * softplus
    return g


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    *,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    g = _gate(A_log, a, dt_bias, softplus_beta, softplus_threshold)
    return g, 1 / (1 + torch.exp(-b.double()))


def _normalize(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum() + 1e-6)


def _token(
    M: Tensor, q: Tensor, k: Tensor, v: Tensor, g: float, beta: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of one value head: `M [K, V]`, `q, k [K]`, `v [V]`. Returns the state, u and o."""
    M = torch.zeros_like(M) if g == -math.inf else math.exp(g) * M
    u = beta * (v - k @ M)
    M = M + torch.outer(k, u)
    return M, u, scale * (q @ M)


def _is_padding(slot: int, null_slot: int | None) -> bool:
    return slot < 0 or slot == null_slot


def _read(pool: Tensor, slot: int, head: int, v_first: bool) -> Tensor:
    M = pool[slot, head].double()
    return M.T.clone() if v_first else M.clone()


def _write(pool: Tensor, slot: int, head: int, M: Tensor, v_first: bool) -> None:
    pool[slot, head] = (M.T if v_first else M).to(pool.dtype)


def _spans(cu_seqlens: Tensor | None, num_rows: int, num_tokens: int) -> list[range]:
    if cu_seqlens is None:
        return [range(n * num_tokens, (n + 1) * num_tokens) for n in range(num_rows)]
    bounds = cu_seqlens.tolist()
    return [range(bounds[n], bounds[n + 1]) for n in range(len(bounds) - 1)]


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalize: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    null_slot: int | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run whole sequences; g is the log decay and beta the step size, `[B, T, HV]`."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, v = (x.double().reshape(B * T, *x.shape[2:]) for x in (q, k, v))
    g, beta = g.double().reshape(B * T, HV), beta.double().reshape(B * T, HV)
    spans = _spans(cu_seqlens, B, T)
    o = torch.zeros(B * T, HV, V, dtype=torch.float64)
    final = torch.zeros(len(spans), HV, K, V, dtype=torch.float64)
    starts = []
    for n, span in enumerate(spans):
        starts_of_row = torch.zeros(math.ceil(len(span) / _CHUNK), HV, K, V, dtype=torch.float64)
        starts.append(starts_of_row)
        slot = n if state_indices is None else int(state_indices[n])
        if _is_padding(slot, null_slot if state_indices is not None else None):
            continue
        is_fresh = initial_state is None or (
            has_initial_state is not None and len(span) > 0 and not bool(has_initial_state[n])
        )
        for h in range(HV):
            M = torch.zeros(K, V, dtype=torch.float64)
            if not is_fresh and initial_state is not None:
                M = _read(initial_state, slot, h, state_v_first)
            for i, t in enumerate(span):
                if i % _CHUNK == 0:
                    starts_of_row[i // _CHUNK, h] = M
                q_t, k_t = q[t, h // (HV // H)], k[t, h // (HV // H)]
                if normalize:
                    q_t, k_t = _normalize(q_t), _normalize(k_t)
                M, _, o[t, h] = _token(M, q_t, k_t, v[t, h], g[t, h].item(), beta[t, h].item(), scale)
            final[n, h] = M
            if state_indices is not None and initial_state is not None and len(span) > 0:
                _write(initial_state, slot, h, M, state_v_first)
    chunk_states = torch.cat([torch.zeros(0, HV, K, V, dtype=torch.float64), *starts])
    if state_v_first:
        final, chunk_states = final.transpose(-1, -2), chunk_states.transpose(-1, -2)
    wanted = output_final_state and state_indices is None
    return o.reshape(B, T, HV, V), final if wanted else None, chunk_states


def _step_size(beta: Tensor, apply_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    beta = beta.double()
    if apply_sigmoid:
        beta = 1 / (1 + torch.exp(-beta))
    return 2 * beta if allow_neg_eigval else beta


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    output_chunk_states: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    beta = _step_size(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, final, chunk_states = _sequences(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens, state_indices, has_initial_state, null_slot,
    )  # fmt: skip
    return (o, final, chunk_states) if output_chunk_states else (o, final)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    shape = v.shape[:3]
    log_decay = torch.zeros(shape, dtype=torch.float64) if g is None else g.double()
    if use_gate_in_kernel:
        assert A_log is not None and dt_bias is not None
        log_decay = _gate(A_log, log_decay, dt_bias, 1.0, 20.0)
    step = torch.ones(shape, dtype=torch.float64) if beta is None else beta
    step = _step_size(step, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, final, _ = _sequences(
        q, k, v, log_decay, step, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens, state_indices, has_initial_state, null_slot,
    )  # fmt: skip
    return o, final


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)
    bounds = torch.arange(v.shape[1] + 1) if cu_seqlens is None else cu_seqlens
    o, _, _ = _sequences(
        q, k, v, g[None], beta[None], scale, initial_state_source, False, use_qk_l2norm_in_kernel, state_v_first,
        bounds, initial_state_indices, None, null_slot,
    )  # fmt: skip
    return o


def _rows_and_heads(cu_seqlens: Tensor, num_heads: int) -> Iterator[tuple[int, range, int]]:
    for n, span in enumerate(_spans(cu_seqlens, 0, 0)):
        for h in range(num_heads):
            yield n, span, h


def _accepted(num_accepted_tokens: Tensor | None, n: int) -> int:
    return 1 if num_accepted_tokens is None else max(int(num_accepted_tokens[n]), 1)


def _several_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    table: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    normalize: bool,
    scale: float | None,
    state_v_first: bool,
    null_slot: int | None,
) -> Tensor:
    """`q, k [T, H, K]`, `v [T, HV, V]`, `g, beta [T, HV]` to o `[T, HV, V]`."""
    H, K = q.shape[1:]
    HV, V = v.shape[1:]
    scale = K**-0.5 if scale is None else scale
    o = torch.zeros(len(q), HV, V, dtype=torch.float64)
    for n, span, h in _rows_and_heads(cu_seqlens, HV):
        source = int(table[n, _accepted(num_accepted_tokens, n) - 1]) if len(span) else -1
        if _is_padding(source, null_slot):
            continue
        M = _read(pool, source, h, state_v_first)
        for i, t in enumerate(span):
            q_t, k_t = q[t, h // (HV // H)].double(), k[t, h // (HV // H)].double()
            if normalize:
                q_t, k_t = _normalize(q_t), _normalize(k_t)
            M, _, o[t, h] = _token(M, q_t, k_t, v[t, h].double(), g[t, h].item(), beta[t, h].item(), scale)
            if not _is_padding(int(table[n, i]), null_slot):
                _write(pool, int(table[n, i]), h, M, state_v_first)
    return o


def _replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slot_indices: Tensor,
    records: ReplayRecords,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    normalize: bool,
    scale: float | None,
    state_v_first: bool,
    null_slot: int | None,
) -> Tensor:
    """As `_several_slots`, with one slot a row and records."""
    H, K = q.shape[1:]
    HV, V = v.shape[1:]
    scale = K**-0.5 if scale is None else scale
    o = torch.zeros(len(q), HV, V, dtype=torch.float64)
    old_k, old_live = records.k.double().clone(), records.live.tolist()
    for n, span, h in _rows_and_heads(cu_seqlens, HV):
        slot = int(slot_indices[n])
        if _is_padding(slot, null_slot) or not len(span):
            continue
        key_head = h // (HV // H)
        M = _read(pool, slot, h, state_v_first)
        for i in range(min(_accepted(num_accepted_tokens, n), old_live[slot])):
            k_i = old_k[slot, i, key_head]
            decay = records.decay[slot, i, h].item()
            M = torch.zeros_like(M) if decay == 0 else decay * M
            M = M + torch.outer(_normalize(k_i) if normalize else k_i, records.u[slot, i, h].double())
        _write(pool, slot, h, M, state_v_first)
        M = _read(pool, slot, h, state_v_first)
        for i, t in enumerate(span):
            q_t, k_t = q[t, key_head].double(), k[t, key_head].double()
            if normalize:
                q_t, k_t = _normalize(q_t), _normalize(k_t)
            M, u, o[t, h] = _token(M, q_t, k_t, v[t, h].double(), g[t, h].item(), beta[t, h].item(), scale)
            records.k[slot, i, key_head] = k[t, key_head].to(records.k.dtype)
            records.u[slot, i, h] = u.to(records.u.dtype)
            records.decay[slot, i, h] = math.exp(g[t, h].item())
        records.live[slot] = len(span)
    return o


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
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)
    return _several_slots(
        q[0], k[0], v[0], g, beta, initial_state_source, spec_state_indices, num_accepted_tokens, cu_seqlens,
        use_qk_l2norm_in_kernel, scale, state_v_first, null_slot,
    )[None]  # fmt: skip


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
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)
    return _replay(
        q[0], k[0], v[0], g, beta, state, slot_indices, records, num_accepted_tokens, cu_seqlens,
        use_qk_l2norm_in_kernel, scale, state_v_first, null_slot,
    )[None]  # fmt: skip


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _convolve_row(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """One row: `history [C, W-1]`, `x [C, L]` to y `[C, L]`."""
    C, W = weight.shape
    inputs = torch.cat([history.double(), x.double()], dim=1)
    y = torch.zeros(C, x.shape[1], dtype=torch.float64)
    for t in range(x.shape[1]):
        if bias is not None:
            y[:, t] = bias.double()
        for j in range(W):
            y[:, t] += weight[:, j].double() * inputs[:, t + j]
    return y if activation is None else _silu(y)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    C, W = weight.shape
    y = torch.zeros(x.shape, dtype=torch.float64)
    if seq_idx is not None:
        for row, segments in enumerate(seq_idx.tolist()):
            for t, segment in enumerate(segments):
                if segment < 0:
                    continue
                window = torch.zeros(C, W, dtype=torch.float64)
                for j in range(W):
                    s = t - W + 1 + j
                    if s >= 0 and segments[s] == segment:
                        window[:, j] = x[row, :, s]
                y[row, :, t] = _convolve_row(window[:, :-1], window[:, -1:], weight, bias, activation)[:, 0]
        return y

    dense = x.dim() == 3
    spans = [range(x.shape[2])] * x.shape[0] if dense else _spans(query_start_loc, 0, 0)
    final = torch.zeros(len(spans), C, W - 1, dtype=torch.float64)
    for n, span in enumerate(spans):
        tokens = x[n] if dense else x[:, span.start : span.stop]
        slot = n if cache_indices is None else int(cache_indices[n])
        if conv_states is not None and _is_padding(slot, null_slot):
            continue
        history = torch.zeros(C, W - 1, dtype=torch.float64)
        if has_initial_state is None or bool(has_initial_state[n]) or not len(span):
            if conv_states is not None:
                history = conv_states[slot, :, : W - 1].double()
            elif initial_states is not None:
                history = initial_states[n].double()
        result = _convolve_row(history, tokens, weight, bias, activation)
        if dense:
            y[n] = result
        else:
            y[:, span.start : span.stop] = result
        final[n] = torch.cat([history, tokens.double()], dim=1)[:, len(span) :]
        if conv_states is not None and len(span):
            conv_states[slot, :, : W - 1] = final[n].to(conv_states.dtype)
    return (y, final) if return_final_states else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    W = weight.shape[1]
    y = torch.zeros(x.shape, dtype=torch.float64)
    spans = _spans(query_start_loc, 0, 0) if query_start_loc is not None else [range(0)] * x.shape[0]
    for n, span in enumerate(spans):
        if query_start_loc is not None:
            tokens, target = x[span.start : span.stop].T, y[span.start : span.stop].T
        else:
            tokens, target = (x[n], y[n]) if x.dim() == 3 else (x[n, :, None], y[n, :, None])
        slot = n if conv_state_indices is None else int(conv_state_indices[n])
        if _is_padding(slot, null_slot) or not tokens.shape[1]:
            continue
        old = conv_state[slot].double().clone()
        state_len = old.shape[1]
        new = old.clone()
        if cache_seqlens is not None:
            position = int(cache_seqlens[n])
            history = old[:, [(position + d) % state_len for d in range(1 - W, 0)]]
            for t in range(tokens.shape[1]):
                new[:, (position + t) % state_len] = tokens[:, t].double()
        elif num_accepted_tokens is not None:
            first = _accepted(num_accepted_tokens, n) - 1
            history = old[:, first : first + W - 1]
            kept = torch.cat([history[:, 1:], tokens.double()], dim=1)
            new[:, : kept.shape[1]] = kept
        else:
            history = old[:, state_len - (W - 1) :]
            new = torch.cat([old, tokens.double()], dim=1)[:, -state_len:]
        conv_state[slot] = new.to(conv_state.dtype)
        target.copy_(_convolve_row(history, tokens, weight, bias, activation))
    return y


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str = "silu", out: Tensor | None = None
) -> Tensor:
    rows, gates = x.double().reshape(-1, x.shape[-1]), gate.double().reshape(-1, x.shape[-1])
    y = torch.zeros_like(rows)
    for row in range(len(rows)):
        normed = rows[row] / torch.sqrt((rows[row] * rows[row]).mean() + eps) * weight.double()
        sigmoid = 1 / (1 + torch.exp(-gates[row]))
        factors = {"sigmoid": sigmoid, "none": torch.ones_like(sigmoid)}
        y[row] = normed * factors.get(activation, gates[row] * sigmoid)
    return y.reshape(x.shape)


def _split_channels(mixed_qkv: Tensor, output_gate: Tensor, H: int | None, K: int) -> tuple[Tensor, Tensor, Tensor]:
    T, C = mixed_qkv.shape
    HV, V = output_gate.shape[1:]
    H = (C - HV * V) // (2 * K) if H is None else H
    q, k, v = mixed_qkv[:, : H * K], mixed_qkv[:, H * K : 2 * H * K], mixed_qkv[:, 2 * H * K :]
    return q.reshape(T, H, K), k.reshape(T, H, K), v.reshape(T, HV, V)


def _gated_rows(
    o: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str,
    cu_seqlens: Tensor,
    live: list[bool],
) -> Tensor:
    out = torch.zeros_like(o)
    for n, span in enumerate(_spans(cu_seqlens, 0, 0)):
        for t in span if live[n] else ():
            out[t] = rms_norm_gated(o[t], output_gate[t], norm_weight, eps, activation=activation)
    return out


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    *,
    output_gate_activation: str = "silu",
    num_key_heads: int | None = None,
    head_k_dim: int = 128,
    state_v_first: bool = True,
    null_slot: int | None = None,
) -> Tensor:
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    q, k, v = _split_channels(mixed_qkv, output_gate, num_key_heads, head_k_dim)
    o = _several_slots(
        q, k, v, g, beta, state, state_indices, num_accepted_tokens, cu_seqlens, True, scale, state_v_first, null_slot
    )
    live = [
        not _is_padding(int(state_indices[n, _accepted(num_accepted_tokens, n) - 1]), null_slot)
        for n in range(len(state_indices))
    ]
    return _gated_rows(o, output_gate, norm_weight, norm_eps, output_gate_activation, cu_seqlens, live)


def fused_gdn_decode_post_conv_mtp_replay(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slot_indices: Tensor,
    records: ReplayRecords,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    *,
    output_gate_activation: str = "silu",
    num_key_heads: int | None = None,
    head_k_dim: int = 128,
    state_v_first: bool = True,
    null_slot: int | None = None,
) -> Tensor:
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    q, k, v = _split_channels(mixed_qkv, output_gate, num_key_heads, head_k_dim)
    o = _replay(
        q, k, v, g, beta, state, slot_indices, records, num_accepted_tokens, cu_seqlens, True, scale, state_v_first,
        null_slot,
    )  # fmt: skip
    live = [not _is_padding(slot, null_slot) for slot in slot_indices.tolist()]
    return _gated_rows(o, output_gate, norm_weight, norm_eps, output_gate_activation, cu_seqlens, live)


def gdn_attention(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    z: Tensor,
    layer: GDNLayerParams,
    cache: GDNStateCache,
    metadata: GDNMetadata,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Row by row: `mixed_qkv [T, C]`, `a, b [T, HV]`, `z [T, HV, V]` to out `[T, HV, V]`."""
    result = torch.zeros(z.shape, dtype=torch.float64)
    for n, (start, end) in enumerate(pairwise(metadata.query_start_loc.tolist())):
        if start == end or _is_padding(int(metadata.slots[n, 0]), cache.null_slot):
            continue
        part = slice(start, end)
        row = _attention_prefill if int(metadata.layout[n, 0]) == PREFILL else _attention_step
        result[part] = row(mixed_qkv[part], a[part], b[part], z[part], layer, cache, metadata, n)
    return result


def _attention_prefill(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, layer: GDNLayerParams, cache: GDNStateCache,
    metadata: GDNMetadata, n: int,
) -> Tensor:  # fmt: skip
    bounds, slots = torch.tensor([0, len(mixed_qkv)]), metadata.slots[n, :1]
    initial = metadata.has_initial_state[n : n + 1]
    y = causal_conv1d_fn(
        mixed_qkv.T, layer.conv_weight, layer.conv_bias, activation=layer.activation, conv_states=cache.conv_states,
        query_start_loc=bounds, cache_indices=slots, has_initial_state=initial,
    )  # fmt: skip
    assert isinstance(y, Tensor)
    q, k, v = _split_channels(y.T, z, layer.num_key_heads, layer.head_k_dim)
    g, beta = fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
    o = fused_recurrent_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta=beta[None], initial_state=cache.state, use_qk_l2norm_in_kernel=True,
        state_v_first=cache.state_v_first, cu_seqlens=bounds, state_indices=slots, has_initial_state=initial,
    )[0]  # fmt: skip
    if cache.records is not None:
        cache.records.live[slots.long()] = 0
    return rms_norm_gated(o[0], z, layer.norm_weight, layer.norm_eps, activation=layer.output_gate_activation)


def _attention_step(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, layer: GDNLayerParams, cache: GDNStateCache,
    metadata: GDNMetadata, n: int,
) -> Tensor:  # fmt: skip
    bounds, accepted = torch.tensor([0, len(mixed_qkv)]), metadata.num_accepted_tokens[n : n + 1]
    table = metadata.slots[n : n + 1]
    y = causal_conv1d_update(
        mixed_qkv, cache.conv_states, layer.conv_weight, layer.conv_bias, layer.activation, None, table[:, 0],
        num_accepted_tokens=accepted, query_start_loc=bounds,
    )  # fmt: skip
    options: dict[str, Any] = {
        "output_gate": z, "norm_weight": layer.norm_weight, "norm_eps": layer.norm_eps,
        "output_gate_activation": layer.output_gate_activation, "num_key_heads": layer.num_key_heads,
        "head_k_dim": layer.head_k_dim, "state_v_first": cache.state_v_first, "null_slot": cache.null_slot,
        "num_accepted_tokens": accepted, "cu_seqlens": bounds, "state": cache.state,
    }  # fmt: skip
    if int(metadata.layout[n, 0]) == REPLAY:
        assert cache.records is not None
        return fused_gdn_decode_post_conv_mtp_replay(
            y, a, b, layer.A_log, layer.dt_bias, table[:, 0], cache.records, **options
        )
    return fused_gdn_decode_post_conv_mtp(y, a, b, layer.A_log, layer.dt_bias, table, **options)
