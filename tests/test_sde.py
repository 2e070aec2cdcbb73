# SPDX-License-Identifier: Apache-2.0
"""tools/devkit/sde.py, with a stand-in for Intel's emulator, which is not to be had everywhere."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from devkit import sde
from devkit.console import Problem
from devkit.machines import FROM_INTEL, X86_LEVELS

# Says on which processor it would run a program, and runs it.
STAND_IN = b'#!/bin/sh\necho "on $1"\nshift 2\nexec "$@"\n'


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "sde"
    folder.mkdir()
    with tarfile.open(folder / sde.ARCHIVE, "w:xz") as archive:
        member = tarfile.TarInfo(f"{sde.RELEASE}/sde64")
        member.mode, member.size = 0o755, len(STAND_IN)
        archive.addfile(member, io.BytesIO(STAND_IN))
    monkeypatch.setattr(sde, "HOME", folder)
    monkeypatch.setattr(sde, "PYTHON", Path(sys.executable))
    return folder


def test_python_runs_in_the_emulator(home, monkeypatch):
    monkeypatch.setattr(sde, "SHA256", hashlib.sha256((home / sde.ARCHIVE).read_bytes()).hexdigest())
    for processor in ("spr", "hsw"):  # the second one finds the emulator unpacked
        command = [sde.python(processor), "-c", "import sys; print(sys.argv[1:])", "two words"]
        assert subprocess.check_output(command, text=True) == f"on -{processor}\n['two words']\n"
    assert not (home / sde.ARCHIVE).exists()


def test_another_archive_than_intel_s_is_not_unpacked(home):
    with pytest.raises(Problem, match="expected SHA-256"):
        sde.python("spr")
    assert list(home.iterdir()) == []


def test_each_level_of_x86_is_the_highest_of_one_processor():
    assert [machine.levels for machine in FROM_INTEL.values()] == [X86_LEVELS[: i + 1] for i in range(len(X86_LEVELS))]
    for machine in FROM_INTEL.values():
        assert machine.tests[:2] == ("-k", f"cpu-{machine.levels[-1]}")
