# SPDX-License-Identifier: Apache-2.0
"""`gdn demo` on a small model, and the patch of transformers' modeling modules that it rests on."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gdn_core
from gdn_core.cli import CommandError, demo, demo_model, main
from gdn_core.cli.demo_compare import compare

transformers = pytest.importorskip("transformers")
integration = importlib.import_module("gdn_core.integrations.transformers")

SHAPE = demo_model.Shape(
    layers=4,
    hidden=64,
    intermediate=96,
    attention_heads=2,
    attention_kv_heads=1,
    attention_head_dim=32,
    key_heads=2,
    value_heads=4,
    key_dim=16,
    value_dim=24,
)


@pytest.fixture(autouse=True)
def _leaves_no_patch() -> Iterator[None]:
    yield
    assert not integration.is_patched()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    demo_model.save_seeded_model(directory, SHAPE, 1, torch.float32)
    return demo_model.load(str(directory), torch.float32)[0]


@pytest.fixture(scope="module")
def next_model() -> Any:
    """A small Qwen3-Next, whose projections are interleaved and whose MLPs are experts."""
    config = transformers.Qwen3NextConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        intermediate_size=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3NextForCausalLM(config).eval()


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--prompt-tokens", "70", "--new-tokens", "6", "--rounds", "1", *argv])


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(5))


# The demo


def test_demo_in_float32_gives_equal_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    assert demo.run(arguments("--dtype", "float32", "--json", str(path)), SHAPE) == 0
    report = json.loads(path.read_text())
    assert report["passed"] and report["comparison"]["equal_tokens"] == 6
    called = {(row["op"], row["prefill"], row["decode"]) for row in report["operations"]}
    assert called == {
        ("causal_conv1d_fn", 3, 0),
        ("fused_gdn_gating", 3, 0),
        ("chunk_gated_delta_rule", 3, 0),
        ("causal_conv1d_update", 0, 3),
        ("fused_gdn_decode_post_conv_mtp", 0, 3),
        ("rms_norm_gated", 3, 0),
    }
    assert all(report["gdn"][phase]["core_ms"] > 0 for phase in ("prefill", "decode"))
    text = capsys.readouterr().out
    assert "Greedy tokens: 6 of 6 equal" in text and "prefill, tokens/s" in text


def test_demo_in_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    assert demo.run(arguments("--json", str(path)), SHAPE) == 0
    comparison = json.loads(path.read_text())["comparison"]
    # Both round; neither should be much further from the float32 model than the other.
    assert 0 < comparison["distance_after"] < 2 * comparison["distance_before"] < 0.2


def test_demo_fails_on_wrong_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    norm = gdn_core.rms_norm_gated
    monkeypatch.setattr(gdn_core, "rms_norm_gated", lambda x, gate, *rest, **options: norm(x, -gate, *rest, **options))
    assert demo.run(arguments("--dtype", "float32"), SHAPE) == 1
    assert "FAILED: in float32 the tokens must be equal" in capsys.readouterr().out


def test_demo_fails_when_a_native_op_runs_on_the_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {"prefill": Counter({("rms_norm_gated", "reference"): 3}), "decode": Counter()}
    monkeypatch.setattr(demo, "count_calls", lambda *_: calls)
    provider = SimpleNamespace(device_types=("cpu",), ops={"rms_norm_gated": None})
    monkeypatch.setattr(demo._registry, "provider", lambda name: provider)
    monkeypatch.setattr(demo._registry, "settings", lambda: SimpleNamespace(backend=None))
    backend = SimpleNamespace(name="cpu", available=True, level=None)
    monkeypatch.setattr(gdn_core, "backends", lambda: [backend])
    assert demo._native_ops_on_reference(calls) == ["rms_norm_gated"]


def test_demo_on_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_model.save_seeded_model(tmp_path, SHAPE, 2, torch.float32)
    argv = ["--prompt-tokens", "20", "--new-tokens", "3", "--rounds", "1", "--dtype", "float32"]
    assert main(["demo", "--model", str(tmp_path), *argv]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path}(qwen3_5_text)" in "".join(text.split()) and "Text: " in text


def test_demo_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*argv: str) -> str:
        assert main(["demo", *argv]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    (tmp_path / "empty").mkdir()
    assert "must hold config.json, the weights" in message("--model", str(tmp_path / "empty"))

    llama = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    demo_model.save_seeded_model(tmp_path / "llama", SHAPE, 0, torch.float32)
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    assert "a llama model has no Gated DeltaNet layers" in message("--model", str(tmp_path / "llama"))

    monkeypatch.setattr(demo_model, "available_memory", lambda: 1000.0)
    assert "a smaller model or a larger machine" in message("--model", str(tmp_path / "llama"))

    assert "give 2 or more" in message("--new-tokens", "1")
    monkeypatch.setitem(importlib.import_module("sys").modules, "transformers", None)
    assert 'pip install "gdn-core[transformers]"' in message()


def test_demo_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="HF_HUB_OFFLINE is set"):
        demo_model.load("no-such-owner/no-such-model", torch.float32)


def test_comparison() -> None:
    before = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 2.99]])
    after = torch.tensor([[1.0, 2.0, 0.0], [2.99, 1.0, 3.0]])
    parted = compare([1, 0], [1, 2], before, after, None, torch.bfloat16)
    assert parted.passed and parted.equal_tokens == 1 and parted.open_choices == 1
    assert not compare([1, 0], [1, 2], before, after, None, torch.float32).passed
    far = after.clone()
    far[1, 2] = 4.0
    before[1, 2] = 2.5
    assert not compare([1, 0], [1, 2], before, far, None, torch.bfloat16).passed
    # A float32 model that is as far from the first run explains the same choice.
    exact = before + torch.tensor([0.0, 0.0, 0.4])
    assert compare([1, 0], [1, 2], before, far, exact, torch.bfloat16).passed
    same = compare([1, 0], [1, 0], before, before, None, torch.float32)
    assert same.passed and same.equal_tokens == 2 and same.logit_difference == 0


# The patch


def state_of_modules() -> dict[str, Any]:
    found = {}
    for family in integration.FAMILIES:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name, value in vars(module).items():
            found[f"{family}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[f"{family}.{name}.forward"] = vars(value).get("forward")
    return found


def test_unpatch_restores_the_very_functions() -> None:
    before = state_of_modules()
    integration.patch()
    patched = state_of_modules()
    changed = {name for name, value in patched.items() if value is not before[name]}
    assert len([name for name in changed if name.startswith("qwen3_5.")]) == 6
    integration.patch()
    assert all(value is patched[name] for name, value in state_of_modules().items())
    integration.unpatch()
    assert all(value is before[name] for name, value in state_of_modules().items())
    integration.unpatch()


def test_a_nested_patch_keeps_the_outer_one() -> None:
    with integration.patched():
        with integration.patched():
            assert integration.is_patched()
        assert integration.is_patched()
    assert not integration.is_patched()


def test_a_patch_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), integration.patched():
        raise KeyError
    assert not integration.is_patched()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generation_is_the_same(request: pytest.FixtureRequest, family: str, options: dict[str, Any]) -> None:
    model = request.getfixturevalue("model" if family == "qwen3_5" else "next_model")
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padding on the left
    generate = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **options}
    expected = model.generate(ids, **generate)
    with integration.patched(), gdn_core.record_calls() as calls:
        actual = model.generate(ids, **generate)
    assert torch.equal(actual, expected)
    assert calls


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@torch.no_grad()
def test_cached_continuation_is_the_same(request: pytest.FixtureRequest, family: str) -> None:
    """Prefill, one token, several tokens onto the cache, one token, and the same with a cache that records its past."""
    model = request.getfixturevalue("model" if family == "qwen3_5" else "next_model")
    ids = tokens(2, 20)
    cuts = (0, 2, 3, 10, 11, 20)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def logits(record: bool) -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        if record:
            cache.activate_past_recording()
        pieces = [model(ids[:, a:b], use_cache=True, **{argument: cache}).logits for a, b in pairwise(cuts)]
        return torch.cat(pieces, dim=1)

    for record in (False, True) if hasattr(transformers.DynamicCache, "activate_past_recording") else (False,):
        expected = logits(record)
        with integration.patched():
            assert (logits(record) - expected).norm() < 1e-5 * expected.norm()


def test_training_keeps_the_original_code(model: Any) -> None:
    ids = tokens(1, 8)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.model.layers[0].linear_attn.A_log.grad.clone()

    expected = gradient()
    with integration.patched(), gdn_core.record_calls() as calls:
        assert torch.equal(gradient(), expected)
    assert not calls
    model.zero_grad()
