# SPDX-License-Identifier: Apache-2.0
"""The convolution on causal-conv1d, packed sequences on fla-core's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments, decline, live_slots, row_of_tokens

_CHANNEL_MULTIPLE = 8  # of causal-conv1d, where channels are the last dimension in memory


def _import(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        decline(f"needs {distribution} ({error}): pip install {distribution}")


def _check(args: Arguments) -> None:
    x, weight = args["x"], args["weight"]
    tensors = [value for value in args.values() if isinstance(value, Tensor)]
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        decline("float64 runs on the reference")
    if not 2 <= weight.shape[1] <= 4:
        decline(f"weight: causal-conv1d has widths 2 to 4, got {weight.shape[1]}")
    if x.numel() == 0:
        decline("nothing to do")


def _bias(args: Arguments) -> Tensor | None:
    bias = args["bias"]
    return None if bias is None else bias.to(args["weight"].dtype).contiguous()


def causal_conv1d_fn(args: Arguments, *, dry_run: bool) -> None:
    """Run `causal_conv1d_fn` on causal-conv1d, or, packed sequences, on fla-core."""
    _check(args)
    if args["query_start_loc"] is not None:
        _packed(args, dry_run=dry_run)
    elif args["conv_states"] is not None:
        decline("conv_states: only packed sequences, with query_start_loc")
    else:
        _dense(args, dry_run=dry_run)


def _channel_last(x: Tensor) -> Tensor:
    """Return x [B, C, T] with channels next to each other in memory, at strides that causal-conv1d takes."""
    is_right = x.stride(1) == 1 and x.stride(0) % _CHANNEL_MULTIPLE == 0 and x.stride(2) % _CHANNEL_MULTIPLE == 0
    return x if is_right and x.stride(2) > 1 else x.mT.contiguous().mT


def _dense(args: Arguments, *, dry_run: bool) -> None:
    x, seq_idx, initial, final = args["x"], args["seq_idx"], args["initial_states"], args["final_states"]
    wants_states = initial is not None or final is not None
    if seq_idx is not None and wants_states:
        decline("seq_idx: causal-conv1d has no states with it")
    if (seq_idx is not None or wants_states) and x.shape[1] % _CHANNEL_MULTIPLE:
        decline(f"x: causal-conv1d wants a multiple of {_CHANNEL_MULTIPLE} channels, got {x.shape[1]}")
    library = _import("causal_conv1d", "causal-conv1d")
    if dry_run:
        return
    if seq_idx is not None or wants_states:
        x = _channel_last(x)
    elif x.stride(2) != 1:
        x = x.contiguous()
    result = library.causal_conv1d_fn(
        x,
        args["weight"],
        _bias(args),
        seq_idx=None if seq_idx is None else seq_idx.to(torch.int32).contiguous(),
        initial_states=None if initial is None else initial.to(x.dtype).mT.contiguous().mT,
        return_final_states=final is not None,
        activation=args["activation"],
    )
    if final is not None:
        result, states = result
        final.copy_(states)
    args["out"].copy_(result)


def _packed(args: Arguments, *, dry_run: bool) -> None:
    if args["seq_idx"] is not None or args["initial_states"] is not None or args["final_states"] is not None:
        decline("query_start_loc: with conv_states only, or without states")
    library = _import("fla.modules.causal_conv1d", "fla-core")
    if dry_run:
        return
    x, pool, bounds, width = args["x"], args["conv_states"], args["query_start_loc"], args["weight"].shape[1]
    slots = None
    initial = None
    if pool is not None:
        slots = args["cache_indices"]
        if slots is None:
            slots = torch.arange(len(bounds) - 1, device=x.device)
        slots = live_slots(slots, len(pool), args["null_slot"])
        initial = _histories(args, slots, width)
    y, states = library.causal_conv1d(
        x.T[None],
        weight=args["weight"],
        bias=_bias(args),
        initial_state=initial,
        output_final_state=pool is not None,
        activation=args["activation"],
        cu_seqlens=bounds.to(torch.int64).contiguous(),
    )
    row = row_of_tokens(bounds, x.shape[1])
    is_live = row >= 0
    if slots is not None:
        is_live = is_live & (slots >= 0)[row.clamp(min=0)]
        is_stored = (slots >= 0) & (bounds.diff() > 0)
        pool[slots[is_stored], :, : width - 1] = states[is_stored, :, 1:].to(pool.dtype)
    args["out"].copy_(torch.where(is_live, y[0].T, 0))


def _histories(args: Arguments, slots: Tensor, width: int) -> Tensor:
    """Return the last inputs [N, C, W] before each sequence as fla-core takes them, which uses W - 1 of the W."""
    pool, has_initial = args["conv_states"], args["has_initial_state"]
    is_read = slots >= 0
    if has_initial is not None:
        is_read = is_read & has_initial
    states = pool[slots.clamp(min=0), :, : width - 1].to(args["x"].dtype)
    return torch.nn.functional.pad(torch.where(is_read.view(-1, 1, 1), states, 0), (1, 0))


def causal_conv1d_update(args: Arguments, *, dry_run: bool) -> None:
    """Run `causal_conv1d_update` on causal-conv1d: one length for all rows, no drafts."""
    _check(args)
    x, pool, slots = args["x"], args["conv_state"], args["conv_state_indices"]
    if args["num_accepted_tokens"] is not None or args["query_start_loc"] is not None:
        decline("num_accepted_tokens, query_start_loc: causal-conv1d has neither")
    if pool.dtype != x.dtype:
        decline(f"conv_state: causal-conv1d wants the dtype of x, {x.dtype}, got {pool.dtype}")
    library = _import("causal_conv1d", "causal-conv1d")
    if dry_run:
        return
    cache_seqlens = args["cache_seqlens"]
    if slots is not None:  # negative slots are padding there too
        slots = live_slots(slots, len(pool), args["null_slot"]).to(torch.int32)
    args["out"].copy_(
        library.causal_conv1d_update(
            x,
            pool,
            args["weight"],
            _bias(args),
            activation=args["activation"],
            cache_seqlens=None if cache_seqlens is None else cache_seqlens.to(torch.int32).contiguous(),
            conv_state_indices=slots,
        )
    )
