# SPDX-License-Identifier: Apache-2.0
"""GDNStateCache: sizes, slots, the end of speculation, prefix caching, layouts."""

import pytest
import torch

import attention_cases as cases
from attention_cases import FORMS, HV, K, Row, S, V, W
from contract_calls import same_bits
from gdn_core import GDNStateCache, ReplayRecords

LAYER = cases.layer()
IN_BOTH_FORMS = pytest.mark.parametrize("form", FORMS)


def held(form, **options):
    return cases.randomized(cases.cache(form, num_slots=12, **options))


def changed_slots(cache, before):
    """Return the slots of each pool that differ."""
    return {
        name: [i for i in range(12) if not torch.equal(pool[i], cases.pools(before)[name][i])]
        for name, pool in cases.pools(cache).items()
    }


@pytest.mark.parametrize("replay", [False, True])
def test_a_budget_holds_as_many_slots_as_it_says(replay):
    sizes = (2, 4, 16, 8, torch.bfloat16)
    options = {"S": 3, "replay": replay, "state_dtype": torch.bfloat16}
    budget = 1_000_003
    count = GDNStateCache.slots_for_budget(budget, *sizes, **options)
    assert GDNStateCache(count, *sizes, **options).nbytes <= budget < GDNStateCache(count + 1, *sizes, **options).nbytes


def test_nbytes_counts_every_pool():
    for form in FORMS:
        cache = cases.cache(form)
        assert cache.nbytes == sum(pool.numel() * pool.element_size() for pool in cases.pools(cache).values())
        assert str(cache.nbytes) in repr(cache)


@IN_BOTH_FORMS
def test_reset_zeroes_its_slots_and_no_others(form):
    cache = held(form)
    before = cases.clone(cache)
    cache.reset([3, 7])
    assert changed_slots(cache, before)["state"] == changed_slots(cache, before)["conv_states"] == [3, 7]
    assert not cache.state[[3, 7]].any()
    assert not cache.conv_states[[3, 7]].any()
    if form == "replay":
        assert not cache.records.live[[3, 7]].any()


@IN_BOTH_FORMS
def test_copy_reads_all_before_it_writes(form):
    cache = held(form)
    before = cases.clone(cache)
    cache.copy([1, 2, 3], torch.tensor([2, 1, 9]))
    for name, pool in cases.pools(cache).items():
        previous = cases.pools(before)[name]
        for src, dst in ((1, 2), (2, 1), (3, 9)):
            assert torch.equal(pool[dst], previous[src])
        others = [i for i in range(12) if i not in (1, 2, 9)]
        assert torch.equal(pool[others], previous[others])


@IN_BOTH_FORMS
@pytest.mark.parametrize("accepted", range(S + 1))
def test_commit_leaves_others_alone(form, accepted):
    cache = held(form)
    before = cases.clone(cache)
    table = [4, 5, 6, 7]
    cache.commit([4] if form == "replay" else [table], [accepted])
    kept = max(accepted, 1)
    assert torch.equal(cache.conv_states[4, :, : W - 1], before.conv_states[4, :, kept - 1 : kept + W - 2])
    if form == "slots":
        assert torch.equal(cache.state[4], before.state[table[kept - 1]])
    else:
        assert not cache.records.live[4]
    touched = changed_slots(cache, before)
    assert set().union(*touched.values()) <= {4}


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_commit_replays_as_the_next_step_would(state_v_first, state_dtype):
    cache = held("replay", state_v_first=state_v_first, state_dtype=state_dtype)
    stepped = cases.clone(cache)
    row = Row(1, (4,), is_speculative=True, accepted=3)
    cases.random_inputs(1).run(LAYER, stepped, cases.metadata_of([row], "replay"))
    cache.commit([4, 9], [3, 0])
    assert same_bits(cache.state[4], stepped.state[4])


@IN_BOTH_FORMS
@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_snapshot_goes_into_any_slot_of_either_layout(form, state_v_first):
    cache = held(form)
    if form == "replay":
        with pytest.raises(ValueError, match=r"call commit\(\) first"):
            cache.snapshot([3, 4])
        cache.records.reset(torch.tensor([3, 4]))
    snapshot = cache.snapshot([3, 4])
    assert snapshot.nbytes == snapshot.state.nbytes + snapshot.conv_states.nbytes
    expected = cases.clone(cache)
    cache.reset([3, 4])  # a snapshot is a copy
    target = held(form, state_v_first=state_v_first)
    before = cases.clone(target)
    target.restore(snapshot, [11, 0])
    state = target.state.mT if state_v_first else target.state
    assert torch.equal(state[[11, 0]], expected.state[[3, 4]])
    assert torch.equal(target.conv_states[[11, 0], :, : W - 1], expected.conv_states[[3, 4], :, : W - 1])
    assert set().union(*changed_slots(target, before).values()) == {0, 11}
    if form == "replay":
        assert not target.records.live[[0, 11]].any()
    with pytest.raises(ValueError, match=r"snapshot.conv_states: expected \[1, "):
        target.restore(snapshot, [1])


@pytest.mark.report("C15")
@IN_BOTH_FORMS
def test_a_converted_layout_goes_on_as_before(impl, form):
    """Values are transposed, never reinterpreted: K and V differ here, and the states are not symmetric."""
    rows = [Row(1, (3,)), Row(5, (4,)), Row(2, (5, 6), is_speculative=True, accepted=2)]
    cache = held(form)
    cases.prepare(cache, rows)
    converted = cases.clone(cache).convert_layout(state_v_first=True)
    assert converted.state.shape == (12, HV, V, K)
    assert torch.equal(converted.state.mT, cache.state)
    back = converted.convert_layout(state_v_first=False)
    assert same_bits(back.state, cache.state)
    batch = cases.random_inputs(8)
    metadata = cases.metadata_of(rows, form)
    out = batch.run(LAYER, converted, metadata)
    torch.testing.assert_close(out, batch.run(LAYER, cache, metadata), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(converted.state.mT, cache.state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.reset([12]), IndexError, "slots: expected slots from 0 to 11, got 12"),
        (lambda c: c.reset([-1]), IndexError, "slots: expected slots from 0 to 11, got -1"),
        (lambda c: c.copy([1, 2], [3]), ValueError, "dst: expected 2 slots"),
        (lambda c: c.snapshot([99]), IndexError, "got 99"),
        (lambda c: c.commit([4], [1]), ValueError, r"slots: expected \[n, S\], a table"),
        (lambda c: c.commit([[4, 5]], [3]), ValueError, r"num_accepted_tokens: expected values in \[0, 2\]"),
        (lambda c: c.commit([[4, 5]], [1, 1]), ValueError, r"num_accepted_tokens: expected \[1\]"),
        (lambda c: c.commit([[4, -1]], [2]), IndexError, "got -1"),
    ],
)
def test_wrong_slots_change_nothing(call, error, message):
    cache = held("slots")
    before = cases.clone(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert not any(changed_slots(cache, before).values())


def test_wrong_counts_of_the_replay_form_change_nothing():
    cache = held("replay")
    cache.records.live[5] = 2
    before = cases.clone(cache)
    for slots, accepted in (([4, 5], [1, 3]), ([4], [S + 1]), ([[4, 5]], [1])):
        with pytest.raises(ValueError, match=r"num_accepted_tokens|slots"):
            cache.commit(slots, accepted)
    assert not any(changed_slots(cache, before).values())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"conv_states": torch.zeros(4, 7)}, ValueError, r"conv_states: expected \[P, C, state_len\]"),
        ({"conv_states": torch.zeros(4, 96, 2)}, ValueError, "conv_states: expected a state_len of at least 3"),
        ({"state": torch.zeros(5, HV, K, V)}, ValueError, r"state: expected \[4, HV, K, V\]"),
        ({"state": torch.zeros(4, HV, V, K).mT}, ValueError, "state: expected the inside of a slot to be packed"),
        ({"records": ReplayRecords(5, 2, 2, HV, K, V, torch.float32)}, ValueError, "records.live"),
        ({"records": ReplayRecords(4, 3, 2, HV, K, V, torch.float32)}, ValueError, "state_len of at least 5"),
    ],
)
def test_pools_have_to_fit_each_other(changes, error, message):
    arguments = {"conv_states": torch.zeros(4, 96, 4), "state": torch.zeros(4, HV, K, V), **changes}
    with pytest.raises(error, match=message):
        GDNStateCache.from_tensors(**arguments)


@pytest.mark.parametrize("bad", [0, 17])
def test_columns_have_a_limit(bad):
    with pytest.raises(ValueError, match="S: expected 1 to 16"):
        GDNStateCache(1, 2, 4, 16, 8, torch.float32, S=bad)
