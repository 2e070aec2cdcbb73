# SPDX-License-Identifier: Apache-2.0
"""A Python on a processor that Intel's Software Development Emulator plays: the names of its options say which.

It translates code as it runs, AMX too, and says by CPUID what the processor has. Processes that are started by the
emulated one stay on the emulated processor.
"""

import hashlib
import shlex
import shutil
import tarfile
from pathlib import Path

from devkit import system
from devkit.console import ROOT, Problem, Unavailable, run, say
from devkit.environment import PYTHON

HOME = ROOT / "build" / "machines" / "sde"
RELEASE = "sde-external-10.8.0-2026-03-15-lin"
ARCHIVE = f"{RELEASE}.tar.xz"
SHA256 = "50b320cd226acef7a491f5b321fc1be3c3c7984f9e27a456e64894b5b0979dd3"
# Intel's own address turns some networks away.
ADDRESSES = (
    f"https://downloadmirror.intel.com/915934/{ARCHIVE}",
    f"https://github.com/petarpetrovt/setup-sde/releases/download/binaries/{ARCHIVE}",
)


def python(processor: str) -> Path:
    """Return a Python with the packages of .venv on the processor of this name, such as ``spr``."""
    emulator = HOME / RELEASE / "sde64"
    if not emulator.exists():
        _unpack(_download())
    script = HOME / processor / "python"
    script.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join([str(emulator), f"-{processor}", "--", str(PYTHON)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return script


def _download() -> Path:
    archive = HOME / ARCHIVE
    if archive.exists():
        return archive
    system.need({"curl": "curl"}, "downloading Intel's emulator")
    HOME.mkdir(parents=True, exist_ok=True)
    say(f"downloading {RELEASE}")
    for address in ADDRESSES:
        if run(["curl", "-fsSL", "--retry", "2", "--connect-timeout", "20", "-o", archive, address]) == 0:
            return archive
    archive.unlink(missing_ok=True)
    raise Unavailable("Intel's Software Development Emulator could not be downloaded.", f"Put {ARCHIVE} into {HOME}.")


def _unpack(archive: Path) -> None:
    got = hashlib.sha256(archive.read_bytes()).hexdigest()
    if got != SHA256:
        archive.unlink()
        raise Problem(f"{archive.name}: expected SHA-256 {SHA256}, got {got}.", "It was removed; run this again.")
    shutil.rmtree(HOME / RELEASE, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(HOME)
    archive.unlink()
