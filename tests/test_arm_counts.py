# SPDX-License-Identifier: Apache-2.0
"""How many BFMMLA instructions the chunked rule executes for a chunk, counted under qemu.

qemu logs every block of instructions that it translates, and every one that it runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "packages" / "gdn-cpu" / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"

TOKENS, CHUNKS, K, V = 64, 2, 128, 128
INSTRUCTION = re.compile(r"0x([0-9a-f]+):\s+([0-9a-f]{8})\b")
EXECUTED = re.compile(r"Trace \d+: 0x[0-9a-f]+ \[[0-9a-f]+/([0-9a-f]+)/")


def is_bfmmla(word: int) -> bool:
    return word & 0xFFE0FC00 == 0x6E40EC00


def executed_bfmmla(log: Iterator[str]) -> int:
    """Return how many times an instruction of that kind was run."""
    in_block: Counter[int] = Counter()
    executed: Counter[int] = Counter()
    block: int | None = None
    for line in log:
        if line.startswith("IN:"):
            block = None
        elif (instruction := INSTRUCTION.match(line)) is not None:
            address, word = (int(part, 16) for part in instruction.groups())
            if block is None:
                block = address
                in_block[block] = 0  # translated anew
            in_block[block] += is_bfmmla(word)
        elif (trace := EXECUTED.match(line)) is not None:
            executed[int(trace[1], 16)] += 1
    return sum(count * in_block[address] for address, count in executed.items())


@pytest.mark.slow  # compiles the kernel
def test_a_chunk_takes_few_more_bfmmla_than_its_shapes_need(tmp_path: Path) -> None:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    program, log = tmp_path / "arm_chunk", tmp_path / "log"
    kernel = SOURCES / "kernels" / "levels" / "chunk_arm_bf16.inc.cpp"
    # The flags of cmake/GdnIsa.cmake.
    flags = ["-std=c++20", "-O3", "-march=armv8.2-a+fp16+dotprod+bf16", "-ffp-contract=off", "-fno-exceptions"]
    flags += ["-fno-rtti", "-DGDN_ISA=arm_bf16", f"-I{SOURCES}", "-static"]
    sources = [Path(__file__).parent / "arm_chunk.cpp", kernel]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True)
    command = [EMULATOR, "-cpu", "max,sve-max-vq=1", "-d", "exec,nochain,in_asm", "-D", str(log), str(program)]
    subprocess.run(command, check=True, env=os.environ, stdout=subprocess.DEVNULL)
    with log.open(errors="replace") as lines:
        count = executed_bfmmla(lines)
    # One multiplies two rows by two columns, four elements each. k k^T and q k^T up to the diagonal, k M and q M,
    # attention u up to the diagonal, k^T u.
    pairs = TOKENS // 2
    lower = 2 * pairs * (pairs + 1) // 2 * (K // 4)
    by_state = 2 * pairs * (V // 2) * (K // 4)
    attention = sum(-(-(2 * pair + 2) // 4) for pair in range(pairs)) * (V // 2)
    update = (K // 2) * (V // 2) * (TOKENS // 4)
    needed = CHUNKS * (lower + by_state + attention + update)
    assert needed <= count <= 1.1 * needed
