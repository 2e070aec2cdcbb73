# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks of 64 tokens: matrix products inside a chunk, a loop only over chunks.

With `G` the running sum of g inside a chunk, `M` the state at its start, and i, j tokens of the chunk:

    A_ij = beta_i * (k_i . k_j) * exp(G_i - G_j)          j < i
    u    = (I + A)^-1 (beta * (v - exp(G) * (k @ M)))     all predictions of the chunk at once
    o_i  = scale * (exp(G_i) * (q_i @ M) + sum_{j <= i} (q_i . k_j) * exp(G_i - G_j) * u_j)
    M'   = exp(G_last) * M + sum_j exp(G_last - G_j) * outer(k_j, u_j)

A matrix product touches every token, if only with a factor of 0, and would carry a NaN back to earlier tokens or
past a hard reset (g = -inf). So the products see finite values only: `spoils` marks where a value was not, and `reach`
says where that shows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._common import Pieces, States, compute_dtype, deliver, put, take
from .recurrent import keys_and_queries, step_size

CHUNK_SIZE = 64


class Decays(NamedTuple):
    """The decays inside a chunk, `[N, HV, C, ...]`.

    `reach[i, j]`: j comes before i or is i, with no hard reset after j. Every exponent is a difference of sums of g
    that is masked before the exp, so that none is positive.
    """

    reach: Tensor
    between: Tensor  # exp(G_i - G_j) where j reaches i, else 0
    from_start: Tensor  # whether the state at the start reaches i
    start: Tensor  # exp(G_i) where it does, else 0


def chunk_decays(g: Tensor, is_bad: Tensor) -> Decays:
    """Return the decays of `g [N, HV, C]`; a bad token counts as one without decay."""
    reset = g.exp() == 0
    resets = reset.cumsum(-1)
    reach = (resets[..., :, None] == resets[..., None, :]).tril()
    from_start = resets == 0
    # A reset is in the masks and stays out of the sums, where -inf would give the NaN of -inf + inf.
    G = torch.where(is_bad | reset, 0, g).double().cumsum(-1)
    between = (G[..., :, None] - G[..., None, :]).masked_fill(~reach, -torch.inf).exp()
    start = G.masked_fill(~from_start, -torch.inf).exp()
    return Decays(reach, between.to(g.dtype), from_start[..., None], start[..., None].to(g.dtype))


def chunk_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Advance states `[N, HV, K, V]` by a chunk of `q, k, v [N, HV, C, ...]`, `g, beta [N, HV, C]`.

    Return the new states and the outputs.
    """
    is_bad = ~(k.isfinite().all(-1) & beta.isfinite()) | g.isnan() | (g == torch.inf)
    decays = chunk_decays(g, is_bad)
    k = torch.where(is_bad[..., None], 0, k)
    beta = torch.where(is_bad, 0, beta)[..., None]

    A = torch.where(decays.reach, beta * (k @ k.mT) * decays.between, 0).tril(-1)
    overflows = ~A.isfinite().all(-1, keepdim=True)
    rhs = beta * (v - torch.where(decays.from_start, decays.start * (k @ state), 0))
    spoils = is_bad[..., None] | overflows | ~rhs.isfinite()
    A, rhs = torch.where(overflows, 0, A), torch.where(spoils, 0, rhs)
    u = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    spoils = spoils | ~u.isfinite()
    u = torch.where(spoils, 0, u)
    is_spoiled = decays.reach.to(u.dtype) @ spoils.to(u.dtype) > 0

    attention = torch.where(decays.reach, (q @ k.mT) * decays.between, 0)
    o = scale * (torch.where(decays.from_start, decays.start * (q @ state), 0) + attention @ u)
    o = torch.where(is_spoiled, torch.nan, o)

    state = torch.where(decays.from_start[..., -1:, :], decays.start[..., -1:, :] * state, 0)
    state = state + (k * decays.between[..., -1, :, None]).mT @ u
    state = torch.where(is_spoiled[..., -1:, :], torch.nan, state)
    return state, o


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
    """Run the gated delta rule over `q, k [B, T, H, K]`, `v [B, T, HV, V]`, `g, beta [B, T, HV]`, in chunks.

    Returns o `[B, T, HV, V]`, the final states as `fused_recurrent_gated_delta_rule` does, and with
    `output_chunk_states` the states at the start of every chunk, `[total, HV, K, V]`, laid out as the states are.
    """
    B, T, HV, V = v.shape
    dtype = compute_dtype(q)
    q_, k_ = keys_and_queries(q, k, HV, use_qk_l2norm_in_kernel)
    g_ = g.to(dtype)
    beta_ = step_size(beta, g_, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    states = States(initial_state, state_indices, has_initial_state, null_slot, state_v_first)
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    pieces = Pieces(bounds, B, B * T, states.live(), CHUNK_SIZE, v.device)
    state = states.load(pieces, (HV, q.shape[-1], V), dtype)

    chunks = zip(*(pieces.split(x.flatten(0, 1)) for x in (q_, k_, v.to(dtype), g_, beta_)), strict=True)
    outputs, starts = [v.new_zeros(0, CHUNK_SIZE, HV, V, dtype=dtype)], []
    for rows, chunk in zip(pieces.rows, chunks, strict=True):
        q_c, k_c, v_c, g_c, beta_c = (x.transpose(1, 2) for x in chunk)
        start = take(state, rows)
        new_state, o = chunk_step(start, q_c, k_c, v_c, g_c, beta_c, scale)
        state = put(state, rows, new_state)
        starts.append(start)
        outputs.append(o.transpose(1, 2))

    final_state = states.store(pieces, state, output_final_state)
    o = deliver(pieces.join(torch.cat(outputs), like=v.flatten(0, 1)).view(v.shape), out, q.dtype)
    if not output_chunk_states:
        return o, final_state
    chunk_states = collect_chunk_states(pieces, starts, like=state)
    return o, final_state, chunk_states.mT if state_v_first else chunk_states


def collect_chunk_states(pieces: Pieces, starts: list[Tensor], like: Tensor) -> Tensor:
    """Order the states before each chunk by sequence, then chunk; those of padding rows are 0."""
    counts = torch.tensor([-(-length // CHUNK_SIZE) for length in pieces.all_lengths], dtype=torch.int64, device="cpu")
    first = (counts.cumsum(0) - counts).to(like.device)[pieces.live]
    chunk_states = like.new_zeros((int(counts.sum()), *like.shape[1:]))
    for number, (rows, start) in enumerate(zip(pieces.rows, starts, strict=True)):
        chunk_states = chunk_states.index_copy(0, take(first, rows) + number, start)
    return chunk_states
