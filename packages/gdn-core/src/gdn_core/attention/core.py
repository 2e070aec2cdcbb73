# SPDX-License-Identifier: Apache-2.0
"""The core of a layer over any mix of rows: convolution, gates, recurrence, gated norm, in the order given.

A backend may run all of it in one call. Otherwise a batch is divided into groups (see :mod:`.groups`), each of which is
one call of each operation on the batch's own tensors: nothing is gathered, nothing is scattered back. Decode and
speculative rows take the fused step, prefills the chunked rule, whose output stays in fp32 until the gated norm has
been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _dispatch, ops
from ..records import ReplayRecords
from .groups import PREFILL, REPLAY, Group


class Core(NamedTuple):
    """What stays the same over the runs of a call."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    num_key_heads: int
    head_k_dim: int
    activation: str | None
    output_gate_activation: str
    conv_states: Tensor
    state: Tensor
    records: ReplayRecords | None
    state_v_first: bool
    null_slot: int | None

    @property
    def head_v_dim(self) -> int:
        return self.norm_weight.shape[0]

    def run(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, groups: Sequence[Group], out: Tensor) -> None:
        """Fill ``out``: every row of it."""
        # A group's outputs must not change the inputs of those after it.
        mixed_qkv, a, b, z = (x.clone() if _may_overlap(x, out) else x for x in (mixed_qkv, a, b, z))
        convolved = torch.empty_like(mixed_qkv, memory_format=torch.contiguous_format)
        end = 0
        for group in groups:
            if group.kind == PREFILL:
                end = group.end_token
                part = slice(group.first_token, group.end_token)
                inputs = (mixed_qkv[part], a[part], b[part], z[part])
                self.prefill(*inputs, group, convolved[part], out[part])
            else:
                # All rows together also zero what none of them covers.
                end = out.shape[0] if group.row_indices is None else group.end_token
                self.step(mixed_qkv, a, b, z, group, convolved, out)
        if end < out.shape[0]:
            out[end:].zero_()

    def step(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, group: Group, convolved: Tensor, out: Tensor
    ) -> None:
        """Advance decode and speculative rows: two calls, whatever their number, wherever they lie."""
        inputs = (
            mixed_qkv, self.conv_states, self.conv_weight, self.conv_bias, self.activation, None, group.slots,
            group.num_accepted_tokens, group.cu_seqlens, self.null_slot, group.row_indices, convolved,
        )  # fmt: skip
        _dispatch.run("causal_conv1d_update", out, inputs)
        options = (
            group.cu_seqlens, group.num_accepted_tokens, self.state, z, self.norm_weight, None, self.norm_eps,
            self.output_gate_activation, self.num_key_heads, self.head_k_dim, self.state_v_first, self.null_slot,
            group.row_indices, out,
        )  # fmt: skip
        gates = (convolved, a, b, self.A_log, self.dt_bias)
        if group.kind == REPLAY:
            assert self.records is not None
            records = (self.records.k, self.records.u, self.records.decay, self.records.live)
            flat = (*gates, group.slots, *records, *options)
            _dispatch.run("fused_gdn_decode_post_conv_mtp_replay", out, flat)
            return
        _dispatch.run("fused_gdn_decode_post_conv_mtp", out, (*gates, group.table, *options))

    def prefill(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, group: Group, convolved: Tensor, out: Tensor
    ) -> None:
        """Run the prompts of some rows, from their states where they have one."""
        initial = group.has_initial_state
        ops.causal_conv1d_fn(
            mixed_qkv.T, self.conv_weight, self.conv_bias, activation=self.activation, conv_states=self.conv_states,
            query_start_loc=group.cu_seqlens, cache_indices=group.slots, has_initial_state=initial,
            null_slot=self.null_slot, out=convolved.T,
        )  # fmt: skip
        q, k, v = split_heads(convolved[None], self.num_key_heads, self.head_k_dim, self.head_v_dim)
        g, beta = ops.fused_gdn_gating(self.A_log, a[None], b[None], self.dt_bias)
        o = torch.empty(v.shape, dtype=g.dtype, device=v.device)
        ops.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=self.state, use_qk_l2norm_in_kernel=True, cu_seqlens=group.cu_seqlens,
            state_v_first=self.state_v_first, state_indices=group.slots, has_initial_state=initial,
            null_slot=self.null_slot, out=o,
        )  # fmt: skip
        ops.rms_norm_gated(o[0], z, self.norm_weight, self.norm_eps, activation=self.output_gate_activation, out=out)
        if self.records is not None:  # what a slot's last owner recorded is none of this request's
            self.records.reset(group.slots)


def _may_overlap(x: Tensor, out: Tensor) -> bool:
    """Tell whether the memory between the first and last elements of the two meets."""
    return x.data_ptr() < _end(out) and out.data_ptr() < _end(x)


def _end(x: Tensor) -> int:
    if x.numel() == 0:
        return x.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (reach + 1) * x.element_size()


def split_heads(
    mixed_qkv: Tensor, num_key_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """View mixed_qkv [..., C] as q, k [..., H, K] and v [..., HV, V]."""
    key_dim = num_key_heads * head_k_dim
    q, k, v = mixed_qkv.split([key_dim, key_dim, mixed_qkv.shape[-1] - 2 * key_dim], dim=-1)
    heads = (num_key_heads, head_k_dim)
    return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (-1, head_v_dim))
