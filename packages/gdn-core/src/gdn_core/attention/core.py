# SPDX-License-Identifier: Apache-2.0
"""The core of a layer over any mix of rows: convolution, gates, recurrence, gated norm, in the order given.

A batch is cut into runs of consecutive rows of one kind (see :mod:`.runs`), and each run is one call of each
operation on views of the batch's own tensors: nothing is gathered, nothing is scattered back. Engines put decodes
first, so that a batch has one run or two. Decode and speculative rows take the fused step, prefills the chunked rule,
whose output stays in fp32 until the gated norm has been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..records import ReplayRecords
from .runs import PREFILL, REPLAY, SKIP, Run


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

    def run(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, runs: Sequence[Run], out: Tensor) -> None:
        """Fill ``out``: every row of it."""
        convolved = torch.empty_like(mixed_qkv, memory_format=torch.contiguous_format)
        if len(runs) == 1 and runs[0].kind not in (PREFILL, SKIP):
            self.step(mixed_qkv, a, b, z, runs[0], convolved, out)  # which zeroes what its rows do not cover
            return
        end = 0
        for run in runs:
            end = run.end_token
            tokens = slice(run.first_token, end)
            inputs = mixed_qkv[tokens], a[tokens], b[tokens], z[tokens]
            if run.kind == SKIP:
                out[tokens].zero_()
            elif run.kind == PREFILL:
                self.prefill(*inputs, run, convolved[tokens], out[tokens])
            else:
                self.step(*inputs, run, convolved[tokens], out[tokens])
        if end < out.shape[0]:
            out[end:].zero_()

    def step(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, run: Run, convolved: Tensor, out: Tensor
    ) -> None:
        """Advance decode and speculative rows: two calls, whatever their number."""
        ops.causal_conv1d_update(
            mixed_qkv, self.conv_states, self.conv_weight, self.conv_bias, self.activation, None, run.slots,
            num_accepted_tokens=run.num_accepted_tokens, query_start_loc=run.cu_seqlens, null_slot=self.null_slot,
            out=convolved,
        )  # fmt: skip
        options: dict[str, Any] = {
            "output_gate_activation": self.output_gate_activation,
            "num_key_heads": self.num_key_heads,
            "head_k_dim": self.head_k_dim,
            "state_v_first": self.state_v_first,
            "null_slot": self.null_slot,
        }
        if run.kind == REPLAY:
            assert self.records is not None
            ops.fused_gdn_decode_post_conv_mtp_replay(
                convolved, a, b, self.A_log, self.dt_bias, run.slots, self.records, run.cu_seqlens,
                run.num_accepted_tokens, self.state, z, self.norm_weight, out, None, self.norm_eps, **options,
            )  # fmt: skip
            return
        ops.fused_gdn_decode_post_conv_mtp(
            convolved, a, b, self.A_log, self.dt_bias, run.table, run.cu_seqlens, run.num_accepted_tokens, self.state,
            z, self.norm_weight, out, None, self.norm_eps, **options,
        )  # fmt: skip

    def prefill(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, run: Run, convolved: Tensor, out: Tensor
    ) -> None:
        """Run the prompts of some rows, from their states where they have one."""
        initial = run.has_initial_state
        ops.causal_conv1d_fn(
            mixed_qkv.T, self.conv_weight, self.conv_bias, activation=self.activation, conv_states=self.conv_states,
            query_start_loc=run.cu_seqlens, cache_indices=run.slots, has_initial_state=initial,
            null_slot=self.null_slot, out=convolved.T,
        )  # fmt: skip
        q, k, v = split_heads(convolved[None], self.num_key_heads, self.head_k_dim, self.head_v_dim)
        g, beta = ops.fused_gdn_gating(self.A_log, a[None], b[None], self.dt_bias)
        o = torch.empty(v.shape, dtype=g.dtype, device=v.device)
        ops.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=self.state, use_qk_l2norm_in_kernel=True, cu_seqlens=run.cu_seqlens,
            state_v_first=self.state_v_first, state_indices=run.slots, has_initial_state=initial,
            null_slot=self.null_slot, out=o,
        )  # fmt: skip
        ops.rms_norm_gated(o[0], z, self.norm_weight, self.norm_eps, activation=self.output_gate_activation, out=out)
        if self.records is not None:  # what a slot's last owner recorded is none of this request's
            self.records.reset(run.slots)


def split_heads(
    mixed_qkv: Tensor, num_key_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """View mixed_qkv [..., C] as q, k [..., H, K] and v [..., HV, V]."""
    key_dim = num_key_heads * head_k_dim
    q, k, v = mixed_qkv.split([key_dim, key_dim, mixed_qkv.shape[-1] - 2 * key_dim], dim=-1)
    heads = (num_key_heads, head_k_dim)
    return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (-1, head_v_dim))
