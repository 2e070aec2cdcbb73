# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton kernels for decode steps, over the arguments of ``torch.ops.gdn.<op>`` by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .arguments import Arguments, decline, row_of_tokens

_ACTIVATIONS = {"silu": kernels.SILU, "swish": kernels.SILU, "sigmoid": kernels.SIGMOID, "none": kernels.NO_GATE}
_MOST_COLUMNS = 32  # of V in a program
# Products fuse where the kernels say so only: a compiler that chose would give replay other bits than several slots.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class _Rows(NamedTuple):
    """The rows of a call: their slots, and how these are used."""

    form: Any
    slots: Tensor  # [N] or [N, S]
    columns: int
    cu_seqlens: Tensor | None
    accepted: Tensor | None
    indices: Tensor | None
    num_running: int


class _Operands(NamedTuple):
    q: Tensor  # [T, H, K]
    k: Tensor
    v: Tensor  # [T, HV, V]
    state: Tensor
    out: Tensor  # [T, HV, V]


def _strides(tensor: Tensor | None, count: int) -> list[int]:
    """Return the first strides of a tensor, zeros where it has none."""
    strides = list(tensor.stride()[:count]) if tensor is not None else []
    return strides + [0] * (count - len(strides))


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _block(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _rows(args: Arguments, name: str, num_tokens: int) -> _Rows:
    slots, cu_seqlens, indices = args[name], args["cu_seqlens"], args.get("row_indices")
    if "records_k" in args:
        form, columns = kernels.REPLAY, args["records_k"].shape[1]
    elif slots.dim() == 2:
        form, columns = kernels.SEVERAL_SLOTS, slots.shape[1]
    else:
        form, columns = kernels.SINGLE_SLOT, 1
    count = len(slots) if indices is None else len(indices)
    return _Rows(form, slots, columns, cu_seqlens, args.get("num_accepted_tokens"), indices, count)


def _run(args: Arguments, operands: _Operands, rows: _Rows, o: Tensor, *, normalize: bool) -> None:
    """Run the recurrence into ``o``, and store states or records."""
    q, k, v, state, _ = operands
    (T, H, K), (HV, V) = q.shape, v.shape[1:]
    records = [args.get(f"records_{part}") for part in ("k", "u", "decay", "live")]
    is_replay = records[0] is not None
    new_u = torch.empty(T, HV, V, dtype=torch.float32, device=v.device) if is_replay else None
    new_decay = torch.empty(T, HV, dtype=torch.float32, device=v.device) if is_replay else None
    null_slot = args["null_slot"]
    row_tables = (rows.slots, rows.accepted, rows.cu_seqlens, rows.indices)
    row_strides = [*_strides(rows.accepted, 1), *_strides(rows.cu_seqlens, 1), *_strides(rows.indices, 1)]
    record_strides = [*_strides(records[0], 3), *_strides(records[1], 3), *_strides(records[2], 3),
                      *_strides(records[3], 1)]  # fmt: skip
    limits = (len(rows.slots), T, rows.columns, len(state), 0 if null_slot is None else null_slot)
    block_k, block_v = _block(K), min(_block(V), _MOST_COLUMNS)
    scale = K**-0.5 if args["scale"] is None else args["scale"]
    kernels.decode_kernel[(rows.num_running * HV * -(-V // block_v),)](
        q, k, v, args["a"], args["b"], args["A_log"], args["dt_bias"], o, state, *row_tables, *records, new_u,
        new_decay, *_strides(q, 2), *_strides(k, 2), *_strides(v, 2), *_strides(args["a"], 2), *_strides(args["b"], 2),
        *_strides(o, 2), *_strides(args["A_log"], 1), *_strides(args["dt_bias"], 1), *_strides(state, 1),
        *_strides(rows.slots, 2), *row_strides, *record_strides, *limits, float(scale),
        float(args.get("softplus_beta", 1.0)), float(args.get("softplus_threshold", 20.0)), H=H, HV=HV, K=K, V=V,
        BLOCK_K=block_k, BLOCK_V=block_v, FORM=rows.form, HAS_NULL_SLOT=null_slot is not None, NORMALIZE=normalize,
        STATE_V_FIRST=args["state_v_first"], **_OPTIONS,
    )  # fmt: skip
    if is_replay:
        kernels.renew_records_kernel[(rows.num_running * HV,)](
            k, *row_tables, *records, new_u, new_decay, *_strides(k, 2), *_strides(rows.slots, 1), *row_strides,
            *record_strides, *limits, H=H, HV=HV, K=K, V=V, BLOCK_K=block_k, BLOCK_V=_block(V),
            HAS_NULL_SLOT=null_slot is not None, **_OPTIONS,
        )  # fmt: skip


def _norm(args: Arguments, rows: _Rows, o: Tensor, out: Tensor) -> None:
    gate, weight, null_slot = _unit(args["output_gate"]), args["norm_weight"], args["null_slot"]
    (T, HV, V) = o.shape
    row_strides = [*_strides(rows.accepted, 1), *_strides(rows.cu_seqlens, 1), *_strides(rows.indices, 1)]
    limits = (len(rows.slots), T, rows.columns, len(args["state"]), 0 if null_slot is None else null_slot)
    kernels.norm_kernel[(rows.num_running * HV,)](
        o, gate, weight, out, rows.slots, rows.accepted, rows.cu_seqlens, rows.indices, *_strides(gate, 2),
        *_strides(weight, 1), *_strides(out, 2), *_strides(rows.slots, 2), *row_strides, *limits,
        float(args["norm_eps"]), HV=HV, V=V, BLOCK_V=_block(V), FORM=rows.form, HAS_NULL_SLOT=null_slot is not None,
        ACTIVATION=_ACTIVATIONS[args["output_gate_activation"]], **_OPTIONS,
    )  # fmt: skip


def _clear(rows: _Rows, out: Tensor) -> None:
    """Zero what may stay without a result: every token, or, where rows are chosen, theirs."""
    if rows.indices is None or rows.cu_seqlens is None:
        out.zero_()
        return
    N = len(rows.slots)
    indices = rows.indices.to(torch.int64)
    is_chosen = torch.zeros(N + 1, dtype=torch.bool, device=out.device)
    is_chosen.index_fill_(0, indices.masked_fill((indices < 0) | (indices >= N), N), True)
    is_chosen[N] = False
    row = row_of_tokens(rows.cu_seqlens, len(out))
    out.masked_fill_(is_chosen[row.masked_fill(row < 0, N)].view(-1, 1, 1), 0)


def decode(args: Arguments, slots_name: str, pool_name: str, *, dry_run: bool) -> None:
    """Run a step from q, k and v."""
    _check_dtypes(args)
    if dry_run or args["q"].shape[1] == 0:
        return
    q, k, v, out = (args[name][0] for name in ("q", "k", "v", "out"))
    rows = _rows(args, slots_name, len(q))
    operands = _Operands(_unit(q), _unit(k), _unit(v), args[pool_name], out)
    _clear(rows, out)
    if rows.num_running and v.shape[1]:
        _run(args, operands, rows, out, normalize=args["use_qk_l2norm_in_kernel"])


def fused_decode(args: Arguments, slots_name: str, *, dry_run: bool) -> None:
    """Run a step from the convolution's output."""
    _check_dtypes(args)
    mixed_qkv, out = args["mixed_qkv"], args["out"]
    if dry_run or len(mixed_qkv) == 0:
        return
    HV, V = out.shape[1:]
    K = args["head_k_dim"]
    key_channels = (mixed_qkv.shape[1] - HV * V) // 2
    parts = _unit(mixed_qkv).split([key_channels, key_channels, HV * V], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, (K, K, V), strict=True))
    rows = _rows(args, slots_name, len(q))
    _clear(rows, out)
    if not (rows.num_running and HV):
        return
    o = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _run(args, _Operands(q, k, v, args["state"], out), rows, o, normalize=True)
    _norm(args, rows, o, out)


def _check_dtypes(args: Arguments) -> None:
    tensors = [value for value in args.values() if isinstance(value, Tensor)]
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        decline("float64 runs on the reference")
