#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count what gdn-cuda's machine code uses, and hold it to a budget: registers, local memory, width of state accesses.

    python tools/check_device_code.py                       # the installed gdn-cuda
    python tools/check_device_code.py dist/gdn_cuda-*.whl   # a wheel, which has to have every architecture, and PTX

With --release its code has to be of the CUDA that architectures.txt names: that of a newer one needs a newer driver.

Registers and frames are read from the ELF files (needs pyelftools), instructions by nvdisasm, from PyPI's
nvidia-cuda-nvdisasm or from PATH. Needs no GPU.
"""

import argparse
import importlib.util
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ROOT / "packages" / "gdn-cuda" / "architectures.txt"

MAX_REGISTERS = 128
MAX_BYTES = 4 * 1024 * 1024  # of an architecture

# Attributes of a kernel in the section .nv.info.
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F
_WORD_VALUE = 4

# Run in a process of its own, to load a module that is not the installed one.
_EXTRACT = """
import json, sys
from pathlib import Path
from gdn_cuda import _C
folder = Path(sys.argv[1])
rows = []
for i, code in enumerate(_C.device_code()):
    (folder / str(i)).write_bytes(code.data)
    rows.append([code.architecture, code.is_ptx, str(folder / str(i))])
print(json.dumps({"code": rows, "kernels": _C.kernel_names(), "compiler": _C.device_compiler()}))
"""


@dataclass(frozen=True)
class Kernel:
    """What one kernel uses."""

    name: str
    registers: int
    frame: int  # bytes of local memory a thread: spills, and arrays with an index that the compiler does not know
    instructions: Counter[str]

    @property
    def wide_loads(self) -> int:
        """Count the 16-byte loads from device memory."""
        return sum(n for name, n in self.instructions.items() if re.match(r"LDG\..*\b128\b", name))

    @property
    def wide_stores(self) -> int:
        """Count the 16-byte stores to device memory."""
        return sum(n for name, n in self.instructions.items() if re.match(r"STG\..*\b128\b", name))


def state_vectors(kernel: str) -> int:
    """Return how many 16-byte vectors of the state a thread holds, from the kernel's name."""
    _, _, key_dim, dtype, _ = kernel.split("_")
    rows = 1 if int(key_dim) > 128 else 4
    return rows * int(key_dim) // 8 * (4 if dtype == "float32" else 2) // 16


def find_nvdisasm() -> str | None:
    """Return the disassembler of PyPI's package, or the one of PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in Path(folder).glob("cu*/bin/nvdisasm"):
            return str(path)
    return shutil.which("nvdisasm")


def _resources(elf: ELFFile) -> dict[str, dict[int, int]]:
    """Return the attributes of each function by name."""
    symbols = elf.get_section_by_name(".symtab")
    assert isinstance(symbols, SymbolTableSection)
    found: dict[str, dict[int, int]] = {}
    section = elf.get_section_by_name(".nv.info")
    assert section is not None
    data: bytes = section.data()
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _WORD_VALUE:
            continue
        if attribute in (_FRAME_SIZE, _REGISTER_COUNT):
            symbol, value = struct.unpack_from("<II", data, at)
            found.setdefault(symbols.get_symbol(symbol).name, {})[attribute] = value
        at += size
    return found


def _instructions(nvdisasm: str, path: Path) -> dict[str, Counter[str]]:
    text = subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if section := re.match(r"\s*\.text\.(\S+):", line):
            current = counts.setdefault(section[1], Counter())
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            current[found[1]] += 1
    return counts


def read_kernels(path: Path, nvdisasm: str) -> Iterator[Kernel]:
    """Return the kernels of a file of machine code."""
    resources = _resources(ELFFile(io.BytesIO(path.read_bytes())))
    instructions = _instructions(nvdisasm, path)
    for name, attributes in sorted(resources.items()):
        if name.startswith("gdn_"):
            yield Kernel(name, attributes[_REGISTER_COUNT], attributes.get(_FRAME_SIZE, 0), instructions[name])


def problems_of(kernel: Kernel) -> Iterator[str]:
    """Say where a kernel exceeds its budget."""
    if kernel.registers > MAX_REGISTERS:
        yield f"{kernel.registers} registers, at most {MAX_REGISTERS}"
    if kernel.frame > 0:
        yield f"{kernel.frame} bytes of local memory"
    local = {name: n for name, n in kernel.instructions.items() if name.startswith(("LDL", "STL"))}
    if local:
        yield f"accesses to local memory: {local}"
    # Loaded before the tokens are brought and, but with long rows, for later columns; stored in one place.
    vectors = state_vectors(kernel.name)
    loads = vectors if kernel.name.endswith("_rows") else 2 * vectors
    if (kernel.wide_loads, kernel.wide_stores) != (loads, vectors):
        yield (
            f"{kernel.wide_loads} loads and {kernel.wide_stores} stores of 16 bytes, expected {loads} and {vectors}: "
            "the state takes others too"
        )


def listed_architectures() -> list[str]:
    """Return the architectures that a wheel has to have code for."""
    return [line for line in ARCHITECTURES.read_text().splitlines() if re.match(r"\d", line)]


def gaps(code: Sequence[tuple[str, bool]]) -> Iterator[str]:
    """Say what of a wheel's code is missing: (architecture, whether it is PTX) of each piece that it has."""
    listed = listed_architectures()
    machine_code = [architecture for architecture, is_ptx in code if not is_ptx]
    if machine_code != listed:
        yield f"code for {', '.join(machine_code) or 'nothing'}, expected {', '.join(listed)}"
    ptx = [architecture for architecture, is_ptx in code if is_ptx]
    if ptx != listed[:1]:
        yield f"PTX for {', '.join(ptx) or 'nothing'}, expected {listed[0]}: GPUs of other kinds would have no code"


def foreign_compiler(major: int, minor: int) -> Iterator[str]:
    """Say where a wheel was compiled by another CUDA than releases are."""
    wanted = re.findall(r"^CUDA (\S+)$", ARCHITECTURES.read_text(), re.MULTILINE)
    if [f"{major}.{minor}"] != wanted:
        yield f"compiled by CUDA {major}.{minor}, expected {wanted[0]}: drivers that are older would not load it"


def check_module(python_path: Path | None, *, is_release: bool) -> Iterator[str]:
    """Print the counts of a gdn-cuda, and yield what is wrong with it."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        yield "no nvdisasm: pip install nvidia-cuda-nvdisasm"
        return
    with tempfile.TemporaryDirectory() as folder:
        extract = f"import sys; sys.path.insert(0, {str(python_path)!r})\n{_EXTRACT}" if python_path else _EXTRACT
        text = subprocess.run(
            [sys.executable, "-c", extract, folder], capture_output=True, text=True, check=True
        ).stdout
        found = json.loads(text)
        print("compiled by {} of CUDA {}.{}".format(*found["compiler"]))
        machine_code = {row[0]: Path(row[2]) for row in found["code"] if not row[1]}
        if python_path is not None:
            yield from gaps([(architecture, is_ptx) for architecture, is_ptx, _ in found["code"]])
        if is_release:
            yield from foreign_compiler(*found["compiler"][1:])
        if not machine_code:
            yield "no device code"
        for architecture, path in machine_code.items():
            if path.stat().st_size > MAX_BYTES:
                yield f"{architecture}: {path.stat().st_size} bytes, at most {MAX_BYTES}"
            kernels = list(read_kernels(path, nvdisasm))
            if {kernel.name for kernel in kernels} != set(found["kernels"]):
                yield f"{architecture}: other kernels than gdn_cuda._C.kernel_names() lists"
            for kernel in kernels:
                print(
                    f"{architecture:6} {kernel.name:36} {kernel.registers:4} registers {kernel.frame:4} bytes local "
                    f"{kernel.wide_loads:3} wide loads {kernel.wide_stores:3} wide stores "
                    f"{kernel.instructions.total():6} instructions"
                )
                yield from (f"{architecture}, {kernel.name}: {problem}" for problem in problems_of(kernel))


def main() -> int:
    """Print the counts; return 1 when one exceeds its budget."""
    parser = argparse.ArgumentParser(description="Hold gdn-cuda's device code to its budget.")
    parser.add_argument("wheel", nargs="?", type=Path, help="the installed gdn-cuda by default")
    parser.add_argument("--release", action="store_true", help="compiled by the CUDA of architectures.txt")
    options = parser.parse_args()
    wheel = options.wheel
    with tempfile.TemporaryDirectory() as folder:
        if wheel is not None:
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder)
        problems = list(check_module(Path(folder) if wheel is not None else None, is_release=options.release))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
