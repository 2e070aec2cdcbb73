# SPDX-License-Identifier: Apache-2.0
"""gdn_core.speculate: blocks of drafts for several requests at once change nothing but the number of passes."""

import random

import pytest
import torch

import gdn_core
from contract_calls import same_bits
from gdn_core.speculate import ContextCache, Engine, PromptLookup, row_by_row
from speculate_models import VOCABULARY, BlockDrafter, Target, Told

PROMPTS = [(3, 1, 4, 1, 5), (2, 0), tuple(i * i % 5 for i in range(150)), (5,), (1, 2, 3) * 5]
LENGTHS = [40, 25, 12, 33, 30]
CACHES = {"slots": {"S": 4}, "replay": {"S": 4, "replay": True}}


def generate(target, drafter=None, prompts=PROMPTS, **options):
    """Generate for all prompts; some only join when others are decoding already."""
    engine = Engine(target, drafter, **{"max_rows": 3, "prefill_tokens": 64, "exact": True, **options})
    requests = []
    for prompt, length in zip(prompts, LENGTHS, strict=True):
        requests.append(engine.add(prompt, length))
        engine.step()
        engine.step()
    engine.run()
    assert all(request.is_finished for request in requests)
    return engine, requests


@pytest.fixture(scope="module")
def plain():
    """What decoding one token at a time generates, and the hidden states of each request."""
    target = Target()
    drafter = BlockDrafter()
    rows = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        engine = Engine(target, None, prefill_tokens=64, exact=True)
        engine._drafter = drafter  # to record hidden states; with S = 1 it is not asked for drafts
        request = engine.add(prompt, length)
        engine.run()
        slot = request._slots[0]
        rows.append((request.generated, drafter.context.get(slot).clone()))
    assert len({tuple(generated[:12]) for generated, _ in rows}) > 2
    return rows


def same(actual, expected):
    """Compare two passes: bit for bit, but on the reference up to torch's vector tails."""
    if any(backend.name == "cpu" and backend.available for backend in gdn_core.backends()):
        return same_bits(actual, expected)
    return torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


def drafters(plain):
    texts = [[*prompt, *generated] for prompt, (generated, _) in zip(PROMPTS, plain, strict=True)]
    return {"block": BlockDrafter(), "lookup": PromptLookup(least=1), "told": Told(texts)}


@pytest.mark.parametrize("form", CACHES)
@pytest.mark.parametrize("kind", ["block", "lookup", "told"])
def test_speculation_generates_the_very_tokens_of_plain_decoding(plain, form, kind):
    target, drafter = Target(**CACHES[form]), drafters(plain)[kind]
    engine, requests = generate(target, drafter)
    for request, (generated, _) in zip(requests, plain, strict=True):
        assert request.generated == generated
    drafted, accepted = (sum(getattr(r, name) for r in requests) for name in ("num_drafted", "num_accepted"))
    assert 0 < accepted < drafted
    metadata = [batch.metadata for batch in target.batches]
    together = [m for m in metadata if m.num_spec_decodes > 1 and len(set(m.num_accepted_tokens.tolist())) > 1]
    assert together, "no batch with different acceptance"
    assert any(m.num_prefills and m.num_spec_decodes for m in metadata), "no prefill while others decode"
    if kind == "told":
        assert engine.num_passes < sum(LENGTHS) / 2


@pytest.mark.parametrize("form", CACHES)
def test_the_drafters_context_is_rolled_back_to_what_was_accepted(plain, form):
    """After each pass a slot holds the hidden states of the tokens that stayed, the bits of plain decoding."""
    drafter = BlockDrafter()
    engine = Engine(Target(**CACHES[form]), drafter, max_rows=3, prefill_tokens=64, exact=True)
    requests = [engine.add(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    checked = 0
    while not all(request.is_finished for request in requests):
        engine.step()
        for request, (_, hidden) in zip(requests, plain, strict=True):
            if request._slots and not request.is_finished:
                context = drafter.context.get(request._slots[0])
                assert len(context) == request._num_seen
                assert same(context, hidden[: len(context)])
                checked += 1
    assert checked > 20


def test_in_fast_mode_every_token_is_a_near_best_one():
    """Without `exact` rounding may decide between the two best tokens, but nothing else may change."""
    target = Target(S=4)
    engine, requests = generate(target, PromptLookup(least=1), exact=False)
    assert engine.num_passes < sum(LENGTHS)
    judge = Target()
    for request in requests:
        checker = Engine(judge, None, prefill_tokens=512)
        logits = all_logits(checker, [*request.prompt, *request.generated], judge)
        for i, token in enumerate(request.generated, len(request.prompt) - 1):
            assert float(logits[i].max() - logits[i, token]) <= 1e-3


def all_logits(engine, text, judge):
    kept = []
    original = judge.forward

    def forward(batch):
        result = original(batch)
        kept.append(judge.head(result[0]))
        return result

    judge.forward = forward
    engine.add(text, 1)
    engine.run()
    judge.forward = original
    return torch.cat(kept)


@pytest.mark.parametrize("form", CACHES)
def test_slots_go_round(plain, form):
    """A pool that holds two requests at a time serves any number, each as if it were alone."""
    num_slots = 8 if form == "slots" else 2
    target = Target(num_slots, **CACHES[form])
    _, requests = generate(target, PromptLookup(least=1))
    assert [request.generated for request in requests] == [generated for generated, _ in plain]


def test_a_stop_token_ends_a_request_where_it_stands(plain):
    generated = plain[0][0]
    stop = generated[7]
    engine = Engine(Target(S=4), PromptLookup(least=1), exact=True)
    request = engine.add(PROMPTS[0], 40, stop_tokens=[stop])
    engine.run()
    assert request.generated == generated[: generated.index(stop) + 1]


def test_a_null_slot_is_never_used(plain):
    target = Target(S=4, null_slot=0)
    _, requests = generate(target, PromptLookup(least=1))
    assert all(0 not in batch.slots for batch in target.batches)
    assert not any(cache.state[0].any() for cache in target.caches)
    assert requests[0].generated == plain[0][0]


def test_what_makes_no_sense_is_refused():
    target = Target(S=4)
    engine = Engine(target, Told([[0] * 99], block=9))
    for prompt, length, name in (((), 5, "prompt"), ((1,), 0, "max_new_tokens")):
        with pytest.raises(ValueError, match=name):
            engine.add(prompt, length)
    with pytest.raises(ValueError, match="prefill_tokens: expected at least 64"):
        Engine(target, prefill_tokens=63)
    with pytest.raises(ValueError, match="max_rows"):
        Engine(target, max_rows=0)
    with pytest.raises(ValueError, match=r"target.caches: expected at least 4 slots"):
        Engine(Target(3, S=4), PromptLookup())
    target.caches[1] = Target(S=3).caches[0]
    with pytest.raises(ValueError, match=r"target.caches: expected caches alike"):
        Engine(target)
    target.caches = []
    with pytest.raises(ValueError, match="at least one cache"):
        Engine(target)


class TooMany(PromptLookup):
    def propose(self, slots, last_tokens, limits):
        return [[0] * (limit + 1) for limit in limits]


def test_a_drafter_that_proposes_too_much_is_named():
    engine = Engine(Target(S=4), TooMany())
    engine.add((1, 2), 9)
    with pytest.raises(ValueError, match="drafter: expected at most 3 tokens, got 4"):
        engine.run()


# --- parts ------------------------------------------------------------------------------------------------------------


def test_row_by_row_gives_the_bits_of_one_row():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 67), torch.nn.SiLU(), torch.nn.RMSNorm(67), torch.nn.Linear(67, 5))
    x = torch.randn(3, 7, 48)
    with torch.no_grad(), row_by_row():
        together = model(x)
        for i in range(3):
            for j in range(7):
                assert same_bits(together[i, j], model(x[i, j : j + 1])[0])
    torch.testing.assert_close(together, model(x))


def test_a_context_cache_is_the_list_it_stands_for():
    rng, cache, lists = random.Random(0), ContextCache(3), {0: [], 5: []}
    for step in range(200):
        slot = rng.choice([0, 5])
        if rng.random() < 0.6:
            values = torch.full((rng.randint(0, 9), 3), float(step))
            cache.extend(slot, values)
            lists[slot] += [float(step)] * len(values)
        else:
            keep = rng.randint(0, len(lists[slot]))
            cache.truncate(slot, keep)
            del lists[slot][keep:]
        assert cache.get(slot)[:, 1].tolist() == lists[slot]
        assert cache.length(slot) == len(lists[slot])
    with pytest.raises(ValueError, match="length"):
        cache.truncate(0, cache.length(0) + 1)


@pytest.mark.parametrize(
    ("seen", "last", "limit", "expected"),
    [
        ([1, 2, 3, 1], 2, 3, [3, 1, 2]),
        ([1, 2, 3, 9, 2], 3, 1, [9]),
        ([1, 2, 7, 1, 2, 8, 1], 2, 1, [8]),  # the latest place
        ([4, 1, 2, 7, 5, 1, 2, 8, 4, 1], 2, 1, [7]),  # but the longest sequence
        ([1, 2, 3], 4, 3, []),
        ([1, 2, 3, 1], 2, 0, []),
    ],
)
def test_prompt_lookup(seen, last, limit, expected):
    drafter = PromptLookup()
    drafter.start(0)
    drafter.extend(0, [*seen, 99], None)
    drafter.rollback(0, len(seen))
    assert drafter.propose([0], [last], [limit]) == [expected]
    with pytest.raises(ValueError, match="least"):
        PromptLookup(most=1)
    assert VOCABULARY > 2
