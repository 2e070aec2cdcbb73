# SPDX-License-Identifier: Apache-2.0
"""A decode step after the convolution in one call: gates, normalised q and k, recurrence with rollback, gated norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..records import ReplayRecords
from ._common import Pieces, deliver
from .norm import gated_norm
from .recurrent import decode_tokens
from .speculative import run_replay, run_several_slots


def split_mixed_qkv(
    mixed_qkv: Tensor, output_gate: Tensor, num_key_heads: int | None, head_k_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k `[T, H, K]` and v `[T, HV, V]` as views of the channels q | k | v."""
    HV, V = output_gate.shape[-2:]
    key_channels = (mixed_qkv.shape[-1] - HV * V) // 2
    H = key_channels // head_k_dim if num_key_heads is None else num_key_heads
    q, k, v = mixed_qkv.split([key_channels, key_channels, HV * V], dim=-1)
    return q.unflatten(-1, (H, key_channels // H)), k.unflatten(-1, (H, key_channels // H)), v.unflatten(-1, (HV, V))


def norm_and_deliver(
    pieces: Pieces,
    outputs: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    activation: str,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Norm and gate the outputs, not rounded before: a padding row's gate is never read and its result is 0."""
    gate = pieces.gather(output_gate).to(outputs.dtype)
    y = gated_norm(outputs, gate, norm_weight.to(outputs.dtype), norm_eps, activation)
    return deliver(pieces.join(y, like=output_gate), out, dtype)


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
    """Run the step on `mixed_qkv [T, C]` with a table of slots `[N, S]`; out and output_gate are `[T, HV, V]`."""
    q, k, v = split_mixed_qkv(mixed_qkv, output_gate, num_key_heads, head_k_dim)
    tokens = decode_tokens(A_log, dt_bias, q, k, v, a, b, normalize=True)
    pieces, outputs = run_several_slots(
        tokens, q.shape[-1] ** -0.5 if scale is None else scale, state, state_indices, num_accepted_tokens, cu_seqlens,
        state_v_first, null_slot,
    )  # fmt: skip
    return norm_and_deliver(
        pieces, outputs, output_gate, norm_weight, norm_eps, output_gate_activation, out, mixed_qkv.dtype
    )


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
    """Run the step on `mixed_qkv [T, C]` with one slot a row, `[N]`, and records; out is `[T, HV, V]`."""
    q, k, v = split_mixed_qkv(mixed_qkv, output_gate, num_key_heads, head_k_dim)
    tokens = decode_tokens(A_log, dt_bias, q, k, v, a, b, normalize=True)
    pieces, outputs = run_replay(
        tokens, k, True, q.shape[-1] ** -0.5 if scale is None else scale, state, slot_indices, records,
        num_accepted_tokens, cu_seqlens, state_v_first, null_slot,
    )  # fmt: skip
    return norm_and_deliver(
        pieces, outputs, output_gate, norm_weight, norm_eps, output_gate_activation, out, mixed_qkv.dtype
    )
