# SPDX-License-Identifier: Apache-2.0
"""What the tests of the field reports share: which implementations have an op, calls, and comparisons."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn_core
from conftest import EVERY, Implementation
from contract_calls import same_bits
from gdn_core import _registry
from gdn_core.testing import inputs, oracle, packed_relative_error, relative_error, to_float64

Arguments = dict[str, Any]

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which module mmap has from Python 3.13 on

CHUNK, RECURRENT = RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
DECODE = "fused_sigmoid_gating_delta_rule_update"
SPEC, REPLAY = f"{DECODE}_spec", f"{DECODE}_replay"
FUSED = "fused_gdn_decode_post_conv_mtp"
FUSED_REPLAY = f"{FUSED}_replay"
CONV, CONV_UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
NORM, GATING = "rms_norm_gated", "fused_gdn_gating"

SPECULATIVE = (SPEC, REPLAY, FUSED, FUSED_REPLAY)
RECURRENCES = (*RULES, DECODE, *SPECULATIVE)
WITH_SLOTS = (*RECURRENCES, CONV, CONV_UPDATE)

# The argument that holds the states, and the one that holds their slots.
POOL = {
    **dict.fromkeys(RULES, ("initial_state", "state_indices")),
    DECODE: ("initial_state_source", "initial_state_indices"),
    SPEC: ("initial_state_source", "spec_state_indices"),
    REPLAY: ("state", "slot_indices"),
    FUSED: ("state", "state_indices"),
    FUSED_REPLAY: ("state", "slot_indices"),
    CONV: ("conv_states", "cache_indices"),
    CONV_UPDATE: ("conv_state", "conv_state_indices"),
}
# The inputs that have one entry a token, by the dimension that counts them.
TOKENS = {
    **{op: {"q": 1, "k": 1, "v": 1, "g": 1, "beta": 1} for op in RULES},
    **{op: {"q": 1, "k": 1, "v": 1, "a": 0, "b": 0} for op in (DECODE, SPEC, REPLAY)},
    **{op: {"mixed_qkv": 0, "a": 0, "b": 0, "output_gate": 0} for op in (FUSED, FUSED_REPLAY)},
    CONV: {"x": 1},
    CONV_UPDATE: {"x": 0},
}
OFFSETS = {CONV: "query_start_loc", CONV_UPDATE: "query_start_loc"}


def has_kernel(implementation: Implementation, op: str) -> bool:
    if not implementation.is_native:
        return True
    provider = _registry.provider(implementation.backend)
    return provider is None or op in provider.ops


def on(*ops: str) -> pytest.MarkDecorator:
    """Run a test of each op on every implementation that has it; the test takes `op` and `impl`."""
    pairs = [(op, param) for op in ops for param in EVERY if has_kernel(param.values[0], op)]
    cases = [pytest.param(op, *param.values, id=f"{op}-{param.id}", marks=param.marks) for op, param in pairs]
    return pytest.mark.parametrize(("op", "impl"), cases, indirect=["impl"])


def run(op: str, arguments: Arguments) -> Any:
    return getattr(gdn_core, op)(**arguments)


def run_output(op: str, arguments: Arguments) -> Tensor:
    """Call an op and return its output alone."""
    result = run(op, arguments)
    return result[0] if isinstance(result, tuple) else result


def expect(op: str, arguments: Arguments) -> tuple[Any, Arguments]:
    """Return the float64 results of a call and the arguments as they are after it."""
    wide = to_float64(arguments)
    return getattr(oracle, op)(**wide), wide


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error of a tensor as a whole."""
    return relative_error(actual.reshape(1, -1), expected.reshape(1, -1), 1)


def assert_same(impl: Implementation, actual: Tensor, expected: Tensor, bound: float = 2e-6) -> None:
    """Compare two calls of one implementation: the same bits from a native one, close ones from the reference."""
    if impl.is_native:
        assert same_bits(actual, expected)
    else:
        assert error(actual, expected) <= bound


def assert_rule(op: str, arguments: Arguments, *, bound: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Run one of the RULES and compare its output and final state with float64."""
    bound = bound or {CHUNK: 1e-5, RECURRENT: 2e-6}[op]
    (wanted, wanted_state, *_), _ = expect(op, arguments)
    o, state, *_ = run(op, arguments)
    cu_seqlens = arguments.get("cu_seqlens")
    if cu_seqlens is None:
        assert relative_error(o, wanted, (1, 3)) <= bound
    else:
        assert packed_relative_error(o, wanted, cu_seqlens) <= bound
    if wanted_state is not None:
        assert relative_error(state, wanted_state, (-2, -1)) <= bound
    return o, state


def rows_call(
    op: str,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    H: int = 2,
    HV: int = 4,
    K: int = 6,
    V: int = 5,
    S: int | None = None,
    state_v_first: bool = False,
    **options: Any,
) -> Arguments:
    """Return a call of any op with slots, on rows of these lengths."""
    S = max([1, *lengths]) if S is None else S
    sizes = (H, HV, K, V)
    if op in RULES:
        arguments = inputs.delta_rule_arguments(
            lengths, *sizes, seed=seed, state_v_first=state_v_first, initial=False, **options
        )
        rng = inputs.generator(seed + 1)
        arguments["initial_state"] = inputs.state_pool(
            len(lengths) + 3, HV, K, V, state_v_first, torch.float32, rng
        ).pool
        arguments["state_indices"] = inputs.distinct_slots(len(lengths), len(lengths) + 3, rng)
        arguments["output_final_state"] = False
        return arguments
    if op == DECODE:
        return inputs.decode_arguments(lengths, *sizes, seed=seed, state_v_first=state_v_first, **options)[0]
    if op == SPEC:
        return inputs.spec_arguments(lengths, S, *sizes, seed=seed, state_v_first=state_v_first, **options)[0]
    if op == REPLAY:
        return inputs.replay_arguments(lengths, S, *sizes, seed=seed, state_v_first=state_v_first, **options)[0]
    if op in (FUSED, FUSED_REPLAY):
        return inputs.fused_decode_arguments(
            lengths, S, *sizes, replay=op == FUSED_REPLAY, seed=seed, state_v_first=state_v_first, **options
        )[0]
    if op == CONV:
        return inputs.conv_fn_arguments(lengths, 7, 4, seed=seed, **options)[0]
    return inputs.conv_update_arguments(lengths, 7, 4, state_len=3 + S - 1, seed=seed, **options)[0]


def put_tokens(op: str, arguments: Arguments, positions: slice | Sequence[int], value: float) -> None:
    """Overwrite all inputs of some tokens."""
    for name, dim in TOKENS[op].items():
        changed = arguments[name].clone()
        changed.movedim(dim, 0)[positions] = value
        arguments[name] = changed


def part(op: str, arguments: Arguments, tokens: slice, rows: slice) -> Arguments:
    """Cut a call of packed rows down to some rows and their tokens, on the same pool."""
    cut = dict(arguments)
    for name, dim in TOKENS[op].items():
        cut[name] = arguments[name].movedim(dim, 0)[tokens].movedim(0, dim)
    for name in (POOL[op][1], "num_accepted_tokens", "has_initial_state"):
        if arguments.get(name) is not None:
            cut[name] = arguments[name][rows]
    name = OFFSETS.get(op, "cu_seqlens")
    if arguments.get(name) is not None:
        ends = arguments[name][rows.start : rows.stop + 1]
        cut[name] = ends - ends[0]
    return cut


def output_of(op: str, output: Tensor) -> Tensor:
    """Return an output of packed rows with its tokens first, and no batch dimension."""
    if op == CONV:
        return output.T
    return output if op in (CONV_UPDATE, FUSED, FUSED_REPLAY) else output[0]


def distant_slots(num_slots: int, slot_shape: Sequence[int], stride: int) -> Tensor:
    """Return an fp32 pool whose slots lie `stride` elements apart; memory is only used for what is touched."""
    size = torch.Size(slot_shape).numel()
    memory = mmap.mmap(-1, 4 * ((num_slots - 1) * stride + size), flags=mmap.MAP_PRIVATE | _NO_RESERVE)
    flat = torch.frombuffer(memory, dtype=torch.float32)
    inner = torch.empty(slot_shape, device="meta").stride()
    return flat.as_strided((num_slots, *slot_shape), (stride, *inner))
