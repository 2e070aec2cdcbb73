# SPDX-License-Identifier: Apache-2.0
"""The core of a layer as a function, and the same as an op over tensors, which a compiler can take whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import _dispatch, _schema
from .._validate import debugging, describe
from ..records import ReplayRecords
from .cache import GDNStateCache
from .checks import check_batch, check_cache, check_inputs, check_records_live, check_rows
from .core import Core
from .groups import RowTensors, group_rows
from .metadata import GDNMetadata
from .params import GDNLayerParams

if TYPE_CHECKING:
    from .module import GatedDeltaNet

_NO_RECORDS = (None,) * 4
_grad_enabled = torch.is_grad_enabled


def gdn_attention(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    z: Tensor,
    layer: GDNLayerParams | GatedDeltaNet,
    cache: GDNStateCache,
    metadata: GDNMetadata,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Run the core of a layer, between its projections, for any mix of rows.

    Convolution, gates, gated delta rule and gated norm, on the states of the rows' slots, which are updated in place.
    Decode and speculative rows take the fused step, prefill rows the chunked rule; tokens stay in the order given
    (Yang et al., Gated Delta Networks, 2024).

    Args:
        mixed_qkv: [T, C], the projected inputs before the convolution, channels q | k | v; fp32, bf16 or fp16.
        a, b: [T, HV], raw gate inputs, any strides.
        z: [T, HV, V], the gate of the norm.
        layer: the layer's weights and head counts.
        cache: the layer's states, updated in place.
        metadata: the rows; tokens beyond its last row get 0, as those of padding rows do.
        out: [T, HV, V], any activation dtype, written instead of a new tensor.

    Returns:
        out [T, HV, V], in mixed_qkv's dtype.

    Raises:
        TypeError, ValueError, IndexError: before any state has changed.
        RuntimeError: an input requires a gradient.

    Example:
        >>> import torch, gdn_core
        >>> layer = gdn_core.GDNLayerParams(torch.randn(128, 4), torch.zeros(4), torch.ones(4), torch.ones(16), 1e-6,
        ...                                 num_key_heads=2, num_value_heads=4, head_k_dim=16, head_v_dim=16)
        >>> cache = gdn_core.GDNStateCache(8, 2, 4, 16, 16, torch.float32)
        >>> metadata = gdn_core.GDNMetadata.build([0, 1, 9], [4, 2], has_initial_state=[True, False])
        >>> x, gates, z = torch.randn(9, 128), torch.randn(9, 4), torch.randn(9, 4, 16)
        >>> gdn_core.gdn_attention(x, gates, gates, z, layer, cache, metadata).shape
        torch.Size([9, 4, 16])
    """
    # One frame for what every layer of every step goes through: see _dispatch.run_eager.
    if not (isinstance(cache, GDNStateCache) and isinstance(metadata, GDNMetadata) and hasattr(layer, "conv_weight")):
        _refuse_kinds(layer, cache, metadata)
    if out is None:
        for name, value in (("mixed_qkv", mixed_qkv), ("z", z)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")
        out = torch.empty_like(z, dtype=mixed_qkv.dtype, layout=torch.strided, memory_format=torch.contiguous_format)
    records = cache.records
    parts = _NO_RECORDS if records is None else (records.k, records.u, records.decay, records.live)
    flat = (
        mixed_qkv, a, b, z, layer.conv_weight, layer.conv_bias, layer.A_log, layer.dt_bias, layer.norm_weight,
        layer.norm_eps, layer.num_key_heads, layer.head_k_dim, layer.activation, layer.output_gate_activation,
        cache.conv_states, cache.state, *parts, cache.state_v_first, cache.null_slot, metadata.layout,
        metadata.query_start_loc, metadata.slots, metadata.num_accepted_tokens, metadata.has_initial_state, out,
    )  # fmt: skip
    if _dispatch.is_traced():
        torch.ops.gdn.gdn_attention.default(*flat)
        return out
    if not cache.is_known_to_fit(layer):
        check_cache(_core(flat, records))
        cache.remember_to_fit(layer)
    check_batch(cache, metadata, mixed_qkv)
    if _grad_enabled():
        _schema.refuse_gradient("gdn_attention", (*flat[:9], *flat[14:19], out))  # of activations, weights and states
    if cache.records is not None and debugging():
        check_records_live(cache.records, metadata.groups)
    if _dispatch.run_at_once("gdn_attention", out, flat):
        return out
    core = _core(flat, records)
    check_inputs(core, mixed_qkv, a, b, z, out)
    if cache.records is not None:
        check_records_live(cache.records, metadata.groups)
    core.run(mixed_qkv, a, b, z, metadata.groups, out)
    return out


def _refuse_kinds(layer: object, cache: object, metadata: object) -> NoReturn:
    if not hasattr(layer, "conv_weight"):
        raise TypeError(f"layer: expected a GDNLayerParams or a GatedDeltaNet, got {describe(layer)}")
    if not isinstance(cache, GDNStateCache):
        raise TypeError(f"cache: expected a GDNStateCache, got {describe(cache)}")
    raise TypeError(f"metadata: expected a GDNMetadata, got {describe(metadata)}")


# --- the op -----------------------------------------------------------------------------------------------------------

SCHEMA = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor z, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, "
    "Tensor dt_bias, Tensor norm_weight, float norm_eps, int num_key_heads, int head_k_dim, str? activation, "
    "str output_gate_activation, Tensor(a!) conv_states, Tensor(b!) state, Tensor(c!)? records_k, "
    "Tensor(d!)? records_u, Tensor(e!)? records_decay, Tensor(f!)? records_live, bool state_v_first, int? null_slot, "
    "Tensor layout, Tensor query_start_loc, Tensor slots, Tensor num_accepted_tokens, Tensor has_initial_state, "
    "Tensor(g!) out"
)


def _core(flat: Sequence[Any], records: ReplayRecords | None) -> Core:
    return Core._make([*flat[4:16], records, flat[20], flat[21]])


class _Call(NamedTuple):
    """The arguments of the op."""

    core: Core
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # mixed_qkv, a, b, z
    layout: Tensor
    rows: RowTensors
    out: Tensor

    @classmethod
    def of(cls, flat: Sequence[Any]) -> _Call:
        records = None if flat[16] is None else ReplayRecords.from_tensors(*flat[16:20])
        core = _core(flat, records)
        call = cls(core, (flat[0], flat[1], flat[2], flat[3]), flat[22], RowTensors(*flat[23:27]), flat[27])
        check_cache(core)
        check_inputs(core, *call.inputs, call.out)
        check_rows(core, call.layout, call.rows)
        return call


def _run_flat(*flat: Any) -> None:
    call = _Call.of(flat)
    if _dispatch.run_at_once("gdn_attention", call.out, flat):
        return
    groups = group_rows(call.layout.tolist(), call.rows)
    if call.core.records is not None:
        check_records_live(call.core.records, groups)
    call.core.run(*call.inputs, groups, call.out)


def _fake_flat(*flat: Any) -> None:
    _Call.of(flat)


_library = torch.library.Library("gdn", "FRAGMENT")
_library.define(f"gdn_attention({SCHEMA}) -> ()")
_library.impl("gdn_attention", _run_flat, "CompositeExplicitAutograd")
_library.impl("gdn_attention", _schema.autograd_kernel("gdn_attention"), "Autograd")
torch.library.register_fake("gdn::gdn_attention", _fake_flat, lib=_library)
