# SPDX-License-Identifier: Apache-2.0
"""The causal depthwise convolution: `y_t = act(bias + sum_j w[:, j] * x[t - W + 1 + j])`, accumulated in fp32.

Inside this file a sequence is tokens first, `[L, C]`; its history is the W-1 raw inputs before it, oldest first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import Pieces, compute_dtype, deliver, is_live


def convolve(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return y `[M, L, C]` of raw inputs `x [M, L, C]` that follow `history [M, W-1, C]`."""
    dtype = compute_dtype(x)
    inputs = torch.cat([history.to(dtype), x.to(dtype)], dim=1)
    taps = weight.to(dtype).mT.contiguous()
    y = x.new_zeros(x.shape, dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape)
    for j in range(len(taps)):
        y = torch.addcmul(y, taps[j], inputs[:, j : j + x.shape[1]])
    return activate(y, activation)


def convolve_segments(
    x: Tensor, seq_idx: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """As `convolve` with no history, but a token reads tokens of its own segment only; a negative one gives 0."""
    dtype = compute_dtype(x)
    W, L = weight.shape[1], x.shape[1]
    inputs = F.pad(x.to(dtype), (0, 0, W - 1, 0))
    segments = F.pad(seq_idx, (W - 1, 0), value=-1)
    y = x.new_zeros(x.shape, dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape)
    for j in range(W):
        is_own = segments[:, j : j + L] == seq_idx
        y = y + weight[:, j].to(dtype) * torch.where(is_own[..., None], inputs[:, j : j + L], 0)
    return torch.where(seq_idx[..., None] >= 0, activate(y, activation), 0)


def activate(y: Tensor, activation: str | None) -> Tensor:
    """Apply SiLU (also called swish), or nothing."""
    return y if activation is None else F.silu(y)


def columns_from(x: Tensor, first: Tensor, num_columns: int) -> Tensor:
    """Return rows `first[m] .. first[m] + num_columns - 1` of each `x [M, L, C]`."""
    index = first[:, None] + torch.arange(num_columns, device=x.device)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def row_slots(indices: Tensor | None, num_rows: int, pool: Tensor) -> Tensor:
    """Return the slot of each row, its own number where there are no indices."""
    return torch.arange(num_rows, device=pool.device) if indices is None else indices.to(torch.int64)


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
    """Convolve whole sequences: `x [B, C, T]`, or `[C, T]` packed with `query_start_loc [N + 1]`; `weight [C, W]`.

    The histories come from `initial_states [N, C, W-1]`, or from columns 0..W-2 of the pool `conv_states
    [P, C, state_len]`, where the last W-1 inputs are then stored in place. Returns y, with `return_final_states`
    also those last inputs, `[N, C, W-1]`.
    """
    if seq_idx is not None:
        y = convolve_segments(x.mT, seq_idx, weight, bias, activation)
        return deliver(y.mT, out, x.dtype)

    C, W = weight.shape
    B, T = (x.shape[0] if x.dim() == 3 else 1), x.shape[-1]
    tokens = x.mT.reshape(B * T, C)
    source, slots, live = initial_states, None, None
    if conv_states is not None:
        num_rows = B if query_start_loc is None else len(query_start_loc) - 1
        slots = row_slots(cache_indices, num_rows, conv_states)
        live = is_live(slots, conv_states.shape[0], null_slot)
        source = conv_states[..., : W - 1]
    pieces = Pieces(query_start_loc, B, B * T, live, width=None, device=x.device)
    rows = pieces.gather(tokens)

    all_slots = slots
    slots = pieces.live if slots is None else slots[pieces.live]
    history = x.new_zeros(len(slots), C, W - 1) if source is None else source.index_select(0, slots)
    if has_initial_state is not None:
        history = torch.where(has_initial_state[pieces.live, None, None], history, 0)
    history = history.mT

    y = convolve(history, rows, weight, bias, activation)
    joined = pieces.join(y, like=tokens).reshape(x.mT.shape).mT
    last_inputs = columns_from(torch.cat([history, rows], dim=1), pieces.lengths, W - 1).mT
    if conv_states is not None and source is not None:
        source.index_copy_(0, slots, last_inputs.to(source.dtype))
    y = deliver(joined, out, x.dtype)
    if not return_final_states:
        return y
    # Wide enough for both, the inputs and the states that rows without tokens hand on; rounded once, below.
    final_states = last_inputs.new_zeros(len(pieces.all_lengths), C, W - 1)
    if initial_states is not None:
        final_states = initial_states.to(final_states.dtype)
    elif source is not None and all_slots is not None and live is not None:
        rows_of_pool = live.nonzero()[:, 0]
        held = source.index_select(0, all_slots[rows_of_pool]).to(final_states.dtype)
        final_states = final_states.index_copy(0, rows_of_pool, held)
    final_states = final_states.index_copy(0, pieces.live, last_inputs)
    return y, deliver(final_states, final_states_out, x.dtype)


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
    """Convolve new tokens, `x [B, C]`, `[B, C, q]` or ragged rows `[T, C]` with `query_start_loc`; x is kept.

    The pool `conv_state [P, C, state_len]` gives the histories and is updated in place: shifted; or with
    `num_accepted_tokens` left-aligned, so that the next call can pick up after any accepted token; or with
    `cache_seqlens` as a ring that token number t enters at column `t % state_len`.
    """
    tokens = x.mT.flatten(0, 1) if x.dim() == 3 else x
    num_rows = x.shape[0] if query_start_loc is None else len(query_start_loc) - 1
    slots = row_slots(conv_state_indices, num_rows, conv_state)
    live = is_live(slots, conv_state.shape[0], null_slot)
    pieces = Pieces(query_start_loc, num_rows, len(tokens), live, width=None, device=x.device)
    rows, slots = pieces.gather(tokens), slots[pieces.live]
    state = conv_state.index_select(0, slots).mT

    if cache_seqlens is not None:
        position = cache_seqlens.to(torch.int64)[pieces.live]
        history, state = advance_ring(state, rows, position, weight.shape[1])
    elif num_accepted_tokens is not None:
        accepted = num_accepted_tokens.to(torch.int64)[pieces.live].clamp(min=1)
        history, state = advance_accepted(state, rows, pieces.lengths, accepted, weight.shape[1])
    else:
        history, state = advance_shift(state, rows, pieces.lengths, weight.shape[1])

    conv_state.index_copy_(0, slots, state.mT.to(conv_state.dtype))
    y = pieces.join(convolve(history, rows, weight, bias, activation), like=tokens)
    y = y.reshape(x.mT.shape).mT if x.dim() == 3 else y
    return deliver(y, out, x.dtype)


def advance_shift(state: Tensor, x: Tensor, lengths: Tensor, W: int) -> tuple[Tensor, Tensor]:
    """Return the history, the last W-1 columns of the state, and the last columns of `cat(state, x)`."""
    state_len = state.shape[1]
    history = state[:, state_len - (W - 1) :]
    return history, columns_from(torch.cat([state, x], dim=1), lengths, state_len)


def advance_accepted(state: Tensor, x: Tensor, lengths: Tensor, accepted: Tensor, W: int) -> tuple[Tensor, Tensor]:
    """Return the history, from column `accepted - 1` on, and the state that starts with `cat(history[1:], x)`."""
    history = columns_from(state, accepted - 1, W - 1)
    inputs = torch.cat([history[:, 1:], x], dim=1)
    column = torch.arange(inputs.shape[1], device=x.device)
    is_new = (column < lengths[:, None] + W - 2)[..., None]
    kept = state[:, : inputs.shape[1]]
    return history, torch.cat([torch.where(is_new, inputs, kept), state[:, inputs.shape[1] :]], dim=1)


def advance_ring(state: Tensor, x: Tensor, position: Tensor, W: int) -> tuple[Tensor, Tensor]:
    """Return the history, the W-1 columns before `position`, and the ring with x written from there on."""
    state_len, num_tokens = state.shape[1], x.shape[1]
    before = position[:, None] + torch.arange(1 - W, 0, device=x.device)
    history = state.gather(1, (before % state_len)[..., None].expand(-1, -1, state.shape[2]))
    # Of more tokens than there are columns, the last ones stay.
    first = max(num_tokens - state_len, 0)
    columns = (position[:, None] + torch.arange(first, num_tokens, device=x.device)) % state_len
    columns = columns[..., None].expand(-1, -1, state.shape[2])
    return history, state.scatter(1, columns, x[:, first:].to(state.dtype))
