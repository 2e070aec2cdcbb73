# SPDX-License-Identifier: Apache-2.0
"""Checks of everything that an operation of the core could refuse after another one has changed a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._validate import debugging, gate_inputs, has_data, same_dtype, separate_elements, tensor, writable
from ..records import ReplayRecords
from .cache import GDNStateCache
from .core import Core
from .groups import REPLAY, Group, RowTensors
from .metadata import GDNMetadata
from .params import conv_channels

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def _inputs_fit(core: Core, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> bool:
    """Tell in 2 us whether the inputs are plainly right; :func:`check_inputs` looks closer at any others."""
    try:
        shape = z.shape
        gates = shape[:2]
        device = core.state.device
        return bool(
            mixed_qkv.shape == (shape[0], core.conv_weight.shape[0])
            and a.shape == gates
            and b.shape == gates
            and shape[1:] == (core.A_log.shape[0], core.norm_weight.shape[0])
            and out.shape == shape and out.is_contiguous()
            and a.dtype in _FLOATS and b.dtype in _FLOATS and z.dtype in _FLOATS and out.dtype in _FLOATS
            and (mixed_qkv.dtype is torch.float64 or torch.float64 not in (a.dtype, b.dtype))
            and mixed_qkv.dtype in _FLOATS and (core.records is None or core.records.k.dtype == mixed_qkv.dtype)
            and mixed_qkv.device == a.device == b.device == z.device == out.device == device
        )  # fmt: skip
    except AttributeError:
        return False


def check_inputs(core: Core, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> None:
    if _inputs_fit(core, mixed_qkv, a, b, z, out):
        return
    heads, value_dim = core.A_log.shape[0], core.head_v_dim
    tensor("mixed_qkv", mixed_qkv, ["T", core.conv_weight.shape[0]])
    tokens = mixed_qkv.shape[0]
    gate_inputs(a, b, [tokens, heads], mixed_qkv.dtype)
    tensor("z", z, [tokens, heads, value_dim])
    writable("out", out, [tokens, heads, value_dim])
    separate_elements("out", out)
    for name, value in {"mixed_qkv": mixed_qkv, "a": a, "b": b, "z": z, "out": out}.items():
        if value.device != core.state.device:
            raise ValueError(f"{name}: expected device {core.state.device} (of cache.state), got {value.device}")
    if core.records is not None:
        same_dtype("mixed_qkv", mixed_qkv, "cache.records.k", core.records.k)


def check_cache(core: Core) -> None:
    """Check that a cache is one of this layer."""
    heads, value_dim, key_dim = core.A_log.shape[0], core.head_v_dim, core.head_k_dim
    channels = conv_channels(core.num_key_heads, heads, key_dim, value_dim)
    tensor("conv_weight", core.conv_weight, [channels, "W"])
    inner = [value_dim, key_dim] if core.state_v_first else [key_dim, value_dim]
    tensor("cache.state", core.state, ["P", heads, *inner])
    tensor("cache.conv_states", core.conv_states, [core.state.shape[0], channels, "state_len"])
    width = core.conv_weight.shape[1]
    if core.conv_states.shape[2] < width - 1:
        raise ValueError(
            f"cache.conv_states: expected a state_len of at least {width - 1}, got {core.conv_states.shape[2]}"
        )
    if core.records is not None:
        _check_records(core, core.records)


def _check_records(core: Core, records: ReplayRecords) -> None:
    slots, heads = core.state.shape[:2]
    tensor("cache.records.k", records.k, [slots, "S", core.num_key_heads, core.head_k_dim])
    wide = torch.float64 if records.k.dtype == torch.float64 else torch.float32
    tensor("cache.records.u", records.u, [slots, records.k.shape[1], heads, core.head_v_dim], (wide,))
    tensor("cache.records.decay", records.decay, [slots, records.k.shape[1], heads], (wide,))
    tensor("cache.records.live", records.live, [slots], (torch.int32,))


def check_batch(cache: GDNStateCache, metadata: GDNMetadata, mixed_qkv: Tensor) -> None:
    tokens = mixed_qkv.shape[0] if isinstance(mixed_qkv, Tensor) and mixed_qkv.dim() > 0 else metadata.num_tokens
    if metadata.num_tokens > tokens:
        raise ValueError(f"mixed_qkv: expected the {metadata.num_tokens} tokens of the metadata, got {tokens}")
    if metadata.max_slot >= cache.num_slots:
        raise IndexError(f"metadata.slots: expected slots below {cache.num_slots}, got {metadata.max_slot}")
    if metadata.null_slot != cache.null_slot:
        raise ValueError(f"metadata.null_slot: expected the cache's, {cache.null_slot}, got {metadata.null_slot}")
    if metadata.longest_step > cache.S or metadata.max_accepted > cache.S:
        most, what = metadata.longest_step, "tokens in a row"
        if metadata.max_accepted > cache.S:
            most, what = metadata.max_accepted, "accepted tokens"
        raise ValueError(f"metadata: expected at most S = {cache.S} {what} that speculates, got {most}")
    if metadata.is_replay and cache.records is None:
        raise ValueError("metadata.slots: expected a table [N, S] for a cache without records, got one slot a row")
    if metadata.num_spec_decodes and not metadata.is_replay and cache.records is not None:
        raise ValueError("metadata.slots: expected one slot a row for a cache with records, got a table [N, S]")


def check_records_live(records: ReplayRecords, groups: Sequence[Group]) -> None:
    """Check that no row accepts more than its slot recorded and, under GDN_DEBUG=1, that plain rows have no records."""
    for group in groups:
        if not group.slots.is_cpu or (group.kind != REPLAY and not debugging()):
            continue
        slots, lengths = group.slots.tolist(), group.cu_seqlens.diff().tolist()
        accepted_tokens, has_initial_state = group.num_accepted_tokens.tolist(), group.has_initial_state.tolist()
        live = records.live
        named = range(len(slots)) if group.row_indices is None else group.row_indices.tolist()
        for n in named:
            slot, length, accepted, has_state = slots[n], lengths[n], accepted_tokens[n], has_initial_state[n]
            recorded = int(live[slot]) if slot >= 0 and length > 0 else 0
            if group.kind == REPLAY and 0 < recorded < accepted:
                raise ValueError(
                    f"num_accepted_tokens: expected at most the {recorded} live records of slot {slot}, got {accepted}"
                )
            if group.kind != REPLAY and recorded and has_state:
                raise ValueError(
                    f"metadata.slots: expected no live records for a row that does not speculate, got {recorded} in "
                    f"slot {slot}; GDNStateCache.commit() ends the speculation of a request"
                )


def check_rows(core: Core, layout: Tensor, rows: RowTensors) -> None:
    """Check the rows of an op, of which no metadata has been built here."""
    integers = (torch.int32, torch.int64)
    tensor("slots", rows.slots, ["N", "S"], integers)
    count = rows.slots.shape[0]
    tensor("layout", layout, [count, 3], (torch.int64,))
    tensor("query_start_loc", rows.query_start_loc, [count + 1], integers)
    tensor("num_accepted_tokens", rows.num_accepted_tokens, [count], integers)
    tensor("has_initial_state", rows.has_initial_state, [count], (torch.bool,))
    slots = rows.slots
    if slots.is_cpu and has_data(slots) and slots.numel() > 0 and int(slots.max()) >= core.state.shape[0]:
        raise IndexError(f"slots: expected slots below {core.state.shape[0]}, got {int(slots.max())}")
