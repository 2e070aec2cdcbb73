# SPDX-License-Identifier: Apache-2.0
"""The reference against the float64 oracle, and the promises that hold of it bit for bit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_core import ReplayRecords, reference
from gdn_core.testing import (
    clone,
    guarded_pool,
    inputs,
    oracle,
    packed_relative_error,
    relative_error,
    to_float64,
    tolerance,
)

# V is large enough for the rounding of a slice to average out: one element in bf16 may be off by 2^-8.
SHAPE = {"H": 2, "HV": 6, "K": 5, "V": 67}
LENGTHS = [3, 0, 64, 1, 130, 65]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN, INF = math.nan, math.inf
RULES = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small shapes only wait for threads, and wait long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def call(op: str, arguments: dict[str, Any]) -> Any:
    return getattr(reference, op)(**arguments)


def expect(op: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the oracle's results and its arguments, whose pools it updated; call before the operation itself."""
    arguments = to_float64(arguments)
    return getattr(oracle, op)(**arguments), arguments


def state_error(actual: Tensor, expected: Tensor) -> float:
    return relative_error(actual, expected, (-1, -2))


def test_oracle_has_the_signatures_of_the_reference() -> None:
    for op in reference.__all__:
        parameters = [inspect.signature(getattr(module, op)).parameters for module in (reference, oracle)]
        described = [[(p.name, p.kind, p.default) for p in each.values()] for each in parameters]
        assert described[0] == described[1], op


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gating(dtype: torch.dtype) -> None:
    arguments = inputs.gating_arguments((3, 4, 5), dtype=dtype, spread=12.0)
    (g, beta), _ = expect("fused_gdn_gating", arguments)
    actual = call("fused_gdn_gating", arguments)
    for result, expected in zip(actual, (g, beta), strict=True):
        assert result.dtype == wide(dtype)
        assert relative_error(result, expected, 1) <= tolerance("gating", dtype)


def test_gating_softplus_parameters() -> None:
    arguments = {
        **inputs.gating_arguments((9, 5), dtype=torch.float64),
        "softplus_beta": 2.5,
        "softplus_threshold": 3.0,
    }
    expected, _ = expect("fused_gdn_gating", arguments)
    torch.testing.assert_close(call("fused_gdn_gating", arguments), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("A_log", "a", "decay"),
    [
        (100.0, -200.0, 1.0),
        (90.0, -95.0, math.exp(-math.exp(-5.0))),
        (1000.0, -200.0, 1.0),
        (89.0, 0.0, 0.0),
        (-5.0, 50.0, math.exp(-50 * math.exp(-5.0))),
    ],
)
def test_gating_where_exp_overflows(A_log: float, a: float, decay: float) -> None:
    zero = torch.zeros(1)
    g, _ = reference.fused_gdn_gating(torch.tensor([A_log]), torch.tensor([a]), zero, zero)
    assert g.exp().item() == pytest.approx(decay, rel=2e-6)


def test_gating_keeps_beta_in_fp32() -> None:
    zero = torch.zeros(1, dtype=torch.bfloat16)
    _, beta = reference.fused_gdn_gating(zero, zero, torch.tensor([0.5], dtype=torch.bfloat16), zero)
    assert beta.item() == pytest.approx(0.62245935, rel=1e-7)


# --- whole sequences --------------------------------------------------------------------------------------------------


def rule_tolerances(op: str, dtype: torch.dtype) -> tuple[float, float]:
    if op == "chunk_gated_delta_rule":
        return tolerance("chunk", dtype), tolerance("chunk", dtype)
    return tolerance("decode_output", dtype), tolerance("decode_state", dtype)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", RULES)
def test_rule_packed(op: str, dtype: torch.dtype, state_v_first: bool) -> None:
    arguments = inputs.delta_rule_arguments(
        LENGTHS, **SHAPE, dtype=dtype, state_dtype=wide(dtype), state_v_first=state_v_first
    )
    before = clone(arguments)
    (o, final), _ = expect(op, arguments)
    actual, actual_final = call(op, arguments)
    output_bound, state_bound = rule_tolerances(op, dtype)
    assert actual.dtype == dtype
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= output_bound
    assert state_error(actual_final, final) <= state_bound
    assert torch.equal(actual_final[1], arguments["initial_state"][1])
    for name, value in before.items():
        assert not isinstance(value, Tensor) or torch.equal(value, arguments[name]), name


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("op", RULES)
def test_rule_batched_without_initial_state(op: str, length: int) -> None:
    arguments = inputs.delta_rule_arguments([length] * 3, **SHAPE, dtype=torch.float64, is_dense=True, initial=False)
    (o, final), _ = expect(op, arguments)
    actual, actual_final = call(op, arguments)
    assert actual_final.shape == (3, SHAPE["HV"], SHAPE["K"], SHAPE["V"])
    assert relative_error(actual, o, (1, 3)) <= 1e-12
    assert state_error(actual_final, final) <= 1e-12


@pytest.mark.parametrize("op", RULES)
def test_rule_options(op: str) -> None:
    arguments = inputs.delta_rule_arguments([70, 5], **SHAPE, dtype=torch.float64, state_dtype=torch.bfloat16)
    arguments |= {"use_qk_l2norm_in_kernel": False, "scale": 0.3, "allow_neg_eigval": True}
    arguments |= {"use_beta_sigmoid_in_kernel": True, "beta": torch.logit(arguments["beta"]) - 1}
    (o, final), _ = expect(op, arguments)
    actual, actual_final = call(op, arguments)
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= 1e-12
    assert actual_final.dtype == torch.bfloat16
    assert torch.equal(actual_final, final.to(torch.bfloat16))
    assert not torch.allclose(actual, call(op, {**arguments, "use_qk_l2norm_in_kernel": True})[0])
    assert call(op, {**arguments, "output_final_state": False})[1] is None


def test_recurrent_gates_in_kernel() -> None:
    op = "fused_recurrent_gated_delta_rule"
    arguments = inputs.delta_rule_arguments([4, 6], **SHAPE, dtype=torch.float64)
    A_log, dt_bias = inputs.gate_parameters(SHAPE["HV"], inputs.generator(1))
    arguments |= {"g": arguments["g"] * 10 + 1, "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    (o, _), _ = expect(op, arguments)
    assert packed_relative_error(call(op, arguments)[0], o, arguments["cu_seqlens"]) <= 1e-12
    arguments |= {"g": None, "beta": None, "use_gate_in_kernel": False}
    (o, _), _ = expect(op, arguments)
    assert packed_relative_error(call(op, arguments)[0], o, arguments["cu_seqlens"]) <= 1e-12


def test_each_value_head_reads_the_key_head_of_its_group() -> None:
    key = torch.eye(2).reshape(1, 1, 2, 2)
    value = torch.arange(1.0, 5.0).reshape(1, 1, 4, 1)
    gate = torch.zeros(1, 1, 4)
    _, final = reference.fused_recurrent_gated_delta_rule(key, key, value, gate, output_final_state=True)
    assert final[0, :, :, 0].tolist() == [[1, 0], [2, 0], [0, 3], [0, 4]]


@pytest.mark.parametrize(
    ("what", "cosine", "dtype"),
    [
        (what, cosine, dtype)
        for what, cosine in (("chunk_correlated_keys", 0.9), ("chunk_parallel_keys", 0.999))
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ],
)
def test_chunk_with_similar_keys(what: str, cosine: float, dtype: torch.dtype) -> None:
    arguments = inputs.delta_rule_arguments(
        [150], 1, 2, 32, 24, dtype=dtype, decays="none", key_correlation=cosine, beta=0.98, state_dtype=wide(dtype)
    )
    (o, final), _ = expect("chunk_gated_delta_rule", arguments)
    actual, actual_final = call("chunk_gated_delta_rule", arguments)
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= tolerance(what, dtype)
    assert state_error(actual_final, final) <= tolerance(what, dtype)


@pytest.mark.parametrize("decays", ["none", "strong", "vanishing", "thirds", "wild"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", RULES)
def test_rule_extreme_decays(op: str, dtype: torch.dtype, decays: str) -> None:
    arguments = inputs.delta_rule_arguments([64, 131], **SHAPE, dtype=dtype, decays=decays, state_dtype=wide(dtype))
    (o, final), _ = expect(op, arguments)
    actual, actual_final = call(op, arguments)
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= tolerance("extreme_decays", dtype)
    assert state_error(actual_final, final) <= tolerance("extreme_decays", dtype)


@pytest.mark.parametrize("op", RULES)
def test_rule_on_a_pool(op: str) -> None:
    lengths = [2, 66, 0, 3, 65, 0, 4]
    arguments = inputs.delta_rule_arguments(lengths, **SHAPE, dtype=torch.float64, initial=False)
    shape = (SHAPE["HV"], SHAPE["K"], SHAPE["V"])
    guarded = guarded_pool(
        9, shape, torch.float64, values=inputs.normal((9, *shape), inputs.generator(2), torch.float64)
    )
    for fresh_slot in (7, 1):
        guarded.pool[fresh_slot] = NAN
    arguments |= {
        "initial_state": guarded.pool,
        "state_indices": torch.tensor([3, 7, 1, -1, 4, 8, 5]),
        "has_initial_state": torch.tensor([True, False, False, True, True, False, True]),
        "null_slot": 5,
    }
    # The padding rows hold NaN, and rows beyond the last sequence are no sequence's.
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = torch.cat([arguments[name], arguments[name][:, :2]], dim=1)
        arguments[name][:, 68:71] = NAN
        arguments[name][:, -6:] = NAN
    (o, _), expected = expect(op, arguments)
    actual, actual_final = call(op, arguments)
    assert actual_final is None
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= 1e-12
    assert not actual[:, 68:71].any() and not actual[:, -6:].any()
    changed = [3, 7, 4]
    assert state_error(guarded.pool[changed], expected["initial_state"][changed]) <= 1e-12
    untouched = [slot for slot in range(9) if slot not in changed]
    torch.testing.assert_close(
        guarded.pool[untouched], expected["initial_state"][untouched], rtol=0, atol=0, equal_nan=True
    )
    guarded.check()


@pytest.mark.parametrize("state_v_first", [False, True])
def test_chunk_states(state_v_first: bool) -> None:
    op = "chunk_gated_delta_rule"
    arguments = inputs.delta_rule_arguments(LENGTHS, **SHAPE, dtype=torch.float64, state_v_first=state_v_first)
    arguments["output_chunk_states"] = True
    (_, _, expected), _ = expect(op, arguments)
    _, _, chunk_states = call(op, arguments)
    assert len(chunk_states) == 1 + 0 + 1 + 1 + 3 + 2
    assert state_error(chunk_states, expected) <= 1e-12


@pytest.mark.parametrize("op", RULES)
def test_rule_split_anywhere_is_the_uncut_rule(op: str) -> None:
    arguments = inputs.delta_rule_arguments([150], **SHAPE)
    whole, last = call(op, arguments)
    for cut in (1, 64, 65, 149):
        parts = []
        state = arguments["initial_state"]
        for span in (slice(None, cut), slice(cut, None)):
            part = {name: arguments[name][:, span] for name in ("q", "k", "v", "g", "beta")}
            o, state = call(op, {**arguments, **part, "cu_seqlens": None, "initial_state": state})
            parts.append(o)
        assert relative_error(torch.cat(parts, dim=1), whole, (1, 3)) <= tolerance("chunk", torch.float32)
        assert state_error(state, last) <= tolerance("chunk", torch.float32)


@pytest.mark.parametrize("op", RULES)
def test_hard_reset_restarts_from_zero(op: str) -> None:
    length, reset = 80, 9
    arguments = inputs.delta_rule_arguments(
        [length] * 2, **SHAPE, dtype=torch.float64, state_dtype=torch.float64, is_dense=True
    )
    arguments["g"][0, reset] = -INF
    arguments["g"][1, 70, 3] = -INF
    # What came before is gone, whatever it was: a NaN state, a NaN or infinite token of the same chunk.
    arguments["initial_state"][0] = NAN
    arguments["v"][0, 2], arguments["k"][0, 3], arguments["beta"][0, 4], arguments["g"][0, 5] = NAN, INF, NAN, NAN
    o, final = call(op, arguments)
    assert o[0, :reset].isnan().all()
    after = {name: arguments[name][:1, reset:] for name in ("q", "k", "v", "g", "beta")}
    after["g"] = after["g"].clone()
    after["g"][:, 0] = 0
    expected, expected_final = call(op, {**arguments, **after, "initial_state": None})
    assert relative_error(o[:1, reset:], expected, (1, 3)) <= 1e-12
    assert state_error(final[:1], expected_final) <= 1e-12

    second = {name: arguments[name][1:] for name in ("q", "k", "v", "g", "beta", "initial_state")}
    (expected, expected_final), _ = expect(op, {**arguments, **second})
    assert relative_error(o[1:], expected, (1, 3)) <= 1e-12
    assert state_error(final[1:], expected_final) <= 1e-12


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38, 0.5])
@pytest.mark.parametrize("op", RULES)
def test_later_tokens_never_reach_earlier_outputs(op: str, value: float) -> None:
    length = 70
    arguments = inputs.delta_rule_arguments([length], **SHAPE, is_packed=True)
    arguments["use_qk_l2norm_in_kernel"] = False
    o, _ = call(op, arguments)
    for p in (1, 2, 15, 16, 31, 62, 63, 64, 69):
        for names in (("q",), ("k",), ("v",), ("beta",), ("q", "k", "v", "beta")):
            changed = clone(arguments)
            for name in names:
                changed[name][:, p:] = value
            if value != 0.5 and math.isfinite(value) is False and len(names) > 1:
                changed["g"][:, p:] = NAN
            assert torch.equal(call(op, changed)[0][:, :p], o[:, :p]), (p, names)


@pytest.mark.parametrize("op", RULES)
def test_a_bad_token_spoils_its_own_head_of_its_own_sequence(op: str) -> None:
    arguments = inputs.delta_rule_arguments([20, 30, 40], **SHAPE, is_packed=True)
    clean, clean_final = call(op, arguments)
    arguments["v"][0, 25, 4, 2] = NAN
    o, final = call(op, arguments)
    spoiled = torch.zeros_like(o, dtype=torch.bool)
    spoiled[0, 25:50, 4, 2] = True
    assert torch.equal(o.isnan(), spoiled)
    assert torch.equal(o[~spoiled], clean[~spoiled])
    assert final[1, 4, :, 2].isnan().all()
    assert torch.equal(final[[0, 2]], clean_final[[0, 2]])


@pytest.mark.parametrize("op", RULES)
def test_rule_takes_strided_views_and_any_index_type(op: str) -> None:
    arguments = inputs.delta_rule_arguments([3, 5], **SHAPE)
    assert not arguments["q"].is_contiguous()
    packed = clone(arguments)
    packed["cu_seqlens"] = packed["cu_seqlens"].long()
    arguments["cu_seqlens"] = torch.stack([arguments["cu_seqlens"]] * 2, dim=1)[:, 0]
    for result, expected in zip(call(op, arguments), call(op, packed), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("op", RULES)
def test_rule_out(op: str) -> None:
    arguments = inputs.delta_rule_arguments([3, 5], **SHAPE)
    o, _ = call(op, arguments)
    out = torch.full(o.shape, NAN, dtype=torch.bfloat16)
    assert call(op, {**arguments, "out": out})[0] is out
    assert torch.equal(out, o.to(torch.bfloat16))


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize(("B", "T"), [(0, 4), (2, 0), (0, 0)])
def test_rule_on_nothing(op: str, B: int, T: int) -> None:
    arguments = inputs.delta_rule_arguments([T] * B if B else [T], **SHAPE, is_dense=True)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        arguments[name] = arguments[name][:B]
    o, final = call(op, arguments)
    assert o.shape == (B, T, SHAPE["HV"], SHAPE["V"])
    assert torch.equal(final, arguments["initial_state"])
    packed = {**arguments, **{name: arguments[name].flatten(0, 1)[None, :0] for name in ("q", "k", "v", "g", "beta")}}
    packed |= {"cu_seqlens": torch.zeros(1, dtype=torch.int32), "initial_state": arguments["initial_state"][:0]}
    assert call(op, packed)[0].shape == (1, 0, SHAPE["HV"], SHAPE["V"])


# --- decode -----------------------------------------------------------------------------------------------------------

DECODE = "fused_sigmoid_gating_delta_rule_update"
SPEC = "fused_sigmoid_gating_delta_rule_update_spec"
REPLAY = "fused_sigmoid_gating_delta_rule_update_replay"


def decode_bounds(dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[float, float]:
    if state_dtype in (torch.bfloat16, torch.float16):
        return tolerance("decode_half_pool", torch.float32), tolerance("decode_half_pool", torch.float32)
    return tolerance("decode_output", dtype), tolerance("decode_state", dtype)


STATE_DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [2, 1, 0, 5]], ids=["plain", "ragged"])
@pytest.mark.parametrize(("dtype", "state_dtype"), STATE_DTYPES)
def test_decode(dtype: torch.dtype, state_dtype: torch.dtype, lengths: list[int], state_v_first: bool) -> None:
    arguments, guarded = inputs.decode_arguments(
        lengths, **SHAPE, dtype=dtype, state_dtype=state_dtype, state_v_first=state_v_first
    )
    o, expected = expect(DECODE, arguments)
    actual = call(DECODE, arguments)
    output_bound, state_bound = decode_bounds(dtype, state_dtype)
    assert actual.dtype == dtype
    assert packed_relative_error(actual, o, inputs.offsets(lengths)) <= output_bound
    assert state_error(guarded.pool, expected["initial_state_source"]) <= state_bound
    guarded.check()


def test_decode_padding_rows() -> None:
    arguments, guarded = inputs.decode_arguments([1, 2, 1, 1, 1], **SHAPE, is_packed=True)
    arguments["initial_state_indices"] = torch.tensor([3, -1, 0, 100, -7], dtype=torch.int32)
    arguments |= {"null_slot": 100, "cu_seqlens": torch.tensor([0, 1, 3, 4, 5, 5], dtype=torch.int32)}
    before = guarded.pool.clone()
    for name, dim in (("q", 1), ("k", 1), ("v", 1), ("a", 0), ("b", 0)):
        arguments[name].index_fill_(dim, torch.tensor([1, 2, 4, 5]), NAN)
    out = torch.full((1, 6, SHAPE["HV"], SHAPE["V"]), NAN)
    call(DECODE, {**arguments, "out": out})
    assert not out[:, [1, 2, 4, 5]].any()
    assert out[:, [0, 3]].isfinite().all() and out[:, [0, 3]].any(dim=-1).all()
    untouched = [slot for slot in range(len(before)) if slot not in (0, 3)]
    assert torch.equal(guarded.pool[untouched], before[untouched])
    assert guarded.pool.isfinite().all()
    guarded.check()


def test_decode_keeps_a_state_that_nothing_changes() -> None:
    arguments, guarded = inputs.decode_arguments([1], **SHAPE, dtype=torch.bfloat16)
    guarded.pool.fill_(1 + 2**-12)
    arguments |= {"b": torch.full_like(arguments["b"], -INF), "a": torch.full_like(arguments["a"], -INF)}
    for _ in range(3):
        call(DECODE, arguments)
    assert bool((guarded.pool == 1 + 2**-12).all())


def test_decode_large_slot_strides() -> None:
    # Slot 2048 of states of 2^20 elements starts at element 2^31; only its pages are ever touched.
    pool = torch.empty(2049, 64, 128, 128, dtype=torch.bfloat16)
    arguments, _ = inputs.decode_arguments([1], 64, 64, 128, 128)
    pool[2048] = 0.25
    small = pool[2048:].clone()
    arguments |= {"initial_state_source": pool, "initial_state_indices": torch.tensor([2048])}
    o = call(DECODE, arguments)
    expected = call(DECODE, {**arguments, "initial_state_source": small, "initial_state_indices": torch.tensor([0])})
    assert torch.equal(o, expected)
    assert torch.equal(pool[2048:], small)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype"), STATE_DTYPES)
def test_several_slots(dtype: torch.dtype, state_dtype: torch.dtype, state_v_first: bool) -> None:
    lengths, accepted = [1, 4, 0, 3, 2], [4, 1, 2, 0, 3]
    arguments, guarded = inputs.spec_arguments(
        lengths, 4, **SHAPE, accepted=accepted, dtype=dtype, state_dtype=state_dtype, state_v_first=state_v_first
    )
    o, expected = expect(SPEC, arguments)
    actual = call(SPEC, arguments)
    output_bound, state_bound = decode_bounds(dtype, state_dtype)
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= output_bound
    assert state_error(guarded.pool, expected["initial_state_source"]) <= state_bound
    guarded.check()


def test_several_slots_padding() -> None:
    arguments, guarded = inputs.spec_arguments(
        [3, 2, 2, 1], 3, **SHAPE, dtype=torch.float64, state_dtype=torch.float64, is_packed=True
    )
    table = arguments["spec_state_indices"]
    table[0, 1], table[1, 0], table[2, 1] = -1, 77, table[2, 0]
    arguments["null_slot"] = 77
    for name, dim in (("q", 1), ("k", 1), ("v", 1), ("a", 0), ("b", 0)):
        arguments[name].index_fill_(dim, torch.tensor([3, 4]), NAN)
    o, expected = expect(SPEC, arguments)
    actual = call(SPEC, arguments)
    assert not actual[:, 3:5].any()
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= 1e-12
    assert state_error(guarded.pool, expected["initial_state_source"]) <= 1e-12
    guarded.check()


def speculate(
    dtype: torch.dtype, state_dtype: torch.dtype, state_v_first: bool, steps: int = 6
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Run the same drafts through both forms, with acceptance at random; return outputs and last accepted states."""
    N, S = 3, 4
    rng = inputs.generator(11)
    spec, _ = inputs.spec_arguments([S] * N, S, **SHAPE, dtype=dtype, state_dtype=state_dtype,
                                    state_v_first=state_v_first)  # fmt: skip
    replay, _ = inputs.replay_arguments([S] * N, S, **SHAPE, dtype=dtype, state_dtype=state_dtype,
                                        state_v_first=state_v_first)  # fmt: skip
    table, slots = spec["spec_state_indices"], replay["slot_indices"]
    replay["state"][slots.long()] = spec["initial_state_source"][table[:, 0].long()]
    accepted = torch.zeros(N, dtype=torch.int32)
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step in range(steps):
        lengths = [S, S, S] if step == 0 else torch.randint(1, S + 1, (N,), generator=rng).tolist()
        tokens, _ = inputs.spec_arguments(lengths, S, **SHAPE, dtype=dtype, seed=step)
        shared = {name: tokens[name] for name in ("q", "k", "v", "a", "b", "cu_seqlens")}
        shared["num_accepted_tokens"] = accepted
        outputs[0].append(call(SPEC, {**spec, **shared}))
        outputs[1].append(call(REPLAY, {**replay, **shared}))
        accepted = torch.tensor([int(torch.randint(1, n + 1, (), generator=rng)) for n in lengths], dtype=torch.int32)
    # A last single token brings both to the same point: the accepted prefix applied, one token run.
    last, _ = inputs.spec_arguments([1] * N, S, **SHAPE, dtype=dtype, seed=99)
    shared = {name: last[name] for name in ("q", "k", "v", "a", "b", "cu_seqlens")}
    shared["num_accepted_tokens"] = accepted
    source = table.gather(1, accepted.long()[:, None] - 1)[:, 0].long()
    resumed = spec["initial_state_source"][source].clone()
    outputs[0].append(call(SPEC, {**spec, **shared}))
    outputs[1].append(call(REPLAY, {**replay, **shared}))
    return outputs[0], outputs[1], resumed, replay["state"][slots.long()]


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2]
)
def test_replay_is_several_slots_bit_for_bit(dtype: torch.dtype, state_dtype: torch.dtype, state_v_first: bool) -> None:
    several, replayed, several_state, replay_state = speculate(dtype, state_dtype, state_v_first)
    for expected, actual in zip(several, replayed, strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(replay_state, several_state)


def test_rejected_drafts_leave_no_trace() -> None:
    drafted, _ = inputs.spec_arguments([4], 4, **SHAPE, accepted=[1])
    plain, _ = inputs.decode_arguments([1], **SHAPE)
    plain["initial_state_source"][0] = drafted["initial_state_source"][drafted["spec_state_indices"][0, 0]]
    plain["initial_state_indices"] = torch.tensor([0])
    for step in range(5):
        tokens, _ = inputs.spec_arguments([4], 4, **SHAPE, seed=step)
        shared = {name: tokens[name] for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
        o = call(SPEC, {**drafted, **shared})
        first = {name: shared[name][:, :1] for name in ("q", "k", "v")}
        first |= {name: shared[name][:1] for name in ("a", "b")}
        expected = call(DECODE, {**plain, **shared, **first})
        assert torch.equal(o[:, :1], expected)
        slot = drafted["spec_state_indices"][0, 0]
        assert torch.equal(drafted["initial_state_source"][slot], plain["initial_state_source"][0])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype"), STATE_DTYPES)
def test_replay(dtype: torch.dtype, state_dtype: torch.dtype, state_v_first: bool) -> None:
    lengths, accepted, live = [1, 4, 0, 3, 2], [4, 1, 2, 0, 3], [4, 3, 2, 2, 0]
    arguments, guarded = inputs.replay_arguments(
        lengths, 4, **SHAPE, accepted=accepted, live=live, dtype=dtype, state_dtype=state_dtype,
        state_v_first=state_v_first,
    )  # fmt: skip
    records, slots = arguments["records"], arguments["slot_indices"].long()
    o, expected = expect(REPLAY, arguments)
    actual = call(REPLAY, arguments)
    output_bound, state_bound = decode_bounds(dtype, state_dtype)
    assert packed_relative_error(actual, o, arguments["cu_seqlens"]) <= output_bound
    assert state_error(guarded.pool, expected["state"]) <= state_bound
    assert records.live[slots].tolist() == [1, 4, 2, 3, 2]
    assert torch.equal(records.live, expected["records"].live)
    for name in ("k", "u", "decay"):
        wanted = getattr(expected["records"], name)
        assert relative_error(getattr(records, name), wanted, -1) <= max(state_bound, output_bound)
    guarded.check()


def test_replay_padding() -> None:
    arguments, guarded = inputs.replay_arguments([2, 2, 1], 3, **SHAPE, live=[1, 2, 3], is_packed=True)
    arguments["slot_indices"][:2] = torch.tensor([-1, 50])
    arguments["null_slot"] = 50
    for name, dim in (("q", 1), ("k", 1), ("v", 1), ("a", 0), ("b", 0)):
        arguments[name].index_fill_(dim, torch.tensor([0, 1, 2, 3]), NAN)
    before = clone(arguments)
    actual = call(REPLAY, arguments)
    assert not actual[:, :4].any() and actual[:, 4].any()
    untouched = [slot for slot in range(len(guarded.pool)) if slot != int(arguments["slot_indices"][2])]
    assert torch.equal(guarded.pool[untouched], before["state"][untouched])
    assert torch.equal(arguments["records"].u[untouched], before["records"].u[untouched])
    guarded.check()


def test_records() -> None:
    records = ReplayRecords(5, 3, 2, 6, 8, 7, torch.bfloat16)
    assert records.k.shape == (5, 3, 2, 8) and records.k.dtype == torch.bfloat16
    assert records.u.shape == (5, 3, 6, 7) and records.u.dtype == torch.float32
    assert records.decay.shape == (5, 3, 6) and records.decay.dtype == torch.float32
    assert records.live.shape == (5,) and records.live.dtype == torch.int32
    assert records.nbytes == 5 * 3 * (2 * 8 * 2 + 6 * 7 * 4 + 6 * 4) + 5 * 4
    assert "num_slots=5" in repr(records) and "S=3" in repr(records)
    records.live.fill_(2)
    records.reset(torch.tensor([1, 3], dtype=torch.int32))
    assert records.live.tolist() == [2, 0, 2, 0, 2]
    records.reset()
    assert not records.live.any()


# --- convolution ------------------------------------------------------------------------------------------------------

CONV, CONV_UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
CHANNELS = 11


def conv_bound(dtype: torch.dtype) -> float:
    return tolerance("convolution", dtype, slice_size=CHANNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W", [2, 3, 4, 5])
def test_conv_packed(W: int, dtype: torch.dtype) -> None:
    arguments, guarded = inputs.conv_fn_arguments([1, 0, 7, 2, 20, 3], CHANNELS, W, state_len=W + 1, dtype=dtype)
    slots = arguments["cache_indices"].long()
    guarded.pool[slots[3]] = NAN
    slots[5] = -1
    x = arguments["x"].clone()
    x[:, -3:] = NAN
    arguments |= {
        "x": x,
        "cache_indices": slots,
        "has_initial_state": torch.tensor([True, False, True, False, True, True]),
    }
    before = guarded.pool.clone()
    y, expected = expect(CONV, arguments)
    actual = call(CONV, arguments)
    assert not actual[:, -3:].any()
    assert relative_error(actual, y, 0) <= conv_bound(dtype)
    torch.testing.assert_close(guarded.pool, expected["conv_states"].to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(guarded.pool[..., W - 1 :], before[..., W - 1 :], rtol=0, atol=0, equal_nan=True)
    guarded.check()


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_conv_batched(length: int, activation: str | None) -> None:
    arguments, _ = inputs.conv_fn_arguments(
        [length] * 3, CHANNELS, 4, is_dense=True, activation=activation, dtype=torch.float64
    )
    y, expected = expect(CONV, arguments)
    assert relative_error(call(CONV, arguments), y, 1) <= 1e-12
    assert torch.equal(arguments["conv_states"], expected["conv_states"])

    arguments |= {"conv_states": None, "cache_indices": None, "return_final_states": True}
    (y, final), _ = expect(CONV, arguments)
    actual, actual_final = call(CONV, arguments)
    assert relative_error(actual, y, 1) <= 1e-12
    assert torch.equal(actual_final, final)

    arguments["initial_states"] = inputs.normal((3, CHANNELS, 3), inputs.generator(1), torch.float64)
    arguments["final_states_out"] = torch.empty(3, CHANNELS, 3, dtype=torch.float64)
    arguments["bias"] = None
    (y, final), _ = expect(CONV, arguments)
    actual, actual_final = call(CONV, arguments)
    assert relative_error(actual, y, 1) <= 1e-12
    assert actual_final is arguments["final_states_out"]
    assert torch.equal(actual_final, final)


def test_conv_segments() -> None:
    arguments, _ = inputs.conv_fn_arguments([9] * 2, CHANNELS, 4, is_dense=True, dtype=torch.float64)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 2], [5, 5, 5, -1, -1, 6, 6, 7, -1]], dtype=torch.int32)
    arguments |= {"conv_states": None, "cache_indices": None, "seq_idx": segments}
    y, _ = expect(CONV, arguments)
    actual = call(CONV, arguments)
    assert relative_error(actual, y, 1) <= 1e-12
    assert not actual.mT[segments < 0].any()


def test_conv_later_tokens_never_reach_earlier_outputs() -> None:
    arguments, _ = inputs.conv_fn_arguments([6], CHANNELS, 4)
    y = call(CONV, clone(arguments))
    for p in range(1, 6):
        changed = clone(arguments)
        changed["x"][:, p:] = NAN
        assert torch.equal(call(CONV, changed)[:, :p], y[:, :p])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_len", [3, 4, 6])
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_conv_update_shifts(length: int, state_len: int, dtype: torch.dtype) -> None:
    arguments, guarded = inputs.conv_update_arguments(
        [length] * 3, CHANNELS, 4, state_len=state_len, is_dense=True, dtype=dtype
    )
    arguments["conv_state_indices"][1] = -1
    y, expected = expect(CONV_UPDATE, arguments)
    actual = call(CONV_UPDATE, arguments)
    assert actual.shape == arguments["x"].shape
    assert not actual[1].any()
    assert relative_error(actual, y, 1) <= conv_bound(dtype)
    assert torch.equal(guarded.pool, expected["conv_state"].to(dtype))
    guarded.check()


def test_conv_update_ragged() -> None:
    arguments, guarded = inputs.conv_update_arguments([2, 0, 5, 1], CHANNELS, 4, state_len=5, dtype=torch.float64)
    y, expected = expect(CONV_UPDATE, arguments)
    assert relative_error(call(CONV_UPDATE, arguments), y, 1) <= 1e-12
    assert torch.equal(guarded.pool, expected["conv_state"])


def test_conv_update_keeps_a_state_wider_than_the_tokens() -> None:
    arguments, _ = inputs.conv_update_arguments([2] * 3, CHANNELS, 4, state_len=5, is_dense=True, dtype=torch.bfloat16)
    arguments["conv_state"] = inputs.normal(arguments["conv_state"].shape, inputs.generator(1), torch.float32)
    for accepted in (None, torch.tensor([1, 2, 1])):
        arguments["num_accepted_tokens"] = accepted
        y, expected = expect(CONV_UPDATE, arguments)
        assert relative_error(call(CONV_UPDATE, arguments), y, 1) <= conv_bound(torch.bfloat16)
        assert torch.equal(arguments["conv_state"].double(), expected["conv_state"])


def test_conv_update_without_indices() -> None:
    arguments, guarded = inputs.conv_update_arguments([1] * 3, CHANNELS, 3, is_dense=True, dtype=torch.float64)
    arguments["conv_state_indices"] = None
    y, expected = expect(CONV_UPDATE, arguments)
    assert relative_error(call(CONV_UPDATE, arguments), y, 1) <= 1e-12
    assert torch.equal(guarded.pool, expected["conv_state"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_dense", [False, True])
def test_conv_update_accepted(is_dense: bool, dtype: torch.dtype) -> None:
    W, S = 4, 5
    lengths = [3] * 5 if is_dense else [1, 5, 0, 3, 2]
    arguments, guarded = inputs.conv_update_arguments(
        lengths, CHANNELS, W, state_len=W - 1 + S - 1, accepted=[5, 1, 2, 0, 3], is_dense=is_dense, dtype=dtype
    )
    y, expected = expect(CONV_UPDATE, arguments)
    actual = call(CONV_UPDATE, arguments)
    assert relative_error(actual, y, 1) <= conv_bound(dtype)
    for n, slot in enumerate(arguments["conv_state_indices"].tolist()):
        promised = W - 2 + lengths[n] if lengths[n] else None
        assert torch.equal(guarded.pool[slot, :, :promised], expected["conv_state"][slot, :, :promised].to(dtype))
    guarded.check()


def test_conv_speculation_is_one_token_at_a_time() -> None:
    # Without the activation, whose vector tails in torch depend on how many elements there are.
    W, S = 4, 4
    rng = inputs.generator(5)
    drafted, _ = inputs.conv_update_arguments([S], CHANNELS, W, state_len=W - 1 + S - 1, accepted=[1], activation=None)
    plain, _ = inputs.conv_update_arguments([1], CHANNELS, W, is_dense=True, activation=None)
    slot, plain_slot = int(drafted["conv_state_indices"]), int(plain["conv_state_indices"])
    plain["conv_state"][plain_slot] = drafted["conv_state"][slot, :, : W - 1]
    for step in range(12):
        length = int(torch.randint(1, S + 1, (), generator=rng))
        x = inputs.normal((length, CHANNELS), inputs.generator(step), torch.float32)
        y = call(CONV_UPDATE, {**drafted, "x": x, "query_start_loc": inputs.offsets([length])})
        accepted = int(torch.randint(1, length + 1, (), generator=rng))
        for t in range(accepted):
            assert torch.equal(call(CONV_UPDATE, {**plain, "x": x[t : t + 1]}), y[t : t + 1])
        drafted["num_accepted_tokens"] = torch.tensor([accepted])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_conv_update_ring(length: int) -> None:
    state_len = 6
    arguments, guarded = inputs.conv_update_arguments(
        [length] * 3, CHANNELS, 4, state_len=state_len, positions=[0, 5, 13], is_dense=True, dtype=torch.float64
    )
    for _ in range(3):
        y, expected = expect(CONV_UPDATE, arguments)
        assert relative_error(call(CONV_UPDATE, arguments), y, 1) <= 1e-12
        assert torch.equal(guarded.pool, expected["conv_state"])
        arguments["cache_seqlens"] += length
    guarded.check()


def test_conv_ring_follows_the_whole_sequence() -> None:
    whole, _ = inputs.conv_fn_arguments([17], CHANNELS, 4, dtype=torch.float64)
    expected = call(CONV, {**whole, "conv_states": None, "cache_indices": None})
    ring, _ = inputs.conv_update_arguments([1], CHANNELS, 4, state_len=5, positions=[0], is_dense=True)
    ring |= {"conv_state": torch.zeros(1, CHANNELS, 5, dtype=torch.float64), "conv_state_indices": None}
    ring |= {name: whole[name] for name in ("weight", "bias")}
    for t in range(17):
        y = call(CONV_UPDATE, {**ring, "x": whole["x"][:, t][None], "cache_seqlens": torch.tensor([t])})
        torch.testing.assert_close(y[0], expected[:, t], rtol=1e-12, atol=1e-12)


def test_conv_out_and_nothing() -> None:
    arguments, _ = inputs.conv_fn_arguments([3, 4], CHANNELS, 4)
    y = call(CONV, clone(arguments))
    out = torch.full(y.shape, NAN, dtype=torch.bfloat16)
    assert call(CONV, {**clone(arguments), "out": out}) is out
    assert torch.equal(out, y.to(torch.bfloat16))

    empty, guarded = inputs.conv_fn_arguments([0, 0], CHANNELS, 4)
    before = guarded.pool.clone()
    assert call(CONV, empty).shape == (CHANNELS, 0)
    update, _ = inputs.conv_update_arguments([], CHANNELS, 4)
    assert call(CONV_UPDATE, update).shape == (0, CHANNELS)
    for shape in ((0, CHANNELS, 3), (2, CHANNELS, 0)):
        update |= {"x": torch.zeros(shape), "conv_state_indices": torch.arange(shape[0]), "query_start_loc": None}
        assert call(CONV_UPDATE, update).shape == shape
    assert torch.equal(guarded.pool, before)


# --- norm and fused decode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype, activation: str) -> None:
    arguments = inputs.norm_arguments((3, 4, 13), activation=activation, dtype=dtype, eps=1e-3)
    expected, _ = expect("rms_norm_gated", arguments)
    actual = call("rms_norm_gated", arguments)
    assert actual.dtype == dtype
    assert relative_error(actual, expected, 2) <= tolerance("gated_norm", dtype, slice_size=13)
    out = torch.empty(actual.shape, dtype=torch.float64)
    assert call("rms_norm_gated", {**arguments, "out": out}) is out
    assert relative_error(out, expected, 2) <= tolerance("gated_norm", wide(dtype))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype"), STATE_DTYPES)
def test_fused_decode(dtype: torch.dtype, state_dtype: torch.dtype, replay: bool, activation: str) -> None:
    op = "fused_gdn_decode_post_conv_mtp_replay" if replay else "fused_gdn_decode_post_conv_mtp"
    arguments, guarded = inputs.fused_decode_arguments(
        [1, 4, 0, 3], 4, **SHAPE, accepted=[4, 1, 2, 0], live=[4, 3, 2, 2], replay=replay, activation=activation,
        dtype=dtype, state_dtype=state_dtype,
    )  # fmt: skip
    expected, after = expect(op, arguments)
    actual = call(op, arguments)
    _, state_bound = decode_bounds(dtype, state_dtype)
    assert actual.dtype == dtype
    output_bound = max(tolerance("fused_decode", dtype), state_bound)
    assert packed_relative_error(actual[None], expected[None], arguments["cu_seqlens"]) <= output_bound
    assert state_error(guarded.pool, after["state"]) <= state_bound
    guarded.check()


def test_fused_decode_is_its_steps() -> None:
    arguments, guarded = inputs.fused_decode_arguments([2, 3], 3, **SHAPE, accepted=[2, 1])
    q, k, v = arguments["mixed_qkv"].split([10, 10, 6 * 67], dim=-1)
    shared = {name: arguments[name] for name in ("A_log", "dt_bias", "a", "b", "cu_seqlens", "num_accepted_tokens")}
    pool = guarded.pool.clone()
    o = call(SPEC, {
        **shared, "q": q.reshape(1, 5, 2, 5), "k": k.reshape(1, 5, 2, 5), "v": v.reshape(1, 5, 6, 67),
        "initial_state_source": pool, "spec_state_indices": arguments["state_indices"], "state_v_first": True,
        "use_qk_l2norm_in_kernel": True,
    })  # fmt: skip
    expected = reference.rms_norm_gated(o[0], arguments["output_gate"], arguments["norm_weight"], 1e-6)
    out = torch.empty_like(expected)
    # The key heads follow from the channels as well.
    actual = call("fused_gdn_decode_post_conv_mtp", {**arguments, "out": out, "num_key_heads": None})
    assert actual is out
    assert relative_error(actual, expected, (0, 2)) <= tolerance("fused_decode_composed", torch.float32)
    assert torch.equal(guarded.pool, pool)


@pytest.mark.parametrize("replay", [False, True])
def test_fused_decode_padding(replay: bool) -> None:
    op = "fused_gdn_decode_post_conv_mtp_replay" if replay else "fused_gdn_decode_post_conv_mtp"
    arguments, guarded = inputs.fused_decode_arguments([2, 1, 3], 3, **SHAPE, replay=replay)
    slots = arguments["slot_indices" if replay else "state_indices"]
    slots[1] = 0
    slots[2] = -1
    live = int(slots.flatten()[0])
    arguments |= {"null_slot": 0, "output_gate": arguments["output_gate"].clone()}
    for name in ("mixed_qkv", "output_gate", "a", "b"):
        arguments[name][2:] = NAN
    before = guarded.pool.clone()
    out = torch.full(arguments["output_gate"].shape, NAN)
    call(op, {**arguments, "out": out})
    assert not out[2:].any()
    assert (out[:2] != 0).any() if live != 0 else not out.any()
    assert torch.equal(guarded.pool[0], before[0])
    assert guarded.pool.isfinite().all()


# --- gradients and compilation ----------------------------------------------------------------------------------------


def differentiable(arguments: dict[str, Any], names: tuple[str, ...]) -> tuple[list[Tensor], dict[str, Any]]:
    arguments = clone(arguments)
    for name in names:
        arguments[name].requires_grad_()
    return [arguments[name] for name in names], arguments


def check_gradients(op: str, arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    leaves, arguments = differentiable(arguments, names)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        results = call(op, {**arguments, **dict(zip(names, values, strict=True))})
        results = results if isinstance(results, tuple) else (results,)
        return tuple(result for result in results if result is not None)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


SMALL = {"H": 1, "HV": 2, "K": 3, "V": 4}


@pytest.mark.parametrize("lengths", [[5, 5], [3, 0, 66]], ids=["batched", "packed"])
@pytest.mark.parametrize("op", RULES)
def test_rule_gradients(op: str, lengths: list[int]) -> None:
    arguments = inputs.delta_rule_arguments(
        lengths, **SMALL, dtype=torch.float64, state_dtype=torch.float64, is_dense=len(lengths) == 2
    )
    check_gradients(op, arguments, ("q", "k", "v", "g", "beta", "initial_state"))


@pytest.mark.parametrize("op", RULES)
def test_gradients_stay_finite_at_a_hard_reset(op: str) -> None:
    arguments = inputs.delta_rule_arguments([9], **SMALL, dtype=torch.float64)
    arguments["g"][:, 4] = -INF
    leaves, arguments = differentiable(arguments, ("q", "k", "v", "g", "beta"))
    call(op, arguments)[0].square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_other_gradients() -> None:
    arguments = inputs.gating_arguments((4, 3), dtype=torch.float64)
    check_gradients("fused_gdn_gating", arguments, ("A_log", "a", "b", "dt_bias"))
    check_gradients("rms_norm_gated", inputs.norm_arguments((3, 5), dtype=torch.float64), ("x", "gate", "weight"))
    arguments, _ = inputs.conv_fn_arguments([6] * 2, 3, 4, is_dense=True, dtype=torch.float64)
    arguments |= {"conv_states": None, "cache_indices": None, "return_final_states": True}
    arguments["initial_states"] = inputs.normal((2, 3, 3), inputs.generator(1), torch.float64)
    check_gradients(CONV, arguments, ("x", "weight", "bias", "initial_states"))
    arguments |= {"initial_states": None, "return_final_states": False}
    arguments["seq_idx"] = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, -1, -1]])
    check_gradients(CONV, arguments, ("x", "weight", "bias"))


@pytest.mark.parametrize("op", [*RULES, "fused_gdn_gating", "rms_norm_gated", CONV])
def test_batched_forms_trace_as_one_graph(op: str) -> None:
    if op in RULES:
        arguments = inputs.delta_rule_arguments([3, 3], **SMALL, is_dense=True)
    elif op == "fused_gdn_gating":
        arguments = inputs.gating_arguments((2, 3))
    elif op == "rms_norm_gated":
        arguments = inputs.norm_arguments((2, 3))
    else:
        arguments, _ = inputs.conv_fn_arguments([4, 4], 3, 4, is_dense=True)
        arguments |= {"conv_states": None, "cache_indices": None}
    compiled = torch.compile(getattr(reference, op), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**arguments), call(op, arguments), rtol=0, atol=0)


# --- the tools themselves ---------------------------------------------------------------------------------------------


def test_guarded_pool_notices_a_write_beside_a_slot() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        guarded = guarded_pool(3, (2, 4), dtype, guard=8)
        guarded.pool.fill_(5)
        guarded.check()
        guarded.pool.as_strided((1,), (1,), guarded.pool.storage_offset() + 8).zero_()
        with pytest.raises(AssertionError, match="1 elements"):
            guarded.check()


def test_relative_error() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(expected, expected, 1) == 0
    assert relative_error(expected + torch.tensor([[0.0, 5.0], [0.0, 0.0]]), expected, 1) == 1
    assert relative_error(expected + 1e-30, expected, 1) == INF
    assert relative_error(torch.full_like(expected, NAN), expected, 1) == INF
    assert tolerance("gated_norm", torch.bfloat16, slice_size=13) == 2**-8
    with pytest.raises(KeyError):
        tolerance("extreme_decays", torch.bfloat16)
