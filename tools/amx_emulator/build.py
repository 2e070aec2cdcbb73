#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile the AMX emulator, where it is not up to date, and print the path of the library.

    LD_PRELOAD=$(python tools/amx_emulator/build.py) GDN_CPU_ISA=x86_amx pytest

Needs an x86-64 Linux and a C compiler: the one that CC names, or cc, gcc, clang.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("amx_emulator.c")
LIBRARY = Path(__file__).resolve().parents[2] / "build" / "amx_emulator" / "libamx_emulator.so"
FLAGS = ("-O3", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")


class CannotBuildError(Exception):
    """Why there can be no emulator here."""


def compiler() -> str:
    """Return the C compiler to use."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CannotBuildError(f"AMX is emulated on x86-64 Linux; this is {platform.machine()} {sys.platform}")
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise CannotBuildError(f"no C compiler found (looked for {', '.join(names)})")
    return found


def build() -> Path:
    """Compile the library if its sources are newer, and return its path."""
    program = compiler()
    sources = (SOURCE, SOURCE.with_suffix(".h"), Path(__file__))
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
        return LIBRARY
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be loading the old one, or building the same: it appears whole or not at all.
    partial = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    result = subprocess.run(
        [program, *FLAGS, "-o", str(partial), str(SOURCE), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise CannotBuildError(f"{program} failed:\n{result.stderr}")
    partial.replace(LIBRARY)
    return LIBRARY


def main() -> int:
    """Build, and print where."""
    argparse.ArgumentParser(description="Compile the AMX emulator and print the path of the library.").parse_args()
    try:
        print(build())
    except CannotBuildError as error:
        print(f"amx_emulator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
