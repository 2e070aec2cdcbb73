# SPDX-License-Identifier: Apache-2.0
"""A Python for 64-bit Arm with torch and the packages as they are in this checkout, on an emulated processor.

Everything is made in build/machines/aarch64, and only what changed is made again. gdn-cpu is cross-compiled to the same
kind of wheel that a release has. torch is the last version whose Arm wheel on PyPI is a CPU build; it has no
__dlpack_c_exchange_api__, so that the tests also take the binding's other path.
"""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from devkit import qemu, sysroot, system
from devkit.console import ROOT, check, say
from devkit.environment import PYTHON, WITH_TOOLS, fingerprint, installed_version

HOME = ROOT / "build" / "machines" / "aarch64"
SYSROOT = HOME / "sysroot"
STAMP = HOME / "installed.json"
TOOLCHAIN = ROOT / "cmake" / "toolchains" / "aarch64-linux-gnu.cmake"
# Vectors of 128 bits, as in Neoverse N2 and V2: OpenBLAS takes every processor with SVE and BF16 for one of these.
CPU = "max,sve-max-vq=1"

TORCH = "torch==2.9.1"
# Dependencies by name: pip would judge their conditions by this machine, not by the target.
LIBRARIES = (
    *("numpy", "filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"),
    *(
        "pluggy",
        "iniconfig",
        "packaging",
        "pygments",
        "execnet",
        "sortedcontainers",
        "attrs",
        "markdown-it-py",
        "mdurl",
    ),
)
# The same versions as in .venv.
PINNED = ("pytest", "pytest-xdist", "hypothesis", "rich", "nanobind-backend", "scipy-openblas32")
GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def python() -> Path:
    """Return the interpreter, with everything installed."""
    system.need({"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}, "compiling for Arm")
    qemu.need("aarch64")
    sysroot.make(SYSROOT, HOME / "apt")
    _install_wheels()
    _install_native()
    _install_pure()
    interpreter, _ = sysroot.python(SYSROOT)
    where = {"QEMU_LD_PREFIX": str(SYSROOT), "PYTHONHOME": str(SYSROOT / "usr")}
    return qemu.write_python(HOME, "aarch64", CPU, interpreter, where)


def _pip_install(what: Sequence[str | Path], *platforms: str) -> None:
    version = sysroot.python(SYSROOT)[1]
    command: list[str | Path] = [PYTHON, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--upgrade"]
    command += ["--target", sysroot.site_packages(SYSROOT), "--only-binary=:all:"]
    command += ["--python-version", version, "--implementation", "cp"]
    command += [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
    command += [f"--platform={platform}" for platform in platforms]
    check([*command, *what])


def _install_wheels() -> None:
    pinned = [f"{name}=={installed_version(name)}" for name in PINNED]
    wanted = [TORCH, *LIBRARIES, *pinned]
    if _installed().get("wheels") == wanted:
        return
    say(f"installing {TORCH} and the test tools for Arm (about 150 MB to download)")
    _pip_install(wanted, *(f"{tag}_aarch64" for tag in GLIBC_TAGS))
    _remember("wheels", wanted)


def _install_native() -> None:
    made_from = [fingerprint("gdn-cpu"), str(SYSROOT)]
    if _installed().get("gdn-cpu") == made_from:
        return
    say("cross-compiling gdn-cpu for Arm")
    dist = HOME / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    include = SYSROOT / "usr" / "include"
    definitions = [
        f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}",
        f"-DPython_INCLUDE_DIR={include / sysroot.python(SYSROOT)[0].name}",
        # Debian's pyconfig.h includes its other half by a path from here. After everything else: the C library's
        # headers are those of the cross compiler.
        f"-DCMAKE_CXX_FLAGS=-idirafter {include}",
    ]
    environment = {
        **WITH_TOOLS,
        "CMAKE_ARGS": shlex.join(definitions),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": ".abi3.so",
    }
    options = ["-qq", "--no-build-isolation", "--no-deps", "--no-cache-dir", f"--wheel-dir={dist}"]
    options.append(f"--config-settings=build-dir={HOME / 'build'}")
    check([PYTHON, "-m", "pip", "wheel", *options, ROOT / "packages" / "gdn-cpu"], environment)
    check([PYTHON, "tools/check_isa_leaks.py", HOME / "build"])
    _pip_install(sorted(dist.iterdir()), "linux_aarch64")
    _remember("gdn-cpu", made_from)


def _install_pure() -> None:
    options = ["-qq", "--no-build-isolation", "--no-deps", "--no-compile", "--upgrade"]
    site = sysroot.site_packages(SYSROOT)
    check([PYTHON, "-m", "pip", "install", *options, "--target", site, ROOT / "packages" / "gdn-core"], WITH_TOOLS)


def _installed() -> dict[str, list[str]]:
    return json.loads(STAMP.read_text()) if STAMP.exists() else {}


def _remember(name: str, made_from: list[str]) -> None:
    STAMP.write_text(json.dumps(_installed() | {name: made_from}, indent=1))
