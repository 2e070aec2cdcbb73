# SPDX-License-Identifier: Apache-2.0
"""What transformers' own tests do with these models, patched and not: the same results, and the same refusals.

Written after the cases of its test files for Qwen3-Next, Qwen3.5 and OLMo Hybrid, and of the files that all models
share (generation, caches, padding, outputs), on models of the same kind: two layers, a convolution of width 2.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gdn_core

transformers = pytest.importorskip("transformers")
integration = importlib.import_module("gdn_core.integrations.transformers")

from transformers_models import (  # noqa: E402
    FAMILIES,
    forward,
    generate,
    left_padded,
    new_cache,
    relative_difference,
    small_model,
    tokens,
)

_LAYER = type(integration.gated_delta_net_layers(small_model(FAMILIES[0]))[0])
pytestmark = pytest.mark.skipif(
    "cache" not in inspect.signature(_LAYER.forward).parameters, reason="transformers before 5.24"
)

OURS = [family for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid") if family in FAMILIES]
each_family = pytest.mark.parametrize("family", OURS)


@pytest.fixture(autouse=True)
def _on_gdn() -> Iterator[None]:
    """Without gdn-cpu the layers run on the reference only where it is asked for."""
    is_native = any(backend.name == "cpu" and backend.available for backend in gdn_core.backends())
    with gdn_core.use_backend(None if is_native else "reference"):
        yield


def model_of(family: str) -> Any:
    return small_model(family, is_narrow=True)


def embedded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model.get_input_embeddings()(ids)
    return result


def seeded(model: Any, prompt: dict[str, torch.Tensor], **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return list(generate(model, prompt, **options))


def prompt_of(length: int = 9, batch: int = 2) -> dict[str, torch.Tensor]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def right_padded(model: Any) -> list[torch.Tensor]:
    """Of a padded row, what is before the padding."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    return [model(ids, attention_mask=mask).logits[mask.bool()]]


def masked_and_positioned(model: Any) -> list[torch.Tensor]:
    prompt = left_padded(2, 9)
    mask = prompt["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return [model(**prompt, position_ids=positions).logits[mask.bool()], model(tokens(2, 9)).logits]


def other_outputs(model: Any) -> list[torch.Tensor]:
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    result = eager(tokens(2, 9), output_hidden_states=True, output_attentions=True)
    as_tuple = eager(tokens(2, 9), return_dict=False, use_cache=False)
    return [*result.hidden_states, *(a for a in result.attentions if a is not None), as_tuple[0]]


def from_embeddings(model: Any) -> list[torch.Tensor]:
    ids = tokens(2, 9)
    prompt = {"inputs_embeds": embedded(model, ids), "attention_mask": torch.ones_like(ids)}
    static = {"cache_implementation": "static", "disable_compile": True}
    return [
        model(inputs_embeds=embedded(model, ids)).logits,
        *generate(model, prompt),
        *generate(model, prompt, **static),
    ]


def continued(model: Any) -> list[torch.Tensor]:
    """Generate, and go on from the cache with what was generated and some more."""
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = model.generate(**prompt_of(), **settings, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    ids = torch.cat([first.sequences, tokens(2, 3, seed=8)], dim=1)
    name = "cache" if hasattr(first, "cache") else "past_key_values"
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), name: cache}
    return [first.sequences, *generate(model, prompt)]


def reordered(model: Any) -> list[torch.Tensor]:
    """Beams: rows of a cache repeated and put in another order, between decoded tokens."""
    cache = new_cache(model)
    pieces = [forward(model, tokens(2, 6), cache)[:, -1:]]
    for i, order in enumerate(([1, 1], [1, 0], [0, 0])):
        cache.reorder_cache(torch.tensor(order))
        pieces.append(forward(model, tokens(2, 1, seed=i), cache))
    return pieces


def forked(model: Any) -> list[torch.Tensor]:
    """A copy of a cache and the original go on apart, token by token and several at once."""
    cache = new_cache(model)
    forward(model, tokens(2, 6), cache)
    forward(model, tokens(2, 1), cache)
    other = copy.deepcopy(cache)
    pieces = [forward(model, tokens(2, 1, seed=1), cache), forward(model, tokens(2, 4, seed=2), other)]
    return [*pieces, forward(model, tokens(2, 1, seed=3), cache), forward(model, tokens(2, 1, seed=3), other)]


def of_states(model: Any) -> list[torch.Tensor]:
    """The states of the cache, in transformers' shapes: width and dtype are its own."""
    cache = new_cache(model)
    forward(model, tokens(2, 6), cache)
    forward(model, tokens(2, 1), cache)
    (layer,) = integration.gated_delta_net_layers(model)
    held = cache.layers[layer.layer_idx]
    conv_state, state = held.conv_states[0], held.recurrent_states[0]
    assert conv_state.shape == (2, 2 * layer.key_dim + layer.value_dim, layer.conv_kernel_size)
    assert state.shape == (2, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim) and state.dtype == torch.float32
    return [conv_state, state]


CASES: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "right padding": right_padded,
    "masks and positions": masked_and_positioned,
    "hidden states, attentions, tuples": other_outputs,
    "embeddings as inputs": from_embeddings,
    "logits of the last tokens": lambda model: [model(tokens(2, 9), logits_to_keep=2).logits],
    "generation from a cache": continued,
    "beams in another order": reordered,
    "a cache that is copied": forked,
    "the states of a cache": of_states,
    "prompts in chunks": lambda model: list(generate(model, prompt_of(11), prefill_chunk_size=4)),
    "several samples of a prompt": lambda model: seeded(model, prompt_of(), do_sample=True, num_return_sequences=3),
    "samples of beams": lambda model: seeded(model, prompt_of(), do_sample=True, num_beams=2, num_return_sequences=2),
    "beams of padded prompts": lambda model: list(generate(model, left_padded(3, 9), num_beams=2)),
    "one token": lambda model: list(generate(model, prompt_of(1))),
}


@pytest.mark.report("A15", "A16")
@each_family
@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_the_same_results(family: str, case: str) -> None:
    model = model_of(family)
    expected = CASES[case](model)
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = CASES[case](model)
    assert calls
    for mine, other in zip(actual, expected, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        if other.is_floating_point():
            finite = other.isfinite()
            assert torch.equal(mine.isfinite(), finite)
            assert relative_difference(mine[finite], other[finite]) < 1e-5
        else:
            assert torch.equal(mine, other)


REFUSALS: dict[str, Callable[[Any], object]] = {
    "a smaller model drafts": lambda model: generate(model, prompt_of(batch=1), assistant_model=model),
    "drafts looked up in the prompt": lambda model: generate(model, prompt_of(batch=1), prompt_lookup_num_tokens=2),
    "a cache without a past is cropped": lambda model: cropped(model),
}


def cropped(model: Any) -> None:
    cache = new_cache(model)
    forward(model, tokens(1, 6), cache)
    cache.crop(-2)


@each_family
@torch.no_grad()
@pytest.mark.parametrize("case", REFUSALS)
def test_the_same_refusals(family: str, case: str) -> None:
    """What transformers cannot do with a state stays refused, and is not done wrongly."""
    model = model_of(family)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as expected:
        REFUSALS[case](model)
    with integration.patched(), pytest.raises(expected.type) as actual:
        REFUSALS[case](model)
    assert str(actual.value) == str(expected.value)


@each_family
@torch.no_grad()
def test_later_tokens_change_no_earlier_ones(family: str) -> None:
    """A token after the cache is the same alone and as the first of several."""
    model, cache = model_of(family), None
    with integration.patched():
        firsts = []
        for more in (0, 7):
            cache = new_cache(model)
            forward(model, tokens(1, 8), cache)
            following = torch.cat([tokens(1, 1, seed=6), tokens(1, more, seed=7)], dim=1)
            firsts.append(forward(model, following, cache)[:, 0])
    assert relative_difference(firsts[1], firsts[0]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", [family for family in ("qwen3_5", "olmo_hybrid") if family in OURS])
def test_padding_on_either_side_in_half_precision(family: str) -> None:
    """Both round, gdn in fewer places. Not with experts, of which a rounding may choose another."""
    half, exact = copy.deepcopy(model_of(family)).bfloat16(), model_of(family)
    prompt = left_padded(2, 9)
    for mask in (prompt["attention_mask"], prompt["attention_mask"].flip(1)):
        ids, rows = prompt["input_ids"], mask.bool()
        expected = exact(ids, attention_mask=mask).logits[rows]
        before = half(ids, attention_mask=mask).logits[rows].float()
        with integration.patched():
            after = half(ids, attention_mask=mask).logits[rows].float()
        error = relative_difference(before, expected)
        assert 0 < relative_difference(after, expected) < 1.2 * error < 0.05


@torch.no_grad()
@pytest.mark.parametrize("family", [family for family in ("qwen3_5", "olmo_hybrid") if family in OURS])
def test_generation_that_is_compiled(family: str) -> None:
    """With a static cache, without a graph break."""
    model, prompt = copy.deepcopy(model_of(family)), left_padded(2, 9)
    expected = generate(model, prompt, cache_implementation="static", disable_compile=True)
    settings = transformers.CompileConfig(backend="aot_eager", fullgraph=True, dynamic=False)
    settings._compile_all_devices = True
    torch._dynamo.reset()
    compiled: list[Any] = []
    compile_model = type(model).get_compiled_call
    with integration.patched(), pytest.MonkeyPatch.context() as patches:
        patches.setattr(
            type(model), "get_compiled_call", lambda self, config: compiled.append(1) or compile_model(self, config)
        )
        actual = generate(model, prompt, cache_implementation="static", compile_config=settings)
    torch._dynamo.reset()
    assert compiled and torch.equal(actual[0], expected[0]) and relative_difference(actual[1], expected[1]) < 1e-5


# The functions on their own, as the test files call them


def module_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def rule_inputs(length: int, key_heads: int, with_state: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    rng = torch.Generator().manual_seed(0)
    B, HV, K, V = 2, 6, 8, 16
    q, k = (torch.randn(B, length, key_heads, K, generator=rng) for _ in range(2))
    v = torch.randn(B, length, HV, V, generator=rng)
    gates = {"g": -torch.rand(B, length, HV, generator=rng), "beta": torch.rand(B, length, HV, generator=rng)}
    state = torch.randn(B, HV, K, V, generator=rng) if with_state else None
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return [q, k, v], gates | options


@each_family
@torch.no_grad()
@pytest.mark.parametrize("length", [3, 12, 13, 64, 130])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_chunked_rule_matches_the_recurrent_one(family: str, length: int, with_state: bool) -> None:
    """Each against the other and against the original; chunk_size is the original's own."""
    module = module_of(family)
    tensors, options = rule_inputs(length, 6, with_state)
    rules = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    expected = getattr(module, rules[1])(*tensors, **options)
    with integration.patched(), gdn_core.record_calls() as calls:
        results = [getattr(module, rules[0])(*tensors, **options, chunk_size=4)]
        results.append(getattr(module, rules[1])(*tensors, **options))
    assert {op for op, _ in calls} == {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
    for result in results:
        assert relative_difference(result[0], expected[0]) < 1e-5
        assert relative_difference(result[1], expected[1]) < 1e-5


@pytest.mark.report("A17")
@each_family
@torch.no_grad()
@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_fewer_key_heads_match_repeated_ones(family: str, rule: str) -> None:
    module = module_of(family)
    (q, k, v), options = rule_inputs(13, 2, True)
    repeated = (x.repeat_interleave(3, dim=2) for x in (q, k))
    expected = getattr(module, rule)(*repeated, v, **options)
    with integration.patched():
        actual = getattr(module, rule)(q, k, v, **options)
    assert relative_difference(actual[0], expected[0]) < 1e-5 and relative_difference(actual[1], expected[1]) < 1e-5


@each_family
@torch.no_grad()
def test_packed_sequences_are_the_original_s(family: str) -> None:
    """Several texts in one row, by their offsets: whatever transformers makes of them here, patched it is the same."""
    model, ids = model_of(family), tokens(1, 9)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
        "seq_idx": torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32),
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5, "max_length_k": 5,
    }  # fmt: skip

    def result() -> Any:
        try:
            return model(ids, **packed, use_cache=False).logits
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    expected = result()
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = result()
    assert "chunk_gated_delta_rule" not in {op for op, _ in calls}
    if isinstance(expected, str):
        assert actual == expected
    else:
        assert relative_difference(actual, expected) < 1e-5


# Training, checkpoints, offloading, pictures


@each_family
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_activations_give_the_same_gradients(family: str, is_reentrant: bool) -> None:
    """Reentrant ones have a first pass without gradients, which is gdn's; what is differentiated is the original."""
    model = copy.deepcopy(model_of(family)).requires_grad_(True).train()
    ids = tokens(2, 8)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])

    expected = gradients()
    model.activation_checkpointing_enable({"use_reentrant": is_reentrant})
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = gradients()
    assert bool(calls) == is_reentrant
    assert relative_difference(actual, expected) < 1e-5 if is_reentrant else torch.equal(actual, expected)


@torch.no_grad()
def test_weights_that_accelerate_keeps_on_disk(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = generate(small_model("qwen3_5"), left_padded(2, 9))
    model = copy.deepcopy(small_model("qwen3_5"))
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = generate(model, left_padded(2, 9))
    assert torch.equal(actual[0], expected[0]) and relative_difference(actual[1], expected[1]) < 1e-5
    assert "chunk_gated_delta_rule" in {op for op, _ in calls}


@torch.no_grad()
def test_a_model_that_sees_pictures() -> None:
    """Positions of three axes, and embeddings of a picture among those of the text."""
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    patches = {"patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 2, "num_position_embeddings": 16}
    text = model_of("qwen3_5").config.to_dict()
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=sizes | patches, image_token_id=3, video_token_id=4, vision_start_token_id=5,
        vision_end_token_id=6,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        model = transformers.Qwen3_5ForConditionalGeneration(config).eval().requires_grad_(False)
    ids = tokens(2, 12).clamp(min=7)
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 5, 3, 6
    pictures = torch.randn(8, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    prompt = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pictures,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2), "mm_token_type_ids": (ids == 3).long(),
    }  # fmt: skip
    expected = generate(model, prompt)
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = generate(model, prompt)
    assert torch.equal(actual[0], expected[0]) and relative_difference(actual[1], expected[1]) < 1e-5
    assert calls
