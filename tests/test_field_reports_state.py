# SPDX-License-Identifier: Apache-2.0
"""Faults of state pools that others had: wrong slots after a rollback, padding that leaks, reads of stale states."""

import math
import re

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
    POOL,
    REPLAY,
    RULES,
    SPEC,
    SPECULATIVE,
    WITH_SLOTS,
    assert_same,
    distant_slots,
    error,
    expect,
    on,
    output_of,
    part,
    put_tokens,
    rows_call,
    run,
    run_output,
)


def pool_of(op, arguments):
    return arguments[POOL[op][0]]


def assert_matches_float64(op, arguments, bound=2e-6):
    """Run a call on a pool; compare the output and the whole pool with float64."""
    wanted, wide = expect(op, arguments)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    o = run_output(op, arguments)
    assert error(o, wanted) <= bound
    assert error(pool_of(op, arguments), pool_of(op, wide)) <= bound
    return o


# --- speculative rows -------------------------------------------------------------------------------------------------


@pytest.mark.report("B01")
@on(SPEC, FUSED)
def test_no_accepted_token_resumes_at_column_zero(impl, op):
    arguments = rows_call(op, [1, 2], S=3)
    table = arguments[POOL[op][1]]
    keep = pool_of(op, arguments)[table[:, 0].long()].clone()
    pool_of(op, arguments).fill_(math.nan)
    pool_of(op, arguments)[table[:, 0].long()] = keep
    outputs = []
    for accepted in ([0, 0], [1, 1], None):
        call = clone(arguments)
        call["num_accepted_tokens"] = None if accepted is None else torch.tensor(accepted)
        outputs.append(run_output(op, call))
    assert bool(outputs[0].isfinite().all())
    assert same_bits(outputs[0], outputs[1]) and same_bits(outputs[0], outputs[2])


@pytest.mark.report("B01")
@on(REPLAY, FUSED_REPLAY)
def test_no_accepted_token_replays_the_first_record(impl, op):
    outputs = []
    for accepted in ([0, 0], [1, 1], None):
        arguments = rows_call(op, [2, 2], S=3, live=[3, 3], accepted=accepted)
        outputs.append((run_output(op, arguments), pool_of(op, arguments)))
    for o, pool in outputs[1:]:
        assert same_bits(o, outputs[0][0]) and same_bits(pool, outputs[0][1])


@pytest.mark.report("B02")
@pytest.mark.parametrize("slot", [0, 3])
@on(CONV_UPDATE)
def test_no_accepted_token_reads_no_column_before_the_slot(impl, op, slot):
    arguments, guarded = inputs.conv_update_arguments([2], 5, 4, state_len=6, accepted=[0], spare_slots=3)
    arguments["conv_state_indices"].fill_(slot)
    others = [i for i in range(4) if i != slot]
    guarded.pool[others] = math.nan
    wanted, wide = expect(op, arguments)
    assert error(run(op, arguments), wanted) <= 2e-6
    guarded.check()
    assert same_bits(guarded.pool[others], wide["conv_state"][others].float())
    assert bool(guarded.pool[slot].isfinite().all())


def sequential(arguments, state, tokens):
    """Decode tokens one at a time on one state [1, HV, K, V]; return the outputs and the last state."""
    gates = ("A_log", "dt_bias", "use_qk_l2norm_in_kernel")
    state, outputs = state.clone(), []
    for t in tokens:
        outputs.append(
            gdn_core.fused_sigmoid_gating_delta_rule_update(
                **{name: arguments[name] for name in gates},
                **{name: arguments[name][:, t : t + 1] for name in ("q", "k", "v")},
                **{name: arguments[name][t : t + 1] for name in ("a", "b")},
                initial_state_source=state,
                initial_state_indices=torch.tensor([0]),
            )[0, 0]
        )
    return torch.stack(outputs), state


@pytest.mark.report("B03")
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
@on(SPEC)
def test_plain_decode_after_a_verification_resumes_at_the_accepted_slot(impl, op, accepted):
    arguments = rows_call(op, [4], S=4)
    table, pool = arguments["spec_state_indices"], pool_of(op, arguments)
    start = pool[table[0, :1].long()].clone()
    run(op, arguments)
    more = rows_call(DECODE, [1], seed=9)
    shared = {name: arguments[name] for name in ("A_log", "dt_bias")}
    o = run(DECODE, more | shared | {"initial_state_source": pool, "initial_state_indices": table[:, accepted - 1]})
    _, state = sequential(arguments, start, range(accepted))
    expected, state = sequential(more | shared, state, range(1))
    assert_same(impl, o[0], expected)
    assert_same(impl, pool[table[0, accepted - 1].long()], state[0])


@pytest.mark.report("B03")
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
@on(CONV_UPDATE)
def test_a_plain_convolution_step_after_a_verification(impl, op, accepted):
    """The next step passes how many tokens were accepted, also when it has one token only."""
    W, S, C = 4, 4, 5
    first, _ = inputs.conv_update_arguments([S], C, W, state_len=W - 1 + S - 1, accepted=[1])
    plain = first["conv_state"][first["conv_state_indices"].long()][:, :, : W - 1].clone()
    x = first["x"]
    run(op, first)
    token = torch.randn(1, C)
    y = run(op, first | {"x": token, "query_start_loc": torch.tensor([0, 1]),
                         "num_accepted_tokens": torch.tensor([accepted])})  # fmt: skip
    history = torch.cat([plain[0], x[:accepted].T], dim=1)[None, :, -(W - 1) :].contiguous()
    expected = gdn_core.causal_conv1d_update(token, history, first["weight"], first["bias"], first["activation"])
    assert error(y, expected) <= 2e-6


@pytest.mark.report("B04")
@pytest.mark.parametrize("S", [1, 2, 4, 8, 16])
@on(*SPECULATIVE)
def test_every_number_of_accepted_tokens(impl, op, S):
    for accepted in range(1, S + 1):
        live = {"live": [S]} if op in (REPLAY, FUSED_REPLAY) else {}
        arguments = rows_call(op, [S], S=S, accepted=[accepted], seed=accepted, H=1, HV=1, K=4, V=3, **live)
        assert_matches_float64(op, arguments, bound=4e-6)


@pytest.mark.report("B04")
@pytest.mark.parametrize("S", [1, 2, 4, 8])
@on(CONV_UPDATE)
def test_every_number_of_accepted_tokens_of_the_convolution(impl, op, S):
    W = 4
    for accepted in range(1, S + 1):
        arguments, guarded = inputs.conv_update_arguments([S], 3, W, state_len=W - 2 + S, accepted=[accepted])
        assert_matches_float64(op, arguments)
        guarded.check()


def speculate(op, arguments, chosen, steps, S):
    """Run draft steps of one request, `chosen` tokens of each accepted; return the outputs of accepted tokens."""
    outputs, accepted = [], 1
    for step in range(steps):
        tokens = rows_call(SPEC, [S], S=S, seed=100 + step)
        call = arguments | {name: tokens[name] for name in ("q", "k", "v", "a", "b")}
        call["num_accepted_tokens"] = torch.tensor([accepted])
        outputs.append((tokens, run(op, call)[0, : chosen(step)]))
        accepted = chosen(step)
    return outputs


@pytest.mark.report("B21")
@pytest.mark.parametrize("pattern", ["all rejected", "all accepted", "mixed"])
@on(SPEC, REPLAY)
def test_speculation_gives_the_states_of_plain_decode(impl, op, pattern):
    S, steps = 5, 24
    chosen = {"all rejected": lambda i: 1, "all accepted": lambda i: S, "mixed": lambda i: 1 + (i * 3) % S}[pattern]
    arguments = rows_call(op, [S], S=S)
    slots = arguments[POOL[op][1]].flatten()
    state = pool_of(op, arguments)[slots[:1].long()].clone()
    for step, (tokens, o) in enumerate(speculate(op, arguments, chosen, steps, S)):
        shared = {name: arguments[name] for name in ("A_log", "dt_bias")}
        expected, state = sequential(tokens | shared, state, range(chosen(step)))
        assert_same(impl, o, expected, bound=1e-5)
    if op == SPEC:
        assert_same(impl, pool_of(op, arguments)[slots[chosen(steps - 1) - 1].long()], state[0], bound=1e-5)


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.report("B07")
@on(*WITH_SLOTS)
def test_slots_beyond_32_bit_offsets(impl, op):
    """The third slot starts 2^31 + 96 elements in, beyond what 32 bits can count, in elements and in bytes."""
    arguments = rows_call(op, [2, 1], S=2)
    name, indices = POOL[op]
    packed = arguments[name]
    shape = packed.shape[1:]
    far = distant_slots(3, shape, stride=2**30 + 48)
    columns = arguments[indices].shape[1:]
    slots = torch.tensor([2, 0] if not columns else [[2, -1], [0, -1]], dtype=torch.int32)
    near = torch.zeros(3, *shape)
    for slot in (0, 2):
        near[slot] = packed[slot]
        far[slot] = packed[slot]
    calls = [clone(arguments) | {indices: slots, name: pool} for pool in (far, near)]
    if "records" in arguments:
        for call in calls:
            call["records"] = gdn_core.ReplayRecords.from_tensors(
                *(x[:3].clone() for x in vars(arguments["records"]).values())
            )
    results = [run_output(op, call) for call in calls]
    assert same_bits(*results)
    assert same_bits(far[2], near[2]) and same_bits(far[0], near[0])


PAD = pytest.mark.parametrize("null_slot", [None, 0])


@pytest.mark.report("B10")
@PAD
@on(*WITH_SLOTS)
def test_padding_rows_are_inert(impl, op, null_slot):
    """Of four rows two are padding, with NaN in all their inputs, in the middle and at the end."""
    lengths = [1, 2, 1, 2]
    arguments = rows_call(op, lengths, S=2)
    indices = POOL[op][1]
    shape = arguments[indices].shape
    slots = torch.arange(1, 1 + shape.numel(), dtype=torch.int32).view(shape)
    touched = slots[[0, 2]].flatten().tolist()
    slots[[1, 3]] = -1 if null_slot is None else null_slot
    arguments |= {indices: slots, "null_slot": null_slot}
    for tokens in (slice(1, 3), slice(4, 6)):
        put_tokens(op, arguments, tokens, math.nan)
    canary = pool_of(op, arguments)
    still = [i for i in range(len(canary)) if i not in touched]
    canary[still] = math.nan
    records = vars(arguments["records"]) if "records" in arguments else {}
    records_before = {part: x[still].clone() for part, x in records.items()}

    o = output_of(op, run_output(op, arguments))
    assert bool((o[[1, 2, 4, 5]] == 0).all())
    assert bool(o[[0, 3]].isfinite().all()) and bool(o[[0, 3]].any())
    assert bool(canary[still].isnan().all())
    assert bool(canary[touched].isfinite().all())
    for name, old in records_before.items():
        assert torch.equal(records[name][still], old)


@pytest.mark.report("B11")
@on(*WITH_SLOTS)
def test_a_wrong_number_of_slots_names_both_numbers(impl, op):
    arguments = rows_call(op, [1] * 8, S=1)
    indices = POOL[op][1]
    arguments[indices] = arguments[indices][:5]
    with untouched(arguments), pytest.raises(ValueError) as raised:
        run(op, arguments)
    numbers = set(re.findall(r"\d+", str(raised.value)))
    assert {"5", "8"} <= numbers or {"6", "9"} <= numbers, "the rows, or the offsets of the rows"


@pytest.mark.report("B12")
@on(*WITH_SLOTS)
def test_rows_outside_every_span_are_zero(impl, op):
    arguments = rows_call(op, [3, 2, 3], S=3)
    arguments = part(op, arguments, slice(None), slice(0, 2))  # 8 tokens, of which the rows span the first 5
    put_tokens(op, arguments, slice(5, None), math.nan)
    out = torch.full_like(run_output(op, clone(arguments)), math.nan)
    run(op, arguments | {"out": out})
    tokens_first = output_of(op, out)
    assert len(tokens_first) == 8
    assert bool((tokens_first[5:] == 0).all())
    assert bool(tokens_first[:5].isfinite().all()) and bool(tokens_first[:5].any())


@pytest.mark.report("B13")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@on(*RULES, CONV)
def test_a_fresh_sequence_never_reads_its_slot(impl, op, bad):
    arguments = rows_call(op, [1, 70, 1, 3])
    fresh = torch.tensor([True, True, False, False])  # has_initial_state is its opposite
    name, indices = POOL[op]
    pool = arguments[name]
    zeroed = clone(arguments)
    zeroed[name][arguments[indices][fresh].long()] = 0
    pool[arguments[indices][fresh].long()] = bad
    o = run_output(op, arguments | {"has_initial_state": ~fresh})
    assert bool(o.isfinite().all())
    assert same_bits(o, run_output(op, zeroed))
    assert same_bits(pool, zeroed[name])


@pytest.mark.report("B13")
@on(*RULES, CONV)
def test_a_fresh_sequence_without_a_pool(impl, op):
    arguments = rows_call(op, [4, 4])
    name, indices = POOL[op]
    state = arguments[name][:2].clone()
    state[1] = math.nan
    call = {k: v for k, v in arguments.items() if k not in (name, indices)}
    call["has_initial_state"] = torch.tensor([True, False])
    call |= {"initial_states": state[..., :3]} if op == CONV else {"initial_state": state}
    o = run_output(op, call)
    assert bool(o.isfinite().all())


@pytest.mark.report("B14")
@pytest.mark.parametrize("length", [1, 2, 4, 5])
@on(*RULES, CONV)
def test_only_the_flag_makes_a_sequence_fresh(impl, op, length):
    """A prompt as long as a row of drafts is fresh where it is said to be, and continues its slot where it is not."""
    arguments = rows_call(op, [length])
    state = pool_of(op, arguments)[arguments[POOL[op][1]].long()].clone()
    flags = (torch.tensor([True]), torch.tensor([False]), None)
    continued, fresh, default = (run_output(op, clone(arguments) | {"has_initial_state": flag}) for flag in flags)
    assert same_bits(continued, default)
    assert bool(state.any()) and not torch.equal(continued, fresh)
    pool_of(op, arguments).zero_()
    assert same_bits(fresh, run_output(op, arguments))


@pytest.mark.report("B15")
@pytest.mark.parametrize("beyond", [0, 1, 2**31 - 100])
@on(*WITH_SLOTS)
def test_a_slot_beyond_the_pool_raises_before_anything_is_written(impl, op, beyond):
    arguments = rows_call(op, [2, 1], S=2)
    name, indices = POOL[op]
    size = len(arguments[name])
    arguments[indices] = arguments[indices].clone()
    arguments[indices].view(-1)[-1] = size + beyond if beyond < 10 else beyond
    out = torch.full_like(run_output(op, rows_call(op, [2, 1], S=2)), 7)
    arguments["out"] = out
    with untouched(arguments), pytest.raises(IndexError, match=rf"{indices}: expected slots below {size}, got"):
        run(op, arguments)


@pytest.mark.report("B24")
@on(*WITH_SLOTS)
def test_two_rows_on_one_slot_are_an_error_in_debug_mode(impl, op, monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    arguments = rows_call(op, [1, 1], S=1)
    run(op, clone(arguments))
    indices = POOL[op][1]
    padding = clone(arguments)
    padding[indices].fill_(-1)
    run(op, padding)
    arguments[indices][1] = arguments[indices][0]
    with untouched(arguments), pytest.raises(ValueError, match=f"{indices}: expected distinct slots"):
        run(op, arguments)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.report("B16")
@pytest.mark.parametrize("state_v_first", [False, True])
@on(CHUNK)
def test_every_chunk_state_is_a_point_to_resume_from(impl, op, state_v_first):
    lengths = [200, 0, 64, 65]
    arguments = inputs.delta_rule_arguments(lengths, 1, 2, 8, 5, state_v_first=state_v_first)
    o, last, states = run(op, arguments | {"output_chunk_states": True})
    _, _, wanted = expect(op, arguments | {"output_chunk_states": True})[0]
    assert states.dtype == torch.float32 and states.shape == wanted.shape
    assert relative_error(states, wanted, (-2, -1)) <= 1e-5
    for n, (first, begin, length) in enumerate([(0, 0, 200), (4, 200, 0), (4, 200, 64), (5, 264, 65)]):
        for i in range(-(-length // 64)):
            tokens = slice(begin + 64 * i, begin + length)
            rest = {k: v[:, tokens] if k in ("q", "k", "v", "g", "beta") else v for k, v in arguments.items()}
            o_rest, state, *_ = run(op, rest | {"cu_seqlens": None, "initial_state": states[first + i][None]})
            assert_same(impl, o_rest, o[:, tokens], bound=1e-5)
            assert_same(impl, state[0], last[n], bound=1e-5)


# --- batches and threads ----------------------------------------------------------------------------------------------


@pytest.mark.report("B22")
@pytest.mark.parametrize("threads", [1, 2, 16])
@on(*WITH_SLOTS)
def test_a_row_does_not_depend_on_its_batch(impl, op, threads):
    torch.set_num_threads(threads)
    sizes = (1, 2, 3, 17, 64) if impl.is_native else (1, 3, 17)
    arguments = rows_call(op, [1] * max(sizes), S=1)
    name, indices = POOL[op]
    for size in sizes:
        together = part(op, clone(arguments), slice(0, size), slice(0, size))
        o = output_of(op, run_output(op, together))
        for n in {0, size // 2, size - 1}:
            alone = part(op, clone(arguments), slice(n, n + 1), slice(n, n + 1))
            assert_same(impl, output_of(op, run_output(op, alone))[0], o[n])
            slot = int(arguments[indices][n].flatten()[0])
            assert_same(impl, alone[name][slot], together[name][slot])


@pytest.mark.report("B22")
@pytest.mark.parametrize("threads", [1, 2, 16])
@on(GATING, NORM)
def test_a_row_of_an_elementwise_op_does_not_depend_on_its_batch(impl, op, threads):
    torch.set_num_threads(threads)
    make = {GATING: inputs.gating_arguments, NORM: inputs.norm_arguments}[op]
    arguments = make((64, 19))
    names = ("a", "b") if op == GATING else ("x", "gate")
    whole = run(op, arguments)
    for n in (0, 1, 17, 63):
        alone = run(op, arguments | {name: arguments[name][n : n + 1] for name in names})
        if op == NORM:
            alone, results = (alone,), (whole,)
        else:
            results = whole
        for actual, wanted in zip(alone, results, strict=True):
            assert_same(impl, actual[0], wanted[n])
