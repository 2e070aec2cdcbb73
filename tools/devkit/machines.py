# SPDX-License-Identifier: Apache-2.0
"""Machines that are not here: how to run the tests as if on one of them, and which.

Each has to report exactly the instruction-set levels that are listed here, or its run fails before the first test.
"""

import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from devkit import aarch64, qemu, sde
from devkit.console import ROOT, Unavailable
from devkit.environment import PYTHON
from devkit.testing import run_tests

AMX_EMULATOR = ROOT / "tools" / "amx_emulator" / "build.py"


class Machine(NamedTuple):
    """One of them."""

    levels: tuple[str, ...]
    prepare: Callable[[], tuple[Path, Mapping[str, str]]]  # returns its Python, and the environment for that
    tests: tuple[str, ...]  # pytest's options by default
    more_tests: tuple[str, ...]  # and with --full


def run_tests_on(name: str, arguments: Sequence[str], full: bool) -> int:
    """Run tests on a machine, those that pytest's arguments name or else its own, and return pytest's status."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"{name} is emulated on x86-64 Linux only.", "Run the tests without --arch here.")
    machine = MACHINES[name]
    python, environment = machine.prepare()
    # Starting Python with torch takes half a minute under qemu.
    required = {"GDN_REQUIRE": "cpu", "GDN_REQUIRE_LEVELS": ",".join(machine.levels), "GDN_TEST_TIMEOUT": "900"}
    tests = arguments or [*_level_tests(), *(machine.more_tests if full else machine.tests)]
    return run_tests(["-p", "no:cacheprovider", *tests], python, {**environment, **required}, f"tests-{name}")


def _level_tests() -> list[str]:
    """Return pytest's arguments for the files with tests that run on every level, which their ids then name."""
    fixture = re.compile(r"\b(native_)?impl\b")
    paths = (path for path in sorted((ROOT / "tests").glob("test_*.py")) if fixture.search(path.read_text()))
    return [*(str(path.relative_to(ROOT)) for path in paths), "-m", "not slow"]


def _arm() -> tuple[Path, Mapping[str, str]]:
    return aarch64.python(), {}


def _older_x86(name: str, cpu: str) -> tuple[Path, Mapping[str, str]]:
    return qemu.python_of_this_architecture(ROOT / "build" / "machines" / name, cpu), {}


def _amx() -> tuple[Path, Mapping[str, str]]:
    built = subprocess.run([PYTHON, AMX_EMULATOR], stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise Unavailable("the AMX emulator could not be built.")
    if subprocess.run([PYTHON, "-c", _HAS_LEVEL_BELOW_AMX], check=False).returncode != 0:
        raise Unavailable("this CPU has no AVX512-BF16, which the AMX kernels use too and nothing here emulates.")
    return PYTHON, {"LD_PRELOAD": built.stdout.strip(), "AMX_EMULATOR_STRICT": "1", "GDN_CPU_ISA": "x86_amx"}


def _intel(processor: str) -> tuple[Path, Mapping[str, str]]:
    return sde.python(processor), {}


_HAS_LEVEL_BELOW_AMX = """
import sys, gdn_cpu
sys.exit(not any(level.supported for level in gdn_cpu.levels() if level.name == "x86_v4_bf16"))
"""


_NATIVE_PACKAGES_TESTS = ("packages/gdn-cpu/tests", "packages/gdn-cuda/tests")
_AMX_FILES = ("tests/test_amx_emulator.py", "tests/test_chunk.py")
_AMX_TESTS = "cpu-x86_amx or test_gdn_cpu or test_amx_multiplies"
# Of the tests that name engines. With a reset at every token, tiles are of one row each, which takes two minutes.
_AMX_ENGINE_TESTS = "x86_amx-amx and not no_token"
_MORE_AMX_ENGINE_TESTS = "x86_amx-amx and not amx--inf-g"

_ARM_TESTS = "cpu- or test_binding or test_installed"
_ARM_ENGINE_TESTS = "arm_bf16-arm_bf16 and (odd or cut_at or nothing_passes or states_are_rounded)"
_MORE_ARM_ENGINE_TESTS = "arm_bf16-arm_bf16 and not no_token"
_ARM_FILES = ("tests/test_chunk.py", *_NATIVE_PACKAGES_TESTS)

X86_LEVELS = ("baseline", "x86_v3", "x86_v4", "x86_v4_bf16", "x86_amx")
# Each level's first processor, by its name in Intel's emulator: Nehalem, Haswell, Skylake and Cooper Lake servers,
# Sapphire Rapids.
_INTEL = dict(zip(("nhm", "hsw", "skx", "cpx", "spr"), X86_LEVELS, strict=True))

EMULATED: Mapping[str, Machine] = {
    "aarch64": Machine(
        ("baseline", "arm_bf16"),
        _arm,
        ("-k", f"{_ARM_TESTS} or {_ARM_ENGINE_TESTS}", *_ARM_FILES, "--one-in=4", "-n2"),
        ("-k", f"{_ARM_TESTS} or test_threads or {_MORE_ARM_ENGINE_TESTS}", *_ARM_FILES, "--one-in=2", "-n2"),
    ),
    # AVX2 without AVX-512.
    "x86_v3": Machine(
        ("baseline", "x86_v3"),
        lambda: _older_x86("x86_v3", "max"),
        ("-k", "cpu-x86_v3", "--one-in=12"),
        ("-k", "cpu-x86_v3", "--one-in=3", "-n2"),
    ),
    # SSE4.2, the least that numpy starts on.
    "x86_baseline": Machine(
        ("baseline",),
        lambda: _older_x86("x86_baseline", "Nehalem"),
        ("-k", "cpu-baseline", "--one-in=16"),
        ("-k", "cpu-baseline", "--one-in=3", "-n2"),
    ),
    "x86_amx": Machine(
        X86_LEVELS,
        _amx,
        ("-k", f"{_AMX_TESTS} or {_AMX_ENGINE_TESTS}", *_AMX_FILES),
        ("-k", f"{_AMX_TESTS} or {_MORE_AMX_ENGINE_TESTS}", *_AMX_FILES),
    ),
}

# Intel's emulator comes from Intel only, under its own licence: these run where they are asked for by name.
FROM_INTEL: Mapping[str, Machine] = {
    f"sde_{processor}": Machine(
        X86_LEVELS[: X86_LEVELS.index(level) + 1],
        partial(_intel, processor),
        ("-k", f"cpu-{level}", "--one-in=12"),
        ("-k", f"cpu-{level}", "-n2"),
    )
    for processor, level in _INTEL.items()
}

MACHINES = {**EMULATED, **FROM_INTEL}
