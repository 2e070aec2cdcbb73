# SPDX-License-Identifier: Apache-2.0
"""gdn_attention: any mix of rows, against each row alone and against float64."""

import inspect
import random
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import attention_cases as cases
import gdn_core
from attention_cases import FORMS, HV, K, Row, S, V, W
from contract_calls import agree, same_bits
from gdn_core import GDNMetadata, GDNStateCache
from gdn_core.attention.core import split_heads
from gdn_core.testing import inputs, oracle, relative_error, to_float64
from report_calls import distant_slots

IN_BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
LAYER = cases.layer()


def check_slots(impl, actual, expected, row, form):
    """Compare what a row has written, up to the columns that keep no promise."""
    slots = row.written_slots(form)
    if not slots:
        return
    columns = W - 2 + row.length if row.is_speculative or (row.length == 1 and row.has_initial_state) else W - 1
    first = slots[0]
    assert agree(impl, actual.conv_states[first, :, :columns], expected.conv_states[first, :, :columns])
    for slot in slots:
        assert agree(impl, actual.state[slot], expected.state[slot])
    if actual.records is not None:
        live = int(expected.records.live[first])
        assert int(actual.records.live[first]) == live
        for name in ("k", "u", "decay"):
            mine, other = (getattr(held.records, name)[first, :live] for held in (actual, expected))
            assert agree(impl, mine, other)


def check_untouched(held, before, rows, form):
    """Assert that no slot has changed that no row may write."""
    for name, pool in cases.pools(held).items():
        written = [slot for row in rows for slot in row.written_slots(form)]
        if name != "state":
            written = [slots[0] for row in rows if (slots := row.written_slots(form))]
        others = [slot for slot in range(held.num_slots) if slot not in written]
        previous = cases.pools(before)[name]
        assert torch.equal(pool[others], previous[others]), name


def run_mix(rows, form, *, dtype=torch.float32, seed=0, **options):
    """Return inputs, the cache before and after, and the outputs of a mix."""
    before = cases.randomized(cases.cache(form, dtype=dtype, **options), seed)
    cases.prepare(before, rows)
    batch = cases.random_inputs(sum(row.length for row in rows), seed, dtype)
    after = cases.clone(before)
    out = torch.full((batch.z.shape[0], HV, V), float("nan"), dtype=dtype)
    batch.run(LAYER, after, cases.metadata_of(rows, form), out=out)
    return batch, before, after, out


@pytest.mark.report("B22")
@IN_BOTH_FORMS
@pytest.mark.parametrize("seed", range(12))
def test_a_mix_equals_its_rows_alone(impl, form, seed):
    rows = cases.random_rows(seed, form)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    batch, before, after, out = run_mix(rows, form, dtype=dtype, seed=seed, state_v_first=seed % 3 == 0)
    assert out.isfinite().all()
    for row, tokens in zip(rows, cases.token_slices(rows), strict=True):
        alone = cases.clone(before)
        expected = batch.tokens(tokens).run(LAYER, alone, cases.metadata_of([row], form))
        assert agree(impl, out[tokens], expected)
        check_slots(impl, after, alone, row, form)
        if row.is_padding:
            assert not out[tokens].any()
    check_untouched(after, before, rows, form)


@IN_BOTH_FORMS
@pytest.mark.parametrize("seed", range(12, 16))
def test_permuted_rows_give_permuted_outputs(impl, form, seed):
    rows = cases.random_rows(seed, form, count=8)
    batch, before, after, out = run_mix(rows, form, seed=seed)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    slices = cases.token_slices(rows)
    tokens = torch.cat([torch.arange(slices[i].start, slices[i].stop) for i in order])
    permuted = cases.clone(before)
    result = batch.tokens(tokens).run(LAYER, permuted, cases.metadata_of([rows[i] for i in order], form))
    assert agree(impl, result, out[tokens])
    for row in rows:
        check_slots(impl, permuted, after, row, form)


@IN_BOTH_FORMS
def test_a_mix_is_right(impl, form):
    """Every kind of row, also in one another's way, against float64."""
    held = cases.cache(form)
    first = [Row(5, (0,), False), Row(66, (8,), False), Row(1, (16,), False), Row(3, (24, 25, 26, 27), False)]
    shadows = {row.slots[0]: cases.Shadow.fresh() for row in first}
    steps = [
        first,
        [Row(3, (0, 1, 2, 3), is_speculative=True), Row(7, (8,)), Row(1, (16,)), Row(4, (24, 25, 26, 27), True, True)],
        [Row(1, (0, 1, 2, 3), is_speculative=True, accepted=2), Row(1, (8,)), Row(9, (16,)), Row(0, (24,))],
    ]
    accepted = {0: [5, 2, 1], 8: [66, 7, 1], 16: [1, 1, 9], 24: [3, 4, 0]}
    for number, rows in enumerate(steps):
        batch = cases.random_inputs(sum(row.length for row in rows), 50 + number)
        out = batch.run(LAYER, held, cases.metadata_of(rows, form))
        for row, tokens in zip(rows, cases.token_slices(rows), strict=True):
            expected, after = shadows[row.slots[0]].advance(LAYER, batch.tokens(tokens))
            assert relative_error(out[tokens], expected, (0, 2)) <= 1e-5
            if row.length:
                shadows[row.slots[0]] = after[accepted[row.slots[0]][number] - 1]
    slot = cases.Shadow.of_slot(held, 16)
    assert relative_error(slot.state, shadows[16].state, (1, 2)) <= 1e-5
    assert relative_error(slot.history, shadows[16].history, (0, 1)) <= 2e-6


@pytest.mark.parametrize("cut", [64, 128])
def test_a_prefill_cut_at_a_chunk_is_the_uncut_one(native_impl, cut):
    batch = cases.random_inputs(150, 3)
    whole, parts = cases.cache("slots"), cases.cache("slots")
    expected = batch.run(LAYER, whole, cases.metadata_of([Row(150, (5,), False)], "slots"))
    first = batch.tokens(slice(cut)).run(LAYER, parts, cases.metadata_of([Row(cut, (5,), False)], "slots"))
    rest = batch.tokens(slice(cut, None)).run(LAYER, parts, cases.metadata_of([Row(150 - cut, (5,))], "slots"))
    assert same_bits(torch.cat([first, rest]), expected)
    assert same_bits(parts.state, whole.state)
    assert same_bits(parts.conv_states[..., : W - 1], whole.conv_states[..., : W - 1])


@pytest.mark.report("A15")
@pytest.mark.parametrize("cut", [1, 3, 7, 15])
def test_a_prefill_cut_anywhere_goes_on_from_both_states(impl, cut):
    batch, held = cases.random_inputs(16, 4), cases.cache("slots")
    expected, _ = cases.Shadow.fresh().advance(LAYER, batch)
    first = batch.tokens(slice(cut)).run(LAYER, held, cases.metadata_of([Row(cut, (5,), False)], "slots"))
    rest = batch.tokens(slice(cut, None)).run(LAYER, held, cases.metadata_of([Row(16 - cut, (5,))], "slots"))
    assert relative_error(torch.cat([first, rest]), expected, (0, 2)) <= 1e-5


# --- which operations run ---------------------------------------------------------------------------------------------


@pytest.fixture
def composed(monkeypatch):
    """Take the core apart into its operations also where a backend runs it in one call."""
    monkeypatch.setattr("gdn_core._dispatch.run_at_once", lambda *_: False)


def ops_of(rows, form):
    with gdn_core.record_calls() as calls:
        run_mix(rows, form)
    return sorted(op for op, _ in calls.elements())


STEP = ["causal_conv1d_update", "fused_gdn_decode_post_conv_mtp"]
REPLAY = ["causal_conv1d_update", "fused_gdn_decode_post_conv_mtp_replay"]
PREFILL = ["causal_conv1d_fn", "chunk_gated_delta_rule", "fused_gdn_gating", "rms_norm_gated"]
SPEC_ROW = Row(3, (4, 5, 6, 7), is_speculative=True)


@pytest.mark.parametrize(
    ("rows", "form", "expected"),
    [
        ([Row(1, (0,)), Row(1, (1,)), SPEC_ROW], "slots", STEP),
        ([SPEC_ROW, Row(1, (-1,)), Row(0, (1,)), SPEC_ROW], "replay", REPLAY),
        ([Row(1, (0,)), SPEC_ROW], "replay", [*STEP, *REPLAY]),
        ([Row(9, (0,), False), Row(0, (1,)), Row(1, (2,), False), Row(7, (3,))], "slots", PREFILL),
        ([Row(1, (0,)), SPEC_ROW, Row(9, (1,), False)], "slots", [*STEP, *PREFILL]),
        ([Row(1, (0,)), Row(9, (1,), False), SPEC_ROW, Row(3, (2,)), Row(1, (3,))], "slots", [*STEP, *PREFILL]),
        ([Row(99, (-1,)), Row(9, (1,), False), Row(0, (2,)), Row(99, (-1,)), SPEC_ROW], "slots", [*STEP, *PREFILL]),
        ([Row(99, (-1,)), Row(1, (1,)), SPEC_ROW], "slots", STEP),
    ],
)
def test_rows_of_a_kind_share_their_calls(composed, rows, form, expected):
    """Speculative rows next to prefills stay speculative, and decodes decodes; wherever they are, one call has all."""
    if form == "replay":
        rows = [Row(row.length, (i,), *(row.has_initial_state, row.is_speculative)) for i, row in enumerate(rows)]
        rows = [Row(row.length, (-1,)) if i == 1 and len(rows) == 4 else row for i, row in enumerate(rows)]
    assert ops_of(rows, form) == sorted(expected)


def test_a_native_core_is_one_call(native_impl):
    assert ops_of([Row(1, (0,)), SPEC_ROW, Row(70, (1,), False), Row(3, (-1,))], "slots") == ["gdn_attention"]


@IN_BOTH_FORMS
@pytest.mark.parametrize("seed", range(40, 46))
@pytest.mark.parametrize("threads", [1, 3])
def test_one_call_gives_the_bits_of_its_operations(native_impl, monkeypatch, form, seed, threads):
    torch.set_num_threads(threads)
    rows = cases.random_rows(seed, form, count=9)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    results = [run_mix(rows, form, dtype=dtype, seed=seed)]
    monkeypatch.setattr("gdn_core._dispatch.run_at_once", lambda *_: False)
    results.append(run_mix(rows, form, dtype=dtype, seed=seed))
    (_, _, at_once, out), (_, _, composed, expected) = results
    assert same_bits(out, expected)
    for row in rows:
        check_slots(native_impl, at_once, composed, row, form)


@pytest.mark.parametrize(("H", "HV", "V"), [(1, 1, 128), (2, 4, 64)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_call_gives_the_bits_of_its_operations_in_large_heads(
    native_impl, monkeypatch, H, HV, V, state_dtype, threads
):
    """Prompts of several chunks beside steps: cut into turns, and with few heads into columns too."""
    torch.set_num_threads(threads)
    dtype, K = torch.bfloat16, 64
    rng = inputs.generator(threads)
    weight, _ = inputs.conv_weights(2 * H * K + HV * V, W, dtype, rng, False)
    params = gdn_core.GDNLayerParams(weight, *inputs.gate_parameters(HV, rng), torch.ones(V), 1e-6, H, HV, K, V)
    metadata = GDNMetadata.build(
        [0, 1, 300, 303, 304, 340, 341, 642],
        [[0, -1, -1], [1, -1, -1], [2, 3, 4], [5, -1, -1], [-1, -1, -1], [6, -1, -1], [7, -1, -1]],
        has_initial_state=[True, False, True, True, True, False, True],
        is_speculative=[False, False, True, False, False, False, False],
        num_accepted_tokens=[1, 1, 2, 1, 1, 1, 1],
    )
    assert (metadata.num_prefills, metadata.num_decodes, metadata.num_spec_decodes) == (3, 2, 1)
    x, z = (inputs.normal((642, *shape), rng, dtype) for shape in ((weight.shape[0],), (HV, V)))
    a, b = (inputs.normal((642, HV), rng, dtype) for _ in range(2))
    first = GDNStateCache(9, H, HV, K, V, dtype, S=3, state_dtype=state_dtype)
    first.conv_states.copy_(inputs.normal(first.conv_states.shape, rng, dtype))
    first.state.copy_(inputs.normal(first.state.shape, rng, state_dtype))
    second = cases.clone(first)
    out = gdn_core.gdn_attention(x, a, b, z, params, first, metadata)
    monkeypatch.setattr("gdn_core._dispatch.run_at_once", lambda *_: False)
    assert same_bits(gdn_core.gdn_attention(x, a, b, z, params, second, metadata), out)
    assert same_bits(first.state, second.state)
    assert same_bits(first.conv_states, second.conv_states)


# --- isolation --------------------------------------------------------------------------------------------------------


@pytest.mark.report("B10", "B12")
@IN_BOTH_FORMS
@pytest.mark.parametrize("seed", range(20, 24))
def test_nan_in_padding_or_in_another_request_goes_nowhere(impl, form, seed):
    rows = cases.random_rows(seed, form, count=9)
    rows[2], rows[5] = Row(1, (-1,)), Row(3, (-1,), False)
    before = cases.randomized(cases.cache(form), seed)
    cases.prepare(before, rows)
    batch = cases.random_inputs(sum(row.length for row in rows), seed)
    slices = cases.token_slices(rows)
    expected_cache, poisoned_cache = cases.clone(before), cases.clone(before)
    expected = batch.run(LAYER, expected_cache, cases.metadata_of(rows, form))
    victims = [i for i, row in enumerate(rows) if row.is_padding or i == 0]
    poisoned = cases.Inputs(*(x.clone() for x in (batch.mixed_qkv, batch.a, batch.b, batch.z)))
    for i in victims:
        for x in (poisoned.mixed_qkv, poisoned.a, poisoned.b, poisoned.z):
            x[slices[i]] = float("nan")
    out = poisoned.run(LAYER, poisoned_cache, cases.metadata_of(rows, form))
    for i, (row, tokens) in enumerate(zip(rows, slices, strict=True)):
        if row.is_padding:
            assert not out[tokens].any()
        elif i not in victims:
            assert agree(impl, out[tokens], expected[tokens])
            check_slots(impl, poisoned_cache, expected_cache, row, form)


@pytest.mark.report("B13")
@IN_BOTH_FORMS
def test_a_fresh_row_never_reads_its_slot(impl, form):
    rows = [Row(1, (3,), False), Row(5, (9,), False), Row(1, (12,))]
    batch = cases.random_inputs(7, 1)
    clean, stale = cases.cache(form), cases.cache(form)
    for slot in (3, 9):
        stale.state[slot], stale.conv_states[slot] = float("nan"), float("nan")
        if form == "replay":
            stale.records.live[slot] = 3
            stale.records.u[slot] = float("nan")
    metadata = cases.metadata_of(rows, form)
    assert agree(impl, batch.run(LAYER, stale, metadata), batch.run(LAYER, clean, metadata))
    for row in rows:
        check_slots(impl, stale, clean, row, form)
    if form == "replay":
        assert not stale.records.live.any()


def test_tokens_after_the_last_row_give_zero(impl):
    for rows in ([Row(1, (0,)), Row(2, SPEC_ROW.slots, is_speculative=True)], [Row(1, (0,)), Row(5, (1,), False)], []):
        batch, end = cases.random_inputs(12, 2), sum(row.length for row in rows)
        batch.mixed_qkv[end:], batch.z[end:] = float("nan"), float("nan")
        out = torch.full((12, HV, V), float("nan"))
        batch.run(LAYER, cases.cache("slots"), cases.metadata_of(rows, "slots"), out=out)
        assert not out[end:].any()
        assert out[:end].isfinite().all()


@pytest.mark.report("C23")
@pytest.mark.parametrize("rows", [[], [Row(0, (1,)), Row(0, (2,), False)]], ids=["no rows", "no tokens"])
def test_nothing_to_do_changes_nothing(impl, rows):
    _, before, after, out = run_mix(rows, "slots")
    assert out.shape == (0, HV, V)
    check_untouched(after, before, [], "slots")


@IN_BOTH_FORMS
@pytest.mark.parametrize("neighbour", [Row(5, (9,), False), Row(1, (12,))], ids=["prefill", "decode"])
def test_a_speculating_request_may_sit_out_a_step(impl, form, neighbour):
    """Its row without tokens changes nothing, least of all its records."""
    held = cases.randomized(cases.cache(form), 2)
    rows = [neighbour, Row(0, (4, 5, 6, 7), is_speculative=True, accepted=3), replace(neighbour, slots=(20,))]
    cases.prepare(held, [rows[0], rows[2]])
    before = cases.clone(held)
    batch = cases.random_inputs(2 * neighbour.length, 2)
    batch.run(LAYER, held, cases.metadata_of(rows, form))
    check_untouched(held, before, rows, form)


# --- speculation ------------------------------------------------------------------------------------------------------


def verify(held, rows, seed):
    batch = cases.random_inputs(sum(row.length for row in rows), seed)
    return batch, batch.run(LAYER, held, cases.metadata_of(rows, "slots" if held.records is None else "replay"))


def decode_one_by_one(held, slot, batch):
    outputs = [
        batch.tokens(slice(t, t + 1)).run(LAYER, held, cases.metadata_of([Row(1, (slot,))], "slots"))
        for t in range(batch.mixed_qkv.shape[0])
    ]
    return torch.cat(outputs)


@pytest.mark.report("B03", "B04")
@IN_BOTH_FORMS
@pytest.mark.parametrize("accepted", range(S + 1))
def test_a_plain_step_follows_a_committed_one(impl, form, accepted):
    """Whatever was accepted, the next plain step continues from it, bit for bit as if nothing had been drafted."""
    held, plain = cases.cache(form), cases.cache("slots")
    prompt = cases.random_inputs(6, 1)
    for target in (held, plain):
        prompt.run(LAYER, target, cases.metadata_of([Row(6, (4,), False)], "slots"))
    batch, out = verify(held, [Row(S, (4, 5, 6, 7), is_speculative=True)], 2)
    kept = max(accepted, 1)
    expected = decode_one_by_one(plain, 4, batch.tokens(slice(kept)))
    assert agree(impl, out[:kept], expected)
    held.commit([4] if form == "replay" else [[4, 5, 6, 7]], [accepted])
    assert agree(impl, held.state[4], plain.state[4])
    assert agree(impl, held.conv_states[4, :, : W - 1], plain.conv_states[4, :, : W - 1])
    later = cases.random_inputs(2, 3)
    assert agree(impl, decode_one_by_one(held, 4, later), decode_one_by_one(plain, 4, later))


@pytest.mark.report("B21")
@IN_BOTH_FORMS
def test_rejected_drafts_leave_no_trace(native_impl, form):
    """Four drafts a step, all rejected, for 64 steps: the bits of plain decoding."""
    held, plain = cases.cache(form), cases.cache("slots")
    row = Row(S, (4, 5, 6, 7), is_speculative=True)
    for step in range(64):
        batch, out = verify(held, [row], step)
        expected = decode_one_by_one(plain, 4, batch.tokens(slice(1)))
        assert same_bits(out[:1], expected)
    held.commit([4] if form == "replay" else [list(row.slots)], [1])
    assert same_bits(held.state[4], plain.state[4])


@IN_BOTH_FORMS
def test_both_forms_and_any_acceptance_give_the_bits_of_plain_decoding(native_impl, form):
    """Requests with different acceptance in one batch, one of them joined by a prefill, one without drafts."""
    rng = random.Random(5)
    held, plain = cases.cache(form), cases.cache("slots")
    tables = {0: (0, 1, 2, 3), 10: (10, 11, 12, 13), 20: (20, 21, 22, 23)}
    accepted = dict.fromkeys(tables, 1)
    for step in range(24):
        rows = [
            Row(rng.randint(1, S), table, is_speculative=True, accepted=accepted[slot])
            for slot, table in tables.items()
        ]
        joined = [*rows, Row(5, (40 + step % 8,), False)] if step % 3 == 0 else rows
        rng.shuffle(joined)
        batch, out = verify(held, joined, 100 + step)
        for row, tokens in zip(joined, cases.token_slices(joined), strict=True):
            if not row.is_speculative:
                continue
            accepted[row.slots[0]] = kept = rng.randint(1, row.length)
            new = batch.tokens(slice(tokens.start, tokens.start + kept))
            expected = decode_one_by_one(plain, row.slots[0], new)
            assert same_bits(out[tokens.start : tokens.start + kept], expected)


@pytest.mark.report("B01", "B02")
@IN_BOTH_FORMS
def test_no_accepted_token_acts_as_one(impl, form):
    before = cases.randomized(cases.cache(form), 1)
    for slot in range(64):
        if slot != 4:
            before.state[slot], before.conv_states[slot] = float("nan"), float("nan")
    results = []
    for accepted in (0, 1):
        held = cases.clone(before)
        row = Row(1, (4, 5, 6), is_speculative=True, accepted=accepted)
        results.append(cases.random_inputs(1, 1).run(LAYER, held, cases.metadata_of([row], form)))
    assert results[0].isfinite().all()
    assert same_bits(*results)


@pytest.mark.report("B14")
@IN_BOTH_FORMS
def test_a_fresh_prompt_as_long_as_a_block_of_drafts_is_a_prompt(impl, form):
    """What a row is, is said, not guessed from its length."""
    row = Row(S, (4, 5, 6, 7), False)
    metadata = cases.metadata_of([row], form)
    assert (metadata.num_prefills, metadata.num_spec_decodes) == (1, 0)
    held = cases.cache(form)
    held.state.fill_(float("nan"))
    batch = cases.random_inputs(S, 1)
    expected, _ = cases.Shadow.fresh().advance(LAYER, batch)
    assert relative_error(batch.run(LAYER, held, metadata), expected, (0, 2)) <= 1e-5


@pytest.mark.report("B16")
def test_states_at_chunk_boundaries_can_be_snapshots(impl):
    """A prompt prefilled 64 tokens at a time can be resumed from each boundary."""
    batch, held = cases.random_inputs(200, 7), cases.cache("slots")
    expected = batch.run(LAYER, cases.cache("slots"), cases.metadata_of([Row(200, (0,), False)], "slots"))
    snapshots = []
    for start in range(0, 192, 64):
        row = Row(64, (0,), start > 0)
        batch.tokens(slice(start, start + 64)).run(LAYER, held, cases.metadata_of([row], "slots"))
        snapshots.append(held.snapshot([0]))
    for number, snapshot in enumerate(snapshots, 1):
        resumed = cases.cache("slots")
        resumed.restore(snapshot, [9])
        rest = batch.tokens(slice(64 * number, None))
        row = Row(200 - 64 * number, (9,))
        assert agree(impl, rest.run(LAYER, resumed, cases.metadata_of([row], "slots")), expected[64 * number :])


# --- errors come before anything has changed --------------------------------------------------------------------------


@pytest.mark.report("B11", "B15")
@pytest.mark.parametrize("backend", [None, "reference"])
def test_wrong_calls_change_nothing(backend):
    gdn_core.use_backend(backend)
    rows = [Row(1, (3,)), Row(4, (9,), False)]
    metadata = cases.metadata_of(rows, "slots")
    batch, held = cases.random_inputs(5, 1), cases.randomized(cases.cache("slots"))
    before = cases.clone(held)
    small = cases.cache("slots", num_slots=8)

    def attention(
        mixed_qkv=batch.mixed_qkv, a=batch.a, b=batch.b, z=batch.z, layer=LAYER, held=held, rows=metadata, **options
    ):
        return gdn_core.gdn_attention(mixed_qkv, a, b, z, layer, held, rows, **options)

    replay = cases.metadata_of([Row(2, (1,), is_speculative=True), Row(3, (2,))], "replay")
    long = GDNMetadata.build([0, 5], [[0, 1, 2, 3, 4]], is_speculative=[True])
    null = GDNMetadata.build([0, 5], [1], null_slot=0)
    table = GDNMetadata.build([0, 2, 5], [[0, 1], [2, 3]], is_speculative=[True, False])
    calls = [
        (ValueError, "mixed_qkv: expected", {"mixed_qkv": batch.mixed_qkv[:, :-1]}),
        (
            ValueError,
            "mixed_qkv: expected the 5 tokens",
            {k: getattr(batch, k)[:4] for k in ("mixed_qkv", "a", "b", "z")},
        ),
        (ValueError, "b: expected", {"b": batch.b[:, 1:]}),
        (ValueError, "a: expected", {"a": batch.a[1:]}),
        (ValueError, "z: expected", {"z": batch.z[1:]}),
        (TypeError, "z: expected", {"z": None}),
        (TypeError, "a: expected float32 or bfloat16 or float16", {"a": batch.a.double()}),
        (TypeError, "b: expected float32 or bfloat16 or float16", {"b": batch.b.double()}),
        (ValueError, "out: expected elements that do not overlap", {"out": torch.empty(1, HV, V).expand(5, -1, -1)}),
        (TypeError, "layer: expected a GDNLayerParams or a GatedDeltaNet, got None", {"layer": None}),
        (TypeError, "cache: expected a GDNStateCache, got None", {"held": None}),
        (TypeError, "metadata: expected a GDNMetadata, got None", {"rows": None}),
        (ValueError, "out: expected", {"out": torch.empty(5, HV, V + 1)}),
        (IndexError, "metadata.slots: expected slots below 8, got 9", {"held": small}),
        (ValueError, "records", {"rows": replay}),
        (ValueError, "at most S = 4 tokens in a row", {"rows": long}),
        (ValueError, "null_slot", {"rows": null}),
        (ValueError, "expected one slot a row", {"rows": table, "held": cases.cache("replay")}),
    ]
    for error, message, changes in calls:
        with pytest.raises(error, match=message):
            attention(**changes)
    check_untouched(held, before, [], "slots")
    assert not small.state.any()


@pytest.mark.usefixtures("native_impl")
@IN_BOTH_FORMS
def test_what_a_forced_backend_declines_changes_nothing(form):
    """The convolution could run where the norm after it, or the rule on heads of this size, cannot."""
    rows = [Row(1, (3,)), Row(4, (9,), False)]
    batch, held = cases.random_inputs(5, 1), cases.randomized(cases.cache(form))
    before = cases.clone(held)
    with pytest.raises(NotImplementedError, match="gdn_attention: the forced backend 'cpu' cannot run this call: z"):
        replace(batch, z=batch.z.double()).run(LAYER, held, cases.metadata_of(rows, form))
    check_untouched(held, before, [], form)

    arguments, _ = inputs.attention_arguments([("fresh", 5), ("decode", 1)], 2, 1, 1, 257, 16, replay=form == "replay")
    held = arguments["cache"]
    pools = [held.state.clone(), held.conv_states.clone()]
    with pytest.raises(NotImplementedError, match="K and V: from 1 to 256"):
        gdn_core.gdn_attention(**arguments)
    assert same_bits(held.state, pools[0])
    assert same_bits(held.conv_states, pools[1])


@pytest.mark.parametrize("shift", [0, 5, 3 * HV * V])
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "z"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@IN_BOTH_FORMS
def test_an_output_on_the_memory_of_an_input(impl, form, dtype, name, shift):
    """Rows of every kind, of which the first to write do not change what the others read."""
    rows = [Row(1, (3,)), Row(70, (9,), False), Row(2, (-1,)), Row(66, (11,)), Row(1, (12,)), Row(1, (13,))]
    tokens = sum(row.length for row in rows)
    before = cases.randomized(cases.cache(form, dtype=dtype))
    batch, metadata = cases.random_inputs(tokens, dtype=dtype), cases.metadata_of(rows, form)
    results = []
    for held, changes, out in [
        (cases.clone(before), {}, torch.empty_like(batch.z)),
        (cases.clone(before), *on_top_of(batch, name, shift)),
    ]:
        replace(batch, **changes).run(LAYER, held, metadata, out=out)
        results.append((out, held))
    (expected, expected_held), (out, held) = results
    assert agree(impl, out, expected)
    for pool, value in cases.pools(expected_held).items():
        assert agree(impl, cases.pools(held)[pool], value), pool


def on_top_of(batch, name, shift):
    """Return a copy of an input, and an output whose first element is the copy's element `shift`."""
    value = getattr(batch, name)
    memory = torch.zeros(max(value.numel(), shift + batch.z.numel()), dtype=value.dtype)
    copy = memory[: value.numel()].view(value.shape).copy_(value)
    return {name: copy}, memory[shift : shift + batch.z.numel()].view(batch.z.shape)


def test_more_accepted_than_recorded_changes_nothing():
    held = cases.randomized(cases.cache("replay"))
    held.records.live[4] = 2
    before = cases.clone(held)
    rows = [Row(1, (2,), is_speculative=True), Row(1, (4,), is_speculative=True, accepted=3)]
    with pytest.raises(ValueError, match="num_accepted_tokens: expected at most the 2 live records of slot 4, got 3"):
        cases.random_inputs(2).run(LAYER, held, cases.metadata_of(rows, "replay"))
    check_untouched(held, before, [], "replay")


def test_a_plain_row_on_a_speculating_slot_raises_under_debug(monkeypatch):
    held = cases.randomized(cases.cache("replay"))
    monkeypatch.setenv("GDN_DEBUG", "1")
    with pytest.raises(ValueError, match="commit"):
        cases.random_inputs(1).run(LAYER, held, cases.metadata_of([Row(1, (4,))], "slots"))


@pytest.mark.report("B24")
def test_two_rows_on_one_slot_raise_under_debug(monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    with pytest.raises(ValueError, match="expected distinct slots, got 4 in rows 0 and 2"):
        cases.metadata_of([Row(1, (4,)), Row(1, (5,)), Row(7, (4,), False)], "slots")


def test_a_gradient_is_refused_and_not_dropped():
    batch, held = cases.random_inputs(1), cases.cache("slots")
    batch.z.requires_grad_()
    metadata = cases.metadata_of([Row(1, (0,))], "slots")
    with pytest.raises(RuntimeError, match=r"gdn_attention.*gradient.*no_grad"):
        batch.run(LAYER, held, metadata)
    with torch.no_grad():
        assert batch.run(LAYER, held, metadata).isfinite().all()


OF_THE_LAYER = ("conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
OF_THE_CACHE = ("conv_states", "state", "records.k", "records.u", "records.decay")


@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "z", *OF_THE_LAYER, *OF_THE_CACHE])
@pytest.mark.parametrize("is_forward", [False, True], ids=["backward", "forward"])
def test_a_gradient_of_any_input_is_refused(name, is_forward):
    """Each alone, since one that requires a gradient hides another that was forgotten."""
    batch, held = cases.random_inputs(1), cases.cache("replay")
    layer = replace(LAYER, conv_bias=torch.zeros(len(LAYER.conv_weight)))
    owner = held if name in OF_THE_CACHE else layer if name in OF_THE_LAYER else batch
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    metadata = cases.metadata_of([Row(1, (0,), is_speculative=True)], "replay")
    batch.run(layer, cases.cache("replay"), metadata)  # takes it as it is
    value = getattr(owner, attribute).detach().clone()
    before = held.state.clone()
    with forward_ad.dual_level():
        needs = forward_ad.make_dual(value, torch.ones_like(value)) if is_forward else value.requires_grad_()
        object.__setattr__(owner, attribute, needs)
        with pytest.raises(RuntimeError, match=r"gdn_attention.*gradient.*no_grad"):
            batch.run(layer, held, metadata)
    assert torch.equal(held.state, before)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.report("C20")
def test_every_parameter_is_named():
    signature = inspect.signature(gdn_core.gdn_attention)
    assert list(signature.parameters) == ["mixed_qkv", "a", "b", "z", "layer", "cache", "metadata", "out"]
    assert signature.parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.report("B22")
@IN_BOTH_FORMS
def test_threads_change_no_bit(native_impl, form):
    rows = cases.random_rows(31, form, count=10)
    _, _, expected_cache, expected = run_mix(rows, form, seed=31)
    for threads in (2, 3, 7, 16):
        torch.set_num_threads(threads)
        _, _, after, out = run_mix(rows, form, seed=31)
        assert same_bits(out, expected)
        assert same_bits(after.state, expected_cache.state)


@pytest.mark.report("C14")
@IN_BOTH_FORMS
def test_views_of_a_projection_are_as_good_as_tensors_of_their_own(native_impl, form):
    rows = cases.random_rows(32, form, count=10)
    batch, before, after, out = run_mix(rows, form, seed=32)
    packed = cases.Inputs(*(x.contiguous() for x in (batch.mixed_qkv, batch.a, batch.b, batch.z)))
    assert not batch.mixed_qkv.is_contiguous()
    assert same_bits(packed.run(LAYER, before, cases.metadata_of(rows, form)), out)
    assert same_bits(before.state, after.state)


@pytest.mark.report("B07")
def test_slots_beyond_32_bit_offsets(native_impl):
    """Slot 2 begins 2^32 elements into the pool."""
    state = distant_slots(3, (HV, K, V), 2**31)
    near = cases.cache("slots", num_slots=3)
    far = GDNStateCache.from_tensors(near.conv_states.clone(), state)
    for seed, row in enumerate([Row(5, (2,), False), Row(1, (2,)), Row(2, (2, 1), is_speculative=True)]):
        batch, metadata = cases.random_inputs(row.length, seed), cases.metadata_of([row], "slots")
        assert same_bits(batch.run(LAYER, far, metadata), batch.run(LAYER, near, metadata))
    assert same_bits(far.state[2], near.state[2])


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_of_other_kinds(impl, width, has_bias):
    """Other widths, no activation after the convolution, a sigmoid gate: a prompt and two tokens against float64."""
    rng = inputs.generator(width)
    weight, bias = inputs.conv_weights(cases.C, width, torch.float32, rng, has_bias)
    params = replace(LAYER, conv_weight=weight, conv_bias=bias, activation=None, output_gate_activation="sigmoid")
    held = cases.cache("slots", conv_width=width)
    batch = cases.random_inputs(8, width)
    out = [
        batch.tokens(tokens).run(params, held, cases.metadata_of([row], "slots"))
        for tokens, row in ((slice(6), Row(6, (5,), False)), (slice(6, 7), Row(1, (5,))), (slice(7, 8), Row(1, (5,))))
    ]
    wide = to_float64(vars(batch) | {"weight": weight, "bias": bias})
    convolved = oracle.causal_conv1d_fn(wide["mixed_qkv"].T[None], wide["weight"], wide["bias"])[0].T
    q, k, v = split_heads(convolved[None], cases.H, K, V)
    g, beta = oracle.fused_gdn_gating(params.A_log.double(), wide["a"], wide["b"], params.dt_bias.double())
    o, _ = oracle.fused_recurrent_gated_delta_rule(q, k, v, g[None], beta=beta[None], use_qk_l2norm_in_kernel=True)
    expected = oracle.rms_norm_gated(o[0], wide["z"], params.norm_weight.double(), 1e-6, activation="sigmoid")
    assert relative_error(torch.cat(out), expected, (0, 2)) <= 1e-5


@pytest.mark.report("C16")
@IN_BOTH_FORMS
def test_pools_may_be_views_and_the_null_slot_is_padding(native_impl, form):
    """An engine's pools: slots apart, conv states channel by channel, slot 0 for nobody."""
    rows = [Row(1, (3,)), Row(5, (9,), False), Row(2, (12, 13, 14), is_speculative=True)]
    plain = cases.randomized(cases.cache(form), 3)
    cases.prepare(plain, rows)
    wide = torch.zeros(64, 2, HV, *plain.state.shape[-2:])
    wide[:, 0] = plain.state
    held = GDNStateCache.from_tensors(
        plain.conv_states.clone(memory_format=torch.contiguous_format), wide[:, 0],
        None if plain.records is None else cases.clone(plain).records, null_slot=0,
    )  # fmt: skip
    batch = cases.random_inputs(8, 3)
    expected = batch.run(LAYER, plain, cases.metadata_of(rows, form))
    padded = GDNMetadata.build(
        [0, 1, 6, 8, 9, 12],
        [3, 9, 12, 0, 0] if form == "replay" else [[3, 0, 0], [9, 0, 0], [12, 13, 14], [0, 0, 0], [0, 0, 0]],
        has_initial_state=[True, False, True, True, False],
        is_speculative=[False, False, True, False, False],
        null_slot=0,
    )
    longer = cases.random_inputs(12, 4)
    for name in ("mixed_qkv", "a", "b", "z"):
        getattr(longer, name)[:8] = getattr(batch, name)
        getattr(longer, name)[8:] = float("nan")
    out = longer.run(LAYER, held, padded)
    assert same_bits(out[:8], expected)
    assert not out[8:].any()
    assert same_bits(held.state[[3, 9, 12, 13]], plain.state[[3, 9, 12, 13]])
    assert not wide[:, 1].any()
