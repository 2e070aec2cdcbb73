# SPDX-License-Identifier: Apache-2.0
"""Seeded arguments for every operation, and pools whose surroundings are watched.

The `*_arguments` functions return keyword arguments: `op(**arguments)` calls the operation, the reference or the
oracle. `clone` copies them for a second call (operations update pools in place), `to_float64` for the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import GDNLayerParams, GDNMetadata, GDNStateCache
from ..records import ReplayRecords

Arguments = dict[str, Any]


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator of its own, so that one test's draws do not shift another's."""
    return torch.Generator().manual_seed(seed)


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Return `cu_seqlens` of sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def _copy(value: Any, floats: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(floats, copy=True) if floats is not None and value.is_floating_point() else value.clone()
    if isinstance(value, ReplayRecords):
        tensors = (value.k, value.u, value.decay, value.live)
        return ReplayRecords.from_tensors(*(_copy(x, floats) for x in tensors))
    if isinstance(value, GDNLayerParams):
        return replace(value, **{name: _copy(x, floats) for name, x in vars(value).items() if isinstance(x, Tensor)})
    if isinstance(value, GDNStateCache):
        pools = (_copy(x, floats) for x in (value.conv_states, value.state, value.records))
        return GDNStateCache.from_tensors(
            *pools, conv_width=value.conv_width, state_v_first=value.state_v_first, null_slot=value.null_slot
        )
    return value


def clone(arguments: Arguments) -> Arguments:
    """Copy all tensors, records, weights and caches among the arguments."""
    return {name: _copy(value, None) for name, value in arguments.items()}


def to_float64(arguments: Arguments) -> Arguments:
    """Copy all tensors, records, weights and caches among the arguments, floating-point ones to float64."""
    return {name: _copy(value, torch.float64) for name, value in arguments.items()}


class GuardedPool(NamedTuple):
    """A pool whose slots lie apart in a larger buffer, and a check that nothing between or around them changed."""

    pool: Tensor
    check: Callable[[], None]


def guarded_pool(
    num_slots: int, slot_shape: Sequence[int], dtype: torch.dtype, *, guard: int = 64, values: Tensor | None = None
) -> GuardedPool:
    """Lay out a pool `[num_slots, *slot_shape]` with `guard` elements of NaN before, between and after its slots.

    The pool holds `values`, or zeros. `check()` raises AssertionError where a guard was written.
    """
    slot_size = torch.Size(slot_shape).numel()
    stride = slot_size + guard
    # All bits set is a NaN of every floating dtype, so that reading a guard shows in the results too.
    buffer = torch.full((guard + num_slots * stride,), -1, dtype=_bits_of(dtype))
    is_guard = torch.ones(buffer.shape, dtype=torch.bool)
    is_guard[guard:].unflatten(0, (num_slots, stride))[:, :slot_size] = False
    slots = buffer.view(dtype)[guard:].unflatten(0, (num_slots, stride))[:, :slot_size]
    pool = slots.unflatten(1, tuple(slot_shape))
    pool.copy_(torch.zeros(()) if values is None else values)

    def check() -> None:
        written = (is_guard & (buffer != -1)).nonzero()[:, 0]
        first = written[:8].tolist()
        assert not first, f"{len(written)} elements outside the slots were written, at {first} of the buffer"

    return GuardedPool(pool, check)


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def normal(shape: Sequence[int], rng: torch.Generator, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Draw normal values, rounded to `dtype`."""
    return (torch.randn(*shape, generator=rng, dtype=torch.float64) * scale).to(dtype)


class Projection(NamedTuple):
    """Views of one projection: `q, k [B, T, H, K]`, `v [B, T, HV, V]`, `a, b [B, T, HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


def projection(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    rng: torch.Generator,
    *,
    key_correlation: float = 0.0,
    is_packed: bool = False,
) -> Projection:
    """Draw q, k, v, a and b as views of one tensor, with its token stride (`is_packed`: as tensors of their own).

    `key_correlation` is the cosine between any two keys of a head. q and k have about unit norm.
    """
    widths = [H * K, H * K, HV * V, HV, HV, 3]
    mixed = normal((B, T, sum(widths)), rng, torch.float64)
    q, k, v, a, b, _ = mixed.split(widths, dim=-1)
    k = k.unflatten(-1, (H, K))
    common = F.normalize(normal((B, 1, H, K), rng, torch.float64), dim=-1)
    k_own = F.normalize(k - (k * common).sum(-1, keepdim=True) * common, dim=-1) if key_correlation else k / K**0.5
    k = key_correlation**0.5 * common + (1 - key_correlation) ** 0.5 * k_own
    mixed = torch.cat([q / K**0.5, k.flatten(-2), v, a, b, mixed[..., -3:]], dim=-1).to(dtype)
    q, k, v, a, b, _ = mixed.split(widths, dim=-1)
    views = (q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), a, b)
    return Projection(*(x.contiguous() for x in views)) if is_packed else Projection(*views)


def gate_parameters(HV: int, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return A_log and dt_bias `[HV]` as they are initialised in models: decays from about 0.2 to 0.999 a token."""
    A_log = (torch.rand(HV, generator=rng, dtype=torch.float64) * 15 + 1).log()
    dt = torch.exp(torch.rand(HV, generator=rng, dtype=torch.float64) * 4.6 - 6.9)
    return A_log.to(dtype), (dt + torch.log(-torch.expm1(-dt))).to(dtype)


def log_decays(shape: Sequence[int], rng: torch.Generator, kind: str = "realistic") -> Tensor:
    """Draw g in float64.

    Kinds: `realistic` (decays around 0.9), `none` (g = 0), `strong` (g = -2), `vanishing` (decay 1e-12),
    `thirds` (g = -200 at every third token), `wild` (anything from -1e-4 to -100, by token and head).
    """
    uniform = torch.rand(*shape, generator=rng, dtype=torch.float64)
    if kind == "realistic":
        return -0.2 * uniform
    if kind == "none":
        return torch.zeros(*shape, dtype=torch.float64)
    if kind == "strong":
        return torch.full(tuple(shape), -2.0, dtype=torch.float64)
    if kind == "vanishing":
        return torch.full(tuple(shape), 1e-12, dtype=torch.float64).log()
    if kind == "thirds":
        token = torch.arange(shape[1])[:, None]
        return torch.where(token % 3 == 2, -200.0, -0.1 * uniform)
    if kind == "wild":
        return -(10 ** (6 * uniform - 4))
    raise ValueError(f"kind: unknown kind of decays {kind!r}")


def delta_rule_arguments(
    lengths: Sequence[int],
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    is_dense: bool = False,
    decays: str = "realistic",
    key_correlation: float = 0.0,
    beta: float | None = None,
    initial: bool = True,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    is_packed: bool = False,
) -> Arguments:
    """Return arguments of `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`.

    The sequences are packed with `cu_seqlens`, or with `is_dense` (and equal lengths) batched. q and k are normalised
    by the operation. g and beta are fp32 (float64 with float64 activations).
    """
    rng = generator(seed)
    B, T = (len(lengths), lengths[0]) if is_dense else (1, sum(lengths))
    q, k, v, _, b = projection(B, T, H, HV, K, V, dtype, rng, key_correlation=key_correlation, is_packed=is_packed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (len(lengths), HV, V, K) if state_v_first else (len(lengths), HV, K, V)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": log_decays((B, T, HV), rng, decays).to(wide),
        "beta": b.to(wide).sigmoid() if beta is None else torch.full((B, T, HV), beta, dtype=wide),
        "initial_state": normal(shape, rng, state_dtype) if initial else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": state_v_first,
        "cu_seqlens": None if is_dense else offsets(lengths),
    }


def gating_arguments(
    shape: Sequence[int], *, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 4.0
) -> Arguments:
    """Return arguments of `fused_gdn_gating` for a and b of `shape [..., HV]`, views of one wider tensor."""
    rng = generator(seed)
    HV = shape[-1]
    a, b, _ = normal((*shape[:-1], 2 * HV + 1), rng, dtype, spread).split([HV, HV, 1], dim=-1)
    A_log, dt_bias = gate_parameters(HV, rng, torch.float64 if dtype == torch.float64 else torch.float32)
    return {"A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias}


def _decode_tokens(
    T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, rng: torch.Generator, is_packed: bool
) -> Arguments:
    q, k, v, a, b = projection(1, T, H, HV, K, V, dtype, rng, is_packed=is_packed)
    A_log, dt_bias = gate_parameters(HV, rng, torch.float64 if dtype == torch.float64 else torch.float32)
    return {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "q": q,
        "k": k,
        "v": v,
        "a": a[0],
        "b": b[0],
        "use_qk_l2norm_in_kernel": True,
    }


def state_pool(
    num_slots: int, HV: int, K: int, V: int, state_v_first: bool, dtype: torch.dtype, rng: torch.Generator
) -> GuardedPool:
    """Return a guarded pool of random states."""
    shape = (HV, V, K) if state_v_first else (HV, K, V)
    return guarded_pool(num_slots, shape, dtype, values=normal((num_slots, *shape), rng, dtype))


def distinct_slots(count: int, num_slots: int, rng: torch.Generator) -> Tensor:
    """Draw `count` different slots, int32."""
    return torch.randperm(num_slots, generator=rng)[:count].to(torch.int32)


def decode_arguments(
    lengths: Sequence[int],
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    seed: int = 0,
    is_packed: bool = False,
    spare_slots: int = 3,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `fused_sigmoid_gating_delta_rule_update` and the pool that is among them."""
    rng = generator(seed)
    tokens = _decode_tokens(sum(lengths), H, HV, K, V, dtype, rng, is_packed)
    guarded = state_pool(len(lengths) + spare_slots, HV, K, V, state_v_first, state_dtype, rng)
    is_plain = all(length == 1 for length in lengths)
    return {
        **tokens,
        "initial_state_source": guarded.pool,
        "initial_state_indices": distinct_slots(len(lengths), len(guarded.pool), rng),
        "cu_seqlens": None if is_plain else offsets(lengths),
        "state_v_first": state_v_first,
    }, guarded


def spec_arguments(
    lengths: Sequence[int],
    S: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    accepted: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    seed: int = 0,
    is_packed: bool = False,
    spare_slots: int = 3,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `fused_sigmoid_gating_delta_rule_update_spec` and the pool that is among them."""
    rng = generator(seed)
    N = len(lengths)
    tokens = _decode_tokens(sum(lengths), H, HV, K, V, dtype, rng, is_packed)
    guarded = state_pool(N * S + spare_slots, HV, K, V, state_v_first, state_dtype, rng)
    return {
        **tokens,
        "initial_state_source": guarded.pool,
        "spec_state_indices": distinct_slots(N * S, len(guarded.pool), rng).view(N, S),
        "num_accepted_tokens": None if accepted is None else torch.tensor(accepted, dtype=torch.int32),
        "cu_seqlens": offsets(lengths),
        "state_v_first": state_v_first,
    }, guarded


def replay_arguments(
    lengths: Sequence[int],
    S: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    accepted: Sequence[int] | None = None,
    live: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    seed: int = 0,
    is_packed: bool = False,
    spare_slots: int = 3,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `fused_sigmoid_gating_delta_rule_update_replay` and the pool that is among them.

    `live` gives the records that each row's slot holds already (none by default), drawn at random.
    """
    rng = generator(seed)
    N = len(lengths)
    tokens = _decode_tokens(sum(lengths), H, HV, K, V, dtype, rng, is_packed)
    guarded = state_pool(N + spare_slots, HV, K, V, state_v_first, state_dtype, rng)
    slots = distinct_slots(N, len(guarded.pool), rng)
    return {
        **tokens,
        "state": guarded.pool,
        "slot_indices": slots,
        "records": random_records(len(guarded.pool), S, H, HV, K, V, dtype, rng, slots, live),
        "num_accepted_tokens": None if accepted is None else torch.tensor(accepted, dtype=torch.int32),
        "cu_seqlens": offsets(lengths),
        "state_v_first": state_v_first,
    }, guarded


def random_records(
    num_slots: int,
    S: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    rng: torch.Generator,
    slots: Tensor,
    live: Sequence[int] | None,
) -> ReplayRecords:
    """Return records that hold `live[n]` random tokens for slot `slots[n]`."""
    records = ReplayRecords(num_slots, S, H, HV, K, V, dtype)
    records.k.copy_(normal(records.k.shape, rng, dtype, K**-0.5))
    records.u.copy_(normal(records.u.shape, rng, records.u.dtype))
    records.decay.copy_(log_decays(records.decay.shape, rng).exp())
    if live is not None:
        records.live[slots.long()] = torch.tensor(live, dtype=torch.int32)
    return records


def fused_decode_arguments(
    lengths: Sequence[int],
    S: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    accepted: Sequence[int] | None = None,
    live: Sequence[int] | None = None,
    replay: bool = False,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = True,
    seed: int = 0,
    spare_slots: int = 3,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `fused_gdn_decode_post_conv_mtp` (`replay`: `..._replay`) and the pool among them."""
    rng = generator(seed)
    N, T = len(lengths), sum(lengths)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # The convolution's last step is SiLU; the row pitch is not the width, as in a view of a larger buffer.
    mixed_qkv = F.silu(normal((T, 2 * H * K + HV * V + 5), rng, torch.float64)).to(dtype)[:, :-5]
    a, b = normal((T, 2 * HV), rng, dtype).split(HV, dim=-1)
    A_log, dt_bias = gate_parameters(HV, rng, wide)
    guarded = state_pool((N if replay else N * S) + spare_slots, HV, K, V, state_v_first, state_dtype, rng)
    arguments: Arguments = {
        "mixed_qkv": mixed_qkv,
        "a": a,
        "b": b,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "cu_seqlens": offsets(lengths),
        "num_accepted_tokens": None if accepted is None else torch.tensor(accepted, dtype=torch.int32),
        "state": guarded.pool,
        "output_gate": normal((T, HV, V), rng, dtype),
        "norm_weight": 1 + normal((V,), rng, wide, 0.1),
        "norm_eps": 1e-6,
        "output_gate_activation": activation,
        "num_key_heads": H,
        "head_k_dim": K,
        "state_v_first": state_v_first,
    }
    if replay:
        slots = distinct_slots(N, len(guarded.pool), rng)
        arguments["slot_indices"] = slots
        arguments["records"] = random_records(len(guarded.pool), S, H, HV, K, V, dtype, rng, slots, live)
    else:
        arguments["state_indices"] = distinct_slots(N * S, len(guarded.pool), rng).view(N, S)
    return arguments, guarded


def conv_weights(
    C: int, W: int, dtype: torch.dtype, rng: torch.Generator, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return `weight [C, W]` and `bias [C]` or None."""
    return normal((C, W), rng, dtype, W**-0.5), normal((C,), rng, dtype, 0.1) if has_bias else None


def conv_fn_arguments(
    lengths: Sequence[int],
    C: int,
    W: int,
    *,
    state_len: int | None = None,
    is_dense: bool = False,
    has_bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_slots: int = 2,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `causal_conv1d_fn` on a pool: packed `[C, T]`, or `[B, C, T]` with `is_dense`.

    x is channel-last in memory, as the projection leaves it.
    """
    rng = generator(seed)
    weight, bias = conv_weights(C, W, dtype, rng, has_bias)
    N = len(lengths)
    slot_shape = (C, W - 1 if state_len is None else state_len)
    values = normal((N + spare_slots, *slot_shape), rng, dtype)
    guarded = guarded_pool(N + spare_slots, slot_shape, dtype, values=values)
    x = normal((N, lengths[0], C) if is_dense else (sum(lengths), C), rng, dtype).mT
    return {
        "x": x,
        "weight": weight,
        "bias": bias,
        "activation": activation,
        "conv_states": guarded.pool,
        "query_start_loc": None if is_dense else offsets(lengths),
        "cache_indices": distinct_slots(N, N + spare_slots, rng),
    }, guarded


def conv_update_arguments(
    lengths: Sequence[int],
    C: int,
    W: int,
    *,
    state_len: int | None = None,
    accepted: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    is_dense: bool = False,
    has_bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_slots: int = 2,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `causal_conv1d_update`.

    Rows are ragged, `[T, C]`; with `is_dense` (and equal lengths) `[B, C, q]`, or `[B, C]` for single tokens.
    `positions` are the `cache_seqlens` of a ring.
    """
    rng = generator(seed)
    weight, bias = conv_weights(C, W, dtype, rng, has_bias)
    N = len(lengths)
    slot_shape = (C, W - 1 if state_len is None else state_len)
    values = normal((N + spare_slots, *slot_shape), rng, dtype)
    guarded = guarded_pool(N + spare_slots, slot_shape, dtype, values=values)
    x = normal((sum(lengths), C + 3), rng, dtype)[:, :C]
    if is_dense and lengths[0] != 1:
        x = x.unflatten(0, (N, lengths[0])).mT
    return {
        "x": x,
        "conv_state": guarded.pool,
        "weight": weight,
        "bias": bias,
        "activation": activation,
        "cache_seqlens": None if positions is None else torch.tensor(positions, dtype=torch.int32),
        "conv_state_indices": distinct_slots(N, N + spare_slots, rng),
        "num_accepted_tokens": None if accepted is None else torch.tensor(accepted, dtype=torch.int32),
        "query_start_loc": None if is_dense else offsets(lengths),
    }, guarded


def norm_arguments(
    shape: Sequence[int],
    *,
    activation: str = "silu",
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Arguments:
    """Return arguments of `rms_norm_gated` for x and gate of `shape [..., V]`."""
    rng = generator(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x": normal(shape, rng, dtype),
        "gate": normal(shape, rng, dtype),
        "weight": 1 + normal((shape[-1],), rng, wide, 0.1),
        "eps": eps,
        "activation": activation,
    }


def attention_arguments(
    rows: Sequence[tuple[str, int]],
    S: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    replay: bool = False,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    seed: int = 0,
) -> tuple[Arguments, GuardedPool]:
    """Return arguments of `gdn_attention` and the pool of states among them.

    Each row is a kind and a length: "fresh" (its slot holds NaN), "continued", "decode", "drafts" (after 1, 2, ...
    accepted tokens), or "padding" (its inputs are NaN).
    """
    rng = generator(seed)
    N, T, C, W = len(rows), sum(length for _, length in rows), 2 * H * K + HV * V, 4
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    projected = normal((T, C + HV * V + 2 * HV + 3), rng, dtype)
    mixed_qkv, z, a, b, _ = projected.split([C, HV * V, HV, HV, 3], dim=-1)
    weight, bias = conv_weights(C, W, dtype, rng, True)
    A_log, dt_bias = gate_parameters(HV, rng, wide)
    norm_weight = 1 + normal((V,), rng, wide, 0.1)
    guarded = state_pool((N if replay else N * S) + 3, HV, K, V, state_v_first, state_dtype, rng)
    num_slots = len(guarded.pool)
    table = distinct_slots(N if replay else N * S, num_slots, rng).view(N, -1)
    conv_states = normal((num_slots, W + S - 2, C), rng, dtype).mT
    records = random_records(num_slots, S, H, HV, K, V, dtype, rng, table[:, 0], None) if replay else None
    for slots, (kind, _) in zip(table, rows, strict=True):
        if kind == "fresh":
            guarded.pool[slots[0]] = conv_states[slots[0]] = float("nan")
        if kind == "drafts" and records is not None:
            records.live[slots[0]] = S
        if kind == "padding":
            slots.fill_(-1)
    starts = [0, *accumulate(length for _, length in rows)]
    for n, (kind, _) in enumerate(rows):
        if kind == "padding":
            projected[starts[n] : starts[n + 1]] = float("nan")
    drafts = [kind == "drafts" for kind, _ in rows]
    metadata = GDNMetadata.build(
        starts,
        table[:, 0] if replay else table,
        has_initial_state=[kind != "fresh" for kind, _ in rows],
        is_speculative=drafts,
        num_accepted_tokens=[1 + sum(drafts[:n]) % S if drafts[n] else 1 for n in range(N)],
    )
    return {
        "mixed_qkv": mixed_qkv,
        "a": a,
        "b": b,
        "z": z.unflatten(-1, (HV, V)),
        "layer": GDNLayerParams(weight, A_log, dt_bias, norm_weight, 1e-6, H, HV, K, V, conv_bias=bias),
        "cache": GDNStateCache.from_tensors(
            conv_states, guarded.pool, records, conv_width=W, state_v_first=state_v_first
        ),
        "metadata": metadata,
    }, guarded
