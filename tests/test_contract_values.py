# SPDX-License-Identifier: Apache-2.0
"""The recurrence against float64 on the same rounded inputs: shapes, dtypes, layouts, options, hard inputs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from contract_calls import (
    DECODE,
    FLOATS,
    RULES,
    call,
    check_decode,
    check_sequences,
    decode,
    decode_expected,
    sequences,
    sequences_expected,
    untouched,
)
from gdn_core.testing import inputs, oracle, relative_error, to_float64, tolerance

# (K, V): every size both as K and as V, tails of every vector width, square and not.
DIMS = (
    (1, 3), (3, 1), (1, 16), (16, 48), (48, 16), (64, 80), (80, 64), (96, 128), (128, 96), (128, 128), (3, 256),
    (256, 1), (256, 256), (64, 64),
)  # fmt: skip
# (H, HV): HV / H of 1, 2, 3, 4, 5 and 8.
HEADS = ((2, 2), (2, 4), (1, 3), (1, 4), (1, 5), (1, 8), (3, 6), (1, 1), (2, 6))
# Rows of one token, and rows of several.
ROWS = ((1, 1, 1), (2, 1, 5), (1,), (4, 3))


def pairwise_cases():
    """Visit every dims in both layouts; heads, dtypes and row lengths take turns at different strides."""
    for number, ((K, V), v_first) in enumerate(product(DIMS, (False, True))):
        H, HV = HEADS[number % len(HEADS)]
        dtype, state_dtype = FLOATS[number % 3], FLOATS[(number // 3 + number // 9) % 3]
        yield {
            "lengths": ROWS[number % len(ROWS)], "H": H, "HV": HV, "K": K, "V": V, "dtype": dtype,
            "state_dtype": state_dtype, "state_v_first": v_first, "seed": number,
        }  # fmt: skip


def label(case):
    names = "-".join(str(case[name]).removeprefix("torch.") for name in ("H", "HV", "K", "V", "dtype", "state_dtype"))
    return f"{names}-{'VK' if case['state_v_first'] else 'KV'}"


@pytest.mark.parametrize("case", list(pairwise_cases()), ids=label)
def test_decode(impl, case):
    arguments, guarded = decode(**case)
    with untouched(arguments, "initial_state_source"):
        o = call(DECODE, arguments)
    assert o.dtype == case["dtype"]
    check_decode(arguments, guarded, o, decode_expected(**case))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [*DIMS, (7, 9), (17, 33), (65, 127), (255, 31)], ids=str)
def test_decode_every_combination(impl, dims):
    # Enough tokens that no slice of the outputs is a few values that nearly cancel.
    lengths = (64 // dims[1] + 2, 64 // dims[1] + 1)
    for dtype, state_dtype, v_first in product(FLOATS, FLOATS, (False, True)):
        case = {"lengths": lengths, "H": 2, "HV": 4, "K": dims[0], "V": dims[1], "dtype": dtype}
        case |= {"state_dtype": state_dtype, "state_v_first": v_first}
        arguments, guarded = decode(**case)
        check_decode(arguments, guarded, call(DECODE, arguments), decode_expected(**case))


SMALL_DECODE = {"lengths": (2, 1, 1), "H": 2, "HV": 4, "K": 24, "V": 20}
DECODE_OPTIONS = {
    "unnormalised": {"use_qk_l2norm_in_kernel": False},
    "scale": {"scale": 0.3},
    "scale 1": {"scale": 1.0},
    "softplus_beta": {"softplus_beta": 0.5},
}


@pytest.mark.parametrize("name", DECODE_OPTIONS)
def test_decode_options(impl, name):
    case = {**SMALL_DECODE, "options": tuple(DECODE_OPTIONS[name].items())}
    arguments, guarded = decode(**case)
    expected = decode_expected(**case)
    plain = decode_expected(**SMALL_DECODE)
    assert relative_error(expected[0], plain[0], (0, 1, 2, 3)) > 0.01, "the option makes no difference here"
    check_decode(arguments, guarded, call(DECODE, arguments), expected)


def test_decode_with_another_softplus_threshold(impl):
    arguments, guarded = decode(**SMALL_DECODE)
    arguments |= {"dt_bias": torch.full((4,), 0.5), "softplus_threshold": 0.1}
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]
    check_decode(arguments, guarded, call(DECODE, arguments), expected)
    with_default, _ = decode(**SMALL_DECODE)
    call(DECODE, {**with_default, "dt_bias": arguments["dt_bias"]})
    assert relative_error(guarded.pool, with_default["initial_state_source"], (0, 1, 2, 3)) > 1e-3


@pytest.mark.parametrize("A_log_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dt_bias_dtype", FLOATS, ids=str)
def test_decode_head_vectors_of_any_dtype(impl, A_log_dtype, dt_bias_dtype):
    arguments, guarded = decode(**SMALL_DECODE)
    arguments |= {"A_log": arguments["A_log"].to(A_log_dtype), "dt_bias": arguments["dt_bias"].to(dt_bias_dtype)}
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]
    check_decode(arguments, guarded, call(DECODE, arguments), expected)


@pytest.mark.parametrize("gate_dtype", FLOATS, ids=str)
def test_decode_gates_of_another_dtype_than_q(impl, gate_dtype):
    arguments, guarded = decode(**SMALL_DECODE, dtype=torch.bfloat16)
    arguments |= {"a": arguments["a"].to(gate_dtype), "b": arguments["b"].to(gate_dtype)}
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide), wide["initial_state_source"]
    check_decode(arguments, guarded, call(DECODE, arguments), expected)


def test_a_state_in_fp32_is_not_rounded_between_steps(impl):
    """With beta = 0 and no decay, a state that needs all of fp32 survives any number of bf16 steps."""
    arguments, guarded = decode(lengths=(1,), H=1, HV=2, K=16, V=8, dtype=torch.bfloat16)
    guarded.pool.fill_(1 + 2.0**-20)
    # b = -inf is beta 0; a = -inf is a decay of 1.
    arguments |= {"a": torch.full((1, 2), -torch.inf).bfloat16(), "b": torch.full((1, 2), -torch.inf).bfloat16()}
    for _ in range(5):
        call(DECODE, arguments)
    assert bool((guarded.pool == 1 + 2.0**-20).all())


def test_a_half_precision_state_is_rounded_once_a_row(impl):
    """Inside a row of several tokens the state is fp32: increments too small for bf16 add up."""
    T, K, V = 64, 4, 4
    ones = torch.zeros(1, T, 1, K)
    ones[..., 0] = 1.0
    pool = torch.ones(1, 1, K, V, dtype=torch.bfloat16)
    zeros = torch.zeros(T, 1)
    arguments = {
        "A_log": torch.tensor([-torch.inf]), "dt_bias": torch.zeros(1), "q": ones, "k": ones,
        "v": torch.full((1, T, 1, V), 1.5), "a": zeros, "b": torch.full((T, 1), -5.0), "initial_state_source": pool,
        "initial_state_indices": torch.tensor([0]), "cu_seqlens": torch.tensor([0, T]),
    }  # fmt: skip
    # M <- M + beta (1.5 - M): each step moves M by less than half a unit of bf16 at 1.0 near the end.
    beta = 1 / (1 + torch.exp(torch.tensor(5.0, dtype=torch.float64)))
    expected = 1.5 - 0.5 * (1 - beta) ** T
    call(DECODE, arguments)
    assert pool[0, 0, 0, 0].item() == pytest.approx(expected.item(), rel=2.0**-8)


# --- whole sequences --------------------------------------------------------------------------------------------------

# (lengths, dense)
SPANS = (((1,), False), ((63,), False), ((64, 2), False), ((65, 65), True), ((1, 2, 5, 64, 67), False), ((130,), True))


def sequence_cases():
    for number, ((K, V), v_first) in enumerate(product(DIMS, (False, True))):
        H, HV = HEADS[(number + number // 9) % len(HEADS)]
        lengths, is_dense = SPANS[number % len(SPANS)]
        if K * V > 128 * 96:
            lengths, is_dense, H, HV = (66,), False, 1, 1
        dtype, state_dtype = FLOATS[number % 3], FLOATS[(number // 3 + number // 9) % 3]
        yield {
            "lengths": lengths, "is_dense": is_dense, "H": H, "HV": HV, "K": K, "V": V, "dtype": dtype,
            "state_dtype": state_dtype, "state_v_first": v_first, "initial": number % 4 != 1, "seed": number,
        }  # fmt: skip


@pytest.mark.parametrize("case", list(sequence_cases()), ids=label)
@pytest.mark.parametrize("op", RULES)
def test_sequences(impl, op, case):
    arguments = sequences(**case)
    with untouched(arguments):
        o, final_state = call(op, arguments)
    assert o.dtype == case["dtype"]
    assert final_state.dtype == (case["state_dtype"] if case["initial"] else torch.float32)
    check_sequences(op, arguments, (o, final_state), sequences_expected(op, **case))


SMALL = {"lengths": (7, 66), "H": 2, "HV": 4, "K": 12, "V": 20}
OPTIONS = {
    "unnormalised": {"use_qk_l2norm_in_kernel": False},
    "scale": {"scale": 0.3},
    "negative eigenvalues": {"allow_neg_eigval": True},
    "beta from logits": {"use_beta_sigmoid_in_kernel": True},
    "doubled after the sigmoid": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
}
RECURRENT_OPTIONS = {
    "no decay": {"g": None},
    "beta 1": {"beta": None},
    "neither": {"g": None, "beta": None},
    "beta 2": {"beta": None, "allow_neg_eigval": True},
}


def _check_options(op, options):
    case = {**SMALL, "options": tuple(options.items())}
    expected, plain = sequences_expected(op, **case), sequences_expected(op, **SMALL)
    assert relative_error(expected[0], plain[0], (0, 1, 2, 3)) > 0.01, "the option makes no difference here"
    arguments = sequences(**case)
    check_sequences(op, arguments, call(op, arguments), expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("op", RULES)
def test_options(impl, op, name):
    _check_options(op, OPTIONS[name])


@pytest.mark.parametrize("name", RECURRENT_OPTIONS)
def test_options_of_the_token_by_token_form(impl, name):
    _check_options("fused_recurrent_gated_delta_rule", RECURRENT_OPTIONS[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gates_in_the_token_by_token_form(impl, dtype):
    op = "fused_recurrent_gated_delta_rule"
    arguments = sequences(**SMALL)
    raw = inputs.gating_arguments(arguments["g"].shape, dtype=dtype)
    arguments |= {"g": raw["a"], "beta": raw["b"], "A_log": raw["A_log"].to(dtype), "dt_bias": raw["dt_bias"].to(dtype)}
    arguments |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    check_sequences(op, arguments, call(op, arguments), getattr(oracle, op)(**to_float64(arguments)))


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("gate_dtype", FLOATS, ids=str)
def test_g_and_beta_of_any_dtype(impl, op, gate_dtype):
    arguments = sequences(**SMALL)
    arguments |= {"g": arguments["g"].to(gate_dtype), "beta": arguments["beta"].to(gate_dtype)}
    check_sequences(op, arguments, call(op, arguments), getattr(oracle, op)(**to_float64(arguments)))


@pytest.mark.parametrize("op", RULES)
def test_defaults(impl, op):
    """Without options: no normalisation, scale K ** -0.5, a zero state that is not returned, KV layout."""
    arguments = sequences(**SMALL)
    bare = {name: arguments[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    results = call(op, bare)
    assert len(results) == 2
    check_sequences(op, bare, results, getattr(oracle, op)(**to_float64(bare)))


CORRELATED = {"chunk_correlated_keys": 0.9, "chunk_parallel_keys": 0.999}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("what", CORRELATED)
def test_chunks_of_correlated_keys(impl, what, dtype):
    op = "chunk_gated_delta_rule"
    case = {"lengths": (130, 64), "H": 1, "HV": 2, "K": 64, "V": 32, "dtype": dtype, "decays": "none", "beta": 0.98}
    case |= {"key_correlation": CORRELATED[what]}
    arguments = sequences(**case)
    check_sequences(op, arguments, call(op, arguments), sequences_expected(op, **case), tolerance(what, dtype))


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("decays", ["none", "strong", "vanishing", "thirds", "wild"])
def test_extreme_decays(impl, op, decays):
    case = {"lengths": (130, 64, 3), "H": 1, "HV": 3, "K": 16, "V": 24, "decays": decays}
    arguments = sequences(**case)
    limit = tolerance("extreme_decays", torch.float32)
    check_sequences(op, arguments, call(op, arguments), sequences_expected(op, **case), limit)


def test_extreme_decays_in_decode(impl):
    limit = tolerance("extreme_decays", torch.float32)
    case = {"lengths": (40, 1), "H": 1, "HV": 4, "K": 16, "V": 24}
    arguments, guarded = decode(**case)
    arguments["A_log"] = torch.tensor([-9.0, 0.0, 3.0, 6.0])
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide)
    o = call(DECODE, arguments)
    assert relative_error(o, expected, (1, 3)) <= limit
    assert relative_error(guarded.pool, wide["initial_state_source"], (2, 3)) <= limit


@pytest.mark.parametrize("size", [1e20, 1e30])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_q_and_k_whose_squares_leave_fp32_in_decode(native_impl, size, dtype, state_v_first):
    arguments, guarded = decode(
        lengths=(3, 1), H=2, HV=4, K=72, V=80, dtype=dtype, state_dtype=torch.float32, state_v_first=state_v_first
    )
    arguments |= {name: (arguments[name].float() * size).to(dtype) for name in ("q", "k")}
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide)
    check_decode(arguments, guarded, call(DECODE, arguments), (expected, wide["initial_state_source"]))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_chunk_states(impl, initial, state_v_first):
    """State number i of a sequence is the one after 64 * i tokens, in the layout of the state, always fp32."""
    op = "chunk_gated_delta_rule"
    case = {"lengths": (1, 0, 64, 65, 130), "H": 1, "HV": 2, "K": 12, "V": 20, "dtype": torch.bfloat16}
    case |= {"state_dtype": torch.float16, "initial": initial, "state_v_first": state_v_first}
    case |= {"options": (("output_chunk_states", True),)}
    arguments = sequences(**case)
    results = call(op, arguments)
    assert results[2].dtype == torch.float32
    assert len(results[2]) == 1 + 0 + 1 + 2 + 3
    check_sequences(op, arguments, results, sequences_expected(op, **case))
    if initial:
        assert torch.equal(results[2][0], arguments["initial_state"][0].float())
    dense = {**case, "lengths": (65, 65), "is_dense": True}
    arguments = sequences(**dense)
    check_sequences(op, arguments, call(op, arguments), sequences_expected(op, **dense))


def test_chunk_states_of_padding_and_fresh_rows_are_zero(impl):
    op = "chunk_gated_delta_rule"
    arguments = sequences(lengths=(65, 66), H=1, HV=2, K=12, V=20)
    pool = torch.full((3, 2, 12, 20), torch.nan)
    pool[2] = 1.0
    arguments |= {"initial_state": pool, "state_indices": torch.tensor([-1, 0]), "output_chunk_states": True}
    arguments["has_initial_state"] = torch.tensor([True, False])
    *_, chunk_states = call(op, arguments)
    assert bool((chunk_states[:3] == 0).all())
    assert bool((chunk_states[3] != 0).any())


def test_cu_seqlens_on_the_host_and_chunk_indices_change_nothing(impl):
    op = "chunk_gated_delta_rule"
    arguments = sequences(**SMALL)
    expected = call(op, arguments)
    arguments |= {"cu_seqlens_cpu": arguments["cu_seqlens"].long(), "chunk_indices": torch.zeros(3, 2).long()}
    results = call(op, arguments)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("op", RULES)
def test_sequences_every_combination(impl, op, dims):
    for dtype, state_dtype, v_first in product(FLOATS, FLOATS, (False, True)):
        case = {"lengths": (66,), "H": 1, "HV": 2, "K": dims[0], "V": dims[1]}
        case |= {"dtype": dtype, "state_dtype": state_dtype, "state_v_first": v_first}
        arguments = sequences(**case)
        check_sequences(op, arguments, call(op, arguments), sequences_expected(op, **case))
