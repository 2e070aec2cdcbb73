# SPDX-License-Identifier: Apache-2.0
"""gdn-cuda's own loading and launching, on a CUDA driver that is not one: its launches run in the emulator.

Each script runs in a process of its own, where the driver's library is found first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_emulator

pytestmark = cuda_emulator.needs_linux

PRELUDE = """
import ctypes, json, sys
import torch
import gdn_cuda_on_fake_driver._C as _C
from gdn_core.testing import inputs, clone

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_log.restype = ctypes.c_char_p
driver.fake_set_capture.argtypes = [ctypes.c_ulonglong]
driver.fake_set_current_device(0)

def log():
    lines = driver.fake_log().decode().splitlines()
    driver.fake_clear_log()
    return [line.strip() for line in lines]

# What torch has for CUDA only.
current_stream = {0: 0, 1: 0}
torch._C._cuda_getCurrentRawStream = lambda device: current_stream[device]
zeros, allocated = torch.zeros, []
def fake_zeros(size, *, dtype, device):
    allocated.append((size, device))
    return zeros(size, dtype=dtype)
torch.zeros = fake_zeros

def arguments(replay=False, lengths=(2, 1), seed=0):
    torch.zeros = zeros
    made, _ = inputs.fused_decode_arguments(
        lengths, 2, 1, 2, 64, 64, dtype=torch.bfloat16, replay=replay, live=[2] * len(lengths) if replay else None,
        seed=seed)
    torch.zeros = fake_zeros
    return made

def run(made):
    out = torch.full(made["output_gate"].shape, float("nan"), dtype=torch.bfloat16)
    tail = [None, 1e-6, "silu", 1, 64, True, None, None, out]
    first = [made[name] for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias")]
    rest = [made[name] for name in ("cu_seqlens", "num_accepted_tokens", "state", "output_gate", "norm_weight")]
    if "records" in made:
        records = made["records"]
        parts = [records.k, records.u, records.decay, records.live]
        _C.fused_gdn_decode_post_conv_mtp_replay(*first, made["slot_indices"], *parts, *rest, *tail)
    else:
        _C.fused_gdn_decode_post_conv_mtp(*first, made["state_indices"], *rest, *tail)
    return out
"""


def run_python(script: str, **env: str):
    """Run a script after the prelude, and return what it hands to `print(json.dumps(...))`."""
    build = cuda_emulator.build("fake_driver", "gdn_cuda_on_fake_driver_C")
    path = [str(build), os.environ.get("PYTHONPATH", "")]
    libraries = [str(build / "fake_driver"), os.environ.get("LD_LIBRARY_PATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "LD_LIBRARY_PATH": ":".join(libraries), **env},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_launch_is_the_emulator_s():
    script = """
import gdn_cuda_emulated._C as emulated
for replay in (False, True):
    made = arguments(replay)
    copy = clone(made)
    out = run(made)
    _C, real = emulated, _C
    expected = run(copy)
    _C = real
    assert torch.equal(out, expected) and torch.equal(made["state"], copy["state"])
print(json.dumps(log()))
"""
    cuda_emulator.module()
    lines = run_python(PRELUDE + script)
    assert lines[:3] == ["push 0", "load fake code cubin 9.0a", "pop 0"]
    assert lines[3:] == [f"launch gdn_decode_64_float32_{form} device 0 stream 0" for form in ("slots", "replay")]


@pytest.mark.report("D01")
def test_another_device_than_the_current_one():
    """The tensors' device and its current stream; what was current before is current afterwards."""
    script = """
_C.prepare_device(0)
log()
driver.fake_set_current_device(1)
current_stream[0] = 77
run(arguments())
print(json.dumps(log()))
"""
    lines = run_python(PRELUDE + script, FAKE_CUDA_DEVICES="9.0,8.6")
    assert lines == ["push 0", "launch gdn_decode_64_float32_slots device 0 stream 77", "pop 0"]


@pytest.mark.report("D04")
def test_capture_with_padding_rows():
    """The first call cannot be inside of a capture; later ones allocate once for a graph, and padding rows give 0."""
    script = """
found = {}
driver.fake_set_capture(5)
try:
    run(arguments())
except RuntimeError as error:
    found["first"] = str(error)
driver.fake_set_capture(0)
_C.prepare_device(0)
run(arguments(replay=True))
found["eager"] = list(allocated)
run(arguments(replay=True))
found["eager again"] = len(allocated)
driver.fake_set_capture(5)
made = arguments(replay=True, lengths=(2, 1, 2, 1))
made["slot_indices"][2:] = -1
out = run(made)
found["captured"] = allocated[len(found["eager"]):]
found["padding"] = [bool((out[:3] == 0).any()), bool((out[3:] == 0).all())]
before = len(allocated)
run(arguments(replay=True, lengths=(2, 1, 2, 1)))
found["captured again"] = len(allocated) - before
driver.fake_set_capture(6)
run(arguments(replay=True, lengths=(2, 1, 2, 1)))
found["next graph"] = len(allocated) - before
print(json.dumps(found))
"""
    found = run_python(PRELUDE + script)
    assert "call gdn_cuda.prepare() before" in found["first"]
    assert len(found["eager"]) == found["eager again"] == 2  # counters, and the outputs of split heads
    assert len(found["captured"]) == 2 and all(device == "cuda:0" for _, device in found["captured"])
    assert found["padding"] == [False, True]
    assert (found["captured again"], found["next graph"]) == (0, 2)


def test_each_stream_has_its_own_workspace():
    script = """
run(arguments(replay=True))
first = len(allocated)
current_stream[0] = 9
run(arguments(replay=True))
current_stream[0] = 0
run(arguments(replay=True))
print(json.dumps([first, len(allocated)]))
"""
    assert run_python(PRELUDE + script) == [2, 4]


def test_a_launch_that_fails_raises():
    script = """
driver.fake_set_launch_result(1)
try:
    run(arguments())
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    assert run_python(PRELUDE + script) == "cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (as the test asked for)"


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({}, ""),
        ({"FAKE_CUDA_VERSION": "12020"}, ""),
        ({"FAKE_CUDA_VERSION": "11080"}, "the driver is for CUDA 11.8, gdn-cuda needs one for CUDA 12.0 or newer"),
        ({"FAKE_CUDA_INIT": "1"}, "the CUDA driver does not start (cuInit: CUDA_ERROR_INVALID_VALUE)"),
        (
            {"FAKE_CUDA_DEVICES": "7.5"},
            "Fake GPU has compute capability 7.5, for which this gdn-cuda has no device code",
        ),
        ({"FAKE_CUDA_DEVICES": ""}, "no CUDA device is visible"),
        ({"FAKE_CUDA_DEVICES": "7.5,9.0"}, ""),
    ],
    ids=str,
)
def test_what_keeps_gdn_cuda_from_running(env, problem):
    script = "import json, gdn_cuda_on_fake_driver._C as _C\nprint(json.dumps(_C.launch_problem()))"
    assert run_python(script, **env) == problem


def test_the_code_for_a_device():
    script = """
import json, gdn_cuda_on_fake_driver._C as _C
capabilities = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
print(json.dumps([_C.code_for(*capability) for capability in capabilities]))
"""
    assert run_python(script) == ["", "8.0", "8.0", "8.0", "9.0a", "PTX 8.0", "PTX 8.0"]


def test_a_device_without_code_beside_one_with():
    """Calls are declined, so that they run elsewhere; loading raises."""
    script = """
found = []
for attempt in (lambda: _C.prepare_device(0), lambda: run(arguments())):
    try:
        attempt()
    except RuntimeError as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""
    problem = "cuda:0 has compute capability 7.5, for which this gdn-cuda has no device code"
    expected = [["RuntimeError", problem], ["NotImplementedError", problem]]
    assert run_python(PRELUDE + script, FAKE_CUDA_DEVICES="7.5,9.0") == expected


def test_installed_gdn_cuda_says_why_it_cannot_run(monkeypatch):
    """The wheel's own module: on this machine's driver, if any, or on the fake one for a newer or an older CUDA."""
    if importlib.util.find_spec("gdn_cuda") is None:
        pytest.skip("gdn-cuda is not installed")
    script = """
import json, gdn_cuda
provider = gdn_cuda.provider
print(json.dumps([provider.availability(), provider.level(), provider.details(), gdn_cuda._C.device_compiler()]))
"""
    reason, level, details, (compiler, major, _) = run_python(script, FAKE_CUDA_VERSION="14000")
    assert level == "9.0" and "Fake GPU" in details["device 0"]
    if compiler:
        assert reason is None
        reason, *_ = run_python(script, FAKE_CUDA_VERSION=f"{major - 1}090")
        assert "it needs a driver for CUDA" in reason or "or newer" in reason
    else:
        assert "built without device code" in reason


def test_the_fake_driver_is_only_found_where_a_test_asks_for_it():
    assert not any(Path(folder, "libcuda.so.1").exists() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"))
