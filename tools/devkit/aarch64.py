# SPDX-License-Identifier: Apache-2.0
"""A Python for 64-bit Arm with torch and the packages as they are in this checkout, on an emulated processor.

Everything is made in build/machines/aarch64, and only what changed is made again. gdn-cpu and gdn-cuda are
cross-compiled, from their sdists, to the same kind of wheels that a release has. torch is the last version whose Arm
wheel on PyPI is a CPU build; it has no __dlpack_c_exchange_api__, so that the tests also take the binding's other path.
"""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from devkit import qemu, sysroot, system
from devkit.console import ROOT, check, say
from devkit.environment import NATIVE_PACKAGES, PYTHON, WITH_TOOLS, fingerprint, installed_version
from devkit.wheels import make_sdist, make_wheel

HOME = ROOT / "build" / "machines" / "aarch64"
SYSROOT = HOME / "sysroot"
STAMP = HOME / "installed.json"
SYSTEM = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")
TOOLCHAIN = ROOT / "cmake" / "toolchains" / "aarch64-linux-gnu.cmake"
# Vectors of 128 bits, as in Neoverse N2 and V2: OpenBLAS takes every processor with SVE and BF16 for one of these.
CPU = "max,sve-max-vq=1"

TORCH = "torch==2.9.1"
# torch's dependencies by name: pip would judge their conditions by this machine, not by the target.
LIBRARIES = ("numpy", "filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec")
# For the engine of the chunked rule that calls it.
OPENBLAS = "scipy-openblas32"


def wheels(device_code: Path | None = None) -> list[Path]:
    """Return wheels of the native packages for Arm; `device_code` is a build of gdn-cuda that has it compiled."""
    system.need({"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}, "compiling for Arm")
    if not SYSROOT.exists():
        say(f"unpacking Arm libraries and Python into {SYSROOT} (about 30 MB to download)")
    sysroot.make(SYSROOT, SYSTEM, "arm64")
    dist = HOME / "dist"
    made_from = [*map(fingerprint, NATIVE_PACKAGES), str(SYSROOT)]
    if _stamps().get("wheels") != made_from:
        shutil.rmtree(dist, ignore_errors=True)
        for package in NATIVE_PACKAGES:
            extra = [f"-DGDN_CUDA_DEVICE_CODE={device_code}"] if device_code and package == "gdn-cuda" else []
            _cross_compile(package, dist, extra)
        check([PYTHON, "tools/check_isa_leaks.py", HOME / "build" / "gdn-cpu"])
        _stamp("wheels", made_from)
    return sorted(dist.glob("*.whl"))


def python() -> Path:
    """Return the interpreter, with everything installed."""
    qemu.need("aarch64")
    native = wheels()
    _install_libraries()
    _install_native(native)
    _install_pure()
    interpreter, _ = sysroot.python(SYSROOT)
    where = {"QEMU_LD_PREFIX": str(SYSROOT), "PYTHONHOME": str(SYSROOT / "usr")}
    return qemu.write_python(HOME, "aarch64", CPU, interpreter, where)


def _install_libraries() -> None:
    wanted = [TORCH, *LIBRARIES, *sysroot.test_tools(), f"{OPENBLAS}=={installed_version(OPENBLAS)}"]
    if _stamps().get("libraries") == wanted:
        return
    say(f"installing {TORCH} and the test tools for Arm (about 150 MB to download)")
    sysroot.pip_install(SYSROOT, wanted, [f"{tag}_aarch64" for tag in sysroot.GLIBC_TAGS])
    _stamp("libraries", wanted)


def _cross_compile(package: str, dist: Path, extra: Sequence[str]) -> None:
    say(f"cross-compiling {package} for Arm")
    work = HOME / "build" / package
    shutil.rmtree(work, ignore_errors=True)
    include = SYSROOT / "usr" / "include"
    definitions = [
        f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}",
        f"-DPython_INCLUDE_DIR={include / sysroot.python(SYSROOT)[0].name}",
        # Debian's pyconfig.h includes its other half by a path from here. After everything else: the C library's
        # headers are those of the cross compiler.
        f"-DCMAKE_CXX_FLAGS=-idirafter {include}",
        *extra,
    ]
    environment = {
        "CMAKE_ARGS": shlex.join(definitions),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": ".abi3.so",
    }
    make_wheel(make_sdist(package, dist), dist, work, environment)


def _install_native(native: Sequence[Path]) -> None:
    made_from = _stamps()["wheels"]
    if _stamps().get("native") == made_from:
        return
    sysroot.pip_install(SYSROOT, native, [wheel.stem.split("-")[-1] for wheel in native])
    _stamp("native", made_from)


def _install_pure() -> None:
    options = ["-qq", "--no-build-isolation", "--no-deps", "--no-compile", "--upgrade"]
    site = sysroot.site_packages(SYSROOT)
    check([PYTHON, "-m", "pip", "install", *options, "--target", site, ROOT / "packages" / "gdn-core"], WITH_TOOLS)


def _stamps() -> dict[str, list[str]]:
    return json.loads(STAMP.read_text()) if STAMP.exists() else {}


def _stamp(name: str, made_from: list[str]) -> None:
    STAMP.write_text(json.dumps(_stamps() | {name: made_from}, indent=1))
