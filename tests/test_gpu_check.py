# SPDX-License-Identifier: Apache-2.0
"""The script for a machine with a GPU, as far as the emulator can run it, and its golden file."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import cuda_emulator
import triton_interpreter

pytestmark = cuda_emulator.needs_linux


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", cuda_emulator.ROOT / "tools" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_golden_file_is_what_the_emulator_gives(gpu_check):
    """After a change of the kernel's arithmetic: tools/gpu_check.py --write-golden."""
    with cuda_emulator.forced() as emulator:
        emulator.configure(order="random", seed=1, num_processors=1000)
        assert gpu_check.golden_digests("cpu") == json.loads(gpu_check.GOLDEN.read_text())


def test_the_golden_file_has_every_kernel(gpu_check):
    names = list(json.loads(gpu_check.GOLDEN.read_text()))
    kernels = {(name.split("x")[0], *name.split()[2:]) for name in names}
    assert len(kernels) == len(names) == 27


def test_checks_pass_on_the_emulator(gpu_check):
    with cuda_emulator.forced() as emulator:
        emulator.configure(num_processors=3)
        assert list(gpu_check.check_golden("cpu")) == []
        assert list(gpu_check.check_float64("cpu")) == []
        assert list(gpu_check.check_exact("cpu", N=3)) == []


@triton_interpreter.needs_triton
def test_the_check_of_triton_passes_in_its_interpreter(gpu_check):
    with triton_interpreter.forced():
        assert list(gpu_check.check_exact("cpu", N=1, states=(torch.float32,))) == []


def test_the_check_of_fla_core_passes_on_another_backend(gpu_check):
    assert list(gpu_check.check_fla("cpu", "reference")) == []


def test_checks_find_what_is_wrong(gpu_check, monkeypatch):
    run = gpu_check.run

    def off_by_a_bit(arguments):
        out, *rest = run(arguments)
        return (out * 1.01, *rest)

    monkeypatch.setattr(gpu_check, "run", off_by_a_bit)
    with cuda_emulator.forced():
        assert list(gpu_check.check_golden("cpu"))
        assert list(gpu_check.check_float64("cpu"))
