# SPDX-License-Identifier: Apache-2.0
"""gdn_core.speculate: blocks of drafts for several requests at once change nothing but the number of passes."""

import random

import pytest
import torch

import gdn_core
from contract_calls import same_bits
from gdn_core.speculate import ContextCache, Engine, Pace, PromptLookup, TemperatureSampler, row_by_row
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


# --- a temperature ----------------------------------------------------------------------------------------------------


class Markov:
    """A target whose next token depends on the last one alone, by a table of logits."""

    def __init__(self, table, columns):
        self.table = table
        self.caches = [gdn_core.GDNStateCache(8, 1, 1, 2, 2, torch.float32, S=columns, replay=columns > 1)]

    def __call__(self, batch):
        return batch.tokens[:, None].float(), self.table[batch.tokens[batch.needed]]


class Always:
    """Proposes the same tokens, whatever the text."""

    def __init__(self, *drafts):
        self.drafts = list(drafts)

    def start(self, slot):
        pass

    def extend(self, slot, tokens, hidden_states):
        pass

    def rollback(self, slot, num_tokens):
        pass

    def propose(self, slots, last_tokens, limits):
        return [self.drafts[:limit] for limit in limits]


TABLE = torch.tensor([[1.0, 0.3, -0.5, 0.0], [0.0, 1.5, 0.2, -1.0], [0.5, -0.7, 0.1, 0.9], [2.0, 0.0, 0.0, -0.3]])
# What a chi-square statistic of 63 degrees of freedom exceeds once in ten thousand.
CHI_SQUARE_63 = 113.5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("drafts", [(0, 0, 0), (3, 1, 2), (2, 0)], ids=str)
def test_drafts_leave_the_distribution_as_it_is(temperature, drafts):
    """Frequencies of all texts of 3 tokens against their probabilities."""
    count = 3000
    engine = Engine(Markov(TABLE, 4), Always(*drafts), max_rows=7)
    requests = [engine.add([1], 3, temperature=temperature, seed=seed) for seed in range(count)]
    engine.run()
    assert 0 < sum(r.num_accepted for r in requests) < sum(r.num_drafted for r in requests)
    p = (TABLE.double() / temperature).softmax(-1)
    expected = count * torch.einsum("a,ab,bc->abc", p[1], p, p)
    observed = torch.zeros_like(expected)
    for request in requests:
        observed[tuple(request.generated)] += 1
    assert float(((observed - expected) ** 2 / expected).sum()) < CHI_SQUARE_63


@pytest.mark.parametrize("form", CACHES)
def test_with_a_temperature_too_speculation_draws_the_very_tokens_of_plain_decoding(form):
    def texts(target, drafter):
        engine = Engine(target, drafter, max_rows=3, prefill_tokens=64, exact=True)
        settings = zip(PROMPTS, LENGTHS, (0.5, 1.0, 0.0, 2.0, 1.0), strict=True)
        requests = [engine.add(p, n, temperature=t, seed=len(p)) for p, n, t in settings]
        engine.run()
        return [request.generated for request in requests], engine.num_passes

    plain, _ = texts(Target(), None)
    drafted, passes = texts(Target(**CACHES[form]), Told([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)]))
    assert drafted == plain and passes < sum(LENGTHS) / 2
    assert len({tuple(text[:10]) for text in plain}) > 3


def test_a_sampler_has_one_number_a_place():
    logits = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    whole = TemperatureSampler(0.8, seed=4)(logits, 0)
    sampler = TemperatureSampler(0.8, seed=4)
    assert [sampler(logits[i : i + 1], i)[0] for i in range(400)] == whole
    assert sampler(logits[37:90], 37) == whole[37:90]
    assert TemperatureSampler(0.8, seed=5)(logits, 0) != whole
    assert TemperatureSampler(1e-3)(logits, 0) == logits.argmax(-1).tolist()
    impossible = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).expand(200, -1)
    assert set(TemperatureSampler(1.0)(impossible, 0)) == {1}
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            TemperatureSampler(temperature)


# --- when drafts are worth it -----------------------------------------------------------------------------------------


def passes(pace, count, tokens, plain=1.0, drafting=1.3):
    """Decode for `count` passes where drafts bring `tokens`; return the seconds, and tokens made in them."""
    seconds = made = 0.0
    for _ in range(count):
        is_drafting = pace.drafts
        took, new = (drafting, tokens) if is_drafting else (plain, 1)
        pace.passed(7 * is_drafting, new, took)
        seconds, made = seconds + took, made + new
    return seconds, made


@pytest.mark.parametrize("drafting", [1.3, 2.0, 3.0])
def test_drafts_that_do_not_pay_cost_little(drafting):
    seconds, made = passes(Pace(), 400, 1, drafting=drafting)
    assert made / seconds > 0.95


def test_drafts_that_pay_go_on_and_come_back():
    pace = Pace()
    seconds, made = passes(pace, 100, 4)
    assert made / seconds > 2.9
    passes(pace, 100, 1)
    assert not pace.drafts
    seconds, made = passes(pace, 300, 4)
    assert pace.drafts and made / seconds > 2


def test_an_engine_drafts_as_its_pace_says():
    class Never(Pace):
        drafts = False

    engine = Engine(Target(S=4), PromptLookup(least=1), pace=Never())
    request = engine.add(PROMPTS[0], 20)
    engine.run()
    assert request.num_drafted == 0 and engine.num_passes == 20 and engine._pace.plain_seconds > 0
    engine = Engine(Target(S=4), PromptLookup(least=1), pace=Pace())
    request = engine.add(PROMPTS[0], 20)
    engine.run()
    assert request.num_drafted > 0


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


@pytest.mark.parametrize("options", [{"is_causal": True}, {"mask": True}, {}], ids=["causal", "mask", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_by_row_attention_gives_the_bits_of_one_query(options, dtype):
    attention = torch.nn.functional.scaled_dot_product_attention
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 24, generator=generator).to(dtype)
    mask = None
    if "mask" in options:
        mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
        options = {"attn_mask": mask}
    is_causal = mask is not None or options.get("is_causal", False)
    with row_by_row():
        together = attention(q, k, v, **options)
        for i in range(9):
            seen = slice(0, i + 1) if is_causal else slice(None)
            alone = attention(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen])
            assert same_bits(together[:, :, i], alone[:, :, 0])
    torch.testing.assert_close(together, attention(q, k, v, **options))


def test_row_by_row_gives_experts_the_bits_of_one_token():
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch has no grouped product")
    generator = torch.Generator().manual_seed(0)
    x, matrices = (torch.randn(*size, generator=generator).bfloat16() for size in ((6, 32), (3, 32, 16)))
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    with row_by_row():
        together = torch._grouped_mm(x, matrices, offs=offs)
        alone = torch._grouped_mm(x[3:4], matrices, offs=torch.tensor([0, 0, 1], dtype=torch.int32))
    assert same_bits(together[3], alone[0])
    torch.testing.assert_close(together[:5], torch._grouped_mm(x, matrices, offs=offs)[:5])


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
