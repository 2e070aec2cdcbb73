# SPDX-License-Identifier: Apache-2.0
"""The commands of tools/dev.py."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from devkit import aarch64, environment, system, wheels
from devkit.console import ROOT, Problem, Stages, Unavailable, check, explain, run, say
from devkit.environment import BIN, NATIVE_PACKAGES, PYTHON, WITH_TOOLS
from devkit.machines import EMULATED, MACHINES, run_tests_on
from devkit.testing import run_tests

DIST = ROOT / "dist"
# The exit status for what cannot be done on this machine, as test drivers have it.
SKIPPED = 77
PACKAGES = ("gdn-core", *NATIVE_PACKAGES)
# Objects of the wheels' own build stay here, for the instruction-set check.
WHEEL_BUILD = ROOT / "build" / "wheels"
# For the whole suite: a test uses one thread unless it asks for more. Each process holds torch, so memory sets a limit.
SIDE_BY_SIDE = ("-n", str(min(os.cpu_count() or 1, 4)))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit status."""
    options, rest = parse(arguments)
    try:
        if options.command == "setup" and options.tools:
            environment.ensure_tools()
            return 0
        environment.ensure(getattr(options, "wheels", None))
        if options.command == "demo":
            return run([BIN / "gdn", "demo", *rest])
        if options.command == "test":
            return _test(options, rest)
        if options.command == "lint":
            lint()
        if options.command == "build":
            build()
        if options.command == "sanitize":
            sanitize()
    except Unavailable as reason:
        explain(reason)
        return SKIPPED
    except Problem as problem:
        explain(problem)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command, and those that it hands on: to gdn demo, or to pytest."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("demo", "test"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "test" and options.wheels and (options.full or options.arch):
        parser.error("--wheels goes with neither --full nor --arch: they test what the checkout makes")
    return options, rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/dev.py", description="Makes .venv, installs what is pinned, and then runs.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    setup = commands.add_parser("setup", help="only make or refresh .venv", allow_abbrev=False)
    setup.add_argument("--tools", action="store_true", help="only the pinned tools: no torch, nothing compiled")
    commands.add_parser("demo", help="gdn demo: a hybrid model with and without gdn; takes its options", add_help=False)
    test = commands.add_parser("test", help="the test suite; takes options of pytest", allow_abbrev=False)
    test.add_argument(
        "--full", action="store_true", help="also slow tests, lint, planted faults, wheels, cross compile, sanitizers"
    )
    test.add_argument(
        "--arch",
        choices=MACHINES,
        help="on an emulated machine: its own selection, with --full a larger one, or what pytest's options name",
    )
    test.add_argument("--wheels", type=Path, metavar="DIR", help="on these wheels, instead of what the checkout makes")
    commands.add_parser("lint", help="every check of .pre-commit-config.yaml, on all files", allow_abbrev=False)
    commands.add_parser(
        "build", help="sdists, wheels from the sdists into dist/, and the checks on them", allow_abbrev=False
    )
    commands.add_parser(
        "sanitize", help="the CPU kernels' tests, with address and undefined-behaviour sanitizers", allow_abbrev=False
    )
    return parser


def lint() -> None:
    """Run the pre-commit hooks on all files."""
    if not (ROOT / ".git").exists():
        raise Problem("lint looks at the files that git tracks, and this is not a git checkout.")
    check([PYTHON, "-m", "pre_commit", "run", "--all-files", "--show-diff-on-failure"], WITH_TOOLS)


def build() -> None:
    """Build sdists, wheels from these, for Arm too where that can be had, and check the results."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WHEEL_BUILD, ignore_errors=True)
    for package in PACKAGES:
        say(f"sdist and wheel of {package}")
        wheels.make_wheel(wheels.make_sdist(package, DIST), DIST, WHEEL_BUILD / package)
    if NATIVE_PACKAGES:
        _add_arm_wheels(DIST)
    check([PYTHON, "tools/check_version.py", *sorted(DIST.iterdir())])
    check([PYTHON, "tools/check_wheel.py", *sorted(DIST.iterdir())])
    if NATIVE_PACKAGES:
        check([PYTHON, "tools/check_isa_leaks.py", WHEEL_BUILD / "gdn-cpu"])
        _check_device_code()


def _add_arm_wheels(folder: Path) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return
    try:
        for wheel in aarch64.wheels(device_code=WHEEL_BUILD / "gdn-cuda" / "objects"):
            shutil.copy(wheel, folder)
    except Unavailable as reason:
        explain(reason)
        say("no wheels for 64-bit Arm")


def _check_device_code() -> None:
    """Hold the CUDA wheel's machine code to its budget, where a compiler for it was found."""
    which = [str(PYTHON), "packages/gdn-cuda/device_code.py", "--which"]
    if not subprocess.run(
        which, cwd=ROOT, env={**os.environ, **WITH_TOOLS}, capture_output=True, check=True
    ).stdout.strip():
        say("no compiler for CUDA: gdn-cuda has no device code to check")
        return
    (wheel,) = DIST.glob(f"gdn_cuda-*_{platform.machine()}.whl")
    check([PYTHON, "tools/check_device_code.py", wheel])


def _test(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.arch:
        return run_tests_on(options.arch, arguments, options.full)
    if options.full:
        return _test_everything(arguments)
    return run_tests(["-m", "not slow", *(arguments or SIDE_BY_SIDE)])


def _test_everything(arguments: Sequence[str]) -> int:
    stages = Stages()
    stages.run("lint", lint)
    stages.run("tests, slow ones too", lambda: _require_success(run_tests(arguments or SIDE_BY_SIDE)))
    stages.run("planted faults", lambda: check([PYTHON, "tools/mutants.py"]))
    stages.run("sdists, wheels and their checks", build)
    stages.run("wheels in empty environments", lambda: check([PYTHON, "tools/check_install.py", DIST]))
    if NATIVE_PACKAGES:
        stages.run("cross compile for Arm", cross_compile)
        for name in EMULATED:
            stages.run(f"tests on {name}", partial(_test_on, name))
        stages.run("address and undefined-behaviour sanitizers", sanitize)
    print(stages.table(), flush=True)
    return 1 if stages.failed else 0


def _test_on(name: str) -> None:
    _require_success(run_tests_on(name, (), full=True))


def _require_success(status: int) -> None:
    if status != 0:
        raise Problem(f"pytest ended with status {status}.")


def cross_compile() -> None:
    """Compile the kernels and the run-time code for 64-bit Arm."""
    system.need({"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}, "compiling for Arm")
    check([BIN / "cmake", "--preset", "aarch64"], WITH_TOOLS)
    check([BIN / "cmake", "--build", "--preset", "aarch64"], WITH_TOOLS)
    check([PYTHON, "tools/check_isa_leaks.py", "build/aarch64"])


def sanitize() -> None:
    """Run the tests of the CPU kernels on a build with address and undefined-behaviour sanitizers."""
    libraries = [_compiler_file(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    if None in libraries:
        raise Unavailable("the compiler has no sanitizer libraries.", "Set CXX to GCC.")
    build_dir = ROOT / "build" / "asan"
    site = build_dir / "site"
    check([BIN / "cmake", "--preset", "asan"], WITH_TOOLS)
    check([BIN / "cmake", "--build", "--preset", "asan"], WITH_TOOLS)
    check([BIN / "cmake", "--install", build_dir, "--prefix", site], WITH_TOOLS)
    for package in NATIVE_PACKAGES:
        shutil.copytree(ROOT / "packages" / package / "src", site, dirs_exist_ok=True)
    sanitized = {
        # Before everything else in the process; the C++ library too, or the first exception ends it.
        "LD_PRELOAD": " ".join(str(library) for library in libraries),
        # Python leaks at exit by design. The kernels' own threads are torch's.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": str(site),
        # A backend that does not load there must not skip its tests.
        "GDN_REQUIRE": "cpu",
    }
    # The tests of what the contract promises, where their id says that a level of the CPU kernels runs.
    others = [ROOT / "tests" / f"test_{name}.py" for name in ("convolution", "speculative")]
    tests = [*sorted((ROOT / "tests").glob("test_contract_*.py")), *others]
    check([PYTHON, "-m", "pytest", "-q", "-m", "not slow", "-k", "cpu-", *SIDE_BY_SIDE, *tests], sanitized)


def _compiler_file(name: str) -> str | None:
    compiler = os.environ.get("CXX", "g++").split()[0]
    if not shutil.which(compiler):
        return None
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # A name that the compiler does not know comes back as it was.
    return path if os.path.isabs(path) else None
