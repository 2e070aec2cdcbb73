# SPDX-License-Identifier: Apache-2.0
"""Faults of arithmetic that others had: overflowing decays, rounded gates, wrong heads, wrong scales."""

import math

import pytest
import torch

import gdn_core
from contract_calls import same_bits
from gdn_core.testing import clone, inputs, relative_error, tolerance
from report_calls import (
    CHUNK,
    CONV,
    CONV_UPDATE,
    DECODE,
    FUSED,
    FUSED_REPLAY,
    GATING,
    POOL,
    RECURRENCES,
    RECURRENT,
    REPLAY,
    RULES,
    SPEC,
    assert_rule,
    assert_same,
    error,
    expect,
    on,
    output_of,
    put_tokens,
    rows_call,
    run,
    run_output,
)

EXTREME = tolerance("extreme_decays", torch.float32)


def rule(lengths=(64,), H=1, HV=2, K=8, V=8, **options):
    return inputs.delta_rule_arguments(lengths, H, HV, K, V, **options)


# --- decays -----------------------------------------------------------------------------------------------------------


@pytest.mark.report("A01")
@pytest.mark.parametrize("exponent", [3, 6, 12, 20, 30, 38])
@pytest.mark.parametrize("initial", [False, True])
@on(*RULES)
def test_small_decays_at_every_token(impl, op, initial, exponent):
    arguments = rule((64, 130), initial=initial)
    arguments["g"] = torch.full_like(arguments["g"], math.log(10.0**-exponent))
    assert_rule(op, arguments, bound=EXTREME)


@pytest.mark.report("A02")
@pytest.mark.parametrize("decays", ["strong", "vanishing", "thirds", "wild"])
@on(*RULES)
def test_decays_whose_ratios_overflow(impl, op, decays):
    assert_rule(op, rule((64, 1, 129), decays=decays), bound=EXTREME)


@pytest.mark.report("A02")
@pytest.mark.parametrize("g", [-90.0, -104.0, -1000.0, -3e38])
@on(*RULES)
def test_decays_that_underflow_at_every_token(impl, op, g):
    arguments = rule((65,))
    arguments["g"] = torch.full_like(arguments["g"], g)
    assert_rule(op, arguments, bound=EXTREME)


@pytest.mark.report("A11")
@pytest.mark.parametrize("strong", [0.0, -1.0, -30.0, -87.0, -88.0, -104.0, -300.0, -2661.0])
@on(*RULES)
def test_a_head_that_forgets_at_once_beside_one_that_remembers(impl, op, strong):
    """A clamped decay would bring back what the first head has forgotten."""
    arguments = rule((32, 130))
    arguments["g"][..., 0], arguments["g"][..., 1] = strong, -0.01
    assert_rule(op, arguments, bound=EXTREME)


@pytest.mark.report("A11")
@pytest.mark.parametrize("strong", [-30.0, -104.0, -2661.0])
@on(DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_a_decoding_head_that_forgets_at_once_beside_one_that_remembers(impl, op, strong):
    arguments = rows_call(op, [1, 3], H=1, HV=2, K=8, V=8)
    arguments["a"], arguments["dt_bias"] = torch.full_like(arguments["a"], 30.0), torch.zeros(2)  # softplus(30) is 30
    arguments["A_log"] = torch.tensor([math.log(-strong / 30), math.log(0.01 / 30)])
    expected, wide = expect(op, arguments)
    assert error(output_of(op, run_output(op, arguments)), output_of(op, expected)) <= EXTREME
    pool = POOL[op][0]
    assert error(arguments[pool], wide[pool]) <= EXTREME


OVERFLOWING = [(100.0, -200.0), (89.0, -120.0), (300.0, -1000.0), (3e38, -1e30), (88.0, -3e38)]


@pytest.mark.report("A04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("A_log", "a"), OVERFLOWING)
@on(GATING)
def test_the_gate_where_the_rate_overflows_and_softplus_vanishes(impl, op, A_log, a, dtype):
    for num_heads in (1, 3, 8, 17, 33):  # whole vectors and their tails
        raw = torch.full((2, num_heads), a, dtype=dtype)
        g, beta = gdn_core.fused_gdn_gating(torch.full((num_heads,), A_log), raw, raw * 0, torch.zeros(num_heads))
        assert bool((g == 0).all()) and bool(g.signbit().all())
        assert bool((beta == 0.5).all())


@pytest.mark.report("A04")
@pytest.mark.parametrize(("A_log", "a"), OVERFLOWING)
@on(RECURRENT, DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_a_state_does_not_decay_where_the_rate_overflows_and_softplus_vanishes(impl, op, A_log, a):
    arguments = rows_call(op, [1, 3], HV=4)
    if op == RECURRENT:
        arguments |= {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    raw = "g" if op == RECURRENT else "a"
    arguments["dt_bias"] = torch.zeros(4)
    still = clone(arguments)
    still |= {raw: torch.full_like(still[raw], -200.0), "A_log": torch.full((4,), -100.0)}  # a decay of exactly 1
    arguments |= {raw: torch.full_like(arguments[raw], a), "A_log": torch.full((4,), A_log)}
    assert_same(impl, run_output(op, arguments), run_output(op, still))


RESETS = [[0], [5], [63], [64], [65], [129], [0, 1, 2], [5, 40, 64, 100]]


@pytest.mark.report("A05")
@pytest.mark.parametrize("positions", RESETS, ids=str)
@on(*RULES)
def test_an_infinite_decay_is_a_restart_from_zero(impl, op, positions):
    arguments = rule((130,))
    arguments["g"][:, positions] = -math.inf
    o, state = assert_rule(op, arguments, bound=EXTREME)
    last = positions[-1]
    alone = {k: v[:, last:] if k in ("q", "k", "v", "g", "beta") else v for k, v in arguments.items()}
    alone |= {"initial_state": None, "cu_seqlens": None, "g": alone["g"].clone()}
    alone["g"][:, 0] = 0
    expected, expected_state, *_ = run(op, alone)
    assert error(o[:, last:], expected) <= EXTREME
    assert error(state, expected_state) <= EXTREME


@pytest.mark.report("A05")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@on(*RULES)
def test_a_reset_forgets_a_state_that_is_not_finite(impl, op, bad):
    arguments = rule((70,))
    arguments["initial_state"].fill_(bad)
    arguments["g"][:, 3] = -math.inf
    o, state, *_ = run(op, arguments)
    assert not bool(o[:, :3].isfinite().any())
    assert bool(o[:, 3:].isfinite().all()) and bool(state.isfinite().all())


@pytest.mark.report("A05")
@on(DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_a_decode_step_with_a_vanishing_decay_forgets_its_state(impl, op):
    arguments = rows_call(op, [3], HV=4)
    pool = next(arguments[name] for name in ("initial_state_source", "state") if name in arguments)
    pool.fill_(math.nan)
    arguments["A_log"] = torch.full((4,), 89.0)
    arguments["a"] = torch.full_like(arguments["a"], 60.0)
    assert bool(run_output(op, arguments).isfinite().all())


@pytest.mark.report("A09")
@pytest.mark.parametrize("T", [7, 50, 64, 65, 200])
@on(*RULES)
def test_no_decay_is_the_plain_delta_rule(impl, op, T):
    arguments = rule((T,), decays="none")
    o, state = assert_rule(op, arguments)
    without = {name: value for name, value in arguments.items() if name != "g"}
    expected, expected_state = gdn_core.fused_recurrent_gated_delta_rule(**without)
    assert error(o, expected) <= 1e-5 and error(state, expected_state) <= 1e-5


@pytest.mark.report("A10")
@pytest.mark.parametrize("T", [2, 64, 65, 130])
@on(*RULES)
def test_decays_are_natural_exponentials(impl, op, T):
    """One key is written at token 0 and read at the last token: inside a chunk, between chunks, from the state."""
    k = torch.zeros(1, T, 1, 1)
    k[:, 0] = 1
    g = torch.full((1, T, 1), -1.0 / (T - 1))
    ones = torch.ones(1, T, 1, 1)
    o, state, *_ = run(op, {"q": ones, "k": k, "v": ones, "g": g, "beta": ones[..., 0], "scale": 1.0,
                            "output_final_state": True})  # fmt: skip
    expected = math.exp(g[0, 1:, 0].double().sum())
    assert o[0, -1, 0, 0].item() == pytest.approx(expected, rel=1e-5)
    assert state.item() == pytest.approx(expected, rel=1e-5)


# --- gates and states in fp32 -----------------------------------------------------------------------------------------

SIGMOID_OF_HALF = 1 / (1 + math.exp(-0.5))


@pytest.mark.report("A06")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on(GATING)
def test_the_gates_of_half_precision_inputs_are_fp32(impl, op, dtype):
    half = torch.full((2, 19), 0.5, dtype=dtype)
    g, beta = gdn_core.fused_gdn_gating(torch.zeros(19), half, half, torch.zeros(19))
    assert g.dtype == beta.dtype == torch.float32
    assert torch.allclose(beta, torch.tensor(SIGMOID_OF_HALF), rtol=1e-6, atol=0)
    assert torch.allclose(g, torch.tensor(-math.log1p(math.exp(0.5))), rtol=2e-6, atol=0)


def one_hot_token(op, dtype, K=32):
    """A token with q = k = e0 and v = 1, on a state of zeros, with raw update input 0.5 and no decay."""
    q = torch.zeros(1, 1, 1, K, dtype=dtype)
    q[..., 0] = 1
    v = torch.ones(1, 1, 1, K, dtype=dtype)
    half, off = torch.full((1, 1), 0.5, dtype=dtype), torch.full((1, 1), -200.0, dtype=dtype)
    head, out = torch.zeros(1), torch.zeros(1, 1, 1, K)
    if op in RULES:
        return {"q": q, "k": q, "v": v, "g": off[None] * 0, "beta": half[None], "scale": 1.0,
                "use_beta_sigmoid_in_kernel": True, "out": out}  # fmt: skip
    pool, slot, ends = torch.zeros(1, 1, K, K), torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1])
    gates = {"A_log": head, "dt_bias": head, "a": off, "b": half}
    call = {**gates, "q": q, "k": q, "v": v, "scale": 1.0, "out": out}
    if op == DECODE:
        return {**call, "initial_state_source": pool, "initial_state_indices": slot}
    if op == SPEC:
        return {**call, "initial_state_source": pool, "spec_state_indices": slot[:, None],
                "num_accepted_tokens": None, "cu_seqlens": ends}  # fmt: skip
    records = gdn_core.ReplayRecords(1, 1, 1, 1, K, K, dtype)
    return {**call, "state": pool, "slot_indices": slot, "records": records, "num_accepted_tokens": None,
            "cu_seqlens": ends}  # fmt: skip


@pytest.mark.report("A06")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on(*RULES, DECODE, SPEC, REPLAY)
def test_beta_is_not_rounded_inside_an_op(impl, op, dtype):
    arguments = one_hot_token(op, dtype)
    run(op, arguments)
    assert torch.allclose(arguments["out"], torch.tensor(SIGMOID_OF_HALF), rtol=1e-6, atol=0)


@pytest.mark.report("A06")
@on(DECODE)
def test_the_state_stays_exact_over_a_long_row(impl, op):
    arguments, guarded = inputs.decode_arguments([2048], 1, 1, 16, 16, dtype=torch.bfloat16)
    arguments["A_log"], arguments["dt_bias"] = torch.full((1,), -7.0), torch.zeros(1)
    _, wide = expect(op, arguments)
    run(op, arguments)
    assert relative_error(guarded.pool, wide["initial_state_source"], (2, 3)) <= 2e-6


@pytest.mark.report("A08")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@on(RECURRENT, DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_an_fp32_state_that_nothing_changes_keeps_its_bits(impl, op, dtype):
    arguments = rows_call(op, [1, 1], dtype=dtype, HV=4)
    pool = next(arguments[n] for n in ("initial_state_source", "state", "initial_state") if n in arguments)
    pool.copy_(torch.full_like(pool, 1 + 2.0**-12))
    if op == RECURRENT:
        arguments["g"].zero_(), arguments["beta"].zero_()
    else:
        arguments["A_log"], arguments["dt_bias"] = torch.zeros(4), torch.zeros(4)
        arguments["a"] = torch.full_like(arguments["a"], -200.0)
        arguments["b"] = torch.full_like(arguments["b"], -200.0)
    for _ in range(50):
        run(op, arguments)
    assert bool((pool == 1 + 2.0**-12).all())


# --- causality and splits ---------------------------------------------------------------------------------------------


@pytest.mark.report("A12")
@pytest.mark.parametrize("value", [3.0, math.nan, math.inf])
@on(*RULES)
def test_later_tokens_do_not_change_earlier_outputs(impl, op, value):
    for T, cuts in ((40, range(40)), (130, (1, 63, 64, 65, 127, 128, 129))):
        arguments = rows_call(op, [T], H=1, HV=2)
        before = run_output(op, clone(arguments))
        for p in cuts:
            changed = clone(arguments)
            put_tokens(op, changed, slice(p, None), value)
            assert same_bits(run_output(op, changed)[:, :p], before[:, :p]), f"outputs before token {p} of {T}"


@pytest.mark.report("A12")
@pytest.mark.parametrize("value", [3.0, math.nan, -math.inf])
@on(DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY, CONV, CONV_UPDATE)
def test_later_tokens_do_not_change_earlier_outputs_of_a_step(impl, op, value):
    arguments = rows_call(op, [2, 7, 3])
    before = output_of(op, run_output(op, clone(arguments)))
    for p in range(2, 9):
        changed = clone(arguments)
        put_tokens(op, changed, slice(p, 9), value)
        after = output_of(op, run_output(op, changed))
        assert same_bits(after[:p], before[:p])
        assert same_bits(after[9:], before[9:])


@pytest.mark.report("A13")
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("decays", ["realistic", "wild"])
@on(*RULES)
def test_chunks_from_any_initial_state(impl, op, decays, initial, T):
    arguments = rule((T, T), decays=decays, initial=initial, is_dense=True)
    assert_rule(op, arguments, bound=None if decays == "realistic" else EXTREME)


def halves(arguments, s):
    """Cut a dense call of one of the rules after token s."""
    for tokens in (slice(None, s), slice(s, None)):
        yield {k: v[:, tokens] if k in ("q", "k", "v", "g", "beta") else v for k, v in arguments.items()}


@pytest.mark.report("A15")
@on(*RULES)
def test_a_sequence_cut_anywhere_gives_the_same_rule(impl, op):
    arguments = rule((16, 16), is_dense=True)
    whole, last, *_ = run(op, arguments)
    for s in (0, 1, 3, 7, 8, 15, 16):
        first, second = halves(arguments, s)
        o1, state, *_ = run(op, first)
        o2, state, *_ = run(op, second | {"initial_state": state})
        assert error(torch.cat([o1, o2], dim=1), whole) <= 1e-5, f"cut at {s}"
        assert error(state, last) <= 1e-5


@pytest.mark.report("A15")
@on(CONV)
def test_a_sequence_cut_anywhere_gives_the_same_convolution(impl, op):
    arguments, _ = inputs.conv_fn_arguments([16, 16], 5, 4, is_dense=True)
    whole = clone(arguments)
    expected = run(op, whole)
    for s in (0, 1, 2, 3, 4, 7, 15, 16):
        cut, x = clone(arguments), arguments["x"]
        y = torch.cat([run(op, cut | {"x": x[..., :s]}), run(op, cut | {"x": x[..., s:]})], dim=-1)
        assert error(y, expected) <= 2e-6, f"cut at {s}"
        assert torch.equal(cut["conv_states"], whole["conv_states"])


@pytest.mark.report("A15")
@on(CONV_UPDATE)
def test_a_step_of_several_tokens_is_as_many_steps_of_one(impl, op):
    arguments, _ = inputs.conv_update_arguments([6, 6], 5, 4, is_dense=True)
    together, alone = clone(arguments), clone(arguments)
    expected = run(op, together)
    y = torch.stack([run(op, alone | {"x": arguments["x"][..., t]}) for t in range(6)], dim=-1)
    assert error(y, expected) <= 2e-6
    assert torch.equal(alone["conv_state"], together["conv_state"])


# --- heads, shapes and scales -----------------------------------------------------------------------------------------


@pytest.mark.report("A16")
@pytest.mark.parametrize("state_v_first", [False, True])
@on(*RULES)
def test_the_final_state_has_a_row_per_value_head(impl, op, state_v_first):
    arguments = inputs.delta_rule_arguments(
        (3, 3), 2, 4, 8, 16, is_dense=True, initial=False, state_v_first=state_v_first
    )
    o, state = assert_rule(op, arguments)
    assert o.shape == (2, 3, 4, 16)
    assert state.shape == ((2, 4, 16, 8) if state_v_first else (2, 4, 8, 16))


@pytest.mark.report("A17")
@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
@on(*RECURRENCES)
def test_value_heads_read_their_key_heads_in_groups(impl, op, ratio):
    """Key head h is the unit vector e_h, so that the rows of a state show which key head wrote it."""
    H, HV = 2, 2 * ratio
    arguments = rows_call(op, [1], H=H, HV=HV, K=2, V=3, S=1)
    pool = next(arguments[n] for n in ("initial_state_source", "state", "initial_state") if n in arguments)
    pool.zero_()
    keys = torch.eye(2)[None, None]
    if op in (FUSED, FUSED_REPLAY):
        arguments["mixed_qkv"] = torch.cat([keys.flatten(), keys.flatten(), torch.ones(HV * 3)])[None]
    else:
        arguments |= {"q": keys, "k": keys, "v": torch.ones(1, 1, HV, 3)}
    run(op, arguments)
    if op in (REPLAY, FUSED_REPLAY):  # the state is written by the step after
        run(op, arguments | {"num_accepted_tokens": torch.tensor([1])})
    slot = int(next(arguments[n] for n in arguments if n.endswith("_indices")).flatten()[0])
    for head in range(HV):
        written = pool[slot, head].abs().sum(-1) > 0
        assert written.tolist() == [head // ratio == row for row in range(2)]


@pytest.mark.report("A18")
@on(*RULES, DECODE, SPEC, REPLAY)
def test_normalising_q_and_k_is_a_choice(impl, op):
    arguments = rows_call(op, [3])
    arguments["q"], arguments["k"] = arguments["q"] * 10, arguments["k"] * 10
    results = {}
    for flag in (False, True):
        call = clone(arguments) | {"use_qk_l2norm_in_kernel": flag}
        wanted, _ = expect(op, call)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        results[flag] = run_output(op, call)
        assert error(results[flag], wanted) <= 1e-5
    assert error(results[True], results[False].double()) > 0.1


@pytest.mark.report("A18")
@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-3, 1e-2])
@on(*RULES, DECODE, SPEC, REPLAY)
def test_the_eps_of_the_normalisation_is_inside_the_sum(impl, op, size):
    arguments = rows_call(op, [2])
    arguments["k"] = arguments["k"] * size
    wanted, _ = expect(op, arguments)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert error(run_output(op, arguments), wanted) <= 1e-5


@pytest.mark.report("A19")
@on(*RULES)
def test_a_linear_decay_is_caught_in_debug_mode(impl, op, monkeypatch):
    arguments = rule((3,))
    arguments["g"][0, 1, 1] = 0.9
    run(op, arguments)
    monkeypatch.setenv("GDN_DEBUG", "1")
    with pytest.raises(ValueError, match=r"g: expected log decays <= 0, got 0\.[89]"):
        run(op, arguments)
    arguments["g"].clamp_(max=0)
    run(op, arguments)


@pytest.mark.report("A19")
@on(RECURRENT)
def test_a_raw_gate_input_may_be_positive_in_debug_mode(impl, op, monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    arguments = rule((3,)) | {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    arguments["g"] = arguments["g"].abs() + 1
    run(op, arguments)


@pytest.mark.report("A22")
@pytest.mark.parametrize("HV", [3, 4])
@on(DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_permuted_rows_and_heads_permute_the_results(impl, op, HV):
    N = 2
    arguments = rows_call(op, [1] * N, H=1, HV=HV, S=1)
    before = output_of(op, run_output(op, clone(arguments)))
    rows, heads = torch.tensor([1, 0]), torch.arange(HV).roll(1)
    permuted = clone(arguments)
    for name in ("A_log", "dt_bias"):
        permuted[name] = arguments[name][heads]
    for name in ("a", "b"):
        permuted[name] = arguments[name][rows][:, heads]
    for name in ("initial_state_source", "state"):
        if name in arguments:
            permuted[name] = arguments[name][:, heads].contiguous()
    for name in ("initial_state_indices", "spec_state_indices", "slot_indices", "state_indices"):
        if name in arguments:
            permuted[name] = arguments[name][rows]
    if op in (FUSED, FUSED_REPLAY):
        qk, v = arguments["mixed_qkv"].split([2 * 6, HV * 5], dim=-1)
        v = v.unflatten(-1, (HV, 5))[rows][:, heads].flatten(1)
        permuted["mixed_qkv"] = torch.cat([qk[rows], v], dim=-1)
        permuted["output_gate"] = arguments["output_gate"][rows][:, heads]
    else:
        permuted |= {name: arguments[name][:, rows] for name in ("q", "k")}
        permuted["v"] = arguments["v"][:, rows][:, :, heads]
    after = output_of(op, run_output(op, permuted))
    assert_same(impl, after, before[rows][:, heads])


@pytest.mark.report("A22")
@on(GATING)
def test_permuted_gates(impl, op):
    arguments = inputs.gating_arguments((5, 19))
    rows, heads = torch.randperm(5), torch.randperm(19)
    permuted = {name: arguments[name][rows][:, heads] for name in ("a", "b")}
    permuted |= {name: arguments[name][heads] for name in ("A_log", "dt_bias")}
    for actual, wanted in zip(run(op, permuted), run(op, arguments), strict=True):
        assert_same(impl, actual, wanted[rows][:, heads])


@pytest.mark.parametrize("op", [CHUNK])
def test_a_chunk_is_64_tokens(op):
    """The cases above straddle the boundaries of this size."""
    arguments = rule((130,)) | {"output_chunk_states": True}
    assert run(op, arguments)[2].shape[0] == 3
