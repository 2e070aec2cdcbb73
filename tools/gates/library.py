# SPDX-License-Identifier: Apache-2.0
"""What a wheel's shared object needs, exports and may run on."""

import io
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import Policy, WheelPolicies
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

import check_isa_leaks
from gates.expected import RELEASE_PLATFORM

# Libraries that every Linux has, and the C++ runtime, which torch needs too. Torch, OpenMP and CUDA are found at run
# time: linking one of them would tie a wheel to one build of it, or bring a second copy into the process.
ALLOWED_LIBRARIES = re.compile(
    r"(libc\.so\.6|libm\.so\.6|libdl\.so\.2|libpthread\.so\.0|libgcc_s\.so\.1|libstdc\+\+\.so\.6|ld-linux[\w.-]*)"
)
# What else a module may find in a process: Python, and what compilers and linkers look for, where it is there.
KNOWN_SYMBOLS = re.compile(r"_?Py[A-Z_]\w*|_ITM_\w+|__gmon_start__|__cxa_finalize")
_READ, _WRITE = 4, 2
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


def library_problems(data: bytes, platform: str) -> Iterator[str]:
    """Say what is wrong with a shared object of a wheel for this platform, such as ``manylinux_2_28_x86_64``."""
    if data[:4] != b"\x7fELF":
        yield "is not a shared object. The wheel was damaged after it was built: build it again"
        return
    elf = ELFFile(io.BytesIO(data))
    dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
    assert isinstance(dynamic, DynamicSection) and isinstance(symbols, SymbolTableSection)
    processor = next((name for name in MACHINES if platform.endswith(name)), "")
    if elf["e_machine"] != MACHINES.get(processor):
        yield f"is for {elf['e_machine']}, and the tag says {platform}. Set _PYTHON_HOST_PLATFORM in a cross build"
        return
    yield from _linked(dynamic)
    yield from _loaded(elf, dynamic)
    yield from _named(symbols, {symbol for symbol, _ in _versioned_symbols(elf)})
    newer = newer_symbols(elf, platform)
    if newer:
        yield (
            f"asks for {_listed(newer)}, which {platform} does not have. Build in that platform's image, or let "
            "auditwheel repair give the wheel the tag that it reaches"
        )
    yield from _leaks(data)


def _linked(dynamic: DynamicSection) -> Iterator[str]:
    for tag in dynamic.iter_tags():
        library = getattr(tag, "needed", None)  # only tags of kind DT_NEEDED have it
        if library is not None and not ALLOWED_LIBRARIES.fullmatch(library):
            yield f"needs {library}. Do not link it: look it up at run time, as csrc/runtime and csrc/driver do"
        if tag.entry.d_tag in ("DT_AUXILIARY", "DT_FILTER", "DT_AUDIT"):
            yield f"brings in another library ({tag.entry.d_tag}). Link without it: look it up at run time"
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield "has a search path of its own (RPATH). Nothing is to be searched: link system libraries only"


def _loaded(elf: ELFFile, dynamic: DynamicSection) -> Iterator[str]:
    stacks = [segment["p_flags"] for segment in elf.iter_segments() if segment["p_type"] == "PT_GNU_STACK"]
    if stacks != [_READ | _WRITE]:
        yield "wants a stack that can be executed, which newer systems refuse. Mark assembly with .note.GNU-stack"
    if any(tag.entry.d_tag == "DT_TEXTREL" for tag in dynamic.iter_tags()):
        yield "has code that is changed when it is loaded, which hardened systems refuse. Compile everything with -fPIC"


def _named(symbols: SymbolTableSection, of_the_system: set[str]) -> Iterator[str]:
    exported = set()
    for symbol in symbols.iter_symbols():
        is_defined = symbol["st_shndx"] != "SHN_UNDEF"
        if is_defined and symbol["st_info"]["bind"] != "STB_LOCAL":
            exported.add(symbol.name)
        is_known = not symbol.name or symbol.name in of_the_system or KNOWN_SYMBOLS.fullmatch(symbol.name)
        if not is_defined and not is_known:
            yield f"expects {symbol.name} from somewhere. Look it up at run time, and say why where it is missing"
    for name in sorted(exported ^ {"PyInit__C"}):
        verb = "exports" if name in exported else "does not export"
        yield f"{verb} {name}. Python looks for PyInit__C, and only that is to be seen: link with cmake/exports.map"


def _leaks(data: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        if not check_isa_leaks.has_symbols(path):
            yield (
                "is stripped, and nothing tells its instruction-set levels apart. Build with NOSTRIP "
                "(cmake/GdnPython.cmake) and install.strip = false (pyproject.toml)"
            )
            return
        for leak in check_isa_leaks.leaks_in_module(path):
            yield (
                f"{leak}. It would end the process on an older CPU: keep the function inside of its level's namespace "
                "(CONTRIBUTING.md, Instruction-set levels)"
            )


def newer_symbols(elf: ELFFile, platform: str) -> Mapping[str, list[str]]:
    """Return the versioned symbols that a manylinux platform lacks, by version, as {"GLIBC_2.34": ["dlopen"]}."""
    allowed = _policy(platform).symbol_versions
    # A version may be asked for without a symbol: GLIBC_ABI_DT_RELR, of relocations that are packed, is none.
    newer: dict[str, list[str]] = {}
    for version in _versions(elf).values():
        family, _, number = version.partition("_")
        if number not in allowed.get(family, ()):
            newer[version] = []
    for symbol, version in _versioned_symbols(elf):
        if version in newer:
            newer[version].append(symbol)
    return newer


def out_of_reach(data: bytes, platform: str) -> str:
    """Say what keeps a library from the platform of a release, or nothing where it has that."""
    release = re.sub(r"manylinux_\d+_\d+", RELEASE_PLATFORM, platform)
    newer = newer_symbols(ELFFile(io.BytesIO(data)), release)
    return f"{release}, which the images of a release reach, has no {_listed(newer)}" if newer else ""


def _listed(newer: Mapping[str, list[str]]) -> str:
    return ", ".join(
        f"{version} ({', '.join(sorted(names) or ['no symbol'])})" for version, names in sorted(newer.items())
    )


def _versioned_symbols(elf: ELFFile) -> Iterator[tuple[str, str]]:
    numbers, symbols = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".dynsym")
    if not isinstance(numbers, GNUVerSymSection):
        return
    assert isinstance(symbols, SymbolTableSection)
    versions = _versions(elf)
    for symbol, number in zip(symbols.iter_symbols(), numbers.iter_symbols(), strict=True):
        version = versions.get(number["ndx"])
        if version is not None:
            yield symbol.name, version


def _versions(elf: ELFFile) -> dict[int, str]:
    """Return the versions that are asked for, by their numbers in the table of symbols."""
    needed = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(needed, GNUVerNeedSection):
        return {}
    return {entry["vna_other"]: entry.name for _, entries in needed.iter_versions() for entry in entries}


@cache
def _policy(platform: str) -> Policy:
    architecture = Architecture(next(name for name in MACHINES if platform.endswith(name)))
    return WheelPolicies(libc=Libc.GLIBC, arch=architecture).get_policy_by_name(platform)
