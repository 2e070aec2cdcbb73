# SPDX-License-Identifier: Apache-2.0
"""Decode steps that verify draft tokens: against float64, and bit for bit against decoding token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch

import gdn_core
from contract_calls import DECODE, FLOATS, THREADS, call, check_decode, same_bits, untouched
from gdn_core import ReplayRecords
from gdn_core.testing import clone, inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance

SPEC, REPLAY = f"{DECODE}_spec", f"{DECODE}_replay"
FUSED = "fused_gdn_decode_post_conv_mtp"
FUSED_REPLAY = f"{FUSED}_replay"

# (H, HV, K, V): the models' own, tails of every width, odd groups, the largest.
SHAPES = ((2, 4, 128, 128), (3, 6, 48, 80), (1, 3, 17, 33), (2, 10, 3, 5), (1, 1, 256, 200))
LAYOUTS = pytest.mark.parametrize("state_v_first", [False, True], ids=["k_first", "v_first"])
PER_TOKEN = {"q": 1, "k": 1, "v": 1, "a": 0, "b": 0}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def check_outputs(arguments, o, expected, what, half=0.0):
    """Compare outputs with float64; one rounding of few half-precision values does not average."""
    lengths = [length for length in arguments["cu_seqlens"].diff().tolist() if length > 0]
    bound = tolerance(what, o.dtype)
    if o.element_size() == 2 and min(lengths, default=0) * o.shape[-1] < 64:
        bound = max(bound, 2.0**-8)
    assert packed_relative_error(o, expected, arguments["cu_seqlens"]) <= max(bound, half)


def half_bound(pool, dtype):
    return tolerance("decode_half_pool", dtype) if pool.element_size() == 2 else 0.0


def check_spec(arguments, guarded):
    """Run a several-slots call, compare it with float64 and look after the guards."""
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update_spec(**wide)
    with untouched(arguments, "initial_state_source"):
        o = call(SPEC, arguments)
    dtype, half = arguments["q"].dtype, half_bound(guarded.pool, arguments["q"].dtype)
    check_outputs(arguments, o, expected, "decode_output", half)
    expected_pool = wide["initial_state_source"]
    assert relative_error(guarded.pool, expected_pool, (2, 3)) <= max(tolerance("decode_state", dtype), half)
    guarded.check()
    return o


# --- several slots against float64 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@LAYOUTS
def test_several_slots_of_ragged_rows(impl, shape, dtype, state_v_first):
    arguments, guarded = inputs.spec_arguments(
        (4, 1, 0, 2, 3), 4, *shape, accepted=(3, 1, 2, 0, 4), dtype=dtype, state_v_first=state_v_first, is_packed=True
    )
    check_spec(arguments, guarded)


@pytest.mark.parametrize("S", range(1, 17))
def test_tables_of_up_to_16_columns(impl, S):
    lengths, accepted = (S, max(S - 1, 1), 1), (S, 0, (S + 1) // 2)
    arguments, guarded = inputs.spec_arguments(lengths, S, 2, 6, 24, 40, accepted=accepted, state_v_first=S % 2 == 0)
    check_spec(arguments, guarded)


@pytest.mark.parametrize("state_dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@LAYOUTS
def test_several_slots_in_half_precision(impl, state_dtype, dtype, state_v_first):
    arguments, guarded = inputs.spec_arguments(
        (4, 2, 3), 4, 2, 4, 33, 18, accepted=(4, 1, 2), dtype=dtype, state_dtype=state_dtype,
        state_v_first=state_v_first,
    )  # fmt: skip
    check_spec(arguments, guarded)


@pytest.mark.parametrize("state_dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@LAYOUTS
def test_a_half_precision_pool_is_rounded_only_where_it_is_stored(native_impl, state_dtype, shape, state_v_first):
    arguments, guarded = inputs.spec_arguments(
        (5, 1, 3), 5, *shape, accepted=(2, 1, 5), state_dtype=state_dtype, state_v_first=state_v_first
    )
    arguments["spec_state_indices"][0, 2] = -1
    wide = {**arguments, "initial_state_source": guarded.pool.float()}
    assert same_bits(call(SPEC, arguments), call(SPEC, wide))
    assert same_bits(guarded.pool, wide["initial_state_source"].to(state_dtype))
    guarded.check()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_options_of_several_slots(impl, normalize, out_dtype):
    arguments, guarded = inputs.spec_arguments((3, 2), 3, 2, 4, 16, 24, accepted=(2, 1), dtype=torch.bfloat16)
    arguments |= {"use_qk_l2norm_in_kernel": normalize, "scale": 0.3, "softplus_beta": 1.5, "softplus_threshold": 2.0}
    arguments["k"] = arguments["k"] / 4
    out = torch.full((1, 5, 4, 24), math.nan, dtype=out_dtype)
    expected = oracle.fused_sigmoid_gating_delta_rule_update_spec(**to_float64(arguments))
    assert call(SPEC, {**arguments, "out": out}) is out
    check_outputs(arguments, out, expected, "decode_output")
    guarded.check()


# --- replay against float64 -------------------------------------------------------------------------------------------


def check_records(records, expected, slots, lengths):
    """Compare what the last step left in the records with float64."""
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        assert int(records.live[slot]) == int(expected.live[slot])
        if length == 0:
            continue
        assert torch.equal(records.k[slot, :length].double(), expected.k[slot, :length])
        for name in ("u", "decay"):
            actual, wanted = getattr(records, name)[slot, :length], getattr(expected, name)[slot, :length]
            assert relative_error(actual, wanted, tuple(range(actual.dim()))) <= 1e-5


def check_replay(op, arguments, guarded):
    """Run a replay call of either op, compare it and its records with float64, and look after the guards."""
    wide = to_float64(arguments)
    expected = getattr(oracle, op)(**wide)
    written = [f"records.{name}" for name in ("k", "u", "decay", "live")]
    with untouched(arguments, "state", *written):
        o = call(op, arguments)
    dtype, half = o.dtype, half_bound(guarded.pool, o.dtype)
    what = "fused_decode" if op == FUSED_REPLAY else "decode_output"
    check_outputs(arguments, o if o.dim() == 4 else o[None], expected.reshape(1, *expected.shape[-3:]), what, half)
    assert relative_error(guarded.pool, wide["state"], (2, 3)) <= max(tolerance("decode_state", dtype), half)
    guarded.check()
    if half == 0.0:
        lengths = arguments["cu_seqlens"].diff().tolist()
        check_records(arguments["records"], wide["records"], arguments["slot_indices"], lengths)


REPLAYS = pytest.mark.parametrize("op", [REPLAY, FUSED_REPLAY], ids=["replay", "fused"])


def replay_call(op, lengths, S, shape, **options):
    """Return arguments and guarded pool of either replay op."""
    if op == FUSED_REPLAY:
        return inputs.fused_decode_arguments(lengths, S, *shape, replay=True, **options)
    return inputs.replay_arguments(lengths, S, *shape, **options)


@REPLAYS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@LAYOUTS
def test_replay_of_ragged_rows(impl, op, shape, dtype, state_v_first):
    arguments, guarded = replay_call(
        op, (4, 1, 0, 2, 3), 4, shape, accepted=(3, 1, 2, 0, 4), live=(3, 0, 2, 4, 4), dtype=dtype,
        state_v_first=state_v_first,
    )  # fmt: skip
    check_replay(op, arguments, guarded)


@REPLAYS
@pytest.mark.parametrize("S", range(1, 17))
def test_replay_of_up_to_16_records(impl, op, S):
    lengths, accepted = (S, max(S - 1, 1), 1), (S, 0, (S + 1) // 2)
    arguments, guarded = replay_call(
        op, lengths, S, (2, 6, 24, 40), accepted=accepted, live=(S, S, S), state_v_first=S % 2 == 0
    )
    check_replay(op, arguments, guarded)


@REPLAYS
@pytest.mark.parametrize("state_dtype", FLOATS[1:], ids=str)
@LAYOUTS
def test_replay_in_half_precision(impl, op, state_dtype, state_v_first):
    arguments, guarded = replay_call(
        op, (4, 2, 3), 4, (2, 4, 33, 18), accepted=(4, 1, 2), live=(4, 3, 2), dtype=torch.bfloat16,
        state_dtype=state_dtype, state_v_first=state_v_first,
    )  # fmt: skip
    check_replay(op, arguments, guarded)


@pytest.mark.parametrize("state_dtype", FLOATS[1:], ids=str)
@LAYOUTS
def test_new_tokens_run_from_the_stored_state(native_impl, state_dtype, state_v_first):
    arguments, guarded = inputs.replay_arguments(
        (4, 2, 3), 4, 2, 4, 33, 18, accepted=(4, 1, 2), live=(4, 3, 2), state_dtype=state_dtype,
        state_v_first=state_v_first,
    )  # fmt: skip
    wide = {**clone(arguments), "state": guarded.pool.float()}
    o = call(REPLAY, arguments)
    call(REPLAY, wide)
    assert same_bits(guarded.pool, wide["state"].to(state_dtype))
    fresh = {**arguments, "state": guarded.pool.float(), "records": clone(arguments)["records"]}
    fresh["records"].reset()
    assert same_bits(call(REPLAY, fresh), o)
    assert same_bits(fresh["records"].u, arguments["records"].u)


@REPLAYS
def test_replay_without_num_accepted_tokens(impl, op):
    arguments, _ = replay_call(op, (2, 3), 3, (2, 4, 12, 20), live=(2, 0))
    one = clone(arguments) | {"num_accepted_tokens": ints(1, 1)}
    assert same_bits(call(op, arguments), call(op, one))
    assert same_bits(arguments["state"], one["state"])


@REPLAYS
def test_padding_of_replay(impl, op):
    arguments, guarded = replay_call(
        op, (2, 3, 1, 0, 2), 3, (2, 4, 12, 20), accepted=(1, 3, 2, 2, 1), live=(2, 1, 3, 2, 1)
    )
    slots = arguments["slot_indices"]
    kept = slots[[1, 2, 3]].long()
    arguments["null_slot"] = int(slots[2])
    arguments["slot_indices"] = slots.clone()
    arguments["slot_indices"][1] = -1
    per_token = (*PER_TOKEN, "mixed_qkv", "output_gate")
    for name in [name for name in per_token if name in arguments]:
        arguments[name] = arguments[name].clone()
        arguments[name].narrow(PER_TOKEN.get(name, 0), 2, 4).fill_(math.nan)
    records, before = clone(arguments)["records"], guarded.pool.clone()
    o = call(op, arguments)
    o = o.view(8, 4, 20)
    assert bool((o[2:6] == 0).all())
    assert bool(o[:2].isfinite().all()) and bool(o[6:].isfinite().all())
    assert same_bits(guarded.pool[kept], before[kept])
    for name in ("k", "u", "decay", "live"):
        assert torch.equal(getattr(arguments["records"], name)[kept], getattr(records, name)[kept])
    guarded.check()


@LAYOUTS
def test_a_recorded_reset_does_not_read_the_state(impl, state_v_first):
    arguments, guarded = inputs.replay_arguments(
        (2, 1), 4, 2, 4, 12, 20, accepted=(3, 2), live=(4, 2), state_v_first=state_v_first
    )
    first, second = arguments["slot_indices"].tolist()
    arguments["records"].decay[first, 1] = 0
    arguments["records"].decay[second, 0] = 0
    zeroed = clone(arguments)
    zeroed["state"][[first, second]] = 0
    zeroed["records"].u[first, 0] = 0
    guarded.pool[[first, second]] = math.nan
    if not impl.is_native:
        pytest.skip("a record of 0 times NaN is NaN in plain torch")
    assert same_bits(call(REPLAY, arguments), call(REPLAY, zeroed))
    assert same_bits(guarded.pool, zeroed["state"])


def test_records_of_any_strides(impl):
    arguments, _ = inputs.replay_arguments((2, 3), 3, 2, 4, 12, 20, accepted=(2, 3), live=(3, 3), dtype=torch.bfloat16)
    expected = clone(arguments)
    records = arguments["records"]

    def apart(x):
        return torch.stack([x, torch.full_like(x, 7)], dim=1)[:, 0]

    strided = ReplayRecords.from_tensors(*(apart(x) for x in (records.k, records.u, records.decay, records.live)))
    assert same_bits(call(REPLAY, {**arguments, "records": strided}), call(REPLAY, expected))
    for name in ("k", "u", "decay", "live"):
        assert torch.equal(getattr(strided, name), getattr(expected["records"], name))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("num_accepted_tokens", ints(3, 1), ValueError, "expected at most the 2 live records of slot [0-9]+, got 3"),
        ("num_accepted_tokens", ints(4, 1), ValueError, r"expected values in \[0, 3\], got \[4, 1\]"),
        ("cu_seqlens", ints(0, 4, 5), ValueError, "expected rows of at most 3 tokens, got one of 4"),
        ("slot_indices", ints(0, 5), IndexError, "expected slots below 5, got 5"),
        ("slot_indices", ints(0), ValueError, None),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value)[:24],
)
@REPLAYS
def test_errors_of_replay_before_anything_is_written(impl, op, name, value, error, message):
    arguments, _ = replay_call(op, (3, 2), 3, (2, 4, 12, 20), accepted=(2, 1), live=(2, 2))
    arguments[name] = value
    pattern = f"^{name}: {message}" if message is not None else "^cu_seqlens: expected"
    with untouched(arguments), pytest.raises(error, match=pattern):
        call(op, arguments)


@pytest.mark.parametrize("name", ["a", "b"])
@REPLAYS
def test_float64_gates_of_other_activations_change_nothing(impl, op, name):
    arguments, _ = replay_call(op, (3, 2), 3, (2, 4, 12, 20), accepted=(2, 1), live=(2, 2))
    arguments[name] = arguments[name].double()
    error = pytest.raises(TypeError, match=rf"^{name}: expected .*, got float64 \[5, 4\]")
    with gdn_core.use_backend("reference"), untouched(arguments), error:
        call(op, arguments)


@pytest.mark.parametrize("part", ["k", "u", "decay", "live"])
@REPLAYS
def test_errors_of_records(impl, op, part):
    for change, error in ((lambda x: x[1:], ValueError), (lambda x: x.to(torch.int16), TypeError)):
        arguments, _ = replay_call(op, (3, 2), 3, (2, 4, 12, 20))
        setattr(arguments["records"], part, change(getattr(arguments["records"], part)))
        with untouched(arguments), pytest.raises(error, match=f"^records.{part}: expected"):
            call(op, arguments)


# --- products that leave fp32 -----------------------------------------------------------------------------------------

# How many times as large q, k, v, the states and u of the records are, and arguments that are not as usual.
EXTREMES = {
    "q and k times the state": {"q": 1e31, "k": 1e31, "state": 1e9, "u": 1e9},
    "u times what normalises k": {"k": 1e26, "b": -40.0, "state": 0.0, "u": 1e-18},
    "u times what normalises a larger k": {"k": 1e31, "b": -40.0, "state": 0.0, "u": 1e-18},
    "small q times a small state": {"q": 1e-30, "k": 1e-30, "v": 3e-10, "state": 3e-10, "u": 3e-10, "scale": 1e3},
}


def make_extreme(arguments, pool, *, q=1.0, k=1.0, v=1.0, state=1.0, u=1.0, b=None, scale=None):
    """Return the arguments with tokens, states and records of extreme sizes."""
    sizes = {"q": q, "k": k, "v": v}
    scaled = {name: (arguments[name].double() * size).to(arguments[name].dtype) for name, size in sizes.items()}
    set_to = {} if b is None else {"b": torch.full_like(arguments["b"], b)}
    pool.mul_(state)
    if "records" in arguments:
        records = arguments["records"]
        records.k.copy_(records.k.double() * k)
        records.u.mul_(u)
    return {**arguments, **scaled, **set_to, "use_qk_l2norm_in_kernel": True, "scale": scale}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("op", [DECODE, SPEC, REPLAY], ids=["decode", "several_slots", "replay"])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@LAYOUTS
def test_products_on_the_way_may_leave_fp32(native_impl, op, extreme, dtype, state_v_first):
    shape, options = (1, 1, 128, 128), {"dtype": dtype, "state_v_first": state_v_first}
    if op == DECODE:
        arguments, guarded = inputs.decode_arguments((3, 1), *shape, **options)
    elif op == SPEC:
        arguments, guarded = inputs.spec_arguments((3, 1), 3, *shape, accepted=(2, 1), **options)
    else:
        arguments, guarded = inputs.replay_arguments((3, 1), 3, *shape, accepted=(2, 1), live=(2, 1), **options)
    arguments = make_extreme(arguments, guarded.pool, **EXTREMES[extreme])
    if op == SPEC:
        check_spec(arguments, guarded)
    elif op == REPLAY:
        check_replay(op, arguments, guarded)
    else:
        wide = to_float64(arguments)
        expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide)
        assert expected.float().isfinite().all()
        check_decode(arguments, guarded, call(op, arguments), (expected, wide["initial_state_source"]))


@pytest.mark.parametrize(("large", "small"), [(1e10, 1e-32), (1e4, 1e-36), (1e30, 1e-12)])
def test_small_elements_beside_large_ones_count(native_impl, large, small):
    """Not normalised, where q takes only what the small element left in the state."""
    q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16)
    q[..., 1], k[:, 0, :, 0], k[:, 0, :, 1] = 1.0, large, small
    v = inputs.normal((1, 2, 1, 16), inputs.generator(3), torch.float32)
    arguments = {"q": q, "k": k, "v": v, "g": torch.zeros(1, 2, 1)}
    arguments |= {"beta": torch.ones(1, 2, 1), "scale": 1.0, "output_final_state": True}
    o, final = gdn_core.fused_recurrent_gated_delta_rule(**arguments)
    wanted, last = oracle.fused_recurrent_gated_delta_rule(**to_float64(arguments))
    assert relative_error(o, wanted, (1, 2, 3)) <= 2e-6
    assert relative_error(final[..., 1, :], last[..., 1, :], (0, 1, 2)) <= 2e-6


def test_a_large_product_that_a_small_update_takes_away(native_impl):
    """q k is 8e37 and u is 0: what is left of the output is the state's."""
    q, k, v = torch.full((1, 1, 1, 16), 0.5), torch.full((1, 1, 1, 16), 1e37), torch.ones(1, 1, 1, 16)
    g, state = torch.zeros(1, 1, 1), torch.full((1, 1, 16, 16), 4e-10)
    o, _ = gdn_core.fused_recurrent_gated_delta_rule(q, k, v, g, beta=g, initial_state=state, scale=1.0)
    torch.testing.assert_close(o, torch.full_like(o, 3.2e-9), rtol=1e-6, atol=0.0)


# --- the fused step ---------------------------------------------------------------------------------------------------


def check_fused(arguments, guarded):
    """Run a fused call, compare it with float64 and look after the guards."""
    wide = to_float64(arguments)
    expected = oracle.fused_gdn_decode_post_conv_mtp(**wide)
    with untouched(arguments, "state"):
        o = call(FUSED, arguments)
    dtype, half = arguments["mixed_qkv"].dtype, half_bound(guarded.pool, arguments["mixed_qkv"].dtype)
    check_outputs(arguments, o[None], expected[None], "fused_decode", half)
    assert relative_error(guarded.pool, wide["state"], (2, 3)) <= max(tolerance("decode_state", dtype), half)
    guarded.check()


# Every dimension that models have, as K and as V, with every ratio of value heads to key heads.
DIMS, RATIOS = (32, 48, 64, 80, 96, 128, 256), (1, 2, 3, 4, 5, 8)
CLASSES = [(1 + i % 2, (1 + i % 2) * RATIOS[i % 6], K, DIMS[(i + 3 * (i // 7)) % 7]) for i, K in enumerate(DIMS * 2)]


@pytest.mark.parametrize("shape", CLASSES, ids=str)
@LAYOUTS
def test_every_class_of_shapes(impl, shape, state_v_first):
    dtype = FLOATS[shape[3] // 16 % 3]
    lengths, S = (4, 3, 5), 5
    rows = {"accepted": (3, 0, 5), "dtype": dtype, "state_v_first": state_v_first}
    check_spec(*inputs.spec_arguments(lengths, S, *shape, **rows))
    check_replay(REPLAY, *replay_call(REPLAY, lengths, S, shape, live=(3, 1, 5), **rows))
    check_fused(*inputs.fused_decode_arguments(lengths, S, *shape, **rows))
    check_replay(FUSED_REPLAY, *replay_call(FUSED_REPLAY, lengths, S, shape, live=(3, 1, 5), **rows))


def split_channels(arguments, H, K):
    """Return q, k and v as views of mixed_qkv."""
    T, HV, V = arguments["output_gate"].shape
    q, k, v = arguments["mixed_qkv"].split([H * K, H * K, HV * V], dim=-1)
    return {"q": q.view(1, T, H, K), "k": k.view(1, T, H, K), "v": v.view(1, T, HV, V)}


def composed(arguments, H, K):
    """Return what the fused step gives as separate operations, o between them in fp32."""
    tokens = split_channels(arguments, H, K)
    steps = {name: arguments[name] for name in ("A_log", "dt_bias", "a", "b", "num_accepted_tokens", "cu_seqlens")}
    steps |= {name: arguments[name] for name in ("state_v_first", "null_slot", "scale") if name in arguments}
    steps |= {"initial_state_source": arguments["state"], "spec_state_indices": arguments["state_indices"]}
    out = torch.empty(tokens["v"].shape, dtype=torch.float32)
    o = call(SPEC, {**steps, **tokens, "use_qk_l2norm_in_kernel": True, "out": out})
    gate, activation = arguments["output_gate"], arguments["output_gate_activation"]
    norm = {"x": o[0], "gate": gate, "weight": arguments["norm_weight"], "eps": arguments["norm_eps"]}
    return call("rms_norm_gated", {**norm, "activation": activation, "out": torch.empty_like(gate)})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@LAYOUTS
def test_the_fused_step_of_ragged_rows(impl, shape, dtype, state_v_first):
    activation = ("silu", "swish", "sigmoid")[FLOATS.index(dtype)]
    arguments, guarded = inputs.fused_decode_arguments(
        (4, 1, 0, 2, 3), 4, *shape, accepted=(3, 1, 2, 0, 4), dtype=dtype, state_v_first=state_v_first,
        activation=activation,
    )  # fmt: skip
    check_fused(arguments, guarded)


@LAYOUTS
def test_the_fused_step_without_a_gate(impl, state_v_first):
    """Norm alone: output_gate gives the sizes, and is not read."""
    arguments, guarded = inputs.fused_decode_arguments(
        (4, 1, 2), 4, 2, 4, 64, 64, accepted=(3, 1, 2), state_v_first=state_v_first, activation="none"
    )
    arguments["output_gate"].fill_(torch.nan)
    check_fused(arguments, guarded)


@pytest.mark.parametrize("S", range(1, 17))
def test_the_fused_step_of_up_to_16_tokens(impl, S):
    lengths, accepted = (S, max(S - 1, 1), 1), (S, 0, (S + 1) // 2)
    arguments, guarded = inputs.fused_decode_arguments(lengths, S, 2, 6, 24, 40, accepted=accepted)
    check_fused(arguments, guarded)


@pytest.mark.parametrize("state_dtype", FLOATS[1:], ids=str)
@LAYOUTS
def test_the_fused_step_in_half_precision(impl, state_dtype, state_v_first):
    arguments, guarded = inputs.fused_decode_arguments(
        (4, 2, 3), 4, 2, 4, 33, 18, accepted=(4, 1, 2), dtype=torch.bfloat16, state_dtype=state_dtype,
        state_v_first=state_v_first,
    )  # fmt: skip
    check_fused(arguments, guarded)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@LAYOUTS
def test_the_fused_step_is_its_steps(native_impl, shape, dtype, state_v_first):
    H, HV, K, V = shape
    arguments, guarded = inputs.fused_decode_arguments(
        (3, 4, 1), 4, *shape, accepted=(3, 1, 2), dtype=dtype, state_v_first=state_v_first
    )
    arguments |= {"scale": 0.7, "norm_weight": arguments["norm_weight"].to(dtype)}
    separate = clone(arguments)
    expected = composed(separate, H, K)
    for threads in THREADS:
        torch.set_num_threads(threads)
        again = clone(arguments)
        assert same_bits(call(FUSED, again), expected)
        assert same_bits(again["state"], separate["state"])
    for out_dtype in FLOATS:
        out = torch.full((8, HV, V + 3), math.nan, dtype=out_dtype)[..., :V]
        assert call(FUSED, {**clone(arguments), "out": out}) is out
        assert packed_relative_error(out[None], expected[None], arguments["cu_seqlens"]) <= 1e-2
    guarded.check()


def test_the_fused_step_alone(native_impl):
    arguments, _ = inputs.fused_decode_arguments((3, 1, 4), 4, 2, 4, 40, 72, accepted=(2, 4, 1))
    whole = clone(arguments)
    expected = call(FUSED, whole)
    for row, (start, end) in enumerate(((0, 3), (3, 4), (4, 8))):
        alone = clone(arguments)
        alone |= {name: alone[name][start:end] for name in ("mixed_qkv", "a", "b", "output_gate")}
        alone |= {name: alone[name][row : row + 1] for name in ("state_indices", "num_accepted_tokens")}
        alone["cu_seqlens"] = ints(0, end - start)
        assert same_bits(call(FUSED, alone), expected[start:end])
        slots = alone["state_indices"][0, : end - start].long()
        assert same_bits(alone["state"][slots], whole["state"][slots])


def test_key_heads_follow_from_the_channels(impl):
    arguments, _ = inputs.fused_decode_arguments((2, 1), 2, 3, 6, 20, 12)
    expected = call(FUSED, clone(arguments))
    assert same_bits(call(FUSED, {**clone(arguments), "num_key_heads": None}), expected)


def test_strided_operands_of_the_fused_step(impl):
    arguments, _ = inputs.fused_decode_arguments((2, 1), 2, 3, 6, 20, 12, dtype=torch.bfloat16)
    expected = call(FUSED, clone(arguments))
    strided = clone(arguments)
    for name in ("mixed_qkv", "output_gate", "a", "b", "norm_weight"):
        x = strided[name]
        strided[name] = torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]
    with untouched(strided, "state"):
        assert same_bits(call(FUSED, strided), expected)


def test_padding_of_the_fused_step(impl):
    arguments, guarded = inputs.fused_decode_arguments((2, 3, 1, 2), 3, 2, 4, 12, 20, accepted=(1, 2, 3, 1))
    arguments["state_indices"] = torch.tensor([[1, 2, 3], [4, -1, 5], [6, 7, 0]])
    arguments |= {"null_slot": 0, "cu_seqlens": ints(0, 2, 5, 6), "num_accepted_tokens": ints(1, 2, 3)}
    for name in ("mixed_qkv", "output_gate", "a", "b"):
        arguments[name] = arguments[name].clone()
        arguments[name][2:] = math.nan
    before = guarded.pool.clone()
    o = call(FUSED, {**arguments, "out": torch.full((8, 4, 20), math.nan)})
    assert bool(o[:2].isfinite().all()) and bool((o[:2] != 0).any())
    assert bool((o[2:] == 0).all())
    assert same_bits(guarded.pool[[0, 3, 4, 5, 6, 7]], before[[0, 3, 4, 5, 6, 7]])
    guarded.check()


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [-1, 3], ids=["negative", "null"])
@pytest.mark.parametrize("state_dtype", FLOATS[:2], ids=str)
@LAYOUTS
def test_a_padded_column_skips_its_store_only(impl, pad, state_dtype, state_v_first):
    arguments, guarded = inputs.spec_arguments(
        (4, 4, 4), 4, 2, 4, 12, 20, accepted=(1, 2, 3), state_dtype=state_dtype, state_v_first=state_v_first
    )
    arguments["null_slot"] = 3
    table = torch.tensor([[0, 1, 2, 4], [5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int64)
    full = clone({**arguments, "spec_state_indices": table.clone()})
    expected = call(SPEC, full)
    for row, column in ((0, 1), (0, 3), (1, 0), (2, 3)):
        table[row, column] = pad
    arguments["spec_state_indices"] = table
    before = guarded.pool.clone()
    assert same_bits(call(SPEC, arguments), expected)
    skipped = [1, 4, 5, 12]
    stored = [slot for slot in range(13) if slot not in skipped and slot != 3]
    assert same_bits(guarded.pool[stored], full["initial_state_source"][stored])
    assert same_bits(guarded.pool[[*skipped, 3, 13, 14]], before[[*skipped, 3, 13, 14]])
    guarded.check()


@pytest.mark.parametrize("pad", [-1, 0], ids=["negative", "null"])
def test_a_padded_source_makes_the_row_padding(impl, pad):
    arguments, guarded = inputs.spec_arguments((3, 2, 3), 3, 2, 4, 12, 20, accepted=(2, 2, 1))
    arguments["spec_state_indices"] = torch.tensor([[1, 2, 3], [4, pad, 5], [6, 7, 8]])
    arguments["null_slot"] = 0
    for name in PER_TOKEN:
        arguments[name] = arguments[name].clone()
        arguments[name].narrow(PER_TOKEN[name], 3, 2).fill_(math.nan)
    arguments["out"] = torch.full((1, 8, 4, 20), math.nan)
    before = guarded.pool.clone()
    o = call(SPEC, arguments)
    assert bool((o[:, 3:5] == 0).all())
    assert bool(o[:, :3].isfinite().all()) and bool(o[:, 5:].isfinite().all())
    assert same_bits(guarded.pool[[0, 4, 5]], before[[0, 4, 5]])
    guarded.check()


def test_tokens_outside_every_row_give_zeros(impl):
    arguments, _ = inputs.spec_arguments((2, 3, 2, 3), 3, 2, 4, 12, 20, accepted=(1, 2, 1, 3))
    arguments["spec_state_indices"] = arguments["spec_state_indices"][1:3]
    arguments["num_accepted_tokens"] = ints(2, 0)
    arguments["cu_seqlens"] = ints(2, 5, 7)
    for name, dim in PER_TOKEN.items():
        arguments[name] = arguments[name].clone()
        arguments[name].narrow(dim, 0, 2).fill_(math.nan)
        arguments[name].narrow(dim, 7, 3).fill_(math.nan)
    o = call(SPEC, {**arguments, "out": torch.full((1, 10, 4, 20), math.nan)})
    assert bool((o[:, :2] == 0).all()) and bool((o[:, 7:] == 0).all())
    assert bool(o[:, 2:7].isfinite().all())


@pytest.mark.parametrize("lengths", [(0, 0), (0, 2, 0), ()], ids=str)
def test_rows_of_no_tokens_change_nothing(impl, lengths):
    arguments, guarded = inputs.spec_arguments(lengths, 2, 2, 4, 12, 20)
    before = guarded.pool.clone()
    call(SPEC, arguments)
    table = arguments["spec_state_indices"].tolist()
    idle = [slot for row, length in zip(table, lengths, strict=True) if length == 0 for slot in row]
    assert same_bits(guarded.pool[idle], before[idle])
    guarded.check()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("num_accepted_tokens", ints(3, 4), ValueError, r"expected values in \[0, 3\], got \[3, 4\]"),
        ("num_accepted_tokens", ints(-1, 2), ValueError, r"expected values in \[0, 3\], got \[-1, 2\]"),
        ("num_accepted_tokens", ints(1), ValueError, r"expected \[2\], got int32 \[1\]"),
        ("num_accepted_tokens", torch.ones(2), TypeError, r"expected int32 or int64 \[2\], got float32 \[2\]"),
        ("cu_seqlens", ints(0, 4, 5), ValueError, "expected rows of at most 3 tokens, got one of 4"),
        ("cu_seqlens", ints(0, 3, 2), ValueError, r"expected non-decreasing offsets in \[0, 5\], got \[0, 3, 2\]"),
        ("cu_seqlens", ints(0, 3, 6), ValueError, r"expected non-decreasing offsets in \[0, 5\], got \[0, 3, 6\]"),
        ("cu_seqlens", ints(0, 5), ValueError, r"expected \[3\], got int32 \[2\]"),
        ("spec_state_indices", ints(0, 1, 2), ValueError, r"expected \[N, S\], got int32 \[3\]"),
        ("spec_state_indices", torch.zeros(2, 17, dtype=torch.int32), ValueError, r"expected 1 to 16 columns, got"),
        ("spec_state_indices", torch.tensor([[0, 1, 2], [3, 4, 9]]), IndexError, "expected slots below 9, got 9"),
        ("initial_state_source", torch.zeros(9, 4, 12, 19), ValueError, r"expected \[P, 4, 12, 20\], got"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value)[:24],
)
def test_errors_before_anything_is_written(impl, name, value, error, message):
    arguments, _ = inputs.spec_arguments((3, 2), 3, 2, 4, 12, 20, accepted=(2, 1))
    arguments |= {"out": torch.full((1, 5, 4, 20), 7.0), name: value}
    with untouched(arguments), pytest.raises(error, match=f"^{name}: {message}"):
        call(SPEC, arguments)


# --- bit for bit: any acceptance pattern is plain decode --------------------------------------------------------------


class SeveralSlots:
    """Requests that keep a state per token of a step; the state of request n is in its first slot at first."""

    def __init__(self, common, states, S):
        N = len(states)
        rng = inputs.generator(3)
        self.guarded = inputs.guarded_pool(N * S + 2, states.shape[1:], states.dtype)
        self.table = inputs.distinct_slots(N * S, N * S + 2, rng).view(N, S)
        self.guarded.pool[self.table[:, 0].long()] = states
        self.arguments = {**common, "initial_state_source": self.guarded.pool, "spec_state_indices": self.table}

    def step(self, tokens, cu_seqlens, accepted):
        arguments = {**self.arguments, **tokens, "cu_seqlens": cu_seqlens, "num_accepted_tokens": accepted}
        return call(SPEC, arguments)

    def check_states(self, n, before, after):
        """Compare the states after each token of the last step."""
        slots = self.table[n, : len(after)].long()
        assert same_bits(self.guarded.pool[slots], torch.stack(after))


class Replay:
    """Requests that keep one state each, and the records of a step."""

    def __init__(self, common, states, S):
        N, (HV, *inner) = len(states), states.shape[1:]
        K, V = reversed(inner) if common["state_v_first"] else inner
        self.guarded = inputs.guarded_pool(N + 2, states.shape[1:], states.dtype)
        self.slots = inputs.distinct_slots(N, N + 2, inputs.generator(3))
        self.guarded.pool[self.slots.long()] = states
        self.sizes = (N + 2, S, HV, K, V)
        self.records = None
        self.arguments = {**common, "state": self.guarded.pool, "slot_indices": self.slots}

    def step(self, tokens, cu_seqlens, accepted):
        num_slots, S, HV, K, V = self.sizes
        if self.records is None:
            self.records = ReplayRecords(num_slots, S, tokens["q"].shape[2], HV, K, V, tokens["q"].dtype)
        arguments = {**self.arguments, **tokens, "cu_seqlens": cu_seqlens, "records": self.records}
        o = call(REPLAY, {**arguments, "num_accepted_tokens": accepted})
        for n, slot in enumerate(self.slots.tolist()):
            start, end = cu_seqlens[n : n + 2].tolist()
            if start < end:
                assert int(self.records.live[slot]) == end - start
                assert same_bits(self.records.k[slot, : end - start], tokens["k"][0, start:end])
        return o

    def check_states(self, n, before, after):
        """Compare the state that the last step resumed from."""
        assert same_bits(self.guarded.pool[int(self.slots[n])], before)


FORMS = [pytest.param(SeveralSlots, id="several_slots"), pytest.param(Replay, id="replay")]


def draw_tokens(count, shape, dtype, seed, size=None):
    """Draw tokens, with q and k that many times as large."""
    arguments, _ = inputs.decode_arguments((1,) * count, *shape, dtype=dtype, seed=seed, is_packed=True)
    tokens = {name: arguments[name] for name in PER_TOKEN}
    if size is not None:
        tokens |= {name: (tokens[name].float() * size).to(dtype) for name in ("q", "k")}
    tokens["a"] = tokens["a"].clone()
    tokens["a"][3::5] = 1e4  # the decay is 0: a reset
    return tokens


def some_tokens(tokens, start, length):
    return {name: tokens[name].narrow(dim, start, length) for name, dim in PER_TOKEN.items()}


def decode_one_by_one(common, tokens, state, length):
    """Return the outputs of plain decode, and the state after each token."""
    pool, outputs, states = state[None].clone(), [], []
    for t in range(length):
        one = some_tokens(tokens, t, 1)
        slot = {"initial_state_source": pool, "initial_state_indices": ints(0)}
        outputs.append(call(DECODE, {**common, **one, **slot}))
        states.append(pool[0].clone())
    return torch.cat(outputs, dim=1), states


def chain(form_class, shape, S, state_v_first, dtype, rows=2, steps=6, size=None):
    """Speculate for several steps of ragged rows and random acceptance; every output and state must be decode's."""
    _, HV, K, V = shape
    draw = random.Random(f"{shape} {S}")
    seed_arguments, _ = inputs.decode_arguments((1,), *shape, dtype=dtype)
    common = {name: seed_arguments[name] for name in ("A_log", "dt_bias", "use_qk_l2norm_in_kernel")}
    common["state_v_first"] = state_v_first
    inner = (V, K) if state_v_first else (K, V)
    states = list(inputs.normal((rows, HV, *inner), inputs.generator(1), torch.float32))
    form = form_class(common, torch.stack(states), S)
    accepted = [0] * rows
    for step in range(steps):
        lengths = [S if step % 3 == 0 else draw.randint(0, S) for _ in range(rows)]
        tokens = draw_tokens(sum(lengths), shape, dtype, step + 1, size)
        torch.set_num_threads(THREADS[step % len(THREADS)])
        o = form.step(tokens, inputs.offsets(lengths), ints(*accepted))
        start = 0
        for n, length in enumerate(lengths):
            if length == 0:
                continue
            expected, after = decode_one_by_one(common, some_tokens(tokens, start, length), states[n], length)
            assert expected.isfinite().all()
            assert same_bits(o[:, start : start + length], expected), (step, n)
            form.check_states(n, states[n], after)
            # Everything, nothing (which acts as one), or any number of the tokens.
            accepted[n] = (length, 0, draw.randint(1, length))[draw.randint(0, 2)]
            states[n] = after[max(accepted[n], 1) - 1]
            start += length
    form.guarded.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("S", [1, 2, 4, 16])
@LAYOUTS
def test_any_acceptance_pattern_is_decode_token_by_token(native_impl, form, shape, S, state_v_first):
    if S == 16 and shape[2] * shape[3] > 8192:
        pytest.skip("long rows of large heads: nothing that the others lack")
    chain(form, shape, S, state_v_first, FLOATS[SHAPES.index(shape) % 3])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e25, 1e-25])
@LAYOUTS
def test_q_and_k_whose_squares_leave_fp32(native_impl, form, size, state_v_first):
    chain(form, (2, 4, 128, 128), 4, state_v_first, torch.bfloat16, size=size)


def test_every_number_of_accepted_tokens(native_impl):
    for S in range(1, 9):
        for count in range(1, S + 1):
            arguments, guarded = inputs.spec_arguments((S,), S, 1, 2, 20, 36, accepted=(count,))
            source = guarded.pool[arguments["spec_state_indices"][0, count - 1]].clone()
            tokens = {name: arguments[name] for name in PER_TOKEN}
            common = {name: arguments[name] for name in ("A_log", "dt_bias", "use_qk_l2norm_in_kernel")}
            expected, after = decode_one_by_one(common, tokens, source, S)
            assert same_bits(call(SPEC, arguments), expected)
            assert same_bits(guarded.pool[arguments["spec_state_indices"][0].long()], torch.stack(after))


@pytest.mark.parametrize("state_dtype", FLOATS, ids=str)
@LAYOUTS
def test_flushed_states_are_those_of_several_slots(native_impl, state_dtype, state_v_first):
    shape, S, lengths, accepted = (2, 4, 32, 48), 4, (3, 1, 4, 2), (3, 1, 0, 2)
    arguments, _ = inputs.spec_arguments(
        lengths, S, *shape, accepted=(0,) * 4, state_dtype=state_dtype, state_v_first=state_v_first
    )
    pool, table = arguments["initial_state_source"], arguments["spec_state_indices"]
    slots = table[:, 0].clone()
    records = gdn_core.ReplayRecords(len(pool), S, *shape, arguments["q"].dtype)
    one_slot = {k: x for k, x in arguments.items() if k not in ("initial_state_source", "spec_state_indices")}
    states = pool.clone()
    replay = {**one_slot, "state": states, "slot_indices": slots, "records": records}
    assert same_bits(call(REPLAY, replay), call(SPEC, arguments))
    unused = min(set(range(len(pool))) - set(table.flatten().tolist()))
    padded = torch.cat([slots, ints(-1), ints(unused)])
    kept = {"use_qk_l2norm_in_kernel": arguments["use_qk_l2norm_in_kernel"], "state_v_first": state_v_first}
    records.flush(states, padded, ints(*accepted, 0, 4), null_slot=unused, **kept)
    for n, count in enumerate(accepted):
        assert same_bits(states[slots[n]], pool[table[n, max(count, 1) - 1]]), n
    assert not records.live.any()
    # Nothing is left to replay.
    again = states.clone()
    records.flush(again, slots, ints(*accepted), **kept)
    assert same_bits(again, states)


def test_errors_of_flush_before_anything_is_written(impl):
    records = gdn_core.ReplayRecords(3, 2, 1, 1, 16, 16, torch.float32)
    records.u.fill_(1)
    records.k.fill_(1)
    records.live.fill_(1)
    pool = torch.ones(3, 1, 16, 16)
    with pytest.raises(ValueError, match="num_accepted_tokens"):
        records.flush(pool, ints(0, 1), ints(1, 2))
    with pytest.raises(IndexError, match=r"^slots: expected slots below 3, got 3"):
        records.flush(pool, ints(0, 3))
    for slots in ([0, 1], None, torch.zeros(1)):
        with pytest.raises(TypeError, match=r"^slots: expected .*, got"):
            records.flush(pool, slots)
    with pytest.raises(ValueError, match=r"^slots: expected"):
        records.flush(pool, torch.tensor(0))
    with pytest.raises(TypeError, match=r"^state: expected a torch.Tensor, got 'x'"):
        records.flush("x", ints(0))
    with pytest.raises(TypeError, match=r"^num_accepted_tokens: expected a torch.Tensor, got list"):
        records.flush(pool, ints(0), [1])
    elsewhere = gdn_core.ReplayRecords(3, 2, 1, 1, 16, 16, torch.float32, device="meta")
    with pytest.raises(ValueError, match=r"^records.u: expected device cpu \(of state\), got meta"):
        elsewhere.flush(pool, ints(0))
    with torch.inference_mode():
        records.live = records.live.clone()
    with pytest.raises(RuntimeError, match=r"^records.live: expected .*inference_mode"):
        records.flush(pool, ints(0))
    assert (pool == 1).all() and (records.live == 1).all()


# --- bit for bit: alone, in a batch, at any number of threads ---------------------------------------------------------


def one_row(arguments, row, per_row):
    """Keep one row of a call, on a pool of its own."""
    start, end = arguments["cu_seqlens"][row : row + 2].tolist()
    alone = clone(arguments)
    alone |= some_tokens(alone, start, end - start)
    alone |= {name: alone[name][row : row + 1] for name in per_row}
    return {**alone, "cu_seqlens": ints(0, end - start)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@LAYOUTS
def test_several_slots_alone_and_at_any_thread_count(native_impl, shape, state_v_first):
    state_dtype = FLOATS[SHAPES.index(shape) % 3]
    arguments, _ = inputs.spec_arguments(
        (3, 1, 4, 2), 4, *shape, accepted=(1, 4, 2, 0), state_dtype=state_dtype, state_v_first=state_v_first
    )
    torch.set_num_threads(1)
    whole = clone(arguments)
    expected = call(SPEC, whole)
    for threads in THREADS:
        torch.set_num_threads(threads)
        again = clone(arguments)
        assert same_bits(call(SPEC, again), expected)
        assert same_bits(again["initial_state_source"], whole["initial_state_source"])
        row = threads % 4
        alone = one_row(arguments, row, ("spec_state_indices", "num_accepted_tokens"))
        start, end = arguments["cu_seqlens"][row : row + 2].tolist()
        assert same_bits(call(SPEC, alone), expected[:, start:end])
        slots = alone["spec_state_indices"][0, : end - start].long()
        assert same_bits(alone["initial_state_source"][slots], whole["initial_state_source"][slots])


@REPLAYS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@LAYOUTS
def test_replay_alone_and_at_any_thread_count(native_impl, op, shape, state_v_first):
    state_dtype = FLOATS[SHAPES.index(shape) % 3]
    arguments, _ = replay_call(
        op, (3, 1, 4, 2), 4, shape, accepted=(1, 4, 2, 0), live=(3, 4, 2, 0), state_dtype=state_dtype,
        state_v_first=state_v_first,
    )  # fmt: skip
    torch.set_num_threads(1)
    whole = clone(arguments)
    expected = call(op, whole)
    parts = ("k", "u", "decay", "live")
    for threads in THREADS:
        torch.set_num_threads(threads)
        again = clone(arguments)
        assert same_bits(call(op, again), expected)
        assert same_bits(again["state"], whole["state"])
        for name in parts:
            assert torch.equal(getattr(again["records"], name), getattr(whole["records"], name))
        row = threads % 4
        start, end = arguments["cu_seqlens"][row : row + 2].tolist()
        alone = clone(arguments)
        dims = PER_TOKEN if op == REPLAY else dict.fromkeys(("mixed_qkv", "a", "b", "output_gate"), 0)
        alone |= {name: alone[name].narrow(dim, start, end - start) for name, dim in dims.items()}
        alone |= {name: alone[name][row : row + 1] for name in ("slot_indices", "num_accepted_tokens")}
        alone["cu_seqlens"] = ints(0, end - start)
        o = call(op, alone)
        assert same_bits(o, expected[:, start:end] if op == REPLAY else expected[start:end])
        slot = int(alone["slot_indices"][0])
        assert same_bits(alone["state"][slot], whole["state"][slot])
        for name in parts:
            assert torch.equal(getattr(alone["records"], name)[slot], getattr(whole["records"], name)[slot])


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@LAYOUTS
def test_the_fused_forms_agree(native_impl, shape, state_v_first):
    S, steps, rows = 4, 6, 3
    draw = random.Random(str(shape))
    dtype = FLOATS[SHAPES.index(shape) % 3]
    slots, _ = inputs.fused_decode_arguments((S,) * rows, S, *shape, dtype=dtype, state_v_first=state_v_first)
    records, _ = inputs.fused_decode_arguments(
        (S,) * rows, S, *shape, replay=True, dtype=dtype, state_v_first=state_v_first
    )
    records["norm_weight"] = slots["norm_weight"]
    records["state"][records["slot_indices"].long()] = slots["state"][slots["state_indices"][:, 0].long()]
    accepted = [0] * rows
    for step in range(steps):
        lengths = [S if step == 0 else draw.randint(0, S) for _ in range(rows)]
        tokens, _ = inputs.fused_decode_arguments(lengths, S, *shape, dtype=dtype, seed=step + 1)
        tokens = {name: tokens[name] for name in ("mixed_qkv", "a", "b", "output_gate", "cu_seqlens")}
        tokens["num_accepted_tokens"] = ints(*accepted)
        torch.set_num_threads(THREADS[step % len(THREADS)])
        expected = call(FUSED, {**slots, **tokens})
        assert same_bits(call(FUSED_REPLAY, {**records, **tokens}), expected)
        for n, length in enumerate(lengths):
            if length > 0:
                accepted[n] = (length, 0, draw.randint(1, length))[draw.randint(0, 2)]


@pytest.mark.parametrize("op", [SPEC, REPLAY], ids=["several_slots", "replay"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@LAYOUTS
def test_a_head_does_not_depend_on_the_others(native_impl, op, shape, state_v_first):
    H, HV, *_ = shape
    options = {"accepted": (2, 1), "state_v_first": state_v_first}
    if op == REPLAY:
        arguments, _ = inputs.replay_arguments((3, 2), 3, *shape, live=(3, 2), **options)
    else:
        arguments, _ = inputs.spec_arguments((3, 2), 3, *shape, **options)
    pool = "state" if op == REPLAY else "initial_state_source"
    whole = clone(arguments)
    expected = call(op, whole)
    for key_head in range(H):
        heads = slice(key_head * (HV // H), (key_head + 1) * (HV // H))
        alone = clone(arguments)
        alone |= {name: alone[name][:, :, key_head : key_head + 1] for name in ("q", "k")}
        alone |= {name: alone[name][heads] for name in ("A_log", "dt_bias")}
        alone |= {name: alone[name][:, heads] for name in ("a", "b", pool)}
        alone["v"] = alone["v"][:, :, heads]
        if op == REPLAY:
            records = alone["records"]
            alone["records"] = ReplayRecords.from_tensors(
                records.k[:, :, key_head : key_head + 1], records.u[:, :, heads], records.decay[:, :, heads],
                records.live,
            )  # fmt: skip
        assert same_bits(call(op, alone), expected[:, :, heads])
        assert same_bits(alone[pool], whole[pool][:, heads])
        if op == REPLAY:
            assert torch.equal(alone["records"].u, whole["records"].u[:, :, heads])
            assert torch.equal(alone["records"].decay, whole["records"].decay[:, :, heads])
