# SPDX-License-Identifier: Apache-2.0
"""What `gdn verify` checks: for each operation, arguments and how far the results may be from float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..testing import GuardedPool, inputs, packed_relative_error, relative_error, tolerance

Arguments = dict[str, Any]
Made = tuple[Arguments, GuardedPool | None]

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
NAN = float("nan")

# (H, HV, K, V): those of Qwen3-Next and Qwen3.5, and sizes that no vector width divides.
MODEL = (16, 32, 128, 128)
ODD = (2, 6, 40, 23)


class Error(NamedTuple):
    """One compared quantity: its relative error and the tolerance."""

    error: float
    tolerance: float


Errors = Callable[[Arguments, Any, Arguments, Any], Iterator["Error"]]


@dataclass(frozen=True)
class Case:
    """One call of an operation. `make` must return the same arguments every time."""

    op: str
    label: str
    make: Callable[[torch.dtype], Made]
    errors: Errors  # from the actual arguments and result, then the expected ones
    dtypes: tuple[torch.dtype, ...] = (F64, F32, BF16, F16)


def all_cases() -> list[Case]:
    """List the cases of every operation."""
    return [
        *_gating(), *_norm(), *_decode(), *_recurrent(), *_chunk(), *_spec(), *_replay(), *_conv(), *_fused(),
        *_attention(),
    ]  # fmt: skip


def _state_dtype(dtype: torch.dtype, wanted: torch.dtype = F32) -> torch.dtype:
    """Return the dtype of a pool: float64 activations are there to check the reference, without any rounding."""
    return F64 if dtype == F64 else wanted


def _pad_row(arguments: Arguments, slots: str, row: int) -> None:
    """Make `row` padding, with NaN in its inputs, which must go nowhere."""
    arguments[slots][row] = -1
    bounds = arguments.get("cu_seqlens")
    tokens = slice(row, row + 1) if bounds is None else slice(int(bounds[row]), int(bounds[row + 1]))
    for name in ("q", "k", "v", "g", "beta"):
        if name in arguments:
            arguments[name][0, tokens] = NAN
    for name in ("a", "b", "mixed_qkv", "output_gate"):
        if name in arguments:
            arguments[name][tokens] = NAN


# Gating and norm


def _gating() -> Iterator[Case]:
    op = "fused_gdn_gating"
    yield Case(op, "1 token, 32 heads", partial(_gates, (1, 32)), _gating_errors)
    yield Case(op, "5 x 7 tokens, 11 heads", partial(_gates, (5, 7, 11)), _gating_errors)
    yield Case(op, "300 tokens, 16 heads", partial(_gates, (300, 16)), _gating_errors)
    yield Case(op, "exp overflows", _overflowing_gates, _gating_errors)


def _gates(shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return inputs.gating_arguments(shape, dtype=dtype), None


def _overflowing_gates(dtype: torch.dtype) -> Made:
    """exp(A_log) overflows in fp32 where the softplus underflows: there g is -0."""
    arguments = inputs.gating_arguments((9, 5), dtype=dtype, spread=30.0)
    arguments["A_log"][1] = 100.0
    arguments["a"][:, 1] = -2000.0
    return arguments, None


def _gating_errors(arguments: Arguments, result: Any, _: Arguments, expected: Any) -> Iterator[Error]:
    for actual, wanted in zip(result, expected, strict=True):
        error = relative_error(actual.flatten(0, -2), wanted.flatten(0, -2), 0)
        yield Error(error, tolerance("gating", arguments["a"].dtype))


def _norm() -> Iterator[Case]:
    op = "rms_norm_gated"
    yield Case(op, "3 x 32 heads of 128", partial(_norms, (3, 32, 128), "silu"), _norm_errors)
    yield Case(op, "77 heads of 33, sigmoid", partial(_norms, (77, 33), "sigmoid"), _norm_errors)
    yield Case(op, "5 heads of 256", partial(_norms, (5, 256), "silu"), _norm_errors)


def _norms(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> Made:
    return inputs.norm_arguments(shape, dtype=dtype, activation=activation), None


def _norm_errors(arguments: Arguments, result: Any, _: Arguments, expected: Any) -> Iterator[Error]:
    x = arguments["x"]
    yield Error(relative_error(result, expected, -1), tolerance("gated_norm", x.dtype, x.shape[-1]))


# The recurrence on pools: decode and its speculative forms


def _decode() -> Iterator[Case]:
    op, errors = "fused_sigmoid_gating_delta_rule_update", partial(_pool_errors, "initial_state_source")
    half = (F32, BF16, F16)
    model, odd = partial(_decodes, [1, 1], MODEL), partial(_decodes, [1, 4, 0, 2], ODD)
    yield Case(op, "model sizes, 2 rows", model, errors)
    yield Case(op, "model sizes, value-first state", partial(model, state_v_first=True), errors)
    yield Case(op, "model sizes, bfloat16 pool", partial(model, pool=BF16), errors, half)
    yield Case(op, "model sizes, float16 pool, value first", partial(model, pool=F16, state_v_first=True), errors, half)
    yield Case(op, "odd sizes, rows of 1, 4, 0, 2", odd, errors)
    yield Case(op, "odd sizes, padding", _padded_decode, errors)


def _decodes(
    lengths: list[int], sizes: tuple[int, ...], dtype: torch.dtype, pool: torch.dtype = F32, **options: Any
) -> Made:
    return inputs.decode_arguments(lengths, *sizes, dtype=dtype, state_dtype=_state_dtype(dtype, pool), **options)


def _padded_decode(dtype: torch.dtype) -> Made:
    arguments, guard = _decodes([1, 1, 1, 1], ODD, dtype)
    _pad_row(arguments, "initial_state_indices", 1)
    arguments["null_slot"] = int(arguments["initial_state_indices"][2])
    return arguments, guard


def _spec() -> Iterator[Case]:
    op, errors = "fused_sigmoid_gating_delta_rule_update_spec", partial(_pool_errors, "initial_state_source")
    odd = partial(_specs, [4, 1, 0, 2], ODD, [2, 1, 1, 0])
    yield Case(op, "model sizes", partial(_specs, [4], MODEL, [3]), errors)
    yield Case(op, "odd sizes, value-first state", partial(odd, state_v_first=True), errors)
    yield Case(op, "odd sizes, padding", _padded_spec, errors)


def _specs(lengths: list[int], sizes: tuple[int, ...], accepted: list[int], dtype: torch.dtype, **options: Any) -> Made:
    states = _state_dtype(dtype)
    return inputs.spec_arguments(lengths, 4, *sizes, accepted=accepted, dtype=dtype, state_dtype=states, **options)


def _padded_spec(dtype: torch.dtype) -> Made:
    arguments, guard = _specs([4, 2, 3], ODD, [1, 2, 4], dtype)
    arguments["spec_state_indices"][2, 1] = -1  # skips one store
    _pad_row(arguments, "spec_state_indices", 1)
    return arguments, guard


def _replay() -> Iterator[Case]:
    op, errors = "fused_sigmoid_gating_delta_rule_update_replay", partial(_pool_errors, "state")
    yield Case(op, "model sizes", partial(_replays, [4], MODEL, accepted=[3], live=[4]), errors)
    yield Case(op, "odd sizes, nothing to replay", partial(_replays, [2, 1], ODD, state_v_first=True), errors)
    yield Case(op, "odd sizes, padding", _padded_replay, errors)


def _replays(lengths: list[int], sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Made:
    return inputs.replay_arguments(lengths, 4, *sizes, dtype=dtype, state_dtype=_state_dtype(dtype), **options)


def _padded_replay(dtype: torch.dtype) -> Made:
    arguments, guard = _replays([4, 2, 3], ODD, dtype, accepted=[1, 2, 2], live=[1, 3, 2])
    _pad_row(arguments, "slot_indices", 1)
    return arguments, guard


def _pool_errors(pool: str, arguments: Arguments, o: Any, wanted: Arguments, expected: Any) -> Iterator[Error]:
    dtype, states, bounds = arguments["q"].dtype, arguments[pool], arguments["cu_seqlens"]
    half_pool = states.dtype in (BF16, F16)
    bound = tolerance("decode_half_pool" if half_pool else "decode_output", dtype)
    one_token_rows = bounds is None
    yield Error(relative_error(o, expected, 3) if one_token_rows else packed_relative_error(o, expected, bounds), bound)
    bound = tolerance("decode_half_pool" if half_pool else "decode_state", dtype)
    yield Error(relative_error(states, wanted[pool], (2, 3)), bound)


# The recurrence on sequences


def _recurrent() -> Iterator[Case]:
    op, errors = "fused_recurrent_gated_delta_rule", partial(_sequence_errors, "decode_output", "decode_state")
    extreme = partial(_sequence_errors, "extreme_decays", "extreme_decays")
    yield Case(op, "model sizes, rows of 7, 2", partial(_sequences, [7, 2], MODEL), errors)
    yield Case(op, "model sizes, value-first state", partial(_sequences, [3], MODEL, state_v_first=True), errors)
    yield Case(op, "odd sizes, gates in the kernel", _raw_gates, errors)
    yield Case(op, "odd sizes, pool, padding", _pooled_sequences, errors)
    yield Case(op, "odd sizes, wild decays", partial(_sequences, [80], ODD, decays="wild"), extreme, (F64, F32))


def _chunk() -> Iterator[Case]:
    op, errors = "chunk_gated_delta_rule", partial(_sequence_errors, "chunk", "chunk")
    extreme = partial(_sequence_errors, "extreme_decays", "extreme_decays")
    no_decay = partial(_sequences, [200], (2, 2, 64, 64), beta=0.98, decays="none")
    fresh = partial(_sequences, [20], MODEL, state_v_first=True, initial=False)
    yield Case(op, "model sizes, 100 tokens", partial(_sequences, [100], MODEL), errors)
    yield Case(op, "model sizes, value-first state", fresh, errors)
    yield Case(op, "odd sizes, rows of 130, 64, 1, 0", partial(_sequences, [130, 64, 1, 0], ODD), errors)
    yield Case(op, "odd sizes, pool, padding", _pooled_sequences, errors)
    for label, what, cosine in (
        ("correlated keys", "chunk_correlated_keys", 0.9),
        ("nearly parallel keys", "chunk_parallel_keys", 0.999),
    ):
        yield Case(op, label, partial(no_decay, key_correlation=cosine), partial(_sequence_errors, what, what))
    for decays, label in (("thirds", "g = -200 every third token"), ("wild", "wild decays")):
        yield Case(op, f"odd sizes, {label}", partial(_sequences, [150], ODD, decays=decays), extreme, (F64, F32))


def _sequences(lengths: list[int], sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Made:
    states = _state_dtype(dtype)
    return inputs.delta_rule_arguments(lengths, *sizes, dtype=dtype, state_dtype=states, **options), None


def _raw_gates(dtype: torch.dtype) -> Made:
    arguments, _ = _sequences([5, 5], ODD, dtype, is_dense=True)
    A_log, dt_bias = inputs.gate_parameters(ODD[1], inputs.generator(1), arguments["g"].dtype)
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    return arguments | options | {"A_log": A_log, "dt_bias": dt_bias}, None


def _pooled_sequences(dtype: torch.dtype) -> Made:
    """Slots in no order, a fresh row whose slot holds NaN, a padding row, an empty one."""
    arguments, _ = _sequences([70, 3, 1, 0], ODD, dtype)
    states = arguments["initial_state"]
    guard = inputs.guarded_pool(6, states.shape[1:], states.dtype)
    guard.pool[:4] = states
    guard.pool[0] = NAN
    arguments["initial_state"], arguments["output_final_state"] = guard.pool, False
    arguments["state_indices"] = torch.tensor([0, 3, 1, 2], dtype=torch.int32)
    arguments["has_initial_state"] = torch.tensor([False, True, True, True])
    _pad_row(arguments, "state_indices", 1)
    return arguments, guard


def _sequence_errors(
    output: str, state: str, arguments: Arguments, result: Any, wanted: Arguments, expected: Any
) -> Iterator[Error]:
    dtype, bounds = arguments["q"].dtype, arguments["cu_seqlens"]
    if bounds is None:
        yield Error(relative_error(result[0], expected[0], (1, 3)), tolerance(output, dtype))
    else:
        yield Error(packed_relative_error(result[0], expected[0], bounds), tolerance(output, dtype))
    in_pool = arguments.get("state_indices") is not None
    states = (arguments["initial_state"], wanted["initial_state"]) if in_pool else (result[1], expected[1])
    yield Error(relative_error(*states, (2, 3)), tolerance(state, dtype))


# The convolution


def _conv() -> Iterator[Case]:
    fn, update = "causal_conv1d_fn", "causal_conv1d_update"
    batch = partial(_conv_prefills, [6, 6], 37, 3, is_dense=True, has_bias=False)
    wide = partial(_conv_steps, [3, 3], 37, 5, is_dense=True, state_len=6)
    drafts = partial(_conv_steps, [4, 2, 1], 37, 4, state_len=7, accepted=[1, 3, 4])
    ring = partial(_conv_steps, [1, 1], 37, 4, is_dense=True, state_len=5, positions=[0, 7])
    yield Case(fn, "2048 channels, 4 tokens", partial(_conv_prefills, [4], 2048, 4), _conv_fn_errors)
    yield Case(fn, "37 channels, 130 tokens", partial(_conv_prefills, [130], 37, 4), _conv_fn_errors)
    yield Case(fn, "37 channels, rows of 9, 1, 0, 2", partial(_conv_prefills, [9, 1, 0, 2], 37, 4), _conv_fn_errors)
    yield Case(fn, "37 channels, batch, width 3, no bias", batch, _conv_fn_errors)
    yield Case(update, "8192 channels", partial(_conv_steps, [1], 8192, 4, is_dense=True), _conv_update_errors)
    yield Case(update, "37 channels, wide state, width 5", wide, _conv_update_errors)
    yield Case(update, "37 channels, drafts", drafts, _conv_update_errors)
    yield Case(update, "37 channels, ring", ring, _conv_update_errors)


def _conv_prefills(lengths: list[int], C: int, W: int, dtype: torch.dtype, **options: Any) -> Made:
    return inputs.conv_fn_arguments(lengths, C, W, dtype=dtype, **options)


def _conv_steps(lengths: list[int], C: int, W: int, dtype: torch.dtype, **options: Any) -> Made:
    return inputs.conv_update_arguments(lengths, C, W, dtype=dtype, **options)


def _conv_fn_errors(arguments: Arguments, y: Any, wanted: Arguments, expected: Any) -> Iterator[Error]:
    bound = tolerance("convolution", arguments["x"].dtype)
    yield Error(relative_error(y, expected, (-2, -1)), bound)
    yield Error(relative_error(arguments["conv_states"], wanted["conv_states"], (1, 2)), bound)


def _conv_update_errors(arguments: Arguments, y: Any, wanted: Arguments, expected: Any) -> Iterator[Error]:
    bound = tolerance("convolution", arguments["x"].dtype)
    yield Error(relative_error(y, expected, tuple(range(y.dim()))), bound)
    # With drafts, the columns beyond the kept ones keep no promise.
    kept = slice(None if arguments["num_accepted_tokens"] is None else arguments["weight"].shape[1] - 1)
    states = arguments["conv_state"][..., kept], wanted["conv_state"][..., kept]
    yield Error(relative_error(*states, (1, 2)), bound)


# The fused decode step


def _fused() -> Iterator[Case]:
    spec, replay = "fused_gdn_decode_post_conv_mtp", "fused_gdn_decode_post_conv_mtp_replay"
    yield Case(spec, "model sizes", partial(_fused_steps, [2], MODEL, accepted=[3]), _fused_errors)
    yield Case(spec, "odd sizes, padding", partial(_padded_fused, "state_indices"), _fused_errors)
    model = partial(_fused_steps, [2], MODEL, accepted=[3], live=[4], replay=True)
    yield Case(replay, "model sizes", model, _fused_errors)
    odd = partial(_padded_fused, "slot_indices", live=[2, 1, 1], replay=True)
    yield Case(replay, "odd sizes, padding", odd, _fused_errors)


def _fused_steps(lengths: list[int], sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Made:
    return inputs.fused_decode_arguments(lengths, 4, *sizes, dtype=dtype, state_dtype=_state_dtype(dtype), **options)


def _padded_fused(slots: str, dtype: torch.dtype, **options: Any) -> Made:
    arguments, guard = _fused_steps([2, 1, 1], ODD, dtype, accepted=[2, 1, 1], activation="sigmoid", **options)
    _pad_row(arguments, slots, 1)
    return arguments, guard


def _fused_errors(arguments: Arguments, result: Any, wanted: Arguments, expected: Any) -> Iterator[Error]:
    dtype = arguments["mixed_qkv"].dtype
    error = packed_relative_error(result[None], expected[None], arguments["cu_seqlens"])
    yield Error(error, tolerance("fused_decode", dtype))
    yield Error(relative_error(arguments["state"], wanted["state"], (2, 3)), tolerance("decode_state", dtype))


# The core of a layer


def _attention() -> Iterator[Case]:
    op = "gdn_attention"
    every = [
        ("decode", 1),
        ("fresh", 66),
        ("drafts", 4),
        ("padding", 3),
        ("drafts", 2),
        ("continued", 5),
        ("decode", 1),
    ]
    decodes, prompts = partial(_cores, [("decode", 1)] * 2, MODEL), [("fresh", 70), ("continued", 3), ("fresh", 1)]
    drafts = [("drafts", 4), ("drafts", 1), ("drafts", 2)]
    yield Case(op, "model sizes, 2 decodes", decodes, _core_errors)
    yield Case(op, "heads of 64, 3 prompts", partial(_cores, prompts, (2, 4, 64, 64)), _core_errors)
    for form, replay in (("several slots", False), ("replay", True)):
        yield Case(op, f"odd sizes, drafts, {form}", partial(_cores, drafts, ODD, replay=replay), _core_errors)
        mixed = partial(_cores, every, ODD, replay=replay, state_v_first=replay)
        yield Case(op, f"odd sizes, rows of every kind, {form}", mixed, _core_errors)


def _cores(rows: list[tuple[str, int]], sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Made:
    return inputs.attention_arguments(rows, 4, *sizes, dtype=dtype, state_dtype=_state_dtype(dtype), **options)


def _core_errors(arguments: Arguments, out: Any, wanted: Arguments, expected: Any) -> Iterator[Error]:
    dtype, cache, wanted_cache = arguments["mixed_qkv"].dtype, arguments["cache"], wanted["cache"]
    bounds = arguments["metadata"].query_start_loc
    yield Error(packed_relative_error(out[None], expected[None], bounds), tolerance("attention", dtype))
    yield Error(relative_error(cache.state, wanted_cache.state, (2, 3)), tolerance("attention", dtype))
    # With drafts, the columns beyond the kept ones keep no promise.
    kept = slice(cache.conv_width - 1)
    held, of_oracle = (each.conv_states[..., kept] for each in (cache, wanted_cache))
    yield Error(relative_error(held, of_oracle, (1, 2)), tolerance("convolution", dtype))
