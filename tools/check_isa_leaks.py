#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that no instruction and no symbol leaves its instruction-set level.

    python tools/check_isa_leaks.py BUILD_DIR | MODULE.so

Every level's objects go into one shared object. An inline function that the compiler emits in two of them is one symbol
to the linker, which keeps either copy: an AVX-512 one may then run on a machine without AVX-512. And a file built with
the wrong flags crashes only on machines that nobody tests on. So, for every object below BUILD_DIR:

- kernels of a level define no weak or unique symbol, and nothing visible outside the level's own namespace;
- instructions, registers included, are at most those of the object's level; objects of no level count as baseline.

A linked module shows what the linker kept. There the namespace in a function's symbol is its level, and everything else
counts as baseline: an inline function of which an AVX-512 copy was kept is found by its own name.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

X86_LEVELS = ("baseline", "x86_v3", "x86_v4", "x86_v4_bf16", "x86_amx")
ARM_LEVELS = ("baseline", "arm_bf16")
SHOWN_PER_FILE = 5

# What first appears at a level, in objdump's text: mnemonic and operands. Baseline x86-64 has SSE2 only, so SSE3 to
# SSE4.2 count as x86_v3, whose flags imply them.
_X86_FIRST_AT = {
    "x86_v3": re.compile(
        r"%ymm|^v|^(mulx|pdep|pext|rorx|sarx|shlx|shrx|bzhi|andn|blsi|blsr|blsmsk|bextr|popcnt|crc32|movbe)\b"
        r"|^(p?haddp?|phsub|movddup|movs[hl]dup|lddqu|pshufb|palignr|pabs|psign|pmaddubsw|pmulhrsw)"
        r"|^(p?blend|dpp|extractps|insertps|pinsr[bdq]|pextr[bdq]|pm(ax|in)(s[bd]|u[dw])|pmov[sz]x|pmul(dq|ld)|ptest|round[ps])"
        r"|^(pcmp(eqq|gtq|[ei]str)|packusdw|mpsadbw|phminposuw)"
    ),
    "x86_v4": re.compile(r"%zmm|%[xyz]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b"),
    "x86_v4_bf16": re.compile(r"^(vdpbf16ps|vcvtne2?ps2bf16|vpdp)"),
    "x86_amx": re.compile(r"%tmm|^(ldtilecfg|sttilecfg|tilerelease)"),
}
# Baseline Arm is armv8-a: it converts half precision, and neither computes in it nor knows bf16 and dot products.
_ARM_FIRST_AT = {
    "arm_bf16": re.compile(r"^(bf(dot|mmla|mlal[bt]|cvt\w*)|[su]dot)\b|^(?!fcvt|fmov)f\w+\s+(v\d+\.[48]h|h\d+)"),
}

_OBJECT_LIBRARY = re.compile(r"/(?P<target>[\w-]+?)_kernels_(?P<level>\w+)\.dir/")
# gdn::cpu::<level>::..., mangled: the length of a name stands before it.
_LEVEL_NAMESPACE = re.compile(
    rf"_Z+N[KR]*3gdn3cpu({'|'.join(f'{len(name)}{name}' for name in {*X86_LEVELS, *ARM_LEVELS})})"
)


@dataclass(frozen=True)
class Object:
    """One object file and the level it belongs to."""

    path: Path
    level: str
    is_kernel: bool


def objects_below(folder: Path) -> Iterator[Object]:
    """Find the object files of a build tree. Objects of no level must be as plain as the baseline."""
    for path in sorted(folder.rglob("*.o")):
        match = _OBJECT_LIBRARY.search(path.as_posix())
        yield Object(path, match["level"] if match else "baseline", match is not None)


def output(*command: str | Path) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine(path: Path) -> str:
    """Return "x86" or "arm" from the file's ELF header."""
    number = int.from_bytes(path.read_bytes()[18:20], "little")
    names = {62: "x86", 183: "arm"}
    if number not in names:
        raise SystemExit(f"{path}: neither x86-64 nor AArch64 (ELF machine {number})")
    return names[number]


def leaked_symbols(item: Object) -> Iterator[str]:
    """Name the symbols of a kernel object that another object could share or replace."""
    for line in output("nm", "--defined-only", "--demangle", item.path).splitlines():
        kind, name = line.split(maxsplit=2)[1:]
        if kind in "WwVvu":
            yield f"weak or unique symbol {name}"
        elif kind.isupper() and f"::{item.level}::" not in name:
            yield f"global symbol outside the namespace of its level: {name}"


def leaked_instructions(item: Object) -> Iterator[str]:
    """Name the instructions of an object that its level does not have, once per mnemonic."""
    seen = set()
    for _, instruction in instructions(item.path):
        level, mnemonic = first_level(instruction, item.path), instruction.split(maxsplit=1)[0]
        if mnemonic not in seen and is_above(level, item.level, item.path):
            seen.add(mnemonic)
            yield f"needs {level}: {instruction}"


def leaks_in_module(path: Path) -> Iterator[str]:
    """Name the functions of a linked module that have an instruction above their level, each once."""
    seen = set()
    for function, instruction in instructions(path):
        match = _LEVEL_NAMESPACE.match(function)
        own = match[1].lstrip("0123456789") if match else "baseline"
        level = first_level(instruction, path)
        if function not in seen and is_above(level, own, path):
            seen.add(function)
            yield f"{function} is of the level {own} and needs {level}: {instruction}"


def has_symbols(path: Path) -> bool:
    """Tell whether a linked module still has the names of its functions."""
    return bool(output("nm", "--defined-only", path).strip())


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Disassemble a file into pairs: the symbol of the function, and one instruction with its operands."""
    function = ""
    for line in output(objdump_for(path), "-d", "--no-show-raw-insn", path).splitlines():
        address, separator, instruction = line.partition(":\t")
        if separator and address.strip():
            yield function, instruction.strip()
        elif line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]


def first_level(instruction: str, path: Path) -> str:
    """Return the lowest level that has this instruction on the file's kind of processor."""
    _, first_at = _levels(path)
    return next((level for level, pattern in reversed(first_at.items()) if pattern.search(instruction)), "baseline")


def is_above(level: str, other: str, path: Path) -> bool:
    """Tell whether a level is higher than another."""
    levels, _ = _levels(path)
    return levels.index(level) > levels.index(other)


@cache
def _levels(path: Path) -> tuple[tuple[str, ...], dict[str, re.Pattern[str]]]:
    return (X86_LEVELS, _X86_FIRST_AT) if machine(path) == "x86" else (ARM_LEVELS, _ARM_FIRST_AT)


def objdump_for(path: Path) -> str:
    """Return the name of an objdump that reads this file."""
    processor = {"x86": "x86_64", "arm": "aarch64"}[machine(path)]
    name = "objdump" if processor == platform.machine() else f"{processor}-linux-gnu-objdump"
    if shutil.which(name) is None:
        package = "binutils" if name == "objdump" else f"binutils-{processor.replace('_', '-')}-linux-gnu"
        raise SystemExit(f"{name}, which reads {path.name}, is not here. Debian, Ubuntu: apt install {package}")
    return name


def check_objects(folder: Path) -> int:
    """Print every leak of a build tree, and return 1 when there is one."""
    items = list(objects_below(folder))
    if not any(item.is_kernel for item in items):
        print("no kernel objects found: nothing was checked", file=sys.stderr)
        return 1
    leaks = 0
    for item in items:
        found = list(leaked_symbols(item)) if item.is_kernel else []
        found += leaked_instructions(item)
        leaks += len(found)
        report(f"{item.path} ({item.level})", found)
    levels = sorted({item.level for item in items if item.is_kernel})
    print(f"{len(items)} objects, levels {', '.join(levels)}: {leaks or 'no'} leaks")
    return 1 if leaks else 0


def check_module(path: Path) -> int:
    """Print every leak of a linked module, and return 1 when there is one."""
    if not has_symbols(path):
        print(f"{path} is stripped: nothing tells the levels apart", file=sys.stderr)
        return 1
    found = list(leaks_in_module(path))
    report(str(path), found)
    print(f"{path.name}: {len(found) or 'no'} leaks")
    return 1 if found else 0


def report(where: str, leaks: list[str]) -> None:
    """Print the first leaks of a file."""
    for leak in leaks[:SHOWN_PER_FILE]:
        print(f"{where}: {leak}", file=sys.stderr)
    if len(leaks) > SHOWN_PER_FILE:
        print(f"{where}: and {len(leaks) - SHOWN_PER_FILE} more", file=sys.stderr)


def main() -> int:
    """Print every leak; return 1 when there is one."""
    parser = argparse.ArgumentParser(description="Check that nothing leaves its instruction-set level.")
    parser.add_argument("path", type=Path, help="a build tree, or a linked module with its symbols")
    path = parser.parse_args().path
    return check_objects(path) if path.is_dir() else check_module(path)


if __name__ == "__main__":
    sys.exit(main())
