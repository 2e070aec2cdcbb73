# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels for decode steps, in Triton's interpreter against float64, and compiled for GPUs without one.

The interpreter cuts fp32 off where a GPU rounds to bf16: with bf16 the outputs here are fp32, and no pool is bf16.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triton_interpreter
from contract_calls import DECODE, call, same_bits, untouched
from gdn_core import ReplayRecords
from gdn_core.testing import clone, inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance
from gdn_core.triton_backend import provider

pytestmark = triton_interpreter.needs_triton

FUSED = "fused_gdn_decode_post_conv_mtp"
FUSED_REPLAY = f"{FUSED}_replay"
SPEC, REPLAY = f"{DECODE}_spec", f"{DECODE}_replay"
BOTH_FUSED = pytest.mark.parametrize("op", [FUSED, FUSED_REPLAY], ids=["slots", "replay"])
SMALL = (1, 2, 16, 16)  # H, HV, K, V


@pytest.fixture(autouse=True)
def interpreter():
    with triton_interpreter.forced():
        yield


def step(op, lengths, S, shape=SMALL, **options):
    """Return arguments of a form of decode and the pool among them."""
    if op == DECODE:
        return inputs.decode_arguments(lengths, *shape, **options)
    if op.endswith("_replay"):
        options.setdefault("live", [S] * len(lengths))
    if op in (FUSED, FUSED_REPLAY):
        return inputs.fused_decode_arguments(lengths, S, *shape, replay=op == FUSED_REPLAY, **options)
    return (inputs.replay_arguments if op == REPLAY else inputs.spec_arguments)(lengths, S, *shape, **options)


def pool_of(arguments):
    return arguments["state"] if "state" in arguments else arguments["initial_state_source"]


def records_of(arguments):
    records = arguments.get("records")
    return () if records is None else (records.k, records.u, records.decay, records.live)


def check(op, arguments, guarded):
    """Run a call, compare all that it writes with float64, and look after the guards."""
    wide = to_float64({**arguments, "out": None})
    expected = getattr(oracle, op)(**wide)
    written = ("state", "initial_state_source", "out", *(f"records.{name}" for name in ("k", "u", "decay", "live")))
    with untouched(arguments, *written):
        o = call(op, arguments)
    half = tolerance("decode_half_pool", o.dtype) if guarded.pool.element_size() == 2 else 0.0
    bounds = arguments["cu_seqlens"] if arguments["cu_seqlens"] is not None else torch.arange(o.shape[1] + 1)
    (HV, V), kind = o.shape[-2:], "fused_decode" if op in (FUSED, FUSED_REPLAY) else "decode_output"
    error = packed_relative_error(o.view(1, -1, HV, V), expected.view(1, -1, HV, V), bounds)
    assert error <= max(tolerance(kind, o.dtype), half)
    state_error = relative_error(guarded.pool, pool_of(wide), (2, 3))
    assert state_error <= max(tolerance("decode_state", o.dtype), half)
    guarded.check()
    for actual, wanted in zip(records_of(arguments), records_of(wide), strict=True):
        bound = 1e-5 if half == 0.0 else 1e-2
        assert float((actual.double() - wanted.double()).norm()) <= bound * float(wanted.double().norm())


# --- against float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [SPEC, REPLAY, FUSED, FUSED_REPLAY])
@pytest.mark.parametrize("state_v_first", [False, True], ids=["K_first", "V_first"])
def test_ragged_rows_and_rollback(op, state_v_first):
    """Rows of 3, 1, 0 and 2 tokens that resume after 3, 1, 2 and 0 accepted ones."""
    check(op, *step(op, (3, 1, 0, 2), 3, accepted=(3, 1, 2, 0), state_v_first=state_v_first))


@BOTH_FUSED
@pytest.mark.parametrize("shape", [(2, 4, 24, 40), (1, 3, 64, 96), (1, 1, 256, 8), (1, 1, 5, 3)], ids=str)
def test_every_shape(op, shape):
    check(op, *step(op, (2, 1), 2, shape, accepted=(2, 1)))


@BOTH_FUSED
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)], ids=str
)
def test_half_precision(op, dtype, state_dtype):
    arguments, guarded = step(op, (2, 1), 2, accepted=(2, 1), dtype=dtype, state_dtype=state_dtype)
    arguments["out"] = torch.empty(arguments["output_gate"].shape)
    check(op, arguments, guarded)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid", "none"])
def test_every_gate(activation):
    arguments, guarded = step(FUSED, (1, 1), 1, activation=activation)
    if activation == "none":
        arguments["output_gate"] = torch.full_like(arguments["output_gate"], math.nan)
    check(FUSED, arguments, guarded)


@pytest.mark.parametrize("lengths", [(1, 1), (5, 0, 2)], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_plain_decode(lengths, normalize):
    arguments, guarded = step(DECODE, lengths, None)
    arguments |= {"use_qk_l2norm_in_kernel": normalize, "k": arguments["k"] / 4, "scale": 0.3}
    arguments |= {"softplus_beta": 1.5, "softplus_threshold": 2.0}
    check(DECODE, arguments, guarded)


def test_sixteen_tokens():
    check(FUSED, *step(FUSED, (16,), 16, (1, 1, 8, 8), accepted=(16,)))


@pytest.mark.report("A04")
def test_rates_that_overflow():
    """A rate of infinity times a softplus of zero is no decay; an infinite log decay is a reset, also of NaN."""
    arguments, guarded = step(FUSED, (1, 1, 1), 1)
    arguments["A_log"] = torch.tensor([100.0, 100.0])
    arguments["a"] = torch.tensor([[-200.0, -200.0], [50.0, 50.0], [-120.0, -130.0]])
    arguments["dt_bias"] = torch.zeros(2)
    expected = clone(arguments)
    slot = int(arguments["state_indices"][1, 0])
    guarded.pool[slot] = math.nan
    expected["state"][slot] = 0
    wide = to_float64(expected)
    oracle_o = oracle.fused_gdn_decode_post_conv_mtp(**wide)
    o = call(FUSED, arguments)
    assert packed_relative_error(o[None], oracle_o[None], arguments["cu_seqlens"]) <= 2e-5
    assert relative_error(guarded.pool, wide["state"], (2, 3)) <= 2e-5


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_a_chain_of_steps_replays_what_several_slots_hold(state_dtype):
    rng = random.Random(5)
    S, N, shape = 3, 2, SMALL
    several, _ = step(FUSED, [S] * N, S, state_dtype=state_dtype)
    replay, _ = step(FUSED_REPLAY, [S] * N, S, state_dtype=state_dtype)
    for name in ("A_log", "dt_bias", "norm_weight"):
        replay[name] = several[name]
    table, slots = several["state_indices"].long(), replay["slot_indices"].long()
    several["state"][table[:, 0]] = replay["state"][slots]
    replay["records"].reset()
    accepted = [0] * N
    for turn in range(6):
        lengths = [rng.randint(1, S) for _ in range(N)]
        tokens, _ = inputs.fused_decode_arguments(lengths, S, *shape, seed=turn + 1)
        for arguments in (several, replay):
            for name in ("mixed_qkv", "a", "b", "output_gate", "cu_seqlens"):
                arguments[name] = tokens[name]
            arguments["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
        assert same_bits(call(FUSED, several), call(FUSED_REPLAY, replay)), f"step {turn}"
        accepted = [rng.randint(1, length) for length in lengths]


@BOTH_FUSED
def test_a_row_alone_is_as_in_a_batch(op):
    arguments, _ = step(op, (2, 1), 2, accepted=(2, 1))
    alone = clone(arguments)
    o = call(op, arguments)
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    for name in ("mixed_qkv", "a", "b", "output_gate"):
        alone[name] = alone[name][2:]
    for name in (index, "num_accepted_tokens"):
        alone[name] = alone[name][1:]
    alone["cu_seqlens"] = torch.tensor([0, 1], dtype=torch.int32)
    slots = alone[index].reshape(-1).long()
    assert same_bits(call(op, alone), o[2:])
    assert same_bits(pool_of(alone)[slots], pool_of(arguments)[slots])


def test_drafts_are_as_decoding_token_by_token():
    arguments, _ = step(SPEC, (3,), 3, accepted=(1,))
    single = clone(arguments)
    o = call(SPEC, arguments)
    slot = single["spec_state_indices"][0, 0].long()
    for t in range(3):
        token = {name: single[name][:, t : t + 1] for name in ("q", "k", "v")}
        token |= {name: single[name][t : t + 1] for name in ("a", "b")}
        rest = {name: single[name] for name in ("A_log", "dt_bias", "initial_state_source", "use_qk_l2norm_in_kernel")}
        plain = call(DECODE, {**rest, **token, "initial_state_indices": slot[None]})
        assert same_bits(plain, o[:, t : t + 1])
    last = arguments["spec_state_indices"][0, 2].long()
    assert same_bits(single["initial_state_source"][slot], arguments["initial_state_source"][last])


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.report("B10", "B12")
@pytest.mark.parametrize("op", [SPEC, FUSED, FUSED_REPLAY])
def test_padding_rows(op):
    """Negative, null, beyond the pool: zeros, nothing read or written; nor for tokens of no row."""
    arguments, guarded = step(op, (2, 1, 2, 1, 1), 2, accepted=(1, 1, 2, 1, 0))
    index = next(name for name in ("slot_indices", "state_indices", "spec_state_indices") if name in arguments)
    slots = arguments[index] = arguments[index].clone()
    null = int(slots.reshape(-1)[-1])
    slots[1], slots[2], slots[4] = -1, len(guarded.pool), null
    bounds = arguments["cu_seqlens"]
    arguments["cu_seqlens"] = torch.cat([bounds[:-1], bounds[-1:] - 1])  # the last token has no row
    arguments |= {"null_slot": null}
    padded = slice(2, 5)
    for name in ("mixed_qkv", "q", "k", "v", "output_gate"):
        if name in arguments:
            tokens = arguments[name] = arguments[name].clone()
            (tokens[0] if name in "qkv" else tokens)[padded] = math.nan
    guarded.pool[null] = math.nan
    before = guarded.pool.clone()
    o = call(op, arguments)
    o = o[0] if op == SPEC else o
    assert bool((o[padded] == 0).all()) and bool((o[-1] == 0).all())
    assert bool(o.isfinite().all()) and bool((o[:2] != 0).any())
    live = torch.cat([slots[[0, 3]].reshape(-1)]).long()
    others = [slot for slot in range(len(before)) if slot not in live.tolist()]
    assert same_bits(guarded.pool[others], before[others])
    guarded.check()


@pytest.mark.parametrize(
    ("name", "value", "padded"),
    [
        ("num_accepted_tokens", [1, 4, 1], 1),
        ("num_accepted_tokens", [1, -1, 1], 1),
        ("cu_seqlens", [0, 4, 4, 6], 0),  # longer than the table has columns
        ("cu_seqlens", [0, 2, 1, 6], 1),
        ("cu_seqlens", [0, 2, 4, 9], 2),
    ],
    ids=str,
)
def test_rows_out_of_range_are_padding(name, value, padded):
    arguments, _ = step(FUSED, (2, 2, 2), 3, accepted=(1, 1, 1))
    arguments[name] = torch.tensor(value, dtype=torch.int32)
    before = clone(arguments)
    o = call(FUSED, arguments)
    slots = arguments["state_indices"][padded].long()
    assert bool(o.isfinite().all())
    assert same_bits(arguments["state"][slots], before["state"][slots])


def test_a_destination_that_is_padding_is_skipped():
    arguments, guarded = step(SPEC, (2,), 2, accepted=(1,))
    table = arguments["spec_state_indices"] = arguments["spec_state_indices"].clone()
    skipped = int(table[0, 1])
    table[0, 1] = -1
    before = guarded.pool[skipped].clone()
    check(SPEC, arguments, guarded)
    assert same_bits(guarded.pool[skipped], before)


@BOTH_FUSED
def test_nothing_to_do(op):
    arguments, _ = step(op, (0, 0), 2)
    before = clone(arguments)
    assert call(op, arguments).shape == (0, 2, 16)
    assert same_bits(pool_of(arguments), pool_of(before))


# --- layouts and checks -----------------------------------------------------------------------------------------------


@BOTH_FUSED
def test_strided_operands_and_pools(op):
    arguments, _ = step(op, (2, 1), 2, accepted=(1, 2))
    expected = clone(arguments)

    def apart(x, dim):
        return torch.stack([x, torch.full_like(x, 7)], dim=dim + 1).select(dim + 1, 0)

    for name in ("mixed_qkv", "output_gate", "a", "b"):
        arguments[name] = apart(arguments[name], 1)
    arguments["state"] = apart(arguments["state"], 0)
    for name in ("A_log", "dt_bias", "norm_weight", "num_accepted_tokens", "cu_seqlens"):
        arguments[name] = apart(arguments[name], 0)
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    arguments[index] = apart(arguments[index].long(), arguments[index].dim() - 1)
    if op == FUSED_REPLAY:
        parts = (apart(x, 1) if x.dim() > 1 else x for x in records_of(arguments))
        arguments["records"] = ReplayRecords.from_tensors(*parts)
    out = torch.empty(3, 2, 2, 16)[:, :, 0]
    assert call(op, arguments | {"out": out}) is out
    assert same_bits(out.contiguous(), call(op, expected))
    assert same_bits(arguments["state"].contiguous(), expected["state"])


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("mixed_qkv", lambda x: x[:, 1:], ValueError),
        ("state", lambda x: x.int(), TypeError),
        ("cu_seqlens", lambda x: x[1:], ValueError),
        ("num_accepted_tokens", lambda x: x.float(), TypeError),
        ("output_gate_activation", lambda x: "gelu", ValueError),
    ],
    ids=["mixed_qkv", "state", "cu_seqlens", "num_accepted_tokens", "activation"],
)
def test_wrong_arguments_raise_before_anything_changes(name, change, error):
    arguments, _ = step(FUSED, (2, 1), 2, accepted=(1, 2))
    arguments |= {"output_gate_activation": "silu"}
    arguments[name] = change(arguments[name])
    with untouched(arguments), pytest.raises(error, match=f"^{name}: expected"):
        call(FUSED, arguments)


def test_float64_is_declined():
    arguments, _ = step(FUSED, (1,), 1, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64 runs on the reference"):
        call(FUSED, arguments)


def test_checks_read_nothing_of_a_device(monkeypatch):
    """Whatever would wait for a GPU is refused here: a captured graph could not have it."""
    arguments, _ = step(FUSED, (2, 1), 2, accepted=(1, 2))
    defaults = {"scale": None, "norm_eps": 1e-6, "output_gate_activation": "silu", "null_slot": None}
    arguments = defaults | arguments | {"out": torch.empty_like(arguments["output_gate"])}
    schema = torch.ops.gdn.fused_gdn_decode_post_conv_mtp.default._schema
    flat = [arguments.get(argument.name) for argument in schema.arguments]

    def refuse(*args, **kwargs):
        raise AssertionError("reads a tensor's values")

    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    provider.ops[FUSED](*flat, dry_run=True)


@BOTH_FUSED
def test_chosen_rows_leave_the_others_alone(op):
    """Rows 2 and 0 of three, by their indices; one more index is none."""
    arguments, _ = step(op, (2, 1, 2), 2, accepted=(1, 1, 2))
    every = clone(arguments)
    expected = call(op, every)
    index = "slot_indices" if op == FUSED_REPLAY else "state_indices"
    before = arguments["state"].clone()
    values = arguments | {"null_slot": None, "scale": None, "out": torch.full((5, 2, 16), 9.0)}
    records = values.pop("records", None)
    if records is not None:
        parts = ("k", "u", "decay", "live")
        values |= {f"records_{part}": getattr(records, part) for part in parts}
    values["row_indices"] = torch.tensor([2, 0, -1], dtype=torch.int32)
    decode = importlib.import_module("gdn_core.triton_backend.decode")
    decode.fused_decode({"output_gate_activation": "silu", **values}, index, dry_run=False)
    assert same_bits(values["out"][[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert bool((values["out"][2] == 9).all())
    chosen, other = arguments[index][[0, 2]].reshape(-1).long(), arguments[index][1].reshape(-1).long()
    assert same_bits(arguments["state"][chosen], every["state"][chosen])
    assert same_bits(arguments["state"][other], before[other])


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "state"), [(80, "fp32"), (80, "bf16"), (90, "fp32"), (90, "fp16")])
def test_kernels_compile_for_gpus_that_are_not_here(capability, state, tmp_path):
    script = Path(__file__).with_name("triton_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(capability), state],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == 10
    for name, used in found.items():
        assert used["target"].startswith(f"sm_{capability}"), name
        assert used["REG"] <= 128, name
        assert used["STACK"] == 0, name
