# SPDX-License-Identifier: Apache-2.0
"""gdn-cuda's kernels without a GPU: builds tools/cuda_emulator, and puts it in front of gdn-core as a backend."""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import gdn_core
from gdn_core import _registry

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tools" / "cuda_emulator"
BUILD = ROOT / "build" / "cuda-emulator"
KERNELS = ROOT / "packages" / "gdn-cuda" / "csrc" / "kernels"

OPS = (
    "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_spec",
    "fused_sigmoid_gating_delta_rule_update_replay",
    "fused_gdn_decode_post_conv_mtp",
    "fused_gdn_decode_post_conv_mtp_replay",
)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="gdn-cuda is for Linux")


@cache
def build(*targets: str) -> Path:
    """Build targets of the emulator, one test process at a time, and return the folder that they are in."""
    tools = os.path.dirname(sys.executable)
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (BUILD / "build.ninja").exists():
            configure = ["cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
            _run([*configure, "-DGDN_WERROR=ON"], env)
        _run(["cmake", "--build", BUILD, "-j2", "--target", *targets], env)
    return BUILD


def _run(command: list[object], env: dict[str, str]) -> None:
    result = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the emulator. The thread sanitizer wants its shadow where it expects it: no random layout."""
    command = [str(build(name) / name), *arguments]
    if name.endswith("_thread"):
        command = ["setarch", platform.machine(), "--addr-no-randomize", *command]
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}  # one race is enough: each report costs seconds
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def module() -> ModuleType:
    """Return gdn-cuda's binding in front of the emulator."""
    folder = str(build("gdn_cuda_emulated_C"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("gdn_cuda_emulated._C")


class EmulatedProvider:
    """The emulator as a backend for CPU tensors."""

    name, version, device_types = "emulated", "", ("cpu",)

    def __init__(self) -> None:
        self.ops = {op: getattr(module(), op) for op in OPS}

    def availability(self) -> None:
        return None

    def level(self) -> None:
        return None

    def details(self) -> dict[str, str]:
        return {}


@contextmanager
def forced() -> Iterator[ModuleType]:
    """Run every call of the block in the emulator; yields its module, for `configure`."""
    info = _registry.BackendInfo("emulated", None, True)
    backends = _registry.loaded()
    backends["emulated"] = _registry._Backend(info, EmulatedProvider())
    emulator = module()
    emulator.configure()
    try:
        with gdn_core.use_backend("emulated"):
            yield emulator
    finally:
        del backends["emulated"]
