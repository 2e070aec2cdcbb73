# SPDX-License-Identifier: Apache-2.0
"""What one sequence, head or later token holds never shows elsewhere, and a reset forgets everything before it."""

from __future__ import annotations

import math

import pytest
import torch

from contract_calls import DECODE, RULES, agree, call, same_bits
from gdn_core.testing import clone, inputs, oracle, relative_error, to_float64

H, HV, K, V = 2, 4, 12, 20
T = 130
BAD = (math.nan, math.inf)
SEQUENCE_INPUTS = ("q", "k", "v", "g", "beta")


def contiguous(arguments):
    return {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("name", [*SEQUENCE_INPUTS, "initial_state"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("is_dense", [False, True])
def test_a_bad_sequence_stays_alone(impl, op, name, bad, is_dense):
    arguments = contiguous(inputs.delta_rule_arguments((67, 67, 67), H, HV, K, V, is_dense=is_dense))
    clean = call(op, arguments)
    spoiled = clone(arguments)
    x = spoiled[name]
    if name == "initial_state" or is_dense:
        x[1].fill_(bad)
    else:
        x[0, 67:134].fill_(bad)
    o, final_state = call(op, spoiled)
    rows, clean_rows = (x.reshape(3, 67, HV, V) for x in (o, clean[0]))
    assert same_bits(rows[[0, 2]], clean_rows[[0, 2]])
    assert same_bits(final_state[[0, 2]], clean[1][[0, 2]])
    assert not same_bits(rows[1], clean_rows[1])


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "initial_state_source"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_of_decode_stays_alone(impl, name, bad):
    arguments, _ = inputs.decode_arguments((1, 2, 1), H, HV, K, V)
    clean, spoiled = clone(arguments), clone(arguments)
    slots = arguments["initial_state_indices"].tolist()
    expected = call(DECODE, clean)
    x = spoiled[name]
    if name == "initial_state_source":
        x[slots[1]].fill_(bad)
    else:
        (x[0] if x.dim() == 4 else x)[1:3].fill_(bad)
    o = call(DECODE, spoiled)
    assert same_bits(o[0, [0, 3]], expected[0, [0, 3]])
    others = [slot for slot in range(len(clean["initial_state_source"])) if slot != slots[1]]
    assert same_bits(spoiled["initial_state_source"][others], clean["initial_state_source"][others])
    assert not same_bits(o, expected)


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_head_stays_alone(impl, op, bad):
    """A value head reaches itself only, a key head its own group."""
    arguments = contiguous(inputs.delta_rule_arguments((66,), H, HV, K, V))
    clean = call(op, arguments)
    for name, spoiled_head, touched in (("v", 1, [1]), ("k", 1, [2, 3]), ("q", 0, [0, 1]), ("beta", 3, [3])):
        spoiled = clone(arguments)
        spoiled[name][:, :, spoiled_head] = bad
        o, final_state = call(op, spoiled)
        others = [head for head in range(HV) if head not in touched]
        assert same_bits(o[:, :, others], clean[0][:, :, others])
        assert same_bits(final_state[:, others], clean[1][:, others])
        assert not bool(o[:, :, touched].isfinite().all())


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("p", [0, 1, 5, 63, 64, 65, 100, 127, 129])
def test_later_tokens_never_show(impl, op, p):
    arguments = contiguous(inputs.delta_rule_arguments((T,), H, HV, K, V))
    before = call(op, arguments)[0][:, :p]
    for value in (*BAD, 1e30, 0.5):
        changed = clone(arguments)
        for name in SEQUENCE_INPUTS:
            changed[name][:, p:] = -abs(value) if name == "g" else value
        assert same_bits(call(op, changed)[0][:, :p], before), f"tokens from {p} on, set to {value}"


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("name", SEQUENCE_INPUTS)
@pytest.mark.parametrize("p", [5, 64, 70])
def test_a_later_nan_in_one_input_never_shows(impl, op, name, p):
    """A masked 0 * NaN shows with a single bad input, which other bad ones would drown."""
    arguments = contiguous(inputs.delta_rule_arguments((T,), H, HV, K, V))
    before = call(op, arguments)[0][:, :p]
    for bad in (*BAD, -math.inf):
        changed = clone(arguments)
        changed[name][:, p] = bad
        assert same_bits(call(op, changed)[0][:, :p], before)


def test_later_tokens_of_a_decode_row_never_show(impl):
    arguments, _ = inputs.decode_arguments((6,), H, HV, K, V)
    before = call(DECODE, clone(arguments))
    for p in range(6):
        changed = clone(arguments)
        for name in ("q", "k", "v", "a", "b"):
            (changed[name][0] if changed[name].dim() == 4 else changed[name])[p:] = math.nan
        assert same_bits(call(DECODE, changed)[:, :p], before[:, :p])


# --- hard resets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("state", [0.0, 1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("t", [0, 1, 5, 63, 64, 65, 129])
def test_an_infinite_decay_is_a_restart(impl, op, t, state):
    arguments = contiguous(inputs.delta_rule_arguments((T,), H, HV, K, V))
    arguments["initial_state"].fill_(state)
    arguments["g"][:, t] = -math.inf
    o, final_state = call(op, arguments)
    restart = {name: arguments[name][:, t:] for name in SEQUENCE_INPUTS}
    restart["g"] = restart["g"].clone()
    restart["g"][:, 0] = 0
    restart |= {"initial_state": torch.zeros(1, HV, K, V), "cu_seqlens": torch.tensor([0, T - t])}
    expected, expected_state = getattr(oracle, op)(**to_float64({**arguments, **restart}))
    assert relative_error(o[:, t:], expected, (1, 3)) <= 1e-5
    assert relative_error(final_state, expected_state, (2, 3)) <= 1e-5


@pytest.mark.parametrize("op", RULES)
def test_resets_of_single_heads_and_in_a_row(impl, op):
    arguments = contiguous(inputs.delta_rule_arguments((T,), H, HV, K, V))
    arguments["initial_state"][:, 1] = math.nan
    arguments["g"][:, 0, 1] = -math.inf
    arguments["g"][:, 7:9, 2] = -math.inf
    arguments["g"][:, 64:66, 3] = -math.inf
    results = call(op, arguments)
    finite = clone(arguments)
    finite["initial_state"][:, 1] = 0
    expected = getattr(oracle, op)(**to_float64(finite))
    assert relative_error(results[0], expected[0], (1, 3)) <= 1e-5
    assert relative_error(results[1], expected[1], (2, 3)) <= 1e-5


@pytest.mark.parametrize("op", RULES)
def test_a_reset_also_forgets_bad_tokens(impl, op):
    arguments = contiguous(inputs.delta_rule_arguments((T,), H, HV, K, V))
    arguments["g"][:, 40] = -math.inf
    expected = call(op, arguments)
    for name in ("k", "v", "beta"):
        spoiled = clone(arguments)
        spoiled[name][:, 30] = math.nan
        o, final_state = call(op, spoiled)
        assert agree(impl, o[:, 40:], expected[0][:, 40:])
        assert agree(impl, final_state, expected[1])
        assert bool(o[:, 30:40].isnan().all())


def test_a_reset_in_decode(impl):
    """exp(A_log) overflows and softplus does not: the decay is 0, and NaN in the slot is forgotten."""
    arguments, guarded = inputs.decode_arguments((1, 3), H, HV, K, V)
    arguments["A_log"] = torch.full((HV,), 100.0)
    arguments["a"] = torch.zeros(4, HV)
    zeroed = clone(arguments)
    zeroed["initial_state_source"].zero_()
    expected = call(DECODE, zeroed)
    guarded.pool.fill_(math.nan)
    o = call(DECODE, arguments)
    assert same_bits(o, expected)
    slots = arguments["initial_state_indices"]
    assert same_bits(guarded.pool[slots], zeroed["initial_state_source"][slots])
    guarded.check()


def test_no_decay_where_softplus_underflows_in_decode(impl):
    """A_log = 100, a = -200: exp(A_log) overflows in fp32, and the decay is still 1."""
    arguments, guarded = inputs.decode_arguments((1, 3), H, HV, K, V)
    expected_arguments = clone(arguments)
    arguments |= {"A_log": torch.full((HV,), 100.0), "a": torch.full((4, HV), -200.0), "dt_bias": torch.zeros(HV)}
    expected_arguments |= {"A_log": torch.full((HV,), -200.0), "a": torch.full((4, HV), -200.0)}
    o = call(DECODE, arguments)
    assert same_bits(o, call(DECODE, expected_arguments))
    assert same_bits(guarded.pool, expected_arguments["initial_state_source"])
