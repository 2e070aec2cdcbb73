# SPDX-License-Identifier: Apache-2.0
"""What the contract tests share: small valid calls of every op, comparisons with float64, and watched memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_core
from gdn_core import ReplayRecords
from gdn_core.testing import inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance
from gdn_core.testing.inputs import GuardedPool
from gdn_core.testing.tolerances import SMALL_SLICE, SMALL_SLICE_TOLERANCE

Arguments = dict[str, Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
THREADS = (1, 2, 3, 7, 16)
RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
DECODE = "fused_sigmoid_gating_delta_rule_update"
# Seconds for a program that a test starts: more where the machine is an emulated one.
TIMEOUT = float(os.environ.get("GDN_TEST_TIMEOUT", "120"))


def call(op: str, arguments: Arguments) -> Any:
    """Call a public operation."""
    return getattr(gdn_core, op)(**arguments)


# --- watching memory --------------------------------------------------------------------------------------------------


def _tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, ReplayRecords):
            for part in ("k", "u", "decay", "live"):
                yield f"{name}.{part}", getattr(value, part)


def _whole_storage(tensor: Tensor) -> Tensor:
    """Return a copy of all bytes that a dense tensor's storage holds, also those outside the view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


@contextmanager
def untouched(arguments: Arguments, *written: str) -> Iterator[None]:
    """Assert that the block changes none of the tensors, nor anything around them, but those called ``written``."""
    watched = {
        name: (tensor, _whole_storage(tensor))
        for name, tensor in _tensors(arguments)
        if name not in written and tensor.layout == torch.strided and tensor.device.type == "cpu"
    }
    layouts = {name: (tensor.shape, tensor.stride()) for name, (tensor, _) in watched.items()}
    yield
    for name, (tensor, before) in watched.items():
        assert torch.equal(_whole_storage(tensor), before), f"{name} was modified"
        assert (tensor.shape, tensor.stride()) == layouts[name], f"{name} was re-strided"


def same_bits(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Tell whether two tensors hold the same bits: NaN equals NaN, and -0 differs from 0."""
    if actual is None or expected is None:
        return actual is expected
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return torch.equal(actual.contiguous().view(integers), expected.contiguous().view(integers))


def agree(impl: Any, actual: Tensor, expected: Tensor) -> bool:
    """Tell whether two results of one computation agree: bit for bit, on the reference up to torch's vector tails."""
    if impl.is_native or actual.numel() == 0:
        return same_bits(actual, expected)
    same_nan = torch.equal(actual.isnan(), expected.isnan())
    actual, expected = actual.double().nan_to_num(), expected.double().nan_to_num()
    return same_nan and bool(torch.linalg.vector_norm(actual - expected) <= 1e-6 * torch.linalg.vector_norm(expected))


# --- one-slot decode --------------------------------------------------------------------------------------------------


def decode(*, options: tuple[tuple[str, Any], ...] = (), **case: Any) -> tuple[Arguments, GuardedPool]:
    """Build a decode call: ``inputs.decode_arguments(**case)`` with ``options`` replaced; hashable for `cache`."""
    arguments, guarded = inputs.decode_arguments(**case)
    return {**arguments, **dict(options)}, guarded


@cache
def decode_expected(**case: Any) -> tuple[Tensor, Tensor]:
    """Return o and the pool of a decode call, in float64."""
    wide = to_float64(decode(**case)[0])
    return oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]


def _output_bound(what: str, o: Tensor, cu_seqlens: Tensor | None) -> float:
    """Return the tolerance of o; one rounding of few half-precision values does not average, as in the gated norm."""
    lengths = [o.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    shortest = min((length for length in lengths if length > 0), default=0) * o.shape[-1]
    bound = tolerance(what, o.dtype)
    return max(bound, SMALL_SLICE_TOLERANCE) if o.element_size() == 2 and shortest < SMALL_SLICE else bound


def check_decode(arguments: Arguments, guarded: GuardedPool, o: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """Compare the results of a decode call with float64, and look after the guards of its pool."""
    dtype, state_dtype = arguments["q"].dtype, guarded.pool.dtype
    half = tolerance("decode_half_pool", dtype) if state_dtype.itemsize == 2 else 0.0
    expected_o, expected_pool = expected
    bounds = arguments["cu_seqlens"]
    bounds = torch.arange(o.shape[1] + 1) if bounds is None else bounds
    assert packed_relative_error(o, expected_o, bounds) <= max(_output_bound("decode_output", o, bounds), half)
    assert relative_error(guarded.pool, expected_pool, (2, 3)) <= max(tolerance("decode_state", dtype), half)
    guarded.check()


# --- whole sequences --------------------------------------------------------------------------------------------------


def sequences(*, options: tuple[tuple[str, Any], ...] = (), **case: Any) -> Arguments:
    """Build a call of one of the RULES: ``inputs.delta_rule_arguments(**case)`` with ``options`` replaced."""
    return {**inputs.delta_rule_arguments(**case), **dict(options)}


def _oracle_of(op: str, arguments: Arguments) -> Any:
    return getattr(oracle, op)(**to_float64(arguments))


@cache
def sequences_expected(op: str, **case: Any) -> Any:
    """Return what one of the RULES gives in float64."""
    return _oracle_of(op, sequences(**case))


def sequence_error(actual: Tensor, expected: Tensor, cu_seqlens: Tensor | None) -> float:
    """Return the worst relative error of outputs over (sequence, value head)."""
    if cu_seqlens is None:
        return relative_error(actual, expected, (1, 3))
    return packed_relative_error(actual, expected, cu_seqlens)


def check_sequences(op: str, arguments: Arguments, results: Any, expected: Any, limit: float | None = None) -> None:
    """Compare (o, final_state[, chunk_states]) with float64; `limit` replaces the tolerances of random inputs."""
    dtype, state = arguments["q"].dtype, arguments.get("initial_state")
    half = tolerance("decode_half_pool", dtype) if state is not None and state.element_size() == 2 else 0.0
    output, final = ("chunk", "chunk") if op == "chunk_gated_delta_rule" else ("decode_output", "decode_state")
    output_bound = max(_output_bound(output, results[0], arguments["cu_seqlens"]), half)
    state_bound = max(tolerance(final, dtype), half)
    if limit is not None:
        output_bound = state_bound = limit
    assert sequence_error(results[0], expected[0], arguments["cu_seqlens"]) <= output_bound
    assert (results[1] is None) == (expected[1] is None)
    if results[1] is not None:
        assert relative_error(results[1], expected[1], (2, 3)) <= state_bound
    if len(expected) == 3:
        assert relative_error(results[2], expected[2], (2, 3)) <= state_bound


def rule_arguments(op: str, arguments: Arguments) -> Arguments:
    """Keep the arguments that `op` has."""
    if op == "chunk_gated_delta_rule":
        return arguments
    return {name: value for name, value in arguments.items() if name != "output_chunk_states"}


# --- a small valid call of every op -----------------------------------------------------------------------------------

H, HV, K, V, S, C, W = 2, 4, 6, 5, 3, 7, 4


def _with_out(arguments: Arguments, shape: tuple[int, ...], dtype: torch.dtype) -> Arguments:
    return {**arguments, "out": torch.full(shape, 7.0, dtype=dtype)}


def small_call(op: str, dtype: torch.dtype = torch.float32) -> Arguments:
    """Return valid arguments of any public op, on pools and with ``out`` where it has them; all sizes differ."""
    return _SMALL_CALLS[op](dtype)


def _small_gating(dtype: torch.dtype) -> Arguments:
    return inputs.gating_arguments((3, HV), dtype=dtype)


def _small_rule(dtype: torch.dtype) -> Arguments:
    arguments = inputs.delta_rule_arguments((3, 5), H, HV, K, V, dtype=dtype)
    pool = inputs.normal((6, HV, K, V), inputs.generator(1), torch.float32)
    slots = torch.tensor([4, 1], dtype=torch.int32)
    fresh = torch.tensor([True, False])
    arguments |= {"initial_state": pool, "state_indices": slots, "has_initial_state": fresh}
    return _with_out(arguments, (1, 8, HV, V), dtype)


def _small_decode(dtype: torch.dtype) -> Arguments:
    return _with_out(inputs.decode_arguments((1, 2), H, HV, K, V, dtype=dtype)[0], (1, 3, HV, V), dtype)


def _small_spec(dtype: torch.dtype) -> Arguments:
    arguments, _ = inputs.spec_arguments((3, 2), S, H, HV, K, V, accepted=(2, 1), dtype=dtype)
    return _with_out(arguments, (1, 5, HV, V), dtype)


def _small_replay(dtype: torch.dtype) -> Arguments:
    arguments, _ = inputs.replay_arguments((3, 2), S, H, HV, K, V, accepted=(2, 1), live=(3, 2), dtype=dtype)
    return _with_out(arguments, (1, 5, HV, V), dtype)


def _small_conv_fn(dtype: torch.dtype) -> Arguments:
    arguments, _ = inputs.conv_fn_arguments((3, 5), C, W, state_len=6, dtype=dtype)
    arguments["has_initial_state"] = torch.tensor([True, False])
    return _with_out(arguments, (C, 8), dtype)


def _small_conv_update(dtype: torch.dtype) -> Arguments:
    arguments, _ = inputs.conv_update_arguments((3, 2), C, W, state_len=6, accepted=(2, 1), dtype=dtype)
    return _with_out(arguments, (5, C), dtype)


def _small_norm(dtype: torch.dtype) -> Arguments:
    return _with_out(inputs.norm_arguments((3, 2, V), dtype=dtype), (3, 2, V), dtype)


def _small_fused(dtype: torch.dtype) -> Arguments:
    arguments, _ = inputs.fused_decode_arguments((3, 2), S, H, HV, K, V, accepted=(2, 1), dtype=dtype)
    return _with_out(arguments, (5, HV, V), dtype)


def _small_fused_replay(dtype: torch.dtype) -> Arguments:
    arguments, _ = inputs.fused_decode_arguments(
        (3, 2), S, H, HV, K, V, accepted=(2, 1), live=(3, 2), replay=True, dtype=dtype
    )
    return _with_out(arguments, (5, HV, V), dtype)


_SMALL_CALLS = {
    "fused_gdn_gating": _small_gating,
    "chunk_gated_delta_rule": _small_rule,
    "fused_recurrent_gated_delta_rule": _small_rule,
    "fused_sigmoid_gating_delta_rule_update": _small_decode,
    "fused_sigmoid_gating_delta_rule_update_spec": _small_spec,
    "fused_sigmoid_gating_delta_rule_update_replay": _small_replay,
    "causal_conv1d_fn": _small_conv_fn,
    "causal_conv1d_update": _small_conv_update,
    "rms_norm_gated": _small_norm,
    "fused_gdn_decode_post_conv_mtp": _small_fused,
    "fused_gdn_decode_post_conv_mtp_replay": _small_fused_replay,
}


class _Capture(TorchDispatchMode):
    """Keep an op and its arguments instead of running it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gdn":
            self.op, self.flat = func, list(args)
            return None
        return func(*args, **(kwargs or {}))


def call_on_rows(op, arguments, rows, dtype=torch.int32):
    """Run a step on some rows of its tables, as only the ops of torch.ops.gdn can be told."""
    with _Capture() as captured:
        call(op, arguments)
    captured.flat[-2] = torch.tensor(rows, dtype=dtype)
    captured.op(*captured.flat)
