#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that no instruction and no symbol leaves its instruction-set level.

    python tools/check_isa_leaks.py BUILD_DIR | MODULE.so

Every level's objects go into one shared object. An inline function that the compiler emits in two of them is one symbol
to the linker, which keeps either copy: an AVX-512 one may then run on a machine without AVX-512. And a file built with
the wrong flags crashes only on machines that nobody tests on. So, for every object below BUILD_DIR:

- kernels of a level define no weak or unique symbol, and nothing visible outside the level's own namespace;
- instructions, registers included, are at most those of the object's level, and of no extension that no level is
  compiled for; objects of no level count as baseline.

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

# Above every level: what no level is compiled for, however new the processors that have it.
NO_LEVEL = "an extension that no level has"

# What first appears at a level, in objdump's text: mnemonic and operands. Baseline x86-64 has SSE2 only, so SSE3 to
# SSE4.2 count as x86_v3, whose flags imply them. Not here: tzcnt, which compilers emit for the baseline too, since
# older processors take it for bsf.
_X86_FIRST_AT = {
    "x86_v3": re.compile(
        r"%ymm|^v|^(mulx|pdep|pext\b|rorx|sarx|shlx|shrx|bzhi|popcnt|crc32)"
        r"|^(addsubp|p?h(add|sub)|mov[sd]\w*dup|lddqu|fisttp|m(onitor|wait)\b|pshufb|palignr|pabs|psign|pmaddubsw|pmulhrsw)"
        r"|^(p?blend|dpp|extractps|insertps|pinsr[bdq]|pextr[bdq]|pm(ax|in)(s[bd]|u[dw])|pmov[sz]x|pmul(dq|ld)|ptest|round[ps])"
        r"|^(pcmp(eqq|gtq|[ei]str)|packusdw|mpsadbw|movntdqa|phminposuw|pextrw.*\()"
    ),
    # However it is called: a form of 128 or 256 bits and with registers 0 to 15 differs in its encoding only.
    "x86_v4": re.compile(r"^\{evex\}|%zmm|%k[0-7]\b"),
    "x86_v4_bf16": re.compile(r"^(\{evex\} )?(vdpbf16ps|vcvtne2?ps2bf16|vpdp)"),
    "x86_amx": re.compile(r"%tmm|^(ldtilecfg|sttilecfg|tilerelease)"),
    # What -march=native would add: BMI and LZCNT, cryptography, random numbers; of AVX-512 VBMI, IFMA, VPOPCNTDQ,
    # BITALG and FP16; with VEX what AVX-512 has with EVEX; other products of AMX.
    NO_LEVEL: re.compile(
        r"^\{vex\}|^(andn|bextr|bls(i|r|msk)|lzcnt|movbe|ad[co]x)[lqw]?\b"
        r"|^(rdrand|rdseed|v?aes|v?pclmul|sha(1|256)|gf2p8)"
        r"|^(\{evex\} )?v(aes|pclmul|gf2p8|perm(i2|t2)?b\b|pmultishift|p(compress|expand)[bw]\b|psh[lr]d|pmadd52)"
        r"|^\{evex\} v(popcnt|pshufbitqmb|p2intersect|movw|(?!cvtps2ph\b)\w+[ps]h\b|cvt\w*(ph2(?!ps\b)|sh2|2ph[xyz]))"
        r"|^(tdp(?!bf16ps)|tcmm|tconj|ttdp)"
    ),
}
# Baseline Arm is armv8-a: it converts half precision, and neither computes in it nor knows bf16 and dot products.
# Atomic operations and rounding products are of armv8.1, which bf16 implies.
_ARM_FIRST_AT = {
    "arm_bf16": re.compile(
        r"^(bf(dot|mmla|mlal[bt]|cvt\w*)|[su]dot)\b|^(?!fcvt|fmov)f\w+\s+(v\d+\.[48]h|h\d+)"
        r"|^(cas|swp|(ld|st)(add|clr|eor|set|[su](max|min))(a?l?[bh]?)\s|sqrdml[as]h)"
    ),
    # Scalable vectors and matrices, products of bytes, widening products of halves, complex numbers, cryptography.
    NO_LEVEL: re.compile(
        r"\b[zp]\d+\.[bhsdq]\b|\bp\d+/[mz]\b|^(cnt[bhwd]|rdvl|addvl|smstart|smstop)\b"
        r"|^([su]mmla|usmmla|usdot|sudot|fml[as]l2?|fc(mla|add)|fjcvtzs)\b|^(aes|sha(1|256|512))|^pmull2?\s+\S+\.1q"
    ),
}
# libgcc's, which look at the processor before they use what armv8.1 has.
_CHECKED_FIRST = re.compile(r"__aarch64_(cas|swp|ldadd|ldclr|ldeor|ldset)\d+_\w+$")

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
        level, mnemonic = first_level(instruction, item.path), instruction.removeprefix("{evex} ").split(maxsplit=1)[0]
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
        if function not in seen and is_above(level, own, path) and not _CHECKED_FIRST.match(function):
            seen.add(function)
            yield f"{function} is of the level {own} and needs {level}: {instruction}"


def has_symbols(path: Path) -> bool:
    """Tell whether a linked module still has the names of its functions."""
    return bool(output("nm", "--defined-only", path).strip())


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Disassemble a file into pairs: the symbol of the function, and one instruction with its operands.

    One with an EVEX prefix, as AVX-512 has, is marked with "{evex}".
    """
    function = ""
    has_evex = machine(path) == "x86"
    for line in output(objdump_for(path), "-d", "--insn-width=15", path).splitlines():
        address, separator, rest = line.partition(":\t")
        if separator and address.strip():
            encoding, _, instruction = rest.partition("\t")
            mark = "{evex} " if has_evex and _EVEX.match(encoding) else ""
            yield function, mark + instruction.strip().removeprefix("{evex} ")
        elif line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]


# After prefixes that change the segment or the size of an address.
_EVEX = re.compile(r"((26|2e|36|3e|64|65|67) )*62 ")


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
    levels, first_at = (X86_LEVELS, _X86_FIRST_AT) if machine(path) == "x86" else (ARM_LEVELS, _ARM_FIRST_AT)
    return (*levels, NO_LEVEL), first_at


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
