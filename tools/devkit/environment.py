# SPDX-License-Identifier: Apache-2.0
"""The environment .venv: made when missing, filled with what is pinned, and refreshed only where something changed."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from devkit.console import ROOT, Problem, check, run, say

TORCH_VERSION = os.environ.get("GDN_DEV_TORCH", "2.13.0")
CUDA_ARCHITECTURE = os.environ.get("GDN_DEV_CUDA_ARCHITECTURE", "9.0a")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The first pip that reads dependency groups is 25.1; older Pythons bring an older one.
PIP = "pip==26.3"
OLDEST_GCC = 11

VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if sys.platform == "win32" else "bin")
PYTHON = BIN / ("python.exe" if sys.platform == "win32" else "python")
# What a program sees that looks for tools by name: ours first.
WITH_TOOLS = {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
STAMP = VENV / "gdn-installed.json"

NATIVE_PACKAGES = ("gdn-cpu", "gdn-cuda") if sys.platform == "linux" else ()

_OFFLINE_REMEDY = (
    "The lines above are pip's own. Without a way to PyPI, set PIP_INDEX_URL to a mirror, or PIP_FIND_LINKS to a\n"
    "folder of wheels, and run this again: it goes on where it stopped."
)

# Runs inside .venv: prints the requirements of a dependency group that are not installed as pinned.
_MISSING_FROM_GROUP = """
import sys
from importlib import metadata
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
from pip._vendor.packaging.requirements import Requirement

def requirements(groups, name):
    for entry in groups[name]:
        if isinstance(entry, dict):
            yield from requirements(groups, entry["include-group"])
        else:
            yield Requirement(entry)

def installed(requirement):
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False

with open(sys.argv[1], "rb") as file:
    groups = tomllib.load(file)["dependency-groups"]
for requirement in requirements(groups, sys.argv[2]):
    if (requirement.marker is None or requirement.marker.evaluate()) and not installed(requirement):
        print(requirement)
"""


def ensure(wheels: Path | None = None) -> None:
    """Make .venv hold the pinned tools, torch, and the packages: as they are in this checkout, or from built wheels."""
    _check_prerequisites()
    _ensure_venv()
    _install_torch()
    _install_tools()
    if wheels is None:
        _install_packages()
    else:
        _install_wheels(wheels)


def ensure_tools() -> None:
    """Make .venv hold the pinned tools, and nothing that takes a compiler or torch."""
    _ensure_venv()
    _install_tools()


def _ensure_venv() -> None:
    if not PYTHON.exists():
        _make_venv()
    _check_venv()


def _check_prerequisites() -> None:
    if NATIVE_PACKAGES:
        _check_compiler()
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            raise Problem(
                "the headers of this Python (Python.h) are missing.",
                f"Debian, Ubuntu: apt install python{sys.version_info[0]}.{sys.version_info[1]}-dev\n"
                "Fedora: dnf install python3-devel",
            )


def _check_compiler() -> None:
    named = os.environ.get("CXX", "").split()
    candidates = [named[0]] if named else ["c++", "g++", "clang++"]
    compiler = next((path for path in map(shutil.which, candidates) if path), None)
    if compiler is None:
        raise Problem(
            f"no C++ compiler found (looked for {', '.join(candidates)}).",
            "Debian, Ubuntu: apt install g++\nFedora: dnf install gcc-c++\n"
            "Elsewhere: install GCC 11 or newer, or Clang, and set CXX to it.",
        )
    macros = subprocess.run(
        [compiler, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=False
    ).stdout
    version = re.search(r"__GNUC__ (\d+)", macros)
    if version and "__clang__" not in macros and int(version[1]) < OLDEST_GCC:
        raise Problem(
            f"{compiler} is GCC {version[1]}, and gdn needs GCC {OLDEST_GCC} or newer (or Clang).",
            "Install a newer one and name it: CXX=g++-12 python3 tools/dev.py ...",
        )


def _make_venv() -> None:
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        raise Problem(
            "this Python cannot make virtual environments (no module venv or ensurepip).",
            f"Debian, Ubuntu: apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv",
        )
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    if run([sys.executable, "-m", "venv", VENV]) != 0:
        raise Problem(
            f"could not make {VENV}.",
            f"Debian, Ubuntu: apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv\n"
            f"Then remove {VENV} and run this again.",
        )


def _check_venv() -> None:
    version = _capture([PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    if version is None or tuple(map(int, version.split("."))) < (3, 10):
        raise Problem(
            f"the environment {VENV} does not work" + (f" (Python {version})." if version else "."),
            f"Remove {VENV} and run this again: it is made anew.",
        )
    if _capture([PYTHON, "-m", "pip", "--version"]) is None:
        check([PYTHON, "-m", "ensurepip"])
    if installed_version("pip") is None or _pip_is_old():
        _pip_install(["-qq", PIP], "pip")


def _pip_is_old() -> bool:
    numbers = (installed_version("pip") or "0").split(".")[:2]
    return tuple(int(number) for number in numbers) < (25, 1)


def _install_torch() -> None:
    found = installed_version("torch")
    if found is not None and found.split("+")[0] == TORCH_VERSION:
        return
    say(f"installing torch {TORCH_VERSION}, CPU build (about 200 MB to download)")
    attempts: list[list[str]] = []
    if sys.platform == "linux":
        cpu_build = f"torch=={TORCH_VERSION}+cpu"
        attempts = [[cpu_build], [cpu_build, "--extra-index-url", TORCH_CPU_INDEX, "--retries", "1"]]
    attempts.append([f"torch=={TORCH_VERSION}"])
    complaints: list[str] = []
    for attempt in attempts:
        if len(complaints) == 2:
            say("no CPU build to be had: taking the default build, which may bring gigabytes of CUDA libraries")
        # pip says what it does on stdout, and why it failed on stderr: only the last failure matters.
        result = subprocess.run(
            [str(PYTHON), "-m", "pip", "install", *attempt], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
        )
        if result.returncode == 0:
            return
        complaints.append(result.stderr)
    sys.stderr.write(complaints[-1])
    raise Problem(f"pip could not install torch {TORCH_VERSION}.", _OFFLINE_REMEDY)


def _install_tools() -> None:
    missing = _missing_from_group("dev")
    if missing:
        say(f"installing {len(missing)} pinned tools")
        _pip_install(["-qq", "--group", f"{ROOT / 'pyproject.toml'}:dev"], "the pinned tools")


def _missing_from_group(group: str) -> list[str]:
    listed = _capture([PYTHON, "-c", _MISSING_FROM_GROUP, ROOT / "pyproject.toml", group])
    if listed is None:
        raise Problem(f"could not read the dependency group {group!r} of pyproject.toml.")
    return listed.splitlines()


def _install_packages() -> None:
    """Install gdn-core in place, and the native packages as copies: so tests run what a wheel would hold."""
    installed = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    for package in ("gdn-core", *NATIVE_PACKAGES):
        made_from = fingerprint(package)
        if installed.get(package) == made_from and installed_version(package) is not None:
            continue
        path = ROOT / "packages" / package
        say(f"compiling {package}" if package in NATIVE_PACKAGES else f"installing {package}")
        target = [path] if package in NATIVE_PACKAGES else ["--editable", path]
        # Not isolated: the build tools are the pinned ones of .venv, and nothing is downloaded for it.
        options = ["-qq", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
        if package == "gdn-cuda":
            # Compiling for a GPU takes longer than all the rest: wheels have every architecture, this has one.
            options.append(f"--config-settings=cmake.define.GDN_CUDA_ARCHITECTURES={CUDA_ARCHITECTURE}")
        if run([PYTHON, "-m", "pip", "install", *options, *target], WITH_TOOLS) != 0:
            raise Problem(f"{package} did not build.", "The compiler's or pip's own words are above.")
        installed[package] = made_from
        STAMP.write_text(json.dumps(installed, indent=1))


def _install_wheels(folder: Path) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    STAMP.unlink(missing_ok=True)
    options: list[str | Path] = [
        "-qq",
        "--no-deps",
        "--force-reinstall",
        "--no-index",
        "--find-links",
        folder.resolve(),
    ]
    _pip_install(
        [*options, *(f"{package}=={version}" for package in ("gdn-core", *NATIVE_PACKAGES))], f"the wheels of {folder}"
    )


def fingerprint(package: str) -> str:
    """Hash what an installed package was made from."""
    folder = ROOT / "packages" / package
    if package in NATIVE_PACKAGES:
        parts: Iterable[Path] = [
            *sorted(path for path in folder.iterdir() if path.suffix in (".toml", ".txt", ".py")),
            *_files(folder / "csrc"),
            *_files(folder / "src"),
            *_files(ROOT / "cmake"),
        ]
    else:
        parts = [folder / "pyproject.toml"]
    digest = hashlib.sha256()
    settings = [os.environ.get(name) for name in ("CXX", "SKBUILD_CMAKE_DEFINE", "GDN_DEV_CUDA_ARCHITECTURE")]
    digest.update(repr([sys.platform, *settings]).encode())
    for path in [ROOT / "VERSION", *parts]:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _pip_install(arguments: Sequence[str | Path], what: str) -> None:
    if run([PYTHON, "-m", "pip", "install", *arguments]) != 0:
        raise Problem(f"pip could not install {what}.", _OFFLINE_REMEDY)


def installed_version(package: str) -> str | None:
    """Return the version of a package in .venv, or None."""
    return _capture([PYTHON, "-c", f"from importlib.metadata import version; print(version({package!r}))"])


def _capture(command: Sequence[str | Path]) -> str | None:
    """Return what a command prints, or None when it fails."""
    try:
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
