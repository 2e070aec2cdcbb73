#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check built wheels and sdists: what they contain, need, declare and export.

    python tools/check_wheel.py dist/*.whl dist/*.tar.gz

Looks at the finished files, not at how they were made. Needs pyelftools, abi3audit and twine (the pinned tools).
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

MIB = 1024 * 1024
_ON_OUR_MACHINES = 'platform_system == "Linux" and (platform_machine == "x86_64" or platform_machine == "aarch64")'


@dataclass(frozen=True)
class Expected:
    """What a package's files must be like. `{version}` stands for the package's own version."""

    tag: str
    max_size: int
    requirements: frozenset[str]
    entry_points: frozenset[tuple[str, str]]
    sdist_files: tuple[str, ...] = ()


PACKAGES = {
    "gdn_core": Expected(
        tag=r"py3-none-any",
        max_size=1 * MIB,
        requirements=frozenset(
            {
                "torch>=2.6",
                "rich>=13",
                f'gdn-cpu=={{version}}; {_ON_OUR_MACHINES} and extra == "cpu"',
                f'gdn-cuda=={{version}}; {_ON_OUR_MACHINES} and extra == "cuda"',
                f'triton>=3.3; {_ON_OUR_MACHINES} and extra == "triton"',
                f'fla-core>=0.6; {_ON_OUR_MACHINES} and extra == "triton"',
                'transformers>=5.0; extra == "transformers"',
            }
        ),
        entry_points=frozenset({("console_scripts", "gdn = gdn_core.cli:main")}),
    ),
    "gdn_cpu": Expected(
        tag=r"cp310-abi3-(linux|manylinux_\d+_\d+)_(x86_64|aarch64)",
        max_size=8 * MIB,
        requirements=frozenset({"nanobind-backend>=1.0"}),
        entry_points=frozenset({("gdn_core.backends", "cpu = gdn_cpu:provider")}),
        sdist_files=(
            "CMakeLists.txt",
            "cmake/GdnIsa.cmake",
            "cmake/abi/decode_ops.h",
            "csrc/kernels/params.h",
            "csrc/binding/module.cpp",
        ),
    ),
    "gdn_cuda": Expected(
        tag=r"cp310-abi3-(linux|manylinux_\d+_\d+)_(x86_64|aarch64)",
        max_size=20 * MIB,
        requirements=frozenset({"nanobind-backend>=1.0"}),
        entry_points=frozenset({("gdn_core.backends", "cuda = gdn_cuda:provider")}),
        sdist_files=(
            "CMakeLists.txt",
            "architectures.txt",
            "device_code.py",
            "cmake/GdnPython.cmake",
            "cmake/abi/decode_ops.h",
            "csrc/binding/module.cpp",
            "csrc/kernels/fused_decode.cu",
        ),
    ),
}

# Libraries that every Linux has, and the C++ runtime, which torch needs too. Torch, OpenMP and CUDA are found at run
# time: linking one of them would tie a wheel to one build of it, or bring a second copy into the process.
ALLOWED_LIBRARIES = re.compile(
    r"(libc\.so\.6|libm\.so\.6|libdl\.so\.2|libpthread\.so\.0|libgcc_s\.so\.1|libstdc\+\+\.so\.6|ld-linux[\w.-]*)"
)
FOREIGN_SYMBOLS = re.compile(r"(GOMP_|omp_|__kmpc_|cuda[A-Z]|cu[A-Z]|_ZN?K?2at|_ZN?K?3c10)")


def check_wheel(path: Path) -> Iterator[str]:
    """Say what is wrong with a wheel."""
    name, version, tag = path.stem.split("-", 2)
    expected = PACKAGES[name]
    if not re.fullmatch(expected.tag, tag):
        yield f"tag: expected {expected.tag}, got {tag}"
    if path.stat().st_size > expected.max_size:
        yield f"size: expected at most {expected.max_size} bytes, got {path.stat().st_size}"
    with zipfile.ZipFile(path) as wheel:
        files = wheel.namelist()
        info = f"{name}-{version}.dist-info"
        if f"{info}/licenses/LICENSE" not in files:
            yield "no licence file"
        if f"{name}/py.typed" not in files:
            yield f"no {name}/py.typed"
        strangers = {PurePosixPath(file).parts[0] for file in files} - {name, info}
        if strangers:
            yield f"installs outside of {name}: {', '.join(sorted(strangers))}"
        yield from _check_metadata(Parser().parsestr(wheel.read(f"{info}/METADATA").decode()), version, expected)
        entry_points = wheel.read(f"{info}/entry_points.txt").decode() if f"{info}/entry_points.txt" in files else ""
        if set(_entry_points(entry_points)) != expected.entry_points:
            yield f"entry points: expected {sorted(expected.entry_points)}, got {entry_points!r}"
        libraries = [file for file in files if ".so" in PurePosixPath(file).suffixes]
        if libraries != ([] if tag == "py3-none-any" else [f"{name}/_C.abi3.so"]):
            yield f"shared objects: {', '.join(libraries) or 'none'}"
        for library in libraries:
            yield from (f"{library}: {problem}" for problem in _check_library(wheel.read(library)))


def _check_metadata(metadata: Message, version: str, expected: Expected) -> Iterator[str]:
    for key, value in (("Version", version), ("Requires-Python", ">=3.10"), ("License-Expression", "Apache-2.0")):
        if metadata[key] != value:
            yield f"metadata: expected {key}: {value}, got {metadata[key]}"
    wanted = {requirement.format(version=version) for requirement in expected.requirements}
    got = set(metadata.get_all("Requires-Dist", []))
    for requirement in sorted(wanted - got):
        yield f"metadata: lacks the requirement {requirement}"
    for requirement in sorted(got - wanted):
        yield f"metadata: unexpected requirement {requirement}"


def _entry_points(text: str) -> Iterator[tuple[str, str]]:
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]")
        elif line:
            yield group, re.sub(r"\s*=\s*", " = ", line)


def _check_library(data: bytes) -> Iterator[str]:
    elf = ELFFile(io.BytesIO(data))
    dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
    if not isinstance(dynamic, DynamicSection) or not isinstance(symbols, SymbolTableSection):
        yield "is not a shared object"
        return
    for tag in dynamic.iter_tags():
        library = getattr(tag, "needed", None)  # only tags of kind DT_NEEDED have it
        if library is not None and not ALLOWED_LIBRARIES.fullmatch(library):
            yield f"needs {library}"
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield "has a search path of its own (RPATH)"
    for symbol in symbols.iter_symbols():
        is_defined = symbol["st_shndx"] != "SHN_UNDEF"
        if is_defined and symbol["st_info"]["bind"] != "STB_LOCAL" and symbol.name != "PyInit__C":
            yield f"exports {symbol.name}"
        if not is_defined and FOREIGN_SYMBOLS.match(symbol.name):
            yield f"expects {symbol.name} from somewhere"


def check_sdist(path: Path) -> Iterator[str]:
    """Say what is wrong with an sdist: it has to build by itself, away from this repository."""
    root = path.name.removesuffix(".tar.gz")
    name = root.split("-")[0]
    with tarfile.open(path) as sdist:
        members = {member.name.removeprefix(f"{root}/"): member for member in sdist.getmembers()}
    for file in ("pyproject.toml", "README.md", "LICENSE", "VERSION", *PACKAGES[name].sdist_files):
        if file not in members:
            yield f"lacks {file}"
    for file, member in members.items():
        if not member.isfile() and not member.isdir():
            yield f"{file} is a link: it points to nothing outside the repository"
        if re.search(r"(^|/)(build|__pycache__)/|\.(so|pyc)$", file):
            yield f"contains the build product {file}"


def run_tool(*command: str | Path) -> Iterator[str]:
    """Say that a tool found something; its own words go to the terminal."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.stderr.write(result.stdout + result.stderr)
        yield f"{command[0]} failed, see above"


def problems(path: Path) -> Iterator[str]:
    """Say everything that is wrong with a built file."""
    if path.suffix == ".whl":
        yield from check_wheel(path)
        if "-abi3-" in path.name:
            yield from run_tool("abi3audit", "--strict", path)
    else:
        yield from check_sdist(path)
    yield from run_tool("twine", "check", "--strict", path)


def main() -> int:
    """Print every problem; return 1 when there is one."""
    parser = argparse.ArgumentParser(description="Check built wheels and sdists.")
    parser.add_argument("files", nargs="+", type=Path)
    failed = False
    for path in parser.parse_args().files:
        found = list(problems(path))
        failed = failed or bool(found)
        print(f"{path.name} ({path.stat().st_size / 1024:.0f} KiB): {'FAILED' if found else 'ok'}")
        for problem in found:
            print(f"    {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
