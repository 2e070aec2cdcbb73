# SPDX-License-Identifier: Apache-2.0
"""gdn-cuda's decode kernel, run by the emulator: against float64, against gdn-cpu, and bit for bit against itself."""

from __future__ import annotations

import math
import random

import pytest
import torch

import cuda_emulator
import gdn_core
from contract_calls import DECODE, FLOATS, call, same_bits, untouched
from gdn_core import ReplayRecords
from gdn_core.testing import clone, inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance

pytestmark = cuda_emulator.needs_linux

FUSED = "fused_gdn_decode_post_conv_mtp"
FUSED_REPLAY = f"{FUSED}_replay"
SPEC, REPLAY = f"{DECODE}_spec", f"{DECODE}_replay"
BOTH_FUSED = pytest.mark.parametrize("op", [FUSED, FUSED_REPLAY], ids=["slots", "replay"])

# (H, HV, K, V): the models' own, and each dimension with each other one.
MODEL = (2, 4, 128, 128)
SHAPES = (MODEL, (1, 3, 64, 64), (2, 2, 64, 128), (1, 1, 64, 256), (1, 2, 128, 64), (1, 1, 128, 256), (1, 1, 256, 64),
          (1, 2, 256, 128), (1, 1, 256, 256))  # fmt: skip
# Processors of the device: with few, a block has a head's columns to itself; with many, blocks share them.
SPLITS = pytest.mark.parametrize("processors", [1, 1000], ids=["whole_heads", "split_heads"])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def emulator():
    with cuda_emulator.forced() as module:
        yield module


def fused_call(op, lengths, S, shape=MODEL, **options):
    replay = op == FUSED_REPLAY
    if replay:
        options.setdefault("live", [S] * len(lengths))
    else:
        options.pop("live", None)
    return inputs.fused_decode_arguments(lengths, S, *shape, replay=replay, **options)


def plain_call(op, lengths, S, shape=MODEL, **options):
    make = inputs.replay_arguments if op == REPLAY else inputs.spec_arguments
    if op == REPLAY:
        options.setdefault("live", [S] * len(lengths))
    return make(lengths, S, *shape, state_v_first=True, **options)


def pool_of(arguments):
    return arguments["state"] if "state" in arguments else arguments["initial_state_source"]


def records_of(arguments):
    records = arguments.get("records")
    return () if records is None else (records.k, records.u, records.decay, records.live)


def check(op, arguments, guarded):
    """Run a call, compare outputs, states and records with float64, and look after the guards."""
    wide = to_float64(arguments)
    expected = getattr(oracle, op)(**wide)
    written = ["state", "initial_state_source", *(f"records.{name}" for name in ("k", "u", "decay", "live"))]
    with untouched(arguments, *written):
        o = call(op, arguments)
    dtype = o.dtype
    half = tolerance("decode_half_pool", dtype) if guarded.pool.element_size() == 2 else 0.0
    what = "fused_decode" if op in (FUSED, FUSED_REPLAY) else "decode_output"
    T, HV, V = o.shape[-3:]
    error = packed_relative_error(o.view(1, T, HV, V), expected.view(1, T, HV, V), arguments["cu_seqlens"])
    assert error <= max(tolerance(what, dtype), half)
    assert relative_error(guarded.pool, pool_of(wide), (2, 3)) <= max(tolerance("decode_state", dtype), half)
    guarded.check()
    for actual, wanted in zip(records_of(arguments), records_of(wide), strict=True):
        bound = 1e-5 if half == 0.0 else 1e-2
        assert float((actual.double() - wanted.double()).norm()) <= bound * float(wanted.double().norm())
    return o


# --- against float64 --------------------------------------------------------------------------------------------------


@BOTH_FUSED
@SPLITS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dimension(emulator, op, shape, processors):
    emulator.configure(num_processors=processors)
    check(op, *fused_call(op, (3, 1, 0, 2), 3, shape, accepted=(3, 1, 2, 0), dtype=torch.bfloat16))


@BOTH_FUSED
@pytest.mark.parametrize("state_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype(emulator, op, dtype, state_dtype):
    check(op, *fused_call(op, (4, 2, 3), 4, accepted=(4, 1, 2), dtype=dtype, state_dtype=state_dtype))


@pytest.mark.parametrize("op", [SPEC, REPLAY], ids=["slots", "replay"])
@pytest.mark.parametrize("normalize", [False, True])
@SPLITS
def test_separate_q_k_and_v_without_a_norm(emulator, op, normalize, processors):
    emulator.configure(num_processors=processors)
    arguments, guarded = plain_call(op, (3, 1, 2), 3, accepted=(2, 1, 0), dtype=torch.float32, is_packed=True)
    arguments |= {"use_qk_l2norm_in_kernel": normalize, "scale": 0.3, "softplus_beta": 1.5, "softplus_threshold": 2.0}
    if op == REPLAY and not normalize:
        arguments["records"].k.mul_(0.3)
    arguments["k"] = arguments["k"] / 4
    check(op, arguments, guarded)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@SPLITS
def test_single_tokens(emulator, dtype, normalize, processors):
    """One token and one slot a row, without offsets: the plain decode."""
    emulator.configure(num_processors=processors)
    arguments, guarded = inputs.decode_arguments((1, 1, 1), 2, 4, 64, 128, dtype=dtype, state_v_first=True)
    arguments |= {"cu_seqlens": None, "use_qk_l2norm_in_kernel": normalize, "k": arguments["k"] / 4}
    wide = to_float64(arguments)
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide)
    o = call(DECODE, arguments)
    assert packed_relative_error(o, expected, torch.arange(4)) <= tolerance("decode_output", dtype)
    assert relative_error(guarded.pool, wide["initial_state_source"], (2, 3)) <= tolerance("decode_state", dtype)
    guarded.check()


@pytest.mark.parametrize("shape", [(2, 4, 64, 128), (1, 2, 128, 256), (1, 1, 256, 64)], ids=str)
@pytest.mark.parametrize("state_dtype", FLOATS, ids=str)
@SPLITS
def test_rows_of_any_length_on_one_slot(emulator, shape, state_dtype, processors):
    """Longer than what shared memory holds, as long, shorter, empty, and a padding row."""
    emulator.configure(num_processors=processors)
    arguments, guarded = inputs.decode_arguments(
        (19, 8, 0, 3, 9), *shape, dtype=torch.bfloat16, state_dtype=state_dtype, state_v_first=True
    )
    arguments["initial_state_indices"][4] = -1
    arguments |= {"use_qk_l2norm_in_kernel": True, "out": torch.full(arguments["v"].shape, math.nan)}
    wide = to_float64({**arguments, "out": None})
    expected = oracle.fused_sigmoid_gating_delta_rule_update(**wide)
    o = call(DECODE, arguments)
    half = 0.0 if state_dtype == torch.float32 else tolerance("decode_half_pool", torch.bfloat16)
    assert packed_relative_error(o, expected, arguments["cu_seqlens"]) <= 2e-6
    assert bool((o[:, -9:] == 0).all())
    bound = max(tolerance("decode_state", torch.bfloat16), half)
    assert relative_error(guarded.pool, wide["initial_state_source"], (2, 3)) <= bound
    guarded.check()


def test_long_rows_have_the_bits_of_single_tokens(emulator):
    arguments, _ = inputs.decode_arguments((11, 2), 2, 4, 64, 64, dtype=torch.bfloat16, state_v_first=True)
    single = clone(arguments)
    o = call(DECODE, arguments)
    slots = single["initial_state_indices"]
    single |= {"cu_seqlens": None}
    for row, (start, end) in enumerate(((0, 11), (11, 13))):
        for t in range(start, end):
            step = dict(single)
            for name in ("q", "k", "v"):
                step[name] = single[name][:, t : t + 1]
            for name in ("a", "b"):
                step[name] = single[name][t : t + 1]
            step["initial_state_indices"] = slots[row : row + 1]
            assert same_bits(call(DECODE, step), o[:, t : t + 1])
    assert same_bits(single["initial_state_source"], arguments["initial_state_source"])


@BOTH_FUSED
@pytest.mark.parametrize("S", [1, 2, 5, 8, 16])
def test_up_to_16_tokens(emulator, op, S):
    lengths, accepted = (S, max(S - 1, 1), 1), (S, 0, (S + 1) // 2)
    check(op, *fused_call(op, lengths, S, (1, 2, 64, 64), accepted=accepted, dtype=torch.float16))


@BOTH_FUSED
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid", "none"])
@SPLITS
def test_every_activation_and_ratio(emulator, op, activation, processors):
    emulator.configure(num_processors=processors)
    arguments, guarded = fused_call(op, (2, 1), 2, (2, 10, 64, 64), accepted=(1, 2), activation=activation)
    if activation == "none":
        arguments["output_gate"] = torch.full_like(arguments["output_gate"], math.nan)
    check(op, arguments, guarded)


@BOTH_FUSED
@pytest.mark.parametrize("parameters", FLOATS, ids=str)
def test_parameters_of_any_dtype_and_stride(emulator, op, parameters):
    arguments, guarded = fused_call(op, (2, 1), 2, (1, 2, 64, 64), dtype=torch.bfloat16)
    for name in ("A_log", "dt_bias", "norm_weight"):
        arguments[name] = torch.stack([arguments[name].to(parameters)] * 2, dim=1)[:, 0]
    arguments["cu_seqlens"] = torch.stack([arguments["cu_seqlens"].long()] * 2, dim=1)[:, 0]
    name = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    arguments[name] = torch.stack([arguments[name].long()] * 2, dim=-1)[..., 0]
    check(op, arguments, guarded)


@pytest.mark.report("A04")
def test_rates_that_overflow(emulator):
    """A rate of infinity times a softplus of zero is no decay; infinite log decays are resets, also of NaN."""
    arguments, guarded = fused_call(FUSED, (1, 1, 1), 1, (1, 2, 64, 64))
    arguments["A_log"] = torch.tensor([100.0, 100.0])
    arguments["a"] = torch.tensor([[-200.0, -200.0], [50.0, 50.0], [-102.0, -101.0]])
    arguments["dt_bias"] = torch.zeros(2)
    expected = clone(arguments)
    slot = int(arguments["state_indices"][1, 0])
    guarded.pool[slot] = math.nan
    expected["state"][slot] = 0
    o = call(FUSED, arguments)
    wide = to_float64(expected)
    oracle_o = oracle.fused_gdn_decode_post_conv_mtp(**wide)
    assert packed_relative_error(o[None], oracle_o[None], arguments["cu_seqlens"]) <= 2e-5
    assert relative_error(guarded.pool, wide["state"], (2, 3)) <= 2e-5


# --- against the CPU backend ------------------------------------------------------------------------------------------


@BOTH_FUSED
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("state_dtype", FLOATS, ids=str)
def test_agrees_with_the_cpu_backend(emulator, cpu_backend, op, dtype, state_dtype):
    arguments, _ = fused_call(op, (4, 1, 2), 4, accepted=(2, 4, 1), dtype=dtype, state_dtype=state_dtype)
    arguments["out"] = torch.empty(arguments["output_gate"].shape)
    on_cpu = clone(arguments)
    o = call(op, arguments)
    with gdn_core.use_backend("cpu"):
        expected = call(op, on_cpu)
    # An fp32 value at the middle of two of the pool may go either way: then what follows from the state differs too.
    half = 0.0 if state_dtype == torch.float32 else 1e-3
    assert relative_error(o, expected, (0, 2)) <= max(tolerance("fused_decode", torch.float32), half)
    assert relative_error(arguments["state"], on_cpu["state"], (2, 3)) <= max(2e-6, half)


# --- bit for bit ------------------------------------------------------------------------------------------------------


def outcome(op, arguments, **configuration):
    """Run a copy of a call, and return all that it wrote."""
    arguments = clone(arguments)
    cuda_emulator.module().configure(**configuration)
    return (call(op, arguments), pool_of(arguments), *records_of(arguments))


def equal(left, right):
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


@BOTH_FUSED
@pytest.mark.parametrize("shape", [MODEL, (1, 2, 64, 256), (1, 1, 256, 128)], ids=str)
def test_neither_the_order_of_threads_nor_the_split_matters(emulator, op, shape):
    arguments, _ = fused_call(op, (3, 1, 2), 3, shape, accepted=(2, 1, 3), dtype=torch.bfloat16)
    first = outcome(op, arguments)
    for processors in (1, 3, 8, 1000):
        assert equal(outcome(op, arguments, num_processors=processors), first)
    assert equal(outcome(op, arguments, order="reverse", num_processors=1000), first)
    for seed in range(3):
        assert equal(outcome(op, arguments, order="random", seed=seed, num_processors=1000), first)


@BOTH_FUSED
def test_a_row_alone_is_as_in_a_batch(emulator, op):
    arguments, _ = fused_call(op, (3, 1, 2), 3, accepted=(2, 1, 3), dtype=torch.bfloat16)
    o, pool, *records = outcome(op, arguments, num_processors=5)
    offsets = arguments["cu_seqlens"]
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    for n in range(3):
        alone = clone(arguments)
        rows = slice(int(offsets[n]), int(offsets[n + 1]))
        for name in ("mixed_qkv", "a", "b", "output_gate"):
            alone[name] = alone[name][rows]
        for name in (index, "num_accepted_tokens"):
            alone[name] = alone[name][n : n + 1]
        alone["cu_seqlens"] = ints(0, rows.stop - rows.start)
        slots = alone[index].reshape(-1).long()
        o_alone, pool_alone, *records_alone = outcome(op, alone, num_processors=5)
        assert same_bits(o_alone, o[rows])
        assert same_bits(pool_alone[slots], pool[slots])
        for left, right in zip(records_alone, records, strict=True):
            assert torch.equal(left[slots], right[slots])


@pytest.mark.report("B21")
@pytest.mark.parametrize("state_dtype", FLOATS, ids=str)
@SPLITS
def test_a_chain_of_steps_replays_what_several_slots_hold(emulator, state_dtype, processors):
    """Twelve steps with random acceptance: outputs and states of the two forms, bit for bit."""
    emulator.configure(num_processors=processors)
    rng = random.Random(5)
    S, N, H, HV, K, V = 4, 3, 1, 2, 64, 64
    slots_call, _ = inputs.fused_decode_arguments(
        [S] * N, S, H, HV, K, V, dtype=torch.bfloat16, state_dtype=state_dtype
    )
    replay_call, _ = inputs.fused_decode_arguments(
        [S] * N, S, H, HV, K, V, dtype=torch.bfloat16, state_dtype=state_dtype, replay=True
    )
    for name in ("A_log", "dt_bias", "norm_weight"):
        replay_call[name] = slots_call[name]
    table, slots = slots_call["state_indices"].long(), replay_call["slot_indices"].long()
    slots_call["state"][table[:, 0]] = replay_call["state"][slots]
    replay_call["records"].reset()
    accepted = [0] * N
    lengths = [0] * N
    for step in range(12):
        lengths = [rng.randint(1, S) for _ in range(N)]
        tokens, _ = inputs.fused_decode_arguments(lengths, S, H, HV, K, V, dtype=torch.bfloat16, seed=step + 1)
        for arguments in (slots_call, replay_call):
            for name in ("mixed_qkv", "a", "b", "output_gate", "cu_seqlens"):
                arguments[name] = tokens[name]
            arguments["num_accepted_tokens"] = ints(*accepted)
        assert same_bits(call(FUSED, slots_call), call(FUSED_REPLAY, replay_call)), f"step {step}"
        accepted = [rng.randint(0 if step == 0 else 1, length) for length in lengths]
    # A step without tokens to accept brings the one slot to where the several are.
    final = {**replay_call, "num_accepted_tokens": ints(*accepted), "cu_seqlens": torch.arange(N + 1)}
    for name in ("mixed_qkv", "a", "b", "output_gate"):
        final[name] = final[name][:N]
    call(FUSED_REPLAY, final)
    expected = torch.stack([slots_call["state"][table[n, max(accepted[n], 1) - 1]] for n in range(N)])
    assert same_bits(replay_call["state"][slots], expected)


@BOTH_FUSED
def test_drafts_are_as_decoding_token_by_token(emulator, op):
    S, N = 4, 2
    arguments, _ = fused_call(op, [S] * N, S, (1, 2, 64, 64), accepted=[1] * N, live=[0] * N)
    single = clone(arguments)
    o = call(op, arguments).view(N, S, 2, 64)
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    for t in range(S):
        step = dict(single)
        for name in ("mixed_qkv", "a", "b", "output_gate"):
            step[name] = single[name].unflatten(0, (N, S))[:, t]
        step["cu_seqlens"] = torch.arange(N + 1)
        if op == FUSED:  # one column, which is where the token before left the state
            step[index] = single[index][:, :1]
        assert same_bits(call(op, step), o[:, t])
    if op == FUSED:
        table = arguments[index].long()
        assert same_bits(single["state"][table[:, 0]], arguments["state"][table[:, S - 1]])


# --- padding, slots, isolation ----------------------------------------------------------------------------------------


@pytest.mark.report("B10", "B12")
@BOTH_FUSED
@SPLITS
def test_padding_rows(emulator, op, processors):
    """Negative, null, and out of the pool: outputs of 0, nothing read or written, no NaN anywhere else."""
    emulator.configure(num_processors=processors)
    arguments, guarded = fused_call(op, (2, 1, 3, 2, 1, 2), 3, (1, 2, 64, 64), accepted=(1, 1, 2, 1, 0, 1))
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    slots = arguments[index] = arguments[index].clone()
    null = int(slots.reshape(-1)[-1])
    bad = {1: -1, 3: len(guarded.pool), 5: null}
    for row, slot in bad.items():
        slots[row] = slot
    arguments["null_slot"] = null
    offsets = arguments["cu_seqlens"].tolist()
    spare = 3  # rows after the last span
    for name in ("mixed_qkv", "a", "b", "output_gate"):
        value = arguments[name]
        arguments[name] = torch.cat([value, torch.full((spare, *value.shape[1:]), math.nan)])
        for row in bad:
            arguments[name][offsets[row] : offsets[row + 1]] = math.nan
    arguments["out"] = torch.full(arguments["output_gate"].shape, math.nan)
    before = clone(arguments)
    o = call(op, arguments)
    live_rows = [t for row in (0, 2, 4) for t in range(offsets[row], offsets[row + 1])]
    is_live = torch.zeros(len(o), dtype=torch.bool)
    is_live[live_rows] = True
    assert bool((o[~is_live] == 0).all()) and bool(o[is_live].isfinite().all())
    touched = slots[[0, 2, 4]].reshape(-1).long()
    kept = torch.ones(len(guarded.pool), dtype=torch.bool)
    kept[touched] = False
    assert same_bits(pool_of(arguments)[kept], pool_of(before)[kept])
    for after, old in zip(records_of(arguments), records_of(before), strict=True):
        assert torch.equal(after[kept], old[kept])
    guarded.check()


@BOTH_FUSED
@pytest.mark.parametrize(
    ("name", "value", "padded"),
    [
        ("num_accepted_tokens", ints(1, 4, 1), (1,)),
        ("num_accepted_tokens", ints(1, -1, 1), (1,)),
        ("cu_seqlens", ints(0, 1, 5, 6), (1,)),  # longer than the table
        ("cu_seqlens", ints(0, 2, 1, 3), (1,)),  # decreasing
        ("cu_seqlens", ints(0, 2, 4, 9), (2,)),  # beyond the tokens
        ("cu_seqlens", ints(-1, 2, 4, 6), (0,)),
    ],
    ids=str,
)
def test_rows_out_of_range_are_padding(emulator, op, name, value, padded):
    """What a CPU raises for, a GPU cannot without waiting: such rows are padding, and every output is written."""
    arguments, guarded = fused_call(op, (2, 2, 2), 3, (1, 2, 64, 64), accepted=(1, 1, 1))
    arguments["out"] = torch.full(arguments["output_gate"].shape, math.nan)
    arguments[name] = value
    before = clone(arguments)
    o = call(op, arguments)
    assert bool(o.isfinite().all())
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    slots = arguments[index][list(padded)].reshape(-1).long()
    assert same_bits(pool_of(arguments)[slots], pool_of(before)[slots])
    offsets = arguments["cu_seqlens"].tolist()
    for row in padded:
        if name == "num_accepted_tokens":
            assert bool((o[offsets[row] : offsets[row + 1]] == 0).all())
    guarded.check()


@BOTH_FUSED
def test_nothing_to_do(emulator, op):
    """No rows, no tokens of a row, tokens of no row."""
    arguments, _ = fused_call(op, (0, 0), 3, (1, 2, 64, 64))
    before = clone(arguments)
    assert call(op, arguments).shape == (0, 2, 64)
    assert same_bits(pool_of(arguments), pool_of(before))
    arguments, _ = fused_call(op, (2, 0, 1), 3, (1, 2, 64, 64))
    before = clone(arguments)
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    arguments |= {index: arguments[index][:0], "cu_seqlens": ints(0), "num_accepted_tokens": None}
    arguments["out"] = torch.full((3, 2, 64), math.nan)
    assert bool((call(op, arguments) == 0).all())
    assert same_bits(pool_of(arguments), pool_of(before))


def test_a_destination_that_is_padding_is_skipped(emulator):
    arguments, guarded = fused_call(FUSED, (3, 2), 3, (1, 2, 64, 64), accepted=(3, 1))
    table = arguments["state_indices"] = arguments["state_indices"].clone()
    skipped = table[:, 1].long()
    table[0, 1], table[1, 1] = -1, len(guarded.pool)
    before = guarded.pool.clone()
    expected = {**clone(arguments), "state_indices": table.clamp(max=len(guarded.pool) - 1)}
    expected["state_indices"][1, 1] = -1
    wide = to_float64(expected)
    oracle_o = oracle.fused_gdn_decode_post_conv_mtp(**wide)
    o = call(FUSED, arguments)
    assert packed_relative_error(o[None], oracle_o[None], arguments["cu_seqlens"]) <= 2e-6
    assert same_bits(guarded.pool[skipped], before[skipped])


@pytest.mark.parametrize("what", ["mixed_qkv", "a", "b", "output_gate", "state"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@BOTH_FUSED
def test_nan_stays_in_its_row_and_after_its_token(emulator, op, what, value):
    arguments, _ = fused_call(op, (3, 2, 2), 3, (1, 2, 64, 64), accepted=(2, 1, 2))
    clean = clone(arguments)
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    slots = arguments[index].reshape(3, -1).long()
    if what == "state":
        arguments["state"][slots[1]] = value
    else:
        arguments[what][4] = value  # the second token of row 1
    o, expected = call(op, arguments), call(op, clean)
    assert same_bits(o[:3], expected[:3]) and same_bits(o[5:], expected[5:])
    if what != "state":
        assert same_bits(o[3], expected[3])
    for row in (0, 2):
        assert same_bits(pool_of(arguments)[slots[row]], pool_of(clean)[slots[row]])


@pytest.mark.report("B07")
@BOTH_FUSED
def test_slots_beyond_32_bit_offsets(emulator, op):
    """Slot 1 lies more than 2^31 elements behind slot 0: nothing between them is ever touched."""
    arguments, _ = fused_call(op, (1, 1), 1, (1, 2, 64, 64), spare_slots=0)
    near = clone(arguments)
    storage = torch.empty(2**31 + 3 * 2 * 64 * 64)
    far = torch.as_strided(storage, (2, 2, 64, 64), (2**31 + 64, 64 * 64, 64, 1))
    far.copy_(arguments["state"])
    arguments["state"] = far
    assert same_bits(call(op, arguments), call(op, near))
    assert same_bits(far, near["state"])


def test_more_rows_than_a_grid_is_high(emulator):
    """Rows are blocks in x: 66000 of them, nearly all padding."""
    N = 66000
    arguments, guarded = fused_call(FUSED, (1, 1), 1, (1, 1, 64, 64))
    table = torch.full((N, 1), -1, dtype=torch.int32)
    table[0], table[N - 1] = 1, 2
    expected = clone(arguments) | {"state_indices": ints(1, 2)[:, None]}
    offsets = torch.ones(N + 1, dtype=torch.int32)
    offsets[0], offsets[N] = 0, 2
    o = call(FUSED, arguments | {"state_indices": table, "cu_seqlens": offsets})
    assert same_bits(o, call(FUSED, expected))
    assert same_bits(guarded.pool, expected["state"])


@pytest.mark.report("A06")
def test_beta_is_not_rounded(emulator):
    """A logit of 0.5 for a unit key, value and query: o is its sigmoid in fp32, not one that went through bfloat16."""
    arguments, _ = plain_call(SPEC, (1,), 1, (1, 1, 64, 64), dtype=torch.float32)
    for name in ("q", "k"):
        arguments[name] = torch.zeros_like(arguments[name])
        arguments[name][..., 0] = 1
    arguments |= {"v": torch.ones_like(arguments["v"]), "b": torch.full((1, 1), 0.5), "a": torch.full((1, 1), -1e4)}
    arguments["initial_state_source"].zero_()
    o = call(SPEC, {**arguments, "scale": 1.0})
    assert torch.allclose(o, torch.tensor(0.62245935), rtol=1e-6, atol=0)


@pytest.mark.report("A08")
def test_the_state_is_not_rounded_to_the_activations_dtype(emulator):
    arguments, _ = plain_call(SPEC, (2,), 2, (1, 1, 64, 64), dtype=torch.bfloat16)
    arguments |= {"b": torch.full_like(arguments["b"], -math.inf), "a": torch.full_like(arguments["a"], -1e4)}
    arguments["initial_state_source"].fill_(1 + 2.0**-12)
    before = arguments["initial_state_source"].clone()
    call(SPEC, arguments)
    assert same_bits(arguments["initial_state_source"], before)


@pytest.mark.report("A17")
def test_value_heads_read_the_key_head_of_their_group(emulator):
    arguments, _ = plain_call(SPEC, (1,), 1, (2, 4, 64, 64), dtype=torch.float32)
    arguments["initial_state_source"].zero_()
    for name in ("q", "k"):
        arguments[name] = torch.zeros_like(arguments[name])
        arguments[name][0, 0, 0, 0] = arguments[name][0, 0, 1, 1] = 1
    call(SPEC, arguments)
    state = arguments["initial_state_source"][int(arguments["spec_state_indices"][0, 0])]
    used = (state != 0).any(dim=1)
    assert used.nonzero().tolist() == [[0, 0], [1, 0], [2, 1], [3, 1]]


@BOTH_FUSED
@SPLITS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_calls_about_some_rows_leave_the_others_alone(emulator, op, processors, dtype):
    """Decode and speculative rows of a mixed batch, each by an index into the tables of all."""
    emulator.configure(num_processors=processors)
    arguments, _ = fused_call(op, (2, 3, 0, 1, 3), 3, (1, 2, 64, 64), accepted=(1, 3, 1, 2, 1))
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    arguments[index][3] = -1
    arguments["out"] = torch.full((9, 2, 64), math.nan)
    whole, parts = clone(arguments), clone(arguments)
    call(op, whole)

    def about(*rows):
        call_of_rows(op, parts, torch.tensor(rows, dtype=dtype))

    about()
    assert bool(parts["out"].isnan().all())
    about(4, 0, -1, 5)
    assert same_bits(parts["out"][[0, 1, 6, 7, 8]], whole["out"][[0, 1, 6, 7, 8]])
    assert bool(parts["out"][2:6].isnan().all())
    about(3, 1, 2)
    assert bool((parts["out"][5] == 0).all())
    assert same_bits(parts["out"], whole["out"])
    assert same_bits(parts["state"], whole["state"])
    for left, right in zip(records_of(parts), records_of(whole), strict=True):
        assert torch.equal(left, right)


def call_of_rows(op, arguments, rows):
    """Call an op about some of its rows, as the core of a layer does."""
    defaults = {"scale": None, "null_slot": None, "output_gate_activation": "silu", "norm_eps": 1e-5}
    values = defaults | arguments | {"row_indices": rows}
    if op == FUSED_REPLAY:
        parts = ("k", "u", "decay", "live")
        values |= {f"records_{part}": getattr(arguments["records"], part) for part in parts}
    function = getattr(torch.ops.gdn, op).default
    function(*(values[argument.name] for argument in function._schema.arguments))


# --- layouts, and what is declined or wrong ---------------------------------------------------------------------------


@BOTH_FUSED
def test_strided_operands_and_pools(emulator, op):
    arguments, _ = fused_call(op, (2, 3), 3, (2, 4, 64, 64), dtype=torch.bfloat16, accepted=(1, 2))
    expected = clone(arguments)

    def apart(x, dim):
        return torch.stack([x, torch.full_like(x, 7)], dim=dim + 1).select(dim + 1, 0)

    arguments["mixed_qkv"] = apart(arguments["mixed_qkv"], 1)  # no unit stride: copied
    arguments["output_gate"] = apart(arguments["output_gate"], 1)
    arguments["a"], arguments["b"] = arguments["a"].T.contiguous().T, apart(arguments["b"], 1)
    arguments["state"] = apart(arguments["state"], 0)
    out = torch.empty(5, 4, 2, 64)[:, :, 0]
    if op == FUSED_REPLAY:
        arguments["records"] = ReplayRecords.from_tensors(
            *(apart(x, 1) if x.dim() > 1 else x for x in records_of(arguments))
        )
    assert call(op, arguments | {"out": out}) is out
    expected_o = call(op, expected | {"out": torch.empty(5, 4, 64)})
    assert same_bits(out.contiguous(), expected_o)
    assert same_bits(arguments["state"], expected["state"])
    for left, right in zip(records_of(arguments), records_of(expected), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((2, 4, 96, 128), {}, "K and V: 64, 128 or 256, got 96 and 128"),
        ((2, 4, 128, 32), {}, "K and V: 64, 128 or 256, got 128 and 32"),
        ((1, 2, 64, 64), {"state_v_first": False}, r"the kernel takes states of \[HV, V, K\] only"),
    ],
    ids=str,
)
@BOTH_FUSED
def test_what_the_kernel_declines(emulator, op, shape, options, reason):
    arguments, _ = fused_call(op, (2, 1), 2, shape, **options)
    with untouched(arguments), pytest.raises(NotImplementedError, match=reason):
        call(op, arguments)
    assert reason.split(",")[0].replace("\\", "") in str(gdn_core.explain(op, **arguments))


def test_pools_that_are_not_aligned_are_declined(emulator):
    arguments, _ = fused_call(FUSED, (2, 1), 2, (1, 2, 64, 64))
    shape = arguments["state"].shape
    arguments["state"] = torch.zeros(arguments["state"].numel() + 1)[1:].view(shape)
    with pytest.raises(NotImplementedError, match="state: slots that do not start at a multiple of 16 bytes"):
        call(FUSED, arguments)


def test_float64_is_declined(emulator):
    arguments, _ = fused_call(FUSED, (2, 1), 2, (1, 2, 64, 64), dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="mixed_qkv: float64 runs on the reference"):
        call(FUSED, arguments)


WRONG = [
    ("mixed_qkv", lambda x: x[:, :-1]),
    ("mixed_qkv", lambda x: x.long()),
    ("mixed_qkv", lambda x: x[0]),
    ("output_gate", lambda x: x[1:]),
    ("output_gate", lambda x: x.int()),
    ("a", lambda x: x[:, 1:]),
    ("b", lambda x: x[1:]),
    ("A_log", lambda x: x[1:]),
    ("dt_bias", lambda x: None),
    ("norm_weight", lambda x: x[1:]),
    ("norm_weight", lambda x: x.bool()),
    ("state", lambda x: x[:, 1:]),
    ("state", lambda x: x.mT),
    ("state", lambda x: x.int()),
    ("cu_seqlens", lambda x: x[1:]),
    ("cu_seqlens", lambda x: x.float()),
    ("num_accepted_tokens", lambda x: x[1:]),
    ("num_accepted_tokens", lambda x: x.float()),
    ("norm_eps", lambda x: -1.0),
    ("norm_eps", lambda x: "0"),
    ("scale", lambda x: "1"),
    ("output_gate_activation", lambda x: "gelu"),
    ("num_key_heads", lambda x: 3),
    ("head_k_dim", lambda x: 0),
    ("null_slot", lambda x: 0.5),
    ("out", lambda x: x[1:]),
    ("out", lambda x: x[..., ::2]),
]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=[f"{name}{i}" for i, (name, _) in enumerate(WRONG)])
@BOTH_FUSED
def test_wrong_arguments_raise_what_the_reference_raises(emulator, op, name, change):
    arguments, _ = fused_call(op, (2, 1), 2, (1, 2, 64, 64), accepted=(1, 2))
    arguments |= {"scale": 0.1, "null_slot": None, "out": torch.zeros(3, 2, 64)}
    arguments[name] = change(arguments[name])
    with gdn_core.use_backend("reference"), pytest.raises((TypeError, ValueError)) as expected:
        call(op, arguments)
    with untouched(arguments), pytest.raises(type(expected.value)) as raised:
        call(op, arguments)
    assert str(raised.value).split(":")[0] == str(expected.value).split(":")[0]


@pytest.mark.parametrize("part", ["k", "u", "decay", "live"])
def test_wrong_records(emulator, part):
    for change, error in ((lambda x: x[1:], ValueError), (lambda x: x.to(torch.int16), TypeError)):
        arguments, _ = fused_call(FUSED_REPLAY, (2, 1), 2, (1, 2, 64, 64))
        setattr(arguments["records"], part, change(getattr(arguments["records"], part)))
        with untouched(arguments), pytest.raises(error, match=f"^records.{part}: expected"):
            call(FUSED_REPLAY, arguments)
