# SPDX-License-Identifier: Apache-2.0
"""Sequences on fla-core's kernels (flash-linear-attention), behind our arguments.

fla-core takes no pools, no padding rows and no rows without a state: states are gathered before and scattered after,
and what belongs to padding is zeroed. fp32 activations stay off its chunked rule, which multiplies them in TF32, beyond
gdn's tolerances.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..reference.gating import log_decay
from .arguments import Arguments, decline, live_slots, row_of_tokens

# e^-60 is nothing beside a state, and prefix sums of 64 such decays keep four digits of the decays that follow:
# fla-core takes differences of fp32 sums, in which -inf would leave NaN.
_STRONGEST_LOG_DECAY = -60.0
_MOST_DIM = 256


def _operation(name: str) -> Any:
    try:
        return getattr(importlib.import_module("fla.ops.gated_delta_rule"), name)
    except ImportError as error:
        decline(f"needs fla-core ({error}): pip install fla-core")


def _check(args: Arguments) -> None:
    tensors = [value for value in args.values() if isinstance(value, Tensor)]
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        decline("float64 runs on the reference")
    if max(args["q"].shape[-1], args["v"].shape[-1]) > _MOST_DIM:
        decline(f"K and V: up to {_MOST_DIM}")
    if args["v"].numel() == 0 or (args["cu_seqlens"] is not None and len(args["cu_seqlens"]) == 1):
        decline("nothing to do")


def _initial_states(args: Arguments, slots: Tensor | None) -> Tensor | None:
    """Return fp32 states [N, ..], zeros where a sequence has none; nothing of a slot that is not to be read."""
    pool, has_initial = args["state"], args["has_initial_state"]
    states = pool[slots.clamp(min=0)] if slots is not None else (pool if pool is not None else args["initial_state"])
    if states is None:
        return None
    states = states.to(torch.float32)
    is_read = torch.ones(len(states), dtype=torch.bool, device=states.device)
    if slots is not None:
        is_read &= slots >= 0
    if has_initial is not None:
        is_read &= has_initial
    return (
        torch.where(is_read.view(-1, 1, 1, 1), states, 0.0) if slots is not None or has_initial is not None else states
    )


def _deliver(args: Arguments, slots: Tensor | None, o: Tensor, states: Tensor) -> None:
    """Write outputs and states; tokens of padding rows and of none are zeros."""
    cu_seqlens, out, lengths = args["cu_seqlens"], args["out"], None
    is_live = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
    if cu_seqlens is not None:
        row = row_of_tokens(cu_seqlens, out.shape[1])
        is_live = (row >= 0)[None]
        if slots is not None:
            is_live = is_live & (slots >= 0)[row.clamp(min=0)][None]
        lengths = cu_seqlens.diff()
    elif slots is not None:
        is_live = (slots >= 0)[:, None].expand(out.shape[:2])
    out.copy_(torch.where(is_live[..., None, None], o, 0))
    if args["final_state"] is not None:
        if lengths is not None and args["initial_state"] is not None:  # empty sequences keep theirs
            states = torch.where((lengths > 0).view(-1, 1, 1, 1), states, args["initial_state"])
        args["final_state"].copy_(states)
    if slots is not None:
        is_stored = slots >= 0
        if lengths is not None:
            is_stored &= lengths > 0
        args["state"][slots[is_stored]] = states[is_stored].to(args["state"].dtype)


def _run(args: Arguments, function: Any, **keywords: Any) -> None:
    slots = args["state_indices"]
    if slots is not None:
        slots = live_slots(slots, len(args["state"]), args["null_slot"])
    cu_seqlens = args["cu_seqlens"]
    o, states = function(
        q=args["q"],
        k=args["k"],
        v=args["v"],
        scale=args["scale"],
        initial_state=_initial_states(args, slots),
        output_final_state=True,
        use_qk_l2norm_in_kernel=args["use_qk_l2norm_in_kernel"],
        state_v_first=args["state_v_first"],
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous(),
        **keywords,
    )
    _deliver(args, slots, o, states)


def _beta(args: Arguments) -> Tensor:
    """Return the step sizes: fla-core doubles only those that it takes the sigmoid of."""
    beta: Tensor | None = args["beta"]
    if beta is None:
        beta = torch.ones(args["v"].shape[:3], dtype=torch.float32, device=args["v"].device)
    beta = beta.to(torch.float32)
    if args["use_beta_sigmoid_in_kernel"]:
        beta = beta.sigmoid()
    return 2 * beta if args["allow_neg_eigval"] else beta


def chunk_gated_delta_rule(args: Arguments, *, dry_run: bool) -> None:
    """Run `chunk_gated_delta_rule` on fla-core's."""
    _check(args)
    if args["q"].dtype == torch.float32:
        decline("float32 activations: fla-core's chunked rule multiplies them in TF32")
    if args["chunk_states"] is not None:
        decline("output_chunk_states: fla-core does not return them")
    function = _operation("chunk_gated_delta_rule")
    if dry_run:
        return
    g = args["g"].to(torch.float32).clamp(min=_STRONGEST_LOG_DECAY)
    _run(args, function, g=g, beta=_beta(args))


def fused_recurrent_gated_delta_rule(args: Arguments, *, dry_run: bool) -> None:
    """Run `fused_recurrent_gated_delta_rule` on fla-core's."""
    _check(args)
    function = _operation("fused_recurrent_gated_delta_rule")
    if dry_run:
        return
    g = args["g"]
    if args["use_gate_in_kernel"]:  # where exp(A_log) overflows, fla-core's own has infinity times 0
        g = log_decay(args["A_log"], g.to(torch.float32), args["dt_bias"])
    _run(args, function, g=None if g is None else g.to(torch.float32), beta=_beta(args))
