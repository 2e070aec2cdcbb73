# SPDX-License-Identifier: Apache-2.0
"""Who does what of sequences that threads share: everything once and in order, with any number of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "packages" / "gdn-cpu" / "csrc"
TIMEOUT = 120


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the schedule with the thread sanitizer, where the compiler has it and it runs here."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("schedule")
    sources = [Path(__file__).parent / "chunk_schedule.cpp", SOURCES / "runtime" / "chunk_schedule.cpp"]
    command = [compiler, "-std=c++20", "-O1", "-g", "-pthread", f"-I{SOURCES}", *map(str, sources)]
    for option in ("-fsanitize=thread", "-O1"):
        path = folder / "schedule"
        built = subprocess.run([*command, option, "-o", str(path)], capture_output=True, check=False)
        if built.returncode == 0 and run(path, 1, 1, 1, 1, 4, 0, 0, 0).returncode == 0:
            return path
    pytest.fail(built.stderr.decode())


def run(program: Path, *numbers: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


@pytest.mark.parametrize("leaves_outputs", [0, 1])
@pytest.mark.parametrize("prepared_chunks", [4, 8])
@pytest.mark.parametrize("threads", [1, 2, 5, 12, 20])
def test_everything_is_done_once(program, threads, prepared_chunks, leaves_outputs):
    """Three groups of four chains, with threads for some of them, for all, and some more; and five other chains."""
    for seed in range(5):
        done = run(program, threads, 3, 4, 40, prepared_chunks, leaves_outputs, 5, 100 * seed)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("leaves_outputs", [0, 1])
def test_few_chunks(program, leaves_outputs):
    for chunks in (1, 2, 3, 5):
        done = run(program, 9, 2, 3, chunks, 4, leaves_outputs, 0, chunks)
        assert done.returncode == 0, done.stdout + done.stderr
