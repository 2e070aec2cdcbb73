# SPDX-License-Identifier: Apache-2.0
"""Faults of shapes, strides, dtypes and signatures that others had."""

import inspect
import random

import pytest
import torch

import gdn_core
from contract_calls import same_bits, untouched
from gdn_core.testing import clone, inputs, relative_error
from report_calls import (
    CHUNK,
    CONV,
    CONV_UPDATE,
    DECODE,
    FUSED,
    FUSED_REPLAY,
    GATING,
    NORM,
    OFFSETS,
    POOL,
    RECURRENCES,
    RECURRENT,
    REPLAY,
    RULES,
    SPEC,
    TOKENS,
    WITH_SLOTS,
    assert_rule,
    assert_same,
    error,
    expect,
    on,
    output_of,
    part,
    rows_call,
    run,
    run_output,
)

# --- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.report("C01")
@pytest.mark.parametrize("lengths", [[0, 3, 0, 2], [0, 0], [0, 1], [2, 0]], ids=str)
@on(*WITH_SLOTS)
def test_empty_sequences_change_nothing(impl, op, lengths):
    live = {"live": [min(2, length) for length in lengths]} if "replay" in op else {}
    arguments = rows_call(op, lengths, S=3, **live)
    if op in (*RULES, CONV):
        arguments["has_initial_state"] = torch.tensor([False] * len(lengths))
    name, indices = POOL[op]
    before = arguments[name].clone()
    wanted, wide = expect(op, arguments)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    o = run_output(op, arguments)
    assert error(o, wanted) <= 1e-5
    assert error(arguments[name], wide[name]) <= 1e-5
    empty = [n for n, length in enumerate(lengths) if length == 0]
    slots = arguments[indices][empty].flatten().long()
    assert same_bits(arguments[name][slots], before[slots])


@pytest.mark.report("C01")
@on(*RULES)
def test_the_final_state_of_an_empty_sequence_is_its_initial_one(impl, op):
    arguments = inputs.delta_rule_arguments([0, 3, 0, 2], 1, 2, 8, 4)
    _, state = assert_rule(op, arguments)
    assert same_bits(state[[0, 2]], arguments["initial_state"][[0, 2]])
    arguments["initial_state"] = None
    _, state = assert_rule(op, arguments)
    assert not bool(state[[0, 2]].any())


@pytest.mark.report("C02")
@on(*RULES, DECODE, CONV, CONV_UPDATE)
def test_packed_sequences_are_separate_ones(impl, op):
    lengths = [1, 2, 5, 64, 67]
    arguments = rows_call(op, lengths, S=67)
    alone = clone(arguments)
    o = output_of(op, run_output(op, arguments))
    name = POOL[op][0]
    for n, length in enumerate(lengths):
        tokens = slice(sum(lengths[:n]), sum(lengths[:n]) + length)
        single = part(op, alone, tokens, slice(n, n + 1))
        assert_same(impl, output_of(op, run_output(op, single)), o[tokens], bound=1e-5)
    assert_same(impl, alone[name], arguments[name], bound=1e-5)


@pytest.mark.report("C04")
@on(*RULES, DECODE)
def test_a_batch_with_offsets_raises(impl, op):
    arguments = inputs.delta_rule_arguments([4, 4], 1, 2, 8, 4, is_dense=True)
    if op == DECODE:
        packed = rows_call(op, [4, 4])
        arguments = packed | {n: packed[n].reshape(2, 4, *packed[n].shape[2:]) for n in ("q", "k", "v")}
    arguments["cu_seqlens"] = torch.tensor([0, 2, 4])
    with untouched(arguments), pytest.raises(ValueError, match=r"^[qkv]: expected"):
        run(op, arguments)


@pytest.mark.report("C04")
@on(CONV, CONV_UPDATE)
def test_a_batched_convolution_with_offsets_raises(impl, op):
    arguments = rows_call(op, [4, 4])
    arguments["x"] = torch.zeros(2, 7, 4)
    with untouched(arguments), pytest.raises(ValueError, match=r"x: expected"):
        run(op, arguments)


@pytest.mark.report("C05")
@pytest.mark.parametrize("seed", range(3))
@on(*RULES)
def test_sequences_of_random_lengths(impl, op, seed):
    lengths = [random.Random(seed).randint(1, 130) for _ in range(3)]
    assert_rule(op, inputs.delta_rule_arguments(lengths, 1, 2, 12, 9, seed=seed))


@pytest.mark.report("C05")
@on(*RULES)
def test_short_sequences_between_long_ones_at_model_size(impl, op):
    assert_rule(op, inputs.delta_rule_arguments([57, 2, 5], 1, 1, 128, 128))


@pytest.mark.report("C05")
@pytest.mark.parametrize("seed", range(3))
@on(CONV)
def test_convolutions_of_random_lengths(impl, op, seed):
    lengths = [random.Random(seed).randint(1, 40) for _ in range(4)]
    arguments, guarded = inputs.conv_fn_arguments(lengths, 6, 4, seed=seed)
    wanted, wide = expect(op, arguments)
    assert error(run(op, arguments), wanted) <= 2e-6
    assert torch.equal(guarded.pool.double(), wide["conv_states"])
    guarded.check()


# --- the state of the convolution -------------------------------------------------------------------------------------


@pytest.mark.report("C07")
@pytest.mark.parametrize("T", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("W", [2, 3, 4, 5])
@on(CONV)
def test_sequences_shorter_than_the_kernel_shift_the_history(impl, op, W, T):
    history = torch.arange(W - 1.0).expand(1, 3, W - 1).contiguous()
    x = (W - 1 + torch.arange(float(T))).expand(1, 3, T).contiguous()
    expected = torch.cat([history, x], dim=-1)[..., T:]
    weight = torch.ones(3, W)
    _, final = run(op, {"x": x, "weight": weight, "initial_states": history, "return_final_states": True})
    assert torch.equal(final, expected)
    pool = history.clone()
    run(op, {"x": x, "weight": weight, "conv_states": pool})
    assert torch.equal(pool, expected)
    fresh = {"x": x, "weight": weight, "conv_states": pool, "has_initial_state": torch.tensor([False])}
    run(op, fresh)
    if T:
        assert torch.equal(pool, torch.cat([history * 0, x], dim=-1)[..., T:])


def layouts(x):
    """Return one [B, C, T] tensor in every layout that callers have."""
    B, C, T = x.shape
    wide = torch.full((B, C + 3, T + 2), torch.nan)
    wide[:, :C, :T] = x
    channel_last = torch.empty(B, T, C).copy_(x.mT).mT
    sliced = torch.full((B, T, C + 5), torch.nan)
    sliced[..., :C] = x.mT
    doubled = torch.full((B, C, 2 * T), torch.nan)
    doubled[..., ::2] = x
    return {
        "packed": x.contiguous(),
        "slice of channels": wide[:, :C, :T],
        "channel last": channel_last,
        "slice of channel last": sliced[..., :C].mT,
        "every other column": doubled[..., ::2],
        "one batch": x.contiguous().as_strided((B, C, T), (C * T, T, 1)),
    }


@pytest.mark.report("C08")
@pytest.mark.parametrize("C", [1, 65])
@on(CONV, CONV_UPDATE)
def test_any_strides_of_the_convolution_s_input(impl, op, C):
    make = inputs.conv_fn_arguments if op == CONV else inputs.conv_update_arguments
    arguments, _ = make([5, 5], C, 4, is_dense=True)
    results = {}
    for layout, x in layouts(arguments["x"].contiguous()).items():
        call = clone(arguments)
        call["x"] = x  # cloning would pack it
        with untouched({"x": x}):
            results[layout] = (run(op, call), call[POOL[op][0]])
    for y, pool in results.values():
        assert same_bits(y, results["packed"][0])
        assert same_bits(pool, results["packed"][1])


@pytest.mark.report("C09")
@pytest.mark.parametrize("C", [1, 16, 17, 48, 96, 3072, 6160])
@on(CONV, CONV_UPDATE)
def test_any_number_of_channels(impl, op, C):
    make = inputs.conv_fn_arguments if op == CONV else inputs.conv_update_arguments
    arguments, guarded = make([3, 1], C, 4)
    y = run(op, clone(arguments))
    for begin in range(0, C, 500):  # channels do not mix: compare with float64 where that is cheap
        few = slice(begin, begin + 2)
        cut = dict(arguments)
        cut["x"] = arguments["x"][few] if op == CONV else arguments["x"][:, few]
        cut |= {name: arguments[name][few] for name in ("weight", "bias")}
        cut[POOL[op][0]] = guarded.pool[:, few]
        wanted, _ = expect(op, cut)
        assert error(y[few] if op == CONV else y[:, few], wanted) <= 2e-6


@pytest.mark.report("C09")
@pytest.mark.parametrize("C", [1, 16, 48, 6160])
@on(CONV_UPDATE)
def test_any_number_of_channels_of_a_speculative_step(impl, op, C):
    arguments, guarded = inputs.conv_update_arguments([3, 1], C, 4, state_len=6, accepted=[2, 0])
    alone = clone(arguments)
    y = run(op, arguments)
    few = slice(C - 1, C)
    alone |= {"x": alone["x"][:, few], "weight": alone["weight"][few], "bias": alone["bias"][few]}
    alone["conv_state"] = alone["conv_state"][:, few].contiguous()
    wanted, _ = expect(op, alone)
    assert error(y[:, few], wanted) <= 2e-6
    guarded.check()


@pytest.mark.report("C10")
@pytest.mark.parametrize("W", [2, 3, 4, 5])
@pytest.mark.parametrize("accepted", [None, [1, 2]])
@on(CONV, CONV_UPDATE)
def test_every_kernel_width(impl, op, accepted, W):
    if op == CONV:
        arguments, guarded = inputs.conv_fn_arguments([2, 4], 5, W)
    else:
        arguments, guarded = inputs.conv_update_arguments([2, 1], 5, W, state_len=W + 2, accepted=accepted)
    wanted, wide = expect(op, arguments)
    assert error(run(op, arguments), wanted) <= 2e-6
    columns = W + (0 if op == CONV or accepted is None else -1)  # further ones keep no promise
    pool = POOL[op][0]
    if accepted is None:
        columns = arguments[pool].shape[2]
    assert torch.equal(arguments[pool][..., :columns].double(), wide[pool][..., :columns])
    guarded.check()


@pytest.mark.report("C10")
@pytest.mark.parametrize("W", [1, 6])
@on(CONV, CONV_UPDATE)
def test_other_kernel_widths_raise(impl, op, W):
    arguments = rows_call(op, [2, 1])
    arguments["weight"] = torch.ones(7, W)
    with untouched(arguments), pytest.raises(ValueError, match=r"weight: expected a width of 2 to 5"):
        run(op, arguments)


@pytest.mark.report("C11")
@pytest.mark.parametrize("state_len", [3, 4, 6])
@pytest.mark.parametrize("q", [1, 2, 4, 9])
@on(CONV_UPDATE)
def test_a_state_longer_than_the_history_keeps_its_last_columns(impl, op, q, state_len):
    arguments, guarded = inputs.conv_update_arguments([q, q], 5, 4, state_len=state_len, is_dense=True)
    x = arguments["x"] if q > 1 else arguments["x"][..., None]
    slots = arguments["conv_state_indices"].long()
    expected = torch.cat([guarded.pool[slots], x], dim=-1)[..., -state_len:]
    wanted, _ = expect(op, arguments)
    place = guarded.pool.data_ptr()
    assert error(run(op, arguments), wanted) <= 2e-6
    assert torch.equal(guarded.pool[slots], expected)
    assert arguments["conv_state"].data_ptr() == place
    guarded.check()


# --- strides ----------------------------------------------------------------------------------------------------------


def repitched(x):
    """Return the values of x with gaps of NaN between its rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def spread(x):
    """Return the values of x with a last stride of 2."""
    wide = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


@pytest.mark.report("C14")
@pytest.mark.parametrize("change", [repitched, spread])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on(*WITH_SLOTS)
def test_inputs_that_are_views_of_something_wider(impl, op, dtype, change):
    arguments = rows_call(op, [1, 2], dtype=dtype)
    for name in TOKENS[op]:
        arguments[name] = arguments[name].contiguous()
    expected = run_output(op, clone(arguments))
    for name in TOKENS[op]:
        call = clone(arguments) | {name: change(arguments[name])}
        with untouched({name: call[name]}):
            o = run_output(op, call)
        assert same_bits(o, expected), name


@pytest.mark.report("C14")
@pytest.mark.parametrize("change", [repitched, spread])
@on(GATING, NORM)
def test_inputs_of_elementwise_ops_that_are_views(impl, op, change):
    arguments = inputs.gating_arguments((3, 5)) if op == GATING else inputs.norm_arguments((3, 2, 9))
    for name in ("a", "b", "x", "gate", "A_log", "dt_bias", "weight"):
        if name in arguments:
            packed, view = clone(arguments), dict(arguments)
            packed[name], view[name] = arguments[name].contiguous(), change(arguments[name])
            results, expected = run(op, view), run(op, packed)
            if op == NORM:
                results, expected = (results,), (expected,)
            assert all(same_bits(x, y) for x, y in zip(results, expected, strict=True)), name


@pytest.mark.report("C15")
@pytest.mark.parametrize(("K", "V"), [(64, 128), (16, 16)])
@pytest.mark.parametrize("state_v_first", [False, True])
@on(*RULES)
def test_prefill_hands_its_state_to_decode(impl, op, state_v_first, K, V):
    """The states are not symmetric, so that a transposed one would show where K = V."""
    arguments = inputs.delta_rule_arguments([5], 1, 2, K, V, state_v_first=state_v_first)
    _, state = assert_rule(op, arguments)
    step, _ = inputs.decode_arguments([1], 1, 2, K, V, seed=3)
    step |= {"initial_state_source": state, "initial_state_indices": torch.tensor([0]), "state_v_first": state_v_first}
    wanted, wide = expect(DECODE, step)
    o = run(DECODE, step)
    assert error(o, wanted) <= 2e-6
    assert relative_error(state, wide["initial_state_source"], (2, 3)) <= 2e-6


@pytest.mark.report("C15")
@on(*RULES, DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_both_layouts_of_the_state_give_the_same_values(impl, op):
    results = {}
    for v_first in (False, True):
        arguments = rows_call(op, [2, 1], state_v_first=v_first)
        name = POOL[op][0]
        reference = rows_call(op, [2, 1], state_v_first=False)[name]
        arguments[name].copy_(reference.mT if v_first else reference)
        o = run_output(op, arguments)
        results[v_first] = o, arguments[name].mT if v_first else arguments[name]
    for first, second in zip(results[False], results[True], strict=True):
        assert error(first, second) <= 4e-6


@pytest.mark.report("C16")
@on(*WITH_SLOTS)
def test_a_pool_with_gaps_between_its_slots(impl, op):
    guarded = rows_call(op, [2, 1], S=2)
    name = POOL[op][0]
    packed = clone(guarded)
    packed[name] = guarded[name].contiguous()
    assert guarded[name].stride(0) > packed[name].stride(0)
    expected = run_output(op, packed)
    assert same_bits(run_output(op, guarded), expected)
    assert same_bits(guarded[name], packed[name])


@pytest.mark.report("C16")
@on(*RECURRENCES)
def test_a_slot_that_is_not_packed_inside_raises(impl, op):
    arguments = rows_call(op, [2, 1], S=2)
    name = POOL[op][0]
    arguments[name] = repitched(arguments[name])
    with untouched(arguments), pytest.raises(ValueError, match=rf"{name}: expected the inside of a slot to be packed"):
        run(op, arguments)


@pytest.mark.report("C17")
@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 7), (48, 80), (32, 128), (64, 64), (96, 64), (128, 128), (256, 256)])
@on(*RULES, DECODE)
def test_any_head_dimension(impl, op, K, V):
    if op == DECODE:
        arguments, guarded = inputs.decode_arguments([1], 1, 1, K, V)
        wanted, wide = expect(op, arguments)
        assert error(run(op, arguments), wanted) <= 2e-6
        assert relative_error(guarded.pool, wide["initial_state_source"], (2, 3)) <= 2e-6
        guarded.check()
    else:
        assert_rule(op, inputs.delta_rule_arguments([3], 1, 1, K, V))


@pytest.mark.report("C17")
@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 7), (48, 80), (256, 32)])
@on(SPEC, REPLAY, FUSED, FUSED_REPLAY)
def test_any_head_dimension_of_speculative_rows(impl, op, K, V):
    arguments = rows_call(op, [2], H=1, HV=1, K=K, V=V)
    wanted, wide = expect(op, arguments)
    assert error(run_output(op, arguments), wanted) <= 4e-6
    name = POOL[op][0]
    assert error(arguments[name], wide[name]) <= 2e-6


# --- indices ----------------------------------------------------------------------------------------------------------


def column_of_a_table(index):
    """Return an index tensor as a strided view, as `table[:, 0]` of a scheduler's table is."""
    table = torch.full((*index.shape, 3), 10**6, dtype=index.dtype)
    table[..., 0] = index
    return table[..., 0]


@pytest.mark.report("C18")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@on(*WITH_SLOTS)
def test_indices_of_either_width_and_any_stride(impl, op, dtype):
    speculative = op not in (*RULES, DECODE, CONV)
    options = {"accepted": [1, 1]} if speculative else {}
    if "replay" in op:
        options["live"] = [2, 1]
    arguments = rows_call(op, [2, 1], S=2, **options)
    expected = clone(arguments)
    expected_o = run_output(op, expected)
    names = [POOL[op][1], OFFSETS.get(op, "cu_seqlens"), *(["num_accepted_tokens"] if speculative else [])]
    for name in names:
        call = clone(arguments)
        call[name] = column_of_a_table(call[name].to(dtype))
        assert not call[name].is_contiguous()
        assert same_bits(run_output(op, call), expected_o), name
        assert same_bits(call[POOL[op][0]], expected[POOL[op][0]]), name


@pytest.mark.report("C18")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
@on(*WITH_SLOTS)
def test_indices_of_other_dtypes_raise(impl, op, dtype):
    arguments = rows_call(op, [2, 1], S=2)
    for name in (POOL[op][1], OFFSETS.get(op, "cu_seqlens")):
        call = clone(arguments) | {name: arguments[name].to(dtype)}
        with untouched(call), pytest.raises(TypeError, match=rf"{name}: expected int32 or int64"):
            run(op, call)


# --- signatures -------------------------------------------------------------------------------------------------------


def positional(op):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(getattr(gdn_core, op)).parameters.values() if p.kind in kinds]


@pytest.mark.report("C19")
@on(CHUNK)
def test_swapped_gates_are_caught_in_debug_mode(impl, op, monkeypatch):
    """g comes before beta, as in the peer; beta in its place is positive, which no log decay is."""
    assert positional(op)[:5] == ["q", "k", "v", "g", "beta"]
    monkeypatch.setenv("GDN_DEBUG", "1")
    arguments = inputs.delta_rule_arguments([3], 1, 2, 8, 4)
    q, k, v, g, beta = (arguments[name] for name in ("q", "k", "v", "g", "beta"))
    gdn_core.chunk_gated_delta_rule(q, k, v, g, beta)
    with pytest.raises(ValueError, match=r"^g: expected log decays"):
        gdn_core.chunk_gated_delta_rule(q, k, v, beta, g)


@pytest.mark.report("C20")
@pytest.mark.parametrize("op", gdn_core.OPS)
def test_every_parameter_has_a_name(op):
    """Callers filter keywords by the signature: one that only **kwargs takes would be dropped without a word."""
    for module in (gdn_core, gdn_core.reference):
        parameters = inspect.signature(getattr(module, op)).parameters.values()
        assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    with pytest.raises(TypeError, match="unexpected keyword"):
        getattr(gdn_core, op)(no_such_argument=1)


@pytest.mark.report("C20")
@pytest.mark.parametrize("op", RULES)
def test_a_caller_that_filters_by_the_signature_loses_nothing(op):
    wanted = {"g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"}
    assert wanted <= set(inspect.signature(getattr(gdn_core, op)).parameters)


@pytest.mark.report("C21")
@on(CONV, CONV_UPDATE)
def test_the_positional_order_of_the_convolution_is_the_peer_s(impl, op):
    if op == CONV:
        assert positional(op) == [
            "x", "weight", "bias", "seq_idx", "initial_states", "return_final_states", "final_states_out", "activation",
        ]  # fmt: skip
        x, weight, bias, history = torch.randn(2, 3, 6), torch.randn(3, 4), torch.randn(3), torch.randn(2, 3, 3)
        y, final = gdn_core.causal_conv1d_fn(x, weight, bias, None, history, True, None, "silu")
        assert y.shape == x.shape and torch.equal(final, x[..., -3:])
    else:
        assert positional(op) == [
            "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices",
        ]  # fmt: skip
        arguments, _ = inputs.conv_update_arguments([1, 1], 3, 4, is_dense=True)
        again = clone(arguments)
        ordered = [arguments[name] for name in positional(op)]
        assert same_bits(gdn_core.causal_conv1d_update(*ordered), run(op, again))


# --- gradients --------------------------------------------------------------------------------------------------------


def leaves(arguments):
    return {
        name: value.detach().clone().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


DIFFERENTIABLE = {
    GATING: lambda: inputs.gating_arguments((2, 3), dtype=torch.float64, spread=1.0),
    CHUNK: lambda: inputs.delta_rule_arguments([2, 3], 1, 2, 3, 2, dtype=torch.float64, state_dtype=torch.float64),
    RECURRENT: lambda: inputs.delta_rule_arguments([2, 3], 1, 2, 3, 2, dtype=torch.float64, state_dtype=torch.float64),
    CONV: lambda: {
        "x": inputs.normal((1, 2, 4), inputs.generator(0), torch.float64),
        "weight": inputs.normal((2, 3), inputs.generator(1), torch.float64),
        "bias": inputs.normal((2,), inputs.generator(2), torch.float64),
        "initial_states": inputs.normal((1, 2, 2), inputs.generator(3), torch.float64),
        "activation": "silu",
        "return_final_states": True,
    },
    NORM: lambda: inputs.norm_arguments((2, 4), dtype=torch.float64),
}


@pytest.mark.report("C22")
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_are_those_of_the_formula(op):
    arguments = DIFFERENTIABLE[op]()
    parameters = leaves(arguments)

    def function(*values):
        return run(op, arguments | dict(zip(parameters, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(parameters.values()), fast_mode=True)


@pytest.mark.report("C22")
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_fp32_gradients_are_finite_and_reach_every_input(op):
    arguments = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in DIFFERENTIABLE[op]().items()
    }
    parameters = leaves(arguments)
    results = run(op, arguments | parameters)
    results = results if isinstance(results, tuple) else (results,)
    sum(x.square().sum() for x in results).backward()
    for name, leaf in parameters.items():
        assert leaf.grad is not None, name
        assert bool(leaf.grad.isfinite().all()) and bool(leaf.grad.any()), name


@pytest.mark.report("C22")
@pytest.mark.parametrize("g", [-60.0, -200.0, -1e4])
@pytest.mark.parametrize("op", RULES)
def test_gradients_through_vanishing_decays_are_finite(op, g):
    arguments = inputs.delta_rule_arguments([70], 1, 1, 4, 4)
    arguments["g"] = torch.full_like(arguments["g"], g)
    parameters = leaves(arguments)
    o, state, *_ = run(op, arguments | parameters)
    (o.square().sum() + state.square().sum()).backward()
    for name, leaf in parameters.items():
        assert bool(leaf.grad.isfinite().all()), name


@pytest.mark.report("C22")
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_native_backend_never_detaches(native_impl, op):
    arguments = DIFFERENTIABLE[op]()
    for name in leaves(arguments):
        call = arguments | {name: arguments[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match="no gradient"):
            run(op, call)


# --- nothing at all ---------------------------------------------------------------------------------------------------


@pytest.mark.report("C23")
@on(*WITH_SLOTS)
def test_no_rows_and_no_tokens(impl, op):
    full = rows_call(op, [2, 1], S=2)
    for tokens, rows in ((slice(0, 0), slice(0, 0)), (slice(0, 3), slice(0, 0))):
        arguments = part(op, clone(full), tokens, rows)
        name = POOL[op][0]
        before = arguments[name].clone()
        o = run_output(op, arguments)
        assert not bool(o.any())
        assert len(output_of(op, o)) == (0 if tokens.stop == 0 else 3)
        assert same_bits(arguments[name], before)


@pytest.mark.report("C23")
@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (0, 0)])
@on(*RULES)
def test_no_sequences_and_no_tokens_of_a_batch(impl, op, B, T):
    arguments = {
        "q": torch.zeros(B, T, 1, 8), "k": torch.zeros(B, T, 1, 8), "v": torch.zeros(B, T, 2, 4),
        "g": torch.zeros(B, T, 2), "beta": torch.zeros(B, T, 2), "output_final_state": True,
        "initial_state": torch.randn(B, 2, 8, 4),
    }  # fmt: skip
    o, state, *_ = run(op, arguments)
    assert o.shape == (B, T, 2, 4)
    assert same_bits(state, arguments["initial_state"])
    _, state, *_ = run(op, arguments | {"initial_state": None})
    assert state.shape == (B, 2, 8, 4) and not bool(state.any())


@pytest.mark.report("C23")
@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (0, 0)])
@on(CONV)
def test_an_empty_batch_of_convolutions(impl, op, B, T):
    history = torch.randn(B, 5, 3)
    y, final = run(op, {"x": torch.zeros(B, 5, T), "weight": torch.ones(5, 4), "initial_states": history,
                        "return_final_states": True})  # fmt: skip
    assert y.shape == (B, 5, T)
    assert torch.equal(final, history) if T == 0 else final.shape == (B, 5, 3)


@pytest.mark.report("C23")
@on(GATING, NORM)
def test_empty_inputs_of_elementwise_ops(impl, op):
    for shape in ((0, 4), (3, 0, 4), (0, 0, 4)):
        make = inputs.gating_arguments if op == GATING else inputs.norm_arguments
        results = run(op, make(shape))
        for x in results if op == GATING else (results,):
            assert x.shape == shape
