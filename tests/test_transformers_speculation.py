# SPDX-License-Identifier: Apache-2.0
"""transformers' models as targets and drafters of gdn_core.speculate: fewer passes, and the text of plain decoding."""

from __future__ import annotations

import copy
import importlib
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch

import gdn_core
from gdn_core.speculate import Engine, PromptLookup

transformers = pytest.importorskip("transformers")
integration = importlib.import_module("gdn_core.integrations.transformers")

from speculate_models import Told  # noqa: E402
from transformers_models import FAMILIES, relative_difference, small_model, tokens  # noqa: E402

_LAYER = type(integration.gated_delta_net_layers(small_model(FAMILIES[0]))[0])
pytestmark = pytest.mark.skipif(
    "cache" not in inspect.signature(_LAYER.forward).parameters, reason="transformers before 5.24"
)

SUPPORTED = [family for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe") if family in FAMILIES]
each_family = pytest.mark.parametrize("family", SUPPORTED)
each_form = pytest.mark.parametrize("replay", [False, True], ids=["slots", "replay"])
PROMPTS = [tokens(1, 21)[0].tolist(), tokens(1, 3, seed=7)[0].tolist(), tokens(1, 90, seed=8)[0].tolist()]
LENGTH = 24


class Wrong(Told):
    """Drafts the text with an error here and there, for a vocabulary of 99."""

    def follow(self, text: list[int], limit: int) -> list[int]:
        whole = next(whole for whole in self.texts if whole[: len(text)] == text)
        places = range(len(text), min(len(text) + limit, len(whole)))
        return [(whole[i] + (i % self.error == 0)) % 99 for i in places]


class Recorded(integration.TransformersTarget):  # type: ignore[misc]
    """Keeps the logits of each place of the first request's text: those that hold in the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: dict[int, torch.Tensor] = {}
        self.starts = 0  # of requests in slot 0, of which the first one counts

    def __call__(self, batch: Any) -> Any:
        hidden_states, logits = super().__call__(batch)
        spans = zip(batch.slots, pairwise(batch.metadata.row_ends), strict=True)
        start, end = next((span for slot, span in spans if slot == 0), (0, 0))
        self.starts += start < end and int(batch.positions[start]) == 0
        for row, token in enumerate(batch.needed.tolist()):
            if start <= token < end and self.starts == 1:
                self.logits[int(batch.positions[token])] = logits[row].clone()
        return hidden_states, logits


def run(target: Any, drafter: Any = None, **settings: Any) -> tuple[list[list[int]], Engine]:
    engine = Engine(target, drafter, prefill_tokens=64, max_rows=2, exact=settings.pop("exact", True))
    requests = [engine.add(prompt, LENGTH, **settings) for prompt in PROMPTS]
    engine.run()
    return [request.generated for request in requests], engine


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """What decoding each request alone generates, token by token."""
    known: dict[str, Any] = {}
    torch.set_num_threads(1)  # as every test has it: torch's own bits depend on their number
    for family in SUPPORTED:
        texts, logits = [], {}
        for prompt in PROMPTS:
            target = Recorded(small_model(family))
            engine = Engine(target, None, prefill_tokens=64, exact=True)
            asked = engine.add(prompt, LENGTH)
            engine.run()
            texts.append(asked.generated)
            logits = logits or target.logits
        known[family] = texts, logits
    return known


@each_family
@each_form
def test_speculation_generates_the_very_tokens_of_plain_decoding(
    plain: dict[str, Any], family: str, replay: bool, cpu_backend: None
) -> None:
    """Several requests, prompts in parts, drafts of several lengths: also the logits have the bits of one token."""
    texts, logits = plain[family]
    target = Recorded(small_model(family), num_slots=2, S=6, replay=replay)
    wholes = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    drafted, engine = run(target, Wrong(wholes, block=5, error=4))
    assert drafted == texts
    assert engine.num_passes < 1.2 * LENGTH
    places = range(len(PROMPTS[0]) - 1, len(PROMPTS[0]) + LENGTH - 1)
    for place in places:
        assert torch.equal(target.logits[place], logits[place])


@each_family
def test_a_smaller_model_drafts(plain: dict[str, Any], family: str, cpu_backend: None) -> None:
    """The model itself drafts right but for rounding; one of other weights mostly not, and is forgotten."""
    model = small_model(family)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator()))
    for draft, most in ((model, LENGTH), (other, 3 * LENGTH)):
        drafter = integration.ModelDrafter(draft, num_drafts=5, num_slots=2)
        texts, engine = run(integration.TransformersTarget(model, num_slots=2, S=6), drafter)
        assert texts == plain[family][0]
        assert engine.num_passes < most


@each_family
@torch.no_grad()
def test_the_target_agrees_with_the_model(family: str) -> None:
    """Logits of prompts and of decoded tokens, several requests together, against transformers' own code."""
    model = small_model(family)
    texts, _ = run(target := Recorded(model, num_slots=2, S=4), PromptLookup(least=1), exact=False)
    whole = torch.tensor([[*PROMPTS[0], *texts[0]]])
    expected = model(whole).logits[0]
    places = range(len(PROMPTS[0]) - 1, len(PROMPTS[0]) + LENGTH - 1)
    assert relative_difference(torch.stack([target.logits[place] for place in places]), expected[places]) < 1e-5
    assert not integration.is_patched()


def test_with_a_temperature_the_text_is_that_of_plain_decoding(cpu_backend: None) -> None:
    model, settings = small_model("qwen3_5"), {"temperature": 0.9, "seed": 3}
    texts, _ = run(integration.TransformersTarget(model, num_slots=2), **settings)
    wholes = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    drafted, engine = run(integration.TransformersTarget(model, num_slots=2, S=6), Wrong(wholes, 5, 4), **settings)
    assert drafted == texts and engine.num_passes < 1.2 * LENGTH
    assert texts != run(integration.TransformersTarget(model, num_slots=2), temperature=0.9, seed=4)[0]


@each_form
def test_half_precision_parts_only_where_two_tokens_are_near(replay: bool) -> None:
    """Without `exact`, each token is among the best ones of the model in float32."""
    model = copy.deepcopy(small_model("qwen3_5")).bfloat16()
    target = integration.TransformersTarget(model, num_slots=2, S=6, replay=replay)
    texts, _ = run(target, PromptLookup(least=1), exact=False)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            rounded, exact = (m(whole).logits[0, len(prompt) - 1 : -1].float() for m in (model, small_model("qwen3_5")))
        chosen = exact.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert float((exact.amax(-1) - chosen).max()) <= 2 * float((rounded - exact).abs().max())


def test_what_cannot_be_a_target_is_named() -> None:
    with pytest.raises(ValueError, match="model: expected a model with Gated DeltaNet layers, got a Linear"):
        integration.TransformersTarget(torch.nn.Linear(2, 2))
    reasons = {"olmo_hybrid": "update strength goes up to 2", "lara_mini": "sliding_attention", "qwen4_exp": "indexed"}
    for family in set(reasons) & set(FAMILIES):
        with pytest.raises(ValueError, match=reasons[family]):
            integration.TransformersTarget(small_model(family))
    model = copy.deepcopy(small_model("qwen3_5"))
    integration.gated_delta_net_layers(model)[1].activation = "gelu"
    with pytest.raises(ValueError, match="layer 1 cannot run on gdn: gdn has no convolution with gelu"):
        integration.TransformersTarget(model)
    with pytest.raises(ValueError, match="num_drafts: expected at least 1, got 0"):
        integration.ModelDrafter(small_model("qwen3_5"), 0)


def test_a_target_leaves_the_model_to_others(cpu_backend: None) -> None:
    """Between passes the model generates as ever, patched or not."""
    model, ids = small_model("qwen3_5"), tokens(1, 9)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    engine = Engine(integration.TransformersTarget(model, S=4), PromptLookup(least=1))
    request = engine.add(PROMPTS[0], LENGTH)
    while not request.is_finished:
        engine.step()
        if len(request.generated) % 7 == 3:
            with gdn_core.record_calls() as calls:
                assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), expected)
            assert not calls
