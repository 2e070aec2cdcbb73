# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, one token at a time: this recurrence is the specification of every other form.

Per value head, with a state `M [K, V]`:

    M   = exp(g_t) * M
    u_t = beta_t * (v_t - k_t @ M)
    M   = M + outer(k_t, u_t)
    o_t = scale * (q_t @ M)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._common import Pieces, States, compute_dtype, deliver, expand_heads, l2_normalize, put, take
from .gating import fused_gdn_gating, log_decay


class Tokens(NamedTuple):
    """What the recurrence reads, in the compute dtype: `q, k [T, HV, K]`, `v [T, HV, V]`, `decay, beta [T, HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


OnStep = Callable[[int, "Tensor | None", Tensor, Tensor], None]


def decay_state(state: Tensor, decay: Tensor) -> Tensor:
    """Return `decay * state`; a decay of 0 forgets any state, also one of NaN or Inf."""
    decay = decay[..., None, None]
    return torch.where(decay == 0, 0, state) * decay


def add_outer(state: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """Return `state + outer(k, u)`."""
    return state + k[..., :, None] * u[..., None, :]


def apply_state(x: Tensor, state: Tensor) -> Tensor:
    """Return `x @ state` per head: `[N, HV, K]` and `[N, HV, K, V]` to `[N, HV, V]`."""
    return (x[..., None, :] @ state)[..., 0, :]


def delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance states `[N, HV, K, V]` by one token; return the new state, u and the output."""
    state = decay_state(state, decay)
    u = beta[..., None] * (v - apply_state(k, state))
    state = add_outer(state, k, u)
    o = scale * apply_state(q, state)
    return state, u, o


def run_recurrence(
    pieces: Pieces, tokens: Tokens, scale: float, state: Tensor, on_step: OnStep | None = None
) -> tuple[Tensor, Tensor]:
    """Run all sequences from `state [M, HV, K, V]`; return the outputs, in pieces, and the last states.

    `on_step(t, rows, state, u)` sees the result of token t of every sequence that has one.
    """
    steps = zip(*(pieces.split(x) for x in tokens), strict=True)
    outputs = [tokens.v[:0, None]]
    for t, (rows, step) in enumerate(zip(pieces.rows, steps, strict=True)):
        q_t, k_t, v_t, decay_t, beta_t = (x.squeeze(1) for x in step)
        new_state, u, o = delta_rule_step(take(state, rows), q_t, k_t, v_t, decay_t, beta_t, scale)
        state = put(state, rows, new_state)
        outputs.append(o.unsqueeze(1))
        if on_step is not None:
            on_step(t, rows, new_state, u)
    return torch.cat(outputs), state


def keys_and_queries(q: Tensor, k: Tensor, num_value_heads: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Bring q and k `[..., H, K]` to the compute dtype, normalise where asked, and give each value head its own."""
    q, k = q.to(compute_dtype(q)), k.to(compute_dtype(q))
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    return expand_heads(q, num_value_heads), expand_heads(k, num_value_heads)


def step_size(beta: Tensor | None, like: Tensor, apply_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """Return beta in the compute dtype, as `like` (all ones when there is none)."""
    beta = torch.ones_like(like) if beta is None else beta.to(like.dtype)
    if apply_sigmoid:
        beta = beta.sigmoid()
    return 2 * beta if allow_neg_eigval else beta


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
    """Run the recurrence over `q, k [B, T, H, K]`, `v [B, T, HV, V]`, `g, beta [B, T, HV]`.

    Returns o `[B, T, HV, V]` and, with `output_final_state` and no pool, the final states `[N, HV, K, V]`.
    With `state_indices`, `initial_state` is a pool and is updated in place.
    """
    B, T, HV, V = v.shape
    K, dtype = q.shape[-1], compute_dtype(q)
    q_, k_ = keys_and_queries(q.flatten(0, 1), k.flatten(0, 1), HV, use_qk_l2norm_in_kernel)
    g_ = v.new_zeros(B * T, HV, dtype=dtype) if g is None else g.to(dtype).flatten(0, 1)
    if use_gate_in_kernel and A_log is not None:
        g_ = log_decay(A_log, g_, dt_bias)
    beta_ = step_size(None if beta is None else beta.flatten(0, 1), g_, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tokens = Tokens(q_, k_, v.to(dtype).flatten(0, 1), g_.exp(), beta_)

    states = States(initial_state, state_indices, has_initial_state, null_slot, state_v_first)
    pieces = Pieces(cu_seqlens, B, B * T, states.live(), width=1, device=v.device)
    state = states.load(pieces, (HV, K, V), dtype)
    outputs, last = run_recurrence(pieces, tokens, K**-0.5 if scale is None else scale, state)
    final_state = states.store(pieces, last, output_final_state)
    o = pieces.join(outputs, like=tokens.v).view(v.shape)
    return deliver(o, out, q.dtype), final_state


def decode_tokens(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    normalize: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tokens:
    """Apply the gates and the normalisation to `q, k [T, H, K]`, `v [T, HV, V]`, `a, b [T, HV]`."""
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)
    q_, k_ = keys_and_queries(q, k, v.shape[-2], normalize)
    return Tokens(q_, k_, v.to(q_.dtype), g.exp(), beta)


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
    """Decode: gating and recurrence of `q, k [1, T, H, K]`, `v [1, T, HV, V]`, `a, b [T, HV]` on a pool of states.

    Row n resumes from slot `initial_state_indices[n]` and stores its last state there. Without `cu_seqlens` every
    token is a row.
    """
    T, HV, V = v.shape[1:]
    K = q.shape[-1]
    tokens = decode_tokens(
        A_log, dt_bias, q[0], k[0], v[0], a, b, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold
    )
    states = States(initial_state_source, initial_state_indices, None, null_slot, state_v_first)
    pieces = Pieces(cu_seqlens, T, T, states.live(), width=1, device=v.device)
    state = states.load(pieces, (HV, K, V), tokens.v.dtype)
    outputs, last = run_recurrence(pieces, tokens, K**-0.5 if scale is None else scale, state)
    states.store(pieces, last, output_final_state=False)
    o = pieces.join(outputs, like=tokens.v).view(v.shape)
    return deliver(o, out, q.dtype)
