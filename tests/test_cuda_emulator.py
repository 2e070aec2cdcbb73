# SPDX-License-Identifier: Apache-2.0
"""The emulator finds what it is for: each planted fault, and each barrier and fence of the decode kernel left out."""

from __future__ import annotations

import re
from functools import cache

import pytest

import cuda_emulator
from cuda_emulator import program

pytestmark = cuda_emulator.needs_linux

ORDERS = ("forward", "reverse", "random")
RIGHT = ("mirror", "mirror_twice", "mirror_in_warp", "copy", "add_in_last_block")

# Of the thread sanitizer: a race, at a line of the kernel.
RACES = (
    "mirror_without_barrier",
    "mirror_twice_without_barrier",
    "mirror_in_warp_without_barrier",
    "write_from_all_blocks",
    "add_in_last_block_without_fence",
)
# Of the emulator itself, in any order of threads; lines are those of the source.
FAULTS = {
    "barrier_in_both_arms": r"a block parts: thread 0 is at barrier in {0}, thread 32 is at barrier in {1}",
    "barrier_in_half_a_warp": r"a warp parts: thread \d+ is at barrier in {0}, thread \d+ has returned",
    "shuffle_in_half_a_warp": r"a warp parts: thread \d+ is at shuffle in {0}, thread \d+ has returned",
    "return_before_barrier": r"a block parts: thread 0 is at barrier in {0}, thread 32 has returned",
    "copy_without_await": r"thread \d+ returned without having waited for the copy of {0}",
}


@cache
def lines_of(kernel: str) -> list[str]:
    """Return "file:line" of the collectives and copies in a kernel of planted_faults.cpp."""
    path = cuda_emulator.SOURCE / "planted_faults.cpp"
    source = path.read_text().splitlines()
    name = kernel.removesuffix("_without_await")
    (start,) = (i for i, line in enumerate(source) if re.match(rf"void {name}\(", line))
    body = source[start : source.index("}", start)]
    found = [start + i + 1 for i, line in enumerate(body) if re.search(r"\b(barrier|shuffle_xor|copy16_async)\(", line)]
    return [f"{path.name}:{line}" for line in found]


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_raise_no_alarm(name):
    runs = [("none", order) for order in ORDERS] + [("address", "forward"), ("thread", "random")]
    outputs = set()
    for kind, order in runs:
        result = program(f"planted_faults_{kind}", name, order)
        assert (result.returncode, result.stderr) == (0, ""), result.stderr
        outputs.add(result.stdout)
    assert len(outputs) == 1 and "nan" not in outputs.pop()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_line(name, order):
    result = program("planted_faults_none", name, order)
    pattern = FAULTS[name].format(*(re.escape(line) for line in lines_of(name)))
    assert result.returncode == 1
    assert re.search(pattern, result.stdout), result.stdout


@pytest.mark.parametrize("name", RACES)
def test_races_are_found(name):
    result = program("planted_faults_thread", name)
    assert result.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in result.stderr
    assert name.replace("_without_barrier", "").replace("_without_fence", "") in result.stderr


@pytest.mark.parametrize("name", ["overrun_shared", "overrun_global"])
def test_overruns_are_found(name):
    result = program("planted_faults_address", name)
    assert result.returncode != 0
    assert re.search(rf"heap-buffer-overflow .*planted_faults.cpp:\d+ in .*{name}", result.stderr), result.stderr


@pytest.mark.parametrize("name", ["read_what_nobody_wrote", "read_before_await"])
def test_shared_memory_that_was_not_written_is_nan(name):
    for order in ORDERS:
        assert "nan" in program("planted_faults_none", name, order).stdout


def test_a_missing_barrier_shows_in_values():
    outputs = {program("planted_faults_none", "mirror_without_barrier", order).stdout for order in ORDERS}
    assert all("nan" in output for output in outputs)


def test_a_block_that_waits_for_another_is_ended():
    result = program("planted_faults_none", "wait_for_next_block")
    assert result.returncode == 1
    assert re.search(r"thread 0 waits for another block in planted_faults.cpp:\d+", result.stdout)


# --- the decode kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "order"), [*(("none", order) for order in ORDERS), ("address", "random"), ("thread", "random")]
)
def test_the_kernel_is_clean(kind, order):
    result = program(f"decode_cases_{kind}", "--order", order, "--seed", "3")
    assert (result.returncode, result.stderr) == (0, "")


def _kernel_sources() -> str:
    return "\n".join(path.read_text() for path in sorted(cuda_emulator.KERNELS.iterdir()))


def _barriers() -> list[int]:
    """Return the lines of fused_decode.h with a barrier or fence; no other file of the kernel has one."""
    pattern = re.compile(r"^\s*(barrier|warp_barrier|device_fence)\(\);$")
    found = {
        path.name: [i + 1 for i, line in enumerate(path.read_text().splitlines()) if pattern.match(line)]
        for path in cuda_emulator.KERNELS.iterdir()
    }
    lines = found.pop("fused_decode.h")
    assert lines and not any(found.values())
    assert len(re.findall(r"\b(?:barrier|warp_barrier|device_fence)\(\)", _kernel_sources())) == len(lines)
    return lines


@pytest.mark.parametrize("line", _barriers())
def test_each_barrier_and_fence_of_the_kernel_is_needed(line):
    """Left out in turn, the thread sanitizer reports what it ordered."""
    result = program("decode_cases_thread", "--skip", str(line))
    assert result.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in result.stderr


# --- one language, two meanings ---------------------------------------------------------------------------------------


def _names(path) -> set[str]:
    text = path.read_text()
    return set(re.findall(r"^(?:GDN_DEVICE|inline) [\w:* ]+?\b(\w+)\(", text, re.MULTILINE)) | set(
        re.findall(r"^struct alignas\(16\) (\w+)|#define (GDN_\w+)", text, re.MULTILINE)[0]
    )


def test_both_device_headers_have_the_same_names():
    on_gpu = _names(cuda_emulator.ROOT / "packages" / "gdn-cuda" / "csrc" / "device" / "device.h")
    emulated = _names(cuda_emulator.SOURCE / "device.h")
    # The emulator rounds to half precision in steps.
    assert on_gpu <= emulated
    assert emulated - on_gpu <= {"bfloat16_bits", "float16_bits"}


def test_kernels_use_no_other_name_of_cuda():
    words = set(re.findall(r"\w+", re.sub(r"//.*", "", _kernel_sources())))
    assert not {word for word in words if word.startswith("__") and word != "__CUDACC__"} - {"__host__", "__device__"}
    assert not words & {
        "threadIdx",
        "blockIdx",
        "blockDim",
        "gridDim",
        "asm",
        "atomicAdd",
        "atomicInc",
        "printf",
        "std",
    }
