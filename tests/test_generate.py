# SPDX-License-Identifier: Apache-2.0
"""`gdn generate` and `gdn info --model` on small checkpoints."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import gdn_core
from gdn_core.cli import demo_model, main, speculation

transformers = pytest.importorskip("transformers")

from test_demo import SHAPE  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    demo_model.save_seeded_model(directory, SHAPE, 1, torch.float32)
    return str(directory)


def expected_text(checkpoint: str, prompt: str, count: int) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt")
    result = model.generate(**ids, max_new_tokens=count, do_sample=False)[0, ids["input_ids"].shape[1] :]
    text: str = tokenizer.decode(result, skip_special_tokens=True)
    return text


def test_it_streams_what_transformers_generates(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = expected_text(checkpoint, "some words", 9)
    options = ["--dtype", "float32", "--max-new-tokens", "9"]
    capsys.readouterr()
    with gdn_core.record_calls() as calls:
        assert main(["generate", checkpoint, "--prompt", "some words", *options]) == 0
    assert "chunk_gated_delta_rule" in {op for op, _ in calls} or not calls
    printed = capsys.readouterr()
    assert printed.out == expected + "\n"
    assert "loading the model" in printed.err
    assert "9 tokens after a prompt of 10, prompt " in printed.err
    monkeypatch.setattr("sys.stdin", io.StringIO("some words"))
    assert main(["generate", checkpoint, "--prompt", "-", *options]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_a_temperature_draws_by_the_seed(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        argv = ["--temperature", "1.5", "--seed", seed, "--max-new-tokens", "12"]
        assert main(["generate", checkpoint, *argv]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_speculation_streams_the_same_text(
    checkpoint: str, drafter: str, cpu_backend: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float32", "--max-new-tokens", "30", "--prompt", "some words, some words, some"]
    assert main(["generate", checkpoint, *options]) == 0
    expected = capsys.readouterr().out
    draft = ["--draft", checkpoint] if drafter == "model" else []
    assert main(["generate", checkpoint, *options, "--speculate", "--exact", *draft]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert "30 tokens after a prompt of 28, prompt " in printed.err and "drafts right" in printed.err


def test_speculation_with_a_temperature_draws_by_the_seed(
    checkpoint: str, cpu_backend: None, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        argv = ["--temperature", "1.5", "--seed", seed, "--max-new-tokens", "12", "--speculate", "--exact"]
        assert main(["generate", checkpoint, *argv]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("exact", [[], ["--exact"]], ids=["fast", "exact"])
def test_compare_of_speculation_shows_a_table(
    checkpoint: str, exact: list[str], cpu_backend: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--compare", "--speculate", *exact, "--max-new-tokens", "9", "--prompt", "some words", "--dtype", "float32"]
    assert main(["generate", checkpoint, *argv]) == 0
    text = capsys.readouterr().out
    assert "passes" in text and "Greedy tokens: 9 of 9 equal." in text and "\nText: " in text
    assert "…" not in text  # nothing of the table is cut at 80 columns


def test_compare_of_speculation_fails_on_other_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 2.99]])
    near, far = (speculation.Run(tokens, 1.0, 2) for tokens in ([1, 2], [0, 0]))
    plain = speculation.Run([1, 0], 1.0, 2, logits=logits)
    assert speculation.verdict(plain, near, None, torch.bfloat16)[0]
    passed, text = speculation.verdict(plain, far, None, torch.bfloat16)
    assert not passed and "rounding does not explain" in text
    assert not speculation.verdict(plain, near, None, torch.float32)[0]
    plain.logits = None
    assert speculation.verdict(plain, near, None, torch.bfloat16) == (
        False,
        "FAILED: with --exact the tokens must be equal.",
    )


def test_compare_shows_a_table(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--compare", "--dtype", "float32", "--max-new-tokens", "5", "--prompt", "some words"]
    assert main(["generate", checkpoint, *argv]) == 0
    text = capsys.readouterr().out
    assert "Greedy tokens: 5 of 5 equal" in text and "prefill, tokens/s" in text and "prompt 10 tokens" in text


@pytest.mark.parametrize("speculate", [[], ["--speculate"]], ids=["", "speculative"])
def test_an_interrupt_ends_it_cleanly(
    checkpoint: str, speculate: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put, count = transformers.TextStreamer.put, []

    def interrupted(self: Any, value: torch.Tensor) -> None:
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(transformers.TextStreamer, "put", interrupted)
    assert main(["generate", checkpoint, "--max-new-tokens", "50", *speculate]) == 130
    printed = capsys.readouterr()
    assert printed.out.endswith("\n") and printed.err.splitlines()[-1].endswith("interrupted")


@pytest.mark.parametrize("options", [[], ["--compare"], ["--speculate"]])
def test_an_interrupt_while_loading_ends_it_cleanly(
    checkpoint: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", interrupted)
    assert main(["generate", checkpoint, *options]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "gdn generate: interrupted"


def test_a_damaged_checkpoint_gets_a_line_that_says_what_to_do(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(path: Path | str, command: str = "generate") -> str:
        name = ["--model", str(path)] if command in ("demo", "info") else [str(path)]
        assert main([command, *name]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    def copied(name: str, **contents: bytes | None) -> Path:
        directory = tmp_path / name
        shutil.copytree(checkpoint, directory)
        for file in directory.iterdir():
            content = contents.get(file.stem, file.read_bytes())
            file.unlink() if content is None else file.write_bytes(content)
        return directory

    assert "Error no file named model.safetensors" in message(copied("weightless", model=None))
    assert "the weights are damaged (" in message(copied("cut", model=b"few"))
    assert "not a valid JSON file" in message(copied("broken", config=b"{"))
    wordless = copied("wordless", tokenizer=None, tokenizer_config=None)
    for command in ("generate", "demo"):
        assert "the tokenizer makes no token of the prompt" in message(wordless, command)
    for command in ("generate", "demo", "info"):
        assert "there is no such directory" in message(tmp_path / "nowhere", command)
        assert "give the directory of the checkpoint" in message(Path(checkpoint) / "config.json", command)
        newer = tmp_path / "newer"
        newer.mkdir(exist_ok=True)
        (newer / "config.json").write_text('{"model_type": "qwen99"}')
        assert message(newer, command).endswith('; pip install "gdn-core[transformers]" --upgrade')
        older = tmp_path / "older"
        older.mkdir(exist_ok=True)
        (older / "config.json").write_text('{"model_type": "gpt2"}')
        assert "a gpt2 model has no Gated DeltaNet layers" in message(older, command)


@pytest.mark.parametrize("options", [[], ["--speculate"], ["--compare"], ["--compare", "--speculate"]])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
    ids=["CPU", "CUDA", "Python"],
)
def test_memory_that_runs_out_is_no_traceback(
    checkpoint: str,
    options: list[str],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(transformers.Qwen3_5TextModel, "forward", fail)
    assert main(["generate", checkpoint, "--max-new-tokens", "3", *options]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("gdn generate: out of memory; use ") and "a smaller model" in last


def test_another_failure_of_a_model_is_not_called_memory(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(transformers.Qwen3_5TextModel, "forward", fail)
    with pytest.raises(RuntimeError, match="something else"):
        main(["generate", checkpoint, "--max-new-tokens", "3"])


def test_errors_say_what_to_do(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*argv: str) -> str:
        assert main([*argv]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path)
    demo_model._byte_tokenizer(transformers).save_pretrained(tmp_path)
    for command in (["generate", str(tmp_path)], ["info", "--model", str(tmp_path)]):
        assert "a llama model has no Gated DeltaNet layers; try" in message(*command)
    (tmp_path / "empty").mkdir()
    assert "must hold config.json, the weights" in message("generate", str(tmp_path / "empty"))
    assert "leave out --temperature" in message("generate", checkpoint, "--compare", "--temperature", "1")
    assert "--draft: only with --speculate" in message("generate", checkpoint, "--draft", checkpoint)
    assert "--exact: only with --speculate" in message("generate", checkpoint, "--exact")
    assert "give a text" in message("generate", checkpoint, "--prompt", "")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert 'pip install "gdn-core[transformers]"' in message("generate", checkpoint)


@pytest.mark.report("E08")
def test_info_shows_the_layers_of_a_model(
    checkpoint: str, cpu_backend: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--model", checkpoint, "--json"]) == 0
    layers = [row for row in json.loads(capsys.readouterr().out)["model"]["layers"] if row["device"] == "cpu"]
    assert [row["index"] for row in layers] == [0, 1, 2]
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info", "--model", checkpoint]) == 0
    text = capsys.readouterr().out
    assert "Gated DeltaNet layers of" in text and "0 1 2" in text and "2 x 16, 4 x 24" in text
