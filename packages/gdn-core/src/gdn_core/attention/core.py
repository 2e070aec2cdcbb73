# SPDX-License-Identifier: Apache-2.0
"""The core of a layer over any mix of rows: convolution, gates, recurrence, gated norm, in the order given.

A batch is cut into runs of consecutive rows of one kind (see :mod:`.metadata`), and each run is one call of each
operation on views of the batch's own tensors: nothing is gathered, nothing is scattered back. Engines put decodes
first, so that a batch has one run or two. Decode and speculative rows take the fused step, prefills the chunked rule,
whose output stays in fp32 until the gated norm has been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _dispatch, _schema, ops
from .._validate import debugging, describe, has_data, same_dtype, tensor, writable
from ..records import ReplayRecords
from .cache import GDNStateCache
from .metadata import PREFILL, REPLAY, SKIP, GDNMetadata, Run, cut_runs
from .params import GDNLayerParams, conv_channels

if TYPE_CHECKING:
    from .module import GatedDeltaNet


_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


class _Core(NamedTuple):
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


# --- checks: of everything that an operation could refuse after another one has changed a state -----------------------


def _inputs_fit(core: _Core, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> bool:
    """Tell in 2 us whether the inputs are plainly right; :func:`_check_inputs` looks closer at any others."""
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
            and mixed_qkv.dtype in _FLOATS and (core.records is None or core.records.k.dtype == mixed_qkv.dtype)
            and mixed_qkv.device == a.device == b.device == z.device == out.device == device
        )  # fmt: skip
    except AttributeError:
        return False


def _check_inputs(core: _Core, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> None:
    if _inputs_fit(core, mixed_qkv, a, b, z, out):
        return
    heads, value_dim = core.A_log.shape[0], core.head_v_dim
    tensor("mixed_qkv", mixed_qkv, ["T", core.conv_weight.shape[0]])
    tokens = mixed_qkv.shape[0]
    tensor("a", a, [tokens, heads])
    tensor("b", b, [tokens, heads])
    tensor("z", z, [tokens, heads, value_dim])
    writable("out", out, [tokens, heads, value_dim])
    for name, value in {"mixed_qkv": mixed_qkv, "a": a, "b": b, "z": z, "out": out}.items():
        if value.device != core.state.device:
            raise ValueError(f"{name}: expected device {core.state.device} (of cache.state), got {value.device}")
    if core.records is not None:
        same_dtype("mixed_qkv", mixed_qkv, "cache.records.k", core.records.k)


def _check_cache(core: _Core) -> None:
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


def _check_records(core: _Core, records: ReplayRecords) -> None:
    slots, heads = core.state.shape[:2]
    tensor("cache.records.k", records.k, [slots, "S", core.num_key_heads, core.head_k_dim])
    wide = torch.float64 if records.k.dtype == torch.float64 else torch.float32
    tensor("cache.records.u", records.u, [slots, records.k.shape[1], heads, core.head_v_dim], (wide,))
    tensor("cache.records.decay", records.decay, [slots, records.k.shape[1], heads], (wide,))
    tensor("cache.records.live", records.live, [slots], (torch.int32,))


def _check_batch(cache: GDNStateCache, metadata: GDNMetadata, tokens: int) -> None:
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


def _check_records_live(records: ReplayRecords, runs: Sequence[Run]) -> None:
    """Check that no row accepts more than its slot recorded and, under GDN_DEBUG=1, that plain rows have no records."""
    for run in runs:
        if not run.slots.is_cpu or (run.kind != REPLAY and not debugging()):
            continue
        slots, lengths = run.slots.tolist(), run.cu_seqlens.diff().tolist()
        live = records.live
        rows = zip(slots, lengths, run.num_accepted_tokens.tolist(), run.has_initial_state.tolist(), strict=True)
        for slot, length, accepted, has_state in rows:
            recorded = int(live[slot]) if slot >= 0 and length > 0 else 0
            if run.kind == REPLAY and 0 < recorded < accepted:
                raise ValueError(
                    f"num_accepted_tokens: expected at most the {recorded} live records of slot {slot}, got {accepted}"
                )
            if run.kind != REPLAY and recorded and has_state:
                raise ValueError(
                    f"metadata.slots: expected no live records for a row that does not speculate, got {recorded} in "
                    f"slot {slot}; GDNStateCache.commit() ends the speculation of a request"
                )


# --- the public function ----------------------------------------------------------------------------------------------


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
    core = _Core(
        layer.conv_weight, layer.conv_bias, layer.A_log, layer.dt_bias, layer.norm_weight, layer.norm_eps,
        layer.num_key_heads, layer.head_k_dim, layer.activation, layer.output_gate_activation, cache.conv_states,
        cache.state, cache.records, cache.state_v_first, cache.null_slot,
    )  # fmt: skip
    if out is None:
        for name, value in (("mixed_qkv", mixed_qkv), ("z", z)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")
        out = torch.empty_like(z, dtype=mixed_qkv.dtype, memory_format=torch.contiguous_format)
    if _dispatch.is_traced():
        torch.ops.gdn.gdn_attention.default(*_flat(core, mixed_qkv, a, b, z, metadata, out))
        return out
    if not cache.is_known_to_fit(layer):
        _check_cache(core)
        cache.remember_to_fit(layer)
    _check_inputs(core, mixed_qkv, a, b, z, out)
    _check_batch(cache, metadata, mixed_qkv.shape[0])
    if cache.records is not None:
        _check_records_live(cache.records, metadata.runs)
    _schema.refuse_gradient("gdn_attention", (mixed_qkv, a, b, z, *_state_tensors(core), out))
    core.run(mixed_qkv, a, b, z, metadata.runs, out)
    return out


def _state_tensors(core: _Core) -> list[Tensor]:
    return [core.A_log, core.dt_bias, core.conv_weight, core.norm_weight, core.conv_states, core.state]


# --- the same as an op over tensors, which a compiler can take whole --------------------------------------------------

SCHEMA = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor z, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, "
    "Tensor dt_bias, Tensor norm_weight, float norm_eps, int num_key_heads, int head_k_dim, str? activation, "
    "str output_gate_activation, Tensor(a!) conv_states, Tensor(b!) state, Tensor(c!)? records_k, "
    "Tensor(d!)? records_u, Tensor(e!)? records_decay, Tensor(f!)? records_live, bool state_v_first, int? null_slot, "
    "Tensor bounds, Tensor cu_seqlens, Tensor slots, Tensor num_accepted_tokens, Tensor has_initial_state, "
    "Tensor(g!) out"
)


def _flat(
    core: _Core, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, metadata: GDNMetadata, out: Tensor
) -> tuple[Any, ...]:
    records = core.records
    parts = (None,) * 4 if records is None else (records.k, records.u, records.decay, records.live)
    return (
        mixed_qkv, a, b, z, *core[:12], *parts, core.state_v_first, core.null_slot, metadata.bounds,
        metadata.cu_seqlens, metadata.slots, metadata.num_accepted_tokens, metadata.has_initial_state, out,
    )  # fmt: skip


def _unflatten(flat: Sequence[Any]) -> tuple[_Core, tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...], Tensor]:
    """Return the core, its inputs (mixed_qkv, a, b, z), the tensors of the rows and out."""
    records = None if flat[16] is None else ReplayRecords.from_tensors(*flat[16:20])
    core = _Core._make([*flat[4:16], records, flat[20], flat[21]])
    return core, (flat[0], flat[1], flat[2], flat[3]), tuple(flat[22:27]), flat[27]


def _check_rows(
    core: _Core, bounds: Tensor, cu_seqlens: Tensor, slots: Tensor, accepted: Tensor, initial: Tensor
) -> None:
    integers = (torch.int32, torch.int64)
    tensor("bounds", bounds, ["R", 5], (torch.int64,))
    tensor("slots", slots, ["N", "S"], integers)
    tensor("cu_seqlens", cu_seqlens, [slots.shape[0] + bounds.shape[0]], integers)
    tensor("num_accepted_tokens", accepted, [slots.shape[0]], integers)
    tensor("has_initial_state", initial, [slots.shape[0]], (torch.bool,))
    if slots.is_cpu and has_data(slots) and slots.numel() > 0 and int(slots.max()) >= core.state.shape[0]:
        raise IndexError(f"slots: expected slots below {core.state.shape[0]}, got {int(slots.max())}")


def _run_flat(*flat: Any) -> None:
    core, inputs, (bounds, *rows), out = _unflatten(flat)
    _check_cache(core)
    _check_inputs(core, *inputs, out)
    _check_rows(core, bounds, *rows)
    runs = cut_runs(bounds.tolist(), *rows)
    if core.records is not None:
        _check_records_live(core.records, runs)
    core.run(*inputs, runs, out)


def _fake_flat(*flat: Any) -> None:
    core, inputs, (bounds, *rows), out = _unflatten(flat)
    _check_cache(core)
    _check_inputs(core, *inputs, out)
    _check_rows(core, bounds, *rows)


_library = torch.library.Library("gdn", "FRAGMENT")
_library.define(f"gdn_attention({SCHEMA}) -> ()")
_library.impl("gdn_attention", _run_flat, "CompositeExplicitAutograd")
_library.impl("gdn_attention", _schema.autograd_kernel("gdn_attention"), "Autograd")
torch.library.register_fake("gdn::gdn_attention", _fake_flat, lib=_library)
