# SPDX-License-Identifier: Apache-2.0
"""`gdn demo` on a small model."""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gdn_core
from gdn_core.cli import CommandError, demo, demo_model, main, models, timing
from gdn_core.cli.demo_compare import compare, explains_difference

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


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--prompt-tokens", "70", "--new-tokens", "6", "--rounds", "1", *argv])


def test_demo_in_float32_gives_equal_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    assert demo.run(arguments("--dtype", "float32", "--json", str(path)), SHAPE) == 0
    report = json.loads(path.read_text())
    (runs,) = report["runs"]
    assert report["passed"] and runs["comparison"]["equal_tokens"] == 6 and runs["threads"] == 1
    called = {(row["op"], row["prefill"], row["decode"]) for row in report["operations"]}
    assert called == {
        ("causal_conv1d_fn", 3, 0),
        ("fused_gdn_gating", 3, 0),
        ("chunk_gated_delta_rule", 3, 0),
        ("causal_conv1d_update", 0, 3),
        ("fused_gdn_decode_post_conv_mtp", 0, 3),
        ("rms_norm_gated", 3, 0),
    }
    assert all(runs["gdn"][phase]["core_ms"] > 0 for phase in ("prefill", "decode"))
    text = capsys.readouterr().out
    assert "Greedy tokens: 6 of 6 equal" in text and "prefill, tokens/s" in text


def test_demo_takes_several_numbers_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model and one table for all; each is timed and compared with its own threads, which are put back after."""
    monkeypatch.setenv("COLUMNS", "120")
    used: list[tuple[int, bool]] = []
    timed = demo.generate

    def seen(*arguments: Any) -> Any:
        used.append((torch.get_num_threads(), integration.is_patched()))
        return timed(*arguments)

    monkeypatch.setattr(demo, "generate", seen)
    path = tmp_path / "demo.json"
    argv = ("--dtype", "float32", "--threads", "3,1", "--rounds", "2", "--speculate", "--json", str(path))
    assert demo.run(arguments(*argv), SHAPE) == 0
    assert used == [(3, False), *[(1, False), (1, True)] * 2, *[(3, False), (3, True)] * 2]
    assert torch.get_num_threads() == 1
    runs = json.loads(path.read_text())["runs"]
    assert [run["threads"] for run in runs] == [1, 3]
    for run in runs:
        assert run["comparison"]["equal_tokens"] == 6 and run["gdn"]["decode"]["tokens_per_second"] > 0
        assert [row["threads"] for row in run["speculation"]] == [run["threads"]] * 2
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines() if "prefill, tokens/s" in line]
    assert [line[0] for line in lines] == ["1", "3"] and printed.out.count("transformers") == 1
    assert "1 and 3 threads" in printed.out and "1 thread:\n" in printed.out and "3 threads:\n" in printed.out
    for stage in ("1 thread, round 2 of 2 ...", "3 threads, round 1 of 2 ...", "3 threads, speculating ..."):
        assert stage in printed.err


@pytest.mark.parametrize("threads", ["0", "1,", "two"])
def test_wrong_numbers_of_threads_are_named(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--threads", threads]) == 2
    assert f"gdn demo: --threads {threads}: " in capsys.readouterr().err


def test_demo_shows_what_drafts_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu_backend: None
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "demo.json"
    argv = ("--dtype", "float32", "--speculate", "--new-tokens", "60", "--json", str(path))
    assert demo.run(arguments(*argv), SHAPE) == 0
    repeating, other = json.loads(path.read_text())["runs"][0]["speculation"]
    assert repeating["text"] == "repeats the prompt" and repeating["steps"] == other["steps"] == 59
    assert repeating["passes"] < 50 and repeating["accepted"] > 10
    assert other["passes"] > 50
    text = capsys.readouterr().out
    assert "passes" in text and "…" not in text  # nothing is cut at 80 columns


def test_a_figure_taken_beside_others_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(timing.Others, "disturb", True)
    assert demo.run(arguments("--dtype", "float32"), SHAPE) == 0
    text = capsys.readouterr().out
    assert text.count("~ ") == 19 and "run again on an idle machine" in text
    monkeypatch.setattr(timing.Others, "disturb", False)
    assert demo.run(arguments("--dtype", "float32"), SHAPE) == 0
    assert "~" not in capsys.readouterr().out


def test_others_are_seen_and_this_process_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with timing.Others() as others:
        pass
    assert others.cores == 0.0
    busy = iter([100.0, 100.4])
    monkeypatch.setattr(timing, "_busy_elsewhere", lambda: next(busy))
    monkeypatch.setattr(timing, "perf_counter", iter([5.0, 7.0]).__next__)
    with timing.Others() as others:
        pass
    assert others.cores == pytest.approx(0.2) and others.disturb


def test_demo_in_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    assert demo.run(arguments("--json", str(path)), SHAPE) == 0
    comparison = json.loads(path.read_text())["runs"][0]["comparison"]
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

    demo_model.save_seeded_model(tmp_path / "large", SHAPE, 0, torch.float32)
    monkeypatch.setattr(models, "available_memory", lambda: 1000.0)
    assert "a smaller model or a larger machine" in message("--model", str(tmp_path / "large"))

    assert "give 2 or more" in message("--new-tokens", "1")
    monkeypatch.setitem(importlib.import_module("sys").modules, "transformers", None)
    assert 'pip install "gdn-core[transformers]"' in message()


def test_demo_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="HF_HUB_OFFLINE is set"):
        models.load("no-such-owner/no-such-model", torch.float32)


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


def test_a_difference_is_explained_by_rounding_or_not() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 2.99]])
    assert explains_difference([1, 0], [1, 0], logits, None, torch.bfloat16)[0] is None
    step, gap, rounding = explains_difference([1, 0], [1, 2], logits, None, torch.bfloat16)
    assert step == 1 and gap == pytest.approx(0.01) and gap < rounding < 0.1
    assert explains_difference([1, 0], [0, 0], logits, None, torch.bfloat16) == (0, 1.0, pytest.approx(2 * 2**-6))
    exact = logits + torch.tensor([0.6, 0.0, 0.0])
    assert explains_difference([1, 0], [0, 0], logits, exact, torch.bfloat16)[2] == pytest.approx(1.2)
