# SPDX-License-Identifier: Apache-2.0
"""The commands of tools/dev.py."""

import argparse
import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from devkit import environment
from devkit.console import ROOT, Problem, Stages, check, explain, run, say
from devkit.environment import BIN, NATIVE_PACKAGES, PYTHON, WITH_TOOLS

DIST = ROOT / "dist"
PACKAGES = ("gdn-core", *NATIVE_PACKAGES)
# Objects of the wheels' own build stay here, for the instruction-set check.
WHEEL_BUILD = ROOT / "build" / "wheels"


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("demo", "test"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        environment.ensure()
        if options.command == "demo":
            return run([BIN / "gdn", "demo", *rest])
        if options.command == "test":
            return _test_everything(rest) if options.full else _test(["-m", "not slow", *rest])
        if options.command == "lint":
            lint()
        if options.command == "build":
            build()
    except Problem as problem:
        explain(problem)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/dev.py", description="Makes .venv, installs what is pinned, and then runs.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("setup", help="only make or refresh .venv", allow_abbrev=False)
    commands.add_parser("demo", help="gdn demo: a hybrid model with and without gdn; takes its options", add_help=False)
    test = commands.add_parser("test", help="the test suite; takes options of pytest", allow_abbrev=False)
    test.add_argument(
        "--full", action="store_true", help="also slow tests, lint, planted faults, wheels, cross compile, sanitizers"
    )
    commands.add_parser("lint", help="every check of .pre-commit-config.yaml, on all files", allow_abbrev=False)
    commands.add_parser(
        "build", help="sdists, wheels from the sdists into dist/, and the checks on them", allow_abbrev=False
    )
    return parser


def lint() -> None:
    """Run the pre-commit hooks on all files."""
    if not (ROOT / ".git").exists():
        raise Problem("lint looks at the files that git tracks, and this is not a git checkout.")
    check([PYTHON, "-m", "pre_commit", "run", "--all-files", "--show-diff-on-failure"], WITH_TOOLS)


def _test(arguments: Sequence[str]) -> int:
    report = ROOT / "build" / "reports" / "tests.xml"
    report.unlink(missing_ok=True)
    status = run([PYTHON, "-m", "pytest", f"--junitxml={report}", *arguments])
    if report.exists():
        print(_counts(report), flush=True)
    return status


def _counts(report: Path) -> str:
    """Return pytest's counts in one line, the skips among them: a green run must not hide what it left out."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, "0"))
    failed = total["failures"] + total["errors"]
    return f"tests: {total['tests'] - failed - total['skipped']} passed, {failed} failed, {total['skipped']} skipped"


def build() -> None:
    """Build sdists, wheels from these, and check the results."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WHEEL_BUILD, ignore_errors=True)
    for package in PACKAGES:
        say(f"sdist and wheel of {package}")
        check([PYTHON, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, f"packages/{package}"], WITH_TOOLS)
        (sdist,) = DIST.glob(f"{package.replace('-', '_')}-*.tar.gz")
        options: list[str | Path] = ["-qq", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", DIST]
        check(
            [PYTHON, "-m", "pip", "wheel", *options, f"--config-settings=build-dir={WHEEL_BUILD / package}", sdist],
            WITH_TOOLS,
        )
    check([PYTHON, "tools/check_version.py", *sorted(DIST.iterdir())])
    check([PYTHON, "tools/check_wheel.py", *sorted(DIST.iterdir())], WITH_TOOLS)
    if NATIVE_PACKAGES:
        check([PYTHON, "tools/check_isa_leaks.py", WHEEL_BUILD / "gdn-cpu"])
        _check_device_code()


def _check_device_code() -> None:
    """Hold the CUDA wheel's machine code to its budget, where a compiler for it was found."""
    which = [str(PYTHON), "packages/gdn-cuda/device_code.py", "--which"]
    if not subprocess.run(
        which, cwd=ROOT, env={**os.environ, **WITH_TOOLS}, capture_output=True, check=True
    ).stdout.strip():
        say("no compiler for CUDA: gdn-cuda has no device code to check")
        return
    (wheel,) = DIST.glob("gdn_cuda-*.whl")
    check([PYTHON, "tools/check_device_code.py", wheel])


def _test_everything(arguments: Sequence[str]) -> int:
    stages = Stages()
    stages.run("lint", lint)
    stages.run("tests, slow ones too", lambda: _require_success(_test(arguments)))
    stages.run("planted faults", lambda: check([PYTHON, "tools/mutants.py"]))
    stages.run("sdists, wheels and their checks", build)
    stages.run("wheels in empty environments", lambda: check([PYTHON, "tools/check_install.py", DIST]))
    if NATIVE_PACKAGES:
        stages.run("cross compile for Arm", cross_compile)
        stages.run("address and undefined-behaviour sanitizers", sanitize)
    print(stages.table(), flush=True)
    return 1 if stages.failed else 0


def _require_success(status: int) -> None:
    if status != 0:
        raise Problem(f"pytest ended with status {status}.")


def cross_compile() -> str | None:
    """Compile the kernels and the run-time code for 64-bit Arm."""
    compiler = "aarch64-linux-gnu-g++"
    if not shutil.which(compiler) and not _apt_install("g++-aarch64-linux-gnu"):
        return f"skipped: no {compiler} (Debian, Ubuntu: apt install g++-aarch64-linux-gnu)"
    check([BIN / "cmake", "--preset", "aarch64"], WITH_TOOLS)
    check([BIN / "cmake", "--build", "--preset", "aarch64"], WITH_TOOLS)
    check([PYTHON, "tools/check_isa_leaks.py", "build/aarch64"])
    return None


def _apt_install(package: str) -> bool:
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return False
    say(f"installing {package} with apt")
    run(["apt-get", "-qq", "update"])
    return run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", package]) == 0


def sanitize() -> str | None:
    """Run the tests of the CPU kernels on a build with address and undefined-behaviour sanitizers."""
    libraries = [_compiler_file(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    if None in libraries:
        return "skipped: the compiler has no sanitizer libraries (it needs GCC's)"
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
    check([PYTHON, "-m", "pytest", "-q", "-m", "not slow", "-k", "cpu-", *tests], sanitized)
    return None


def _compiler_file(name: str) -> str | None:
    compiler = os.environ.get("CXX", "g++").split()[0]
    if not shutil.which(compiler):
        return None
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # A name that the compiler does not know comes back as it was.
    return path if os.path.isabs(path) else None
