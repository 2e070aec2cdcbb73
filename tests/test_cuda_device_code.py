# SPDX-License-Identifier: Apache-2.0
"""gdn-cuda's machine code, counted: it needs no GPU to see that a kernel spills, or stores a state in small pieces."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from types import ModuleType

import pytest

import cuda_emulator

pytestmark = cuda_emulator.needs_linux

SCRIPT = cuda_emulator.ROOT / "tools" / "check_device_code.py"


@pytest.fixture(scope="module")
def check_device_code():
    spec = importlib.util.spec_from_file_location("check_device_code", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_installed_code_keeps_its_budget():
    if importlib.util.find_spec("gdn_cuda") is None:
        pytest.skip("gdn-cuda is not installed")
    import gdn_cuda

    if not gdn_cuda._C.device_code():
        pytest.skip("gdn-cuda was built without device code")
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"gdn_decode_\w+", result.stdout)) >= len(gdn_cuda._C.kernel_names())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"registers": 129}, "129 registers, at most 128"),
        ({"frame": 8}, "8 bytes of local memory"),
        ({"instructions": Counter({"LDG.E.128": 16, "STG.E.128": 8, "STL": 1})}, "accesses to local memory"),
        (
            {"instructions": Counter({"LDG.E.128": 16, "STG.E": 32})},
            "16 loads and 0 stores of 16 bytes, expected 16 and 8",
        ),
    ],
    ids=str,
)
def test_each_budget_is_held(check_device_code: ModuleType, change, problem):
    right = {"registers": 128, "frame": 0, "instructions": Counter({"LDG.E.128.STRONG.GPU": 16, "STG.E.128": 8})}
    kernel = check_device_code.Kernel("gdn_decode_64_float32_slots", **(right | change))
    found = list(check_device_code.problems_of(kernel))
    assert (found == []) if problem is None else any(problem in text for text in found)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda code: code, None),
        (lambda code: [], "code for nothing, expected {first}"),
        (lambda code: code[1:], "code for {second}"),
        (lambda code: [code[0], *code[2:]], "code for {first}, "),
        (lambda code: code[:-1], "PTX for nothing, expected {first}"),
        (lambda code: [*code[:-1], (code[1][0], True)], "PTX for {second}, expected {first}"),
    ],
    ids=["whole", "nothing", "without the first", "without the second", "without PTX", "newer PTX"],
)
def test_a_wheel_has_code_for_every_gpu(check_device_code: ModuleType, change, problem):
    listed = check_device_code.listed_architectures()
    found = list(check_device_code.gaps(change([*((name, False) for name in listed), (listed[0], True)])))
    if problem is None:
        assert found == []
    else:
        assert any(problem.format(first=listed[0], second=listed[1]) in text for text in found)


def test_a_release_is_compiled_by_the_cuda_that_is_named(check_device_code: ModuleType):
    assert list(check_device_code.foreign_compiler(12, 9)) == []
    (problem,) = check_device_code.foreign_compiler(13, 0)
    assert problem.startswith("compiled by CUDA 13.0, expected 12.9")


def test_long_rows_load_the_state_in_one_place(check_device_code: ModuleType):
    for loads, is_right in ((8, True), (16, False)):
        counts = Counter({"LDG.E.128": loads, "STG.E.128": 8})
        kernel = check_device_code.Kernel("gdn_decode_64_float32_rows", 128, 0, counts)
        assert (list(check_device_code.problems_of(kernel)) == []) == is_right


@pytest.mark.parametrize(
    ("kernel", "vectors"),
    [("gdn_decode_128_float32_slots", 16), ("gdn_decode_128_bfloat16_replay", 8), ("gdn_decode_256_float16_slots", 4)],
)
def test_a_thread_s_part_of_the_state(check_device_code: ModuleType, kernel, vectors):
    assert check_device_code.state_vectors(kernel) == vectors
