# SPDX-License-Identifier: Apache-2.0
"""Bit for bit on native backends: any batch, any number of threads, token by token, cut at multiples of 64.

The reference keeps the same promises within tolerance: torch's own vector tails differ.
"""

from __future__ import annotations

import pytest
import torch

from contract_calls import DECODE, RULES, THREADS, call, same_bits, sequence_error
from gdn_core.testing import clone, inputs, relative_error

# (H, HV, K, V): whole vectors, tails of every width, more columns than a tile, the models' own.
SHAPES = ((2, 4, 128, 128), (3, 6, 48, 80), (1, 3, 17, 33), (2, 2, 3, 5), (1, 2, 1, 1), (1, 1, 256, 200))
MIXES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16))


def decode_rows(arguments, rows):
    """The same call with some of its one-token rows, in that order, on a pool of its own."""
    some = dict(arguments)
    some |= {name: arguments[name][:, rows] for name in ("q", "k", "v")}
    some |= {name: arguments[name][rows] for name in ("a", "b", "initial_state_indices")}
    some["initial_state_source"] = arguments["initial_state_source"].clone()
    return some


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_decode_rows_in_any_batch_at_any_thread_count(native_impl, shape, state_v_first):
    dtype, state_dtype = MIXES[SHAPES.index(shape) % 3]
    rows = 17 if shape[2] < 128 else 5
    arguments, _ = inputs.decode_arguments(
        (1,) * rows, *shape, dtype=dtype, state_dtype=state_dtype, state_v_first=state_v_first
    )
    torch.set_num_threads(1)
    whole = decode_rows(arguments, list(range(rows)))
    expected = call(DECODE, whole)
    slots = arguments["initial_state_indices"].tolist()
    for threads in THREADS:
        torch.set_num_threads(threads)
        for batch in ([0], [rows - 1], [1, 2], [4, 0, 3], list(reversed(range(rows)))):
            some = decode_rows(arguments, batch)
            assert same_bits(call(DECODE, some), expected[:, batch])
            used = [slots[row] for row in batch]
            assert same_bits(some["initial_state_source"][used], whole["initial_state_source"][used])


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("op", [DECODE, *RULES])
def test_a_head_does_not_depend_on_the_others(native_impl, op, shape, state_v_first):
    H, HV, *_ = shape
    group = HV // H
    if op == DECODE:
        arguments, _ = inputs.decode_arguments((1, 3), *shape, state_v_first=state_v_first)
        state_name = "initial_state_source"
    else:
        arguments = inputs.delta_rule_arguments((3, 66), *shape, state_v_first=state_v_first)
        state_name = "initial_state"
    whole = clone(arguments)
    expected = call(op, whole)
    for key_head in range(H):
        heads = slice(key_head * group, (key_head + 1) * group)
        alone = clone(arguments)
        alone |= {name: arguments[name][:, :, key_head : key_head + 1] for name in ("q", "k")}
        per_head = {"A_log": 0, "dt_bias": 0, "a": 1, "b": 1, "v": 2, "g": 2, "beta": 2, state_name: 1}
        for name, dim in per_head.items():
            if name in arguments:
                alone[name] = arguments[name].narrow(dim, heads.start, group).clone()
        results = call(op, alone)
        if op == DECODE:
            assert same_bits(results, expected[:, :, heads])
            assert same_bits(alone[state_name], whole[state_name][:, heads])
        else:
            assert same_bits(results[0], expected[0][:, :, heads])
            assert same_bits(results[1], expected[1][:, heads])


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_in_any_batch_at_any_thread_count(native_impl, op, shape):
    dtype, state_dtype = MIXES[SHAPES.index(shape) % 3]
    lengths = (1, 2, 70, 0, 64, 5)
    arguments = inputs.delta_rule_arguments(lengths, *shape, dtype=dtype, state_dtype=state_dtype)
    torch.set_num_threads(1)
    expected = call(op, arguments)
    for threads in THREADS[1:]:
        torch.set_num_threads(threads)
        for _ in range(2):
            assert all(same_bits(x, y) for x, y in zip(call(op, arguments), expected, strict=True))
    start = 0
    for n, length in enumerate(lengths):
        torch.set_num_threads(THREADS[n % len(THREADS)])
        alone = dict(arguments)
        alone |= {name: arguments[name][:, start : start + length] for name in ("q", "k", "v", "g", "beta")}
        alone |= {"cu_seqlens": None, "initial_state": arguments["initial_state"][n : n + 1]}
        o, final_state = call(op, alone)
        assert same_bits(o, expected[0][:, start : start + length])
        assert same_bits(final_state, expected[1][n : n + 1])
        start += length


@pytest.mark.parametrize("op", RULES)
def test_packed_and_batched_are_the_same(native_impl, op):
    packed = inputs.delta_rule_arguments((70, 70, 70), 2, 4, 24, 40)
    batched = {name: packed[name].unflatten(1, (3, 70))[0] for name in ("q", "k", "v", "g", "beta")}
    results = call(op, {**packed, **batched, "cu_seqlens": None})
    expected = call(op, packed)
    assert same_bits(results[0].flatten(0, 1)[None], expected[0])
    assert same_bits(results[1], expected[1])


# --- token by token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_token_by_token_equals_a_row_of_several(native_impl, shape, state_v_first, dtype):
    T = 9
    arguments, _ = inputs.decode_arguments((T,), *shape, dtype=dtype, state_v_first=state_v_first)
    whole = clone(arguments)
    expected = call(DECODE, whole)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        steps = clone(arguments)
        steps["cu_seqlens"] = None
        for t in range(T):
            step = {**steps, **{name: arguments[name][:, t : t + 1] for name in ("q", "k", "v")}}
            step |= {name: arguments[name][t : t + 1] for name in ("a", "b")}
            assert same_bits(call(DECODE, step), expected[:, t : t + 1])
        assert same_bits(steps["initial_state_source"], whole["initial_state_source"])


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_the_recurrent_form_token_by_token(native_impl, shape, state_v_first):
    op, T = "fused_recurrent_gated_delta_rule", 67
    arguments = inputs.delta_rule_arguments((T,), *shape, state_v_first=state_v_first)
    expected = call(op, arguments)
    state = arguments["initial_state"]
    for t in range(T):
        step = {**arguments, "initial_state": state, "cu_seqlens": None}
        step |= {name: arguments[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        o, state = call(op, step)
        assert same_bits(o, expected[0][:, t : t + 1])
    assert same_bits(state, expected[1])


def test_decode_equals_gating_then_the_recurrent_form(impl):
    arguments, guarded = inputs.decode_arguments((3, 1), 2, 4, 24, 40)
    pool = guarded.pool.clone()
    gates = {name: arguments[name] for name in ("A_log", "a", "b", "dt_bias")}
    g, beta = call("fused_gdn_gating", gates)
    steps = {name: arguments[name] for name in ("q", "k", "v", "cu_seqlens", "use_qk_l2norm_in_kernel")}
    steps |= {"g": g[None], "beta": beta[None], "initial_state": pool}
    steps["state_indices"] = arguments["initial_state_indices"]
    expected, _ = call("fused_recurrent_gated_delta_rule", steps)
    o = call(DECODE, arguments)
    assert relative_error(o, expected, (1, 3)) <= 1e-6
    assert relative_error(guarded.pool, pool, (2, 3)) <= 1e-6


# --- splits -----------------------------------------------------------------------------------------------------------


def in_parts(op, arguments, ends):
    """Run one sequence in parts that hand the state on; return o and the last state."""
    state, outputs, start = arguments["initial_state"], [], 0
    for end in ends:
        part = {name: arguments[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        o, state = call(op, {**arguments, **part, "initial_state": state, "cu_seqlens": None})
        outputs.append(o)
        start = end
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_cut_at_multiples_of_64(native_impl, shape, state_v_first, dtype):
    op = "chunk_gated_delta_rule"
    arguments = inputs.delta_rule_arguments((200,), *shape, dtype=dtype, state_v_first=state_v_first)
    expected = call(op, arguments)
    for ends in ((64, 200), (128, 200), (64, 128, 192, 200)):
        o, state = in_parts(op, arguments, ends)
        assert same_bits(o, expected[0])
        assert same_bits(state, expected[1])


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("ends", [(1, 130), (3, 15, 130), (63, 130), (64, 130), (65, 129, 130), (128, 130)], ids=str)
def test_prefill_cut_anywhere(impl, op, ends):
    arguments = inputs.delta_rule_arguments((130,), 1, 2, 24, 40)
    expected = call(op, arguments)
    o, state = in_parts(op, arguments, ends)
    assert sequence_error(o, expected[0], None) <= 1e-5
    assert relative_error(state, expected[1], (2, 3)) <= 1e-5


def test_resuming_from_every_chunk_state(native_impl):
    op = "chunk_gated_delta_rule"
    arguments = inputs.delta_rule_arguments((200,), 1, 2, 24, 40)
    o, final_state, chunk_states = call(op, {**arguments, "output_chunk_states": True})
    assert all(same_bits(x, y) for x, y in zip((o, final_state), call(op, arguments), strict=True))
    for number in range(4):
        rest = {name: arguments[name][:, 64 * number :] for name in ("q", "k", "v", "g", "beta")}
        rest |= {"initial_state": chunk_states[number : number + 1], "cu_seqlens": None}
        o_rest, last = call(op, {**arguments, **rest})
        assert same_bits(o_rest, o[:, 64 * number :])
        assert same_bits(last, final_state)
