# SPDX-License-Identifier: Apache-2.0
"""State slots: padding rows, strides and offsets of pools, fresh sequences, and calls with nothing in them."""

from __future__ import annotations

import math

import pytest
import torch

from contract_calls import DECODE, RULES, agree, call, check_decode, check_sequences, same_bits, sequences, untouched
from gdn_core.testing import clone, guarded_pool, inputs, oracle, relative_error, to_float64

H, HV, K, V = 2, 4, 12, 20
BAD = (math.nan, math.inf)


def spoil(arguments, tokens, names, bad=math.nan):
    """Overwrite the given tokens of inputs that are `[1, T, ...]` or `[T, HV]`."""
    for name in names:
        x = arguments[name]
        (x[0] if x.dim() > 2 else x)[tokens] = bad


DECODE_INPUTS = ("q", "k", "v", "a", "b")


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(("pad", "null_slot"), [(-1, None), (-7, None), (0, 0), (5, 5), (-1, 0), (99, 99)])
def test_padding_rows_of_decode(impl, pad, null_slot, state_v_first):
    """Row 1 of 4 tokens and row 3 of 1 token are padding; NaN in them goes nowhere."""
    lengths = (2, 4, 1, 1)
    arguments, guarded = inputs.decode_arguments(lengths, H, HV, K, V, state_v_first=state_v_first, seed=3)
    arguments |= {"initial_state_indices": torch.tensor([3, pad, 2, pad]), "null_slot": null_slot}
    spoil(arguments, [2, 3, 4, 5, 7], DECODE_INPUTS)
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]
    arguments["out"] = torch.full((1, 8, HV, V), math.nan)
    o = call(DECODE, arguments)
    assert bool((o[0, [2, 3, 4, 5, 7]] == 0).all())
    check_decode(arguments, guarded, o, expected)
    others = [slot for slot in range(len(guarded.pool)) if slot not in (2, 3)]
    assert same_bits(guarded.pool[others], wide["initial_state_source"][others].float())


def test_a_call_of_padding_only(impl):
    arguments, guarded = inputs.decode_arguments((1, 1, 1), H, HV, K, V)
    arguments["initial_state_indices"] = torch.tensor([-1, -1, -1])
    spoil(arguments, [0, 1, 2], DECODE_INPUTS)
    with untouched(arguments):
        o = call(DECODE, {**arguments, "out": torch.full((1, 3, HV, V), math.nan)})
    assert bool((o == 0).all())
    guarded.check()


def test_null_slot_does_not_pad_other_slots(impl):
    arguments, _ = inputs.decode_arguments((1, 1), H, HV, K, V)
    arguments["initial_state_indices"] = torch.tensor([0, 2])
    expected = call(DECODE, clone(arguments))
    assert same_bits(call(DECODE, {**clone(arguments), "null_slot": 1}), expected)
    assert same_bits(call(DECODE, {**clone(arguments), "null_slot": -1}), expected)


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize(("pad", "null_slot"), [(-1, None), (0, 0), (77, 77)])
def test_padding_rows_of_sequences(impl, op, pad, null_slot):
    arguments = inputs.delta_rule_arguments((65, 3, 5), H, HV, K, V, initial=False)
    guarded = inputs.state_pool(6, HV, K, V, False, torch.float32, inputs.generator(5))
    arguments |= {"initial_state": guarded.pool, "state_indices": torch.tensor([4, pad, 1]), "null_slot": null_slot}
    spoil(arguments, slice(65, 68), ("q", "k", "v", "g", "beta"))
    wide = to_float64(arguments)
    expected = getattr(oracle, op)(**wide)
    arguments["out"] = torch.full((1, 73, HV, V), math.nan)
    o, final_state = call(op, arguments)
    assert final_state is None
    assert bool((o[0, 65:68] == 0).all())
    check_sequences(op, arguments, (o, None), expected)
    assert relative_error(guarded.pool, wide["initial_state"], (2, 3)) <= 1e-5
    assert same_bits(guarded.pool[[0, 2, 3, 5]], wide["initial_state"][[0, 2, 3, 5]].float())
    guarded.check()


@pytest.mark.parametrize("op", [DECODE, *RULES])
@pytest.mark.parametrize("spans", [(0, 3, 5), (2, 3, 5), (2, 2, 8), (4, 4, 4), (8, 8, 8)], ids=str)
def test_rows_outside_every_span_are_zero(impl, op, spans):
    cu_seqlens = torch.tensor(spans)
    if op == DECODE:
        arguments, _ = inputs.decode_arguments((4, 4), H, HV, K, V)
        names = DECODE_INPUTS
    else:
        arguments = inputs.delta_rule_arguments((4, 4), H, HV, K, V)
        names = ("q", "k", "v", "g", "beta")
    outside = [t for t in range(8) if not spans[0] <= t < spans[2]]
    arguments["cu_seqlens"] = cu_seqlens
    spoil(arguments, outside, names)
    wide = to_float64(arguments)
    expected = getattr(oracle, op)(**wide)
    results = call(op, {**arguments, "out": torch.full((1, 8, HV, V), math.nan)})
    o, expected_o = (results, expected) if op == DECODE else (results[0], expected[0])
    assert bool((o[0, outside] == 0).all())
    assert relative_error(o, expected_o, (0, 3)) <= 1e-5


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", [DECODE, *RULES])
def test_indices_of_either_width_and_any_stride(impl, op, dtype):
    """Slots as the column of a table, offsets as every other value of a list."""
    if op == DECODE:
        arguments, _ = inputs.decode_arguments((2, 1, 3), H, HV, K, V)
        slots_name, state_name = "initial_state_indices", "initial_state_source"
    else:
        arguments = inputs.delta_rule_arguments((2, 1, 3), H, HV, K, V, initial=False)
        slots_name, state_name = "state_indices", "initial_state"
        arguments[state_name] = inputs.normal((6, HV, K, V), inputs.generator(1), torch.float32)
        arguments[slots_name] = torch.tensor([5, 0, 3])
        arguments["has_initial_state"] = torch.tensor([True, True, False])
    plain = clone(arguments)
    expected = call(op, plain)
    table = torch.full((3, 4), -1, dtype=dtype)
    table[:, 0] = arguments[slots_name]
    twice = arguments["cu_seqlens"].to(dtype).repeat_interleave(2)
    strided = {**clone(arguments), slots_name: table[:, 0], "cu_seqlens": twice[::2]}
    if op != DECODE:
        strided["has_initial_state"] = torch.tensor([True, False, True, False, False, True])[::2]
    results = call(op, strided)
    o, expected_o = (results, expected) if op == DECODE else (results[0], expected[0])
    assert same_bits(o, expected_o)
    assert same_bits(strided[state_name], plain[state_name])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_between_the_slots_is_touched(impl, dtype, state_v_first):
    shape = (HV, V, K) if state_v_first else (HV, K, V)
    values = inputs.normal((5, *shape), inputs.generator(2), dtype)
    guarded = guarded_pool(5, shape, dtype, guard=3, values=values)
    arguments, _ = inputs.decode_arguments((2, 1, 1), H, HV, K, V, state_v_first=state_v_first)
    slots = torch.tensor([4, 0, 2])
    packed = {**clone(arguments), "initial_state_source": values.clone(), "initial_state_indices": slots}
    expected = call(DECODE, packed)
    o = call(DECODE, {**arguments, "initial_state_source": guarded.pool, "initial_state_indices": slots})
    assert same_bits(o, expected)
    assert same_bits(guarded.pool, packed["initial_state_source"])
    guarded.check()


def _far_pool(elements):
    """A pool of two slots that lie `elements` apart; only the pages that are touched take memory."""
    slot = HV * K * V
    try:
        buffer = torch.empty(elements + slot, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this machine does not lend that much address space")
    return buffer.as_strided((2, HV, K, V), (elements, K * V, V, 1))


@pytest.mark.parametrize("op", [DECODE, *RULES])
def test_offsets_beyond_2_to_the_31(impl, op):
    pool = _far_pool(2**31 + 64)
    start = inputs.normal((HV, K, V), inputs.generator(4), torch.bfloat16)
    pool[1] = start
    pool[0] = 3.0
    if op == DECODE:
        arguments, _ = inputs.decode_arguments((2,), H, HV, K, V)
        slots_name, state_name = "initial_state_indices", "initial_state_source"
    else:
        arguments = inputs.delta_rule_arguments((2,), H, HV, K, V, initial=False)
        slots_name, state_name = "state_indices", "initial_state"
    near = {**arguments, state_name: start[None].clone(), slots_name: torch.tensor([0])}
    expected = call(op, near)
    results = call(op, {**arguments, state_name: pool, slots_name: torch.tensor([1])})
    o, expected_o = (results, expected) if op == DECODE else (results[0], expected[0])
    assert same_bits(o, expected_o)
    assert same_bits(pool[1], near[state_name][0])
    assert bool((pool[0] == 3.0).all())


def test_a_slot_number_whose_offset_is_2_to_the_31(impl):
    """Slot 2048 of [64, 128, 128]: an int32 offset turns negative."""
    try:
        pool = torch.empty(2049, 64, 128, 128, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this machine does not lend that much address space")
    arguments, _ = inputs.decode_arguments((1,), 64, 64, 128, 128, dtype=torch.bfloat16)
    near = {**arguments, "initial_state_source": torch.ones(1, 64, 128, 128, dtype=torch.bfloat16)}
    near["initial_state_indices"] = torch.tensor([0])
    pool[2048] = 1.0
    expected = call(DECODE, near)
    far = {**arguments, "initial_state_source": pool, "initial_state_indices": torch.tensor([2048])}
    assert same_bits(call(DECODE, far), expected)
    assert same_bits(pool[2048], near["initial_state_source"][0])


# --- fresh sequences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_a_fresh_sequence_never_reads_its_slot(impl, op, state_v_first, bad):
    arguments = inputs.delta_rule_arguments((1, 66), H, HV, K, V, initial=False, state_v_first=state_v_first)
    expected = call(op, arguments)
    shape = (HV, V, K) if state_v_first else (HV, K, V)
    pool = torch.full((3, *shape), bad)
    pool[1] = 5.0
    fresh = torch.tensor([False, False])
    arguments |= {"initial_state": pool, "state_indices": torch.tensor([2, 0]), "has_initial_state": fresh}
    o, _ = call(op, arguments)
    assert same_bits(o, expected[0])
    assert same_bits(pool[[2, 0]], expected[1])
    assert bool((pool[1] == 5.0).all())


@pytest.mark.parametrize("op", RULES)
def test_fresh_and_continued_sequences_together(impl, op):
    arguments = inputs.delta_rule_arguments((5, 6, 7), H, HV, K, V)
    arguments["has_initial_state"] = torch.tensor([True, False, True])
    zeroed = clone(arguments)
    zeroed["initial_state"][1] = 0
    del zeroed["has_initial_state"]
    arguments["initial_state"][1] = math.nan
    with untouched(arguments):
        results = call(op, arguments)
    assert all(same_bits(x, y) for x, y in zip(results, call(op, zeroed), strict=True))


# --- nothing in them --------------------------------------------------------------------------------------------------

EMPTY_IN = ((0, 3, 0), (0, 0, 3), (3, 0, 0), (0, 0), (0,), (65, 0, 2))


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("lengths", EMPTY_IN, ids=str)
@pytest.mark.parametrize("initial", [False, True])
def test_sequences_of_no_tokens_keep_their_state(impl, op, lengths, initial):
    arguments = inputs.delta_rule_arguments(lengths, H, HV, K, V, initial=initial)
    o, final_state = call(op, arguments)
    expected = getattr(oracle, op)(**to_float64(arguments))
    check_sequences(op, arguments, (o, final_state), expected)
    for n, length in enumerate(lengths):
        if length == 0:
            start = arguments["initial_state"][n] if initial else torch.zeros(HV, K, V)
            assert same_bits(final_state[n], start)


@pytest.mark.parametrize("op", RULES)
def test_a_fresh_sequence_of_no_tokens_keeps_its_state_too(impl, op):
    arguments = inputs.delta_rule_arguments((0, 3), H, HV, K, V)
    arguments["has_initial_state"] = torch.tensor([False, False])
    _, final_state = call(op, arguments)
    assert same_bits(final_state[0], arguments["initial_state"][0])
    pool = arguments["initial_state"].clone()
    pooled = {**arguments, "initial_state": pool, "state_indices": torch.tensor([0, 1])}
    call(op, pooled)
    assert same_bits(pool[0], arguments["initial_state"][0])
    assert agree(impl, pool[1], final_state[1])


@pytest.mark.parametrize("lengths", EMPTY_IN, ids=str)
def test_decode_rows_of_no_tokens(impl, lengths):
    arguments, guarded = inputs.decode_arguments(lengths, H, HV, K, V)
    before = guarded.pool.clone()
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]
    check_decode(arguments, guarded, call(DECODE, arguments), expected)
    for slot, length in zip(arguments["initial_state_indices"].tolist(), lengths, strict=True):
        if length == 0:
            assert same_bits(guarded.pool[slot], before[slot])


def test_a_decode_call_of_no_rows(impl):
    arguments, guarded = inputs.decode_arguments((1,), H, HV, K, V)
    nothing = {name: arguments[name][:, :0] for name in ("q", "k", "v")} | {n: arguments[n][:0] for n in ("a", "b")}
    nothing["initial_state_indices"] = arguments["initial_state_indices"][:0]
    for cu_seqlens in (None, torch.tensor([0])):
        call_arguments = {**arguments, **nothing, "cu_seqlens": cu_seqlens}
        with untouched(call_arguments):
            assert call(DECODE, call_arguments).shape == (1, 0, HV, V)
    guarded.check()


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (0, 0)])
def test_an_empty_batch(impl, op, B, T, initial):
    arguments = inputs.delta_rule_arguments((1,) * 2, H, HV, K, V, is_dense=True)
    q, k = torch.zeros(B, T, H, K), torch.zeros(B, T, H, K)
    v, g, beta = torch.zeros(B, T, HV, V), torch.zeros(B, T, HV), torch.zeros(B, T, HV)
    state = torch.randn(B, HV, K, V) if initial else None
    arguments |= {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    o, final_state = call(op, arguments)
    assert o.shape == (B, T, HV, V)
    assert same_bits(final_state, torch.zeros(B, HV, K, V) if state is None else state)
    if op == "chunk_gated_delta_rule":
        assert call(op, {**arguments, "output_chunk_states": True})[2].shape == (0, HV, K, V)


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_empty_sequence_keeps_the_bits_of_its_state(impl, op, dtype, state_v_first):
    """Also of values that arithmetic on some levels takes for zero."""
    arguments = inputs.delta_rule_arguments((3, 0, 1), H, HV, K, V)
    shape = (3, HV, V, K) if state_v_first else (3, HV, K, V)
    state = torch.rand(shape, generator=inputs.generator(2)).to(dtype)
    state[1].copy_(torch.finfo(dtype).tiny * torch.rand(shape[1:], generator=inputs.generator(3), dtype=torch.float64))
    _, final_state = call(op, {**arguments, "initial_state": state, "state_v_first": state_v_first})
    assert bool(state[1].any()) and same_bits(final_state[1], state[1])


@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_call_knows_nothing_of_the_one_before(impl, state_v_first):
    """One row of one key head, which is first and last: with keys and gates of its own."""
    for seed in (1, 2, 3):
        arguments, guarded = inputs.decode_arguments((1,), 1, 2, K, V, state_v_first=state_v_first, seed=seed)
        wide = to_float64(arguments)
        expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]
        check_decode(arguments, guarded, call(DECODE, arguments), expected)


@pytest.mark.parametrize("op", RULES)
def test_no_sequences_at_all(impl, op):
    arguments = sequences(lengths=(3,), H=H, HV=HV, K=K, V=V, initial=False)
    arguments["cu_seqlens"] = torch.tensor([0])
    o, final_state = call(op, {**arguments, "out": torch.full((1, 3, HV, V), math.nan)})
    assert bool((o == 0).all())
    assert final_state.shape == (0, HV, K, V)
