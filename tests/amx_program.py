# SPDX-License-Identifier: Apache-2.0
"""Machine code for the tests of the AMX emulator: by the assembler, so that the encodings are not ours.

Run as a program, it calls one function of the assembled library, in a process that may die of it:

    python amx_program.py PROGRAM EMULATOR FUNCTION TILES PERMISSION

TILES are the sizes configured before it ("16x64,16x4": rows x bytes), PERMISSION is "permission" or "none".
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

PERMISSION = (0x1023, 18)  # ARCH_REQ_XCOMP_PERM, XTILEDATA
PRODUCTS = ("tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")


class Configuration(ctypes.Structure):
    """The operand of LDTILECFG."""

    _fields_ = (
        ("palette", ctypes.c_uint8),
        ("start_row", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 14),
        ("row_bytes", ctypes.c_uint16 * 16),
        ("rows", ctypes.c_uint8 * 16),
    )


def configuration(**tiles: tuple[int, int]) -> Configuration:
    """Return palette 1 with the tiles named, as ``t0=(rows, bytes a row)``; without any, all of them at full size."""
    result = Configuration(palette=1)
    for name, (rows, row_bytes) in (tiles or {f"t{n}": (16, 64) for n in range(8)}).items():
        result.rows[int(name[1:])] = rows
        result.row_bytes[int(name[1:])] = row_bytes
    return result


# Address forms of a tile's rows: AT&T text, base and index register. A row is at base + displacement + row * stride.
# %rsp as base has a function of its own below, and so have the segments.
_REGISTERS = ["rax", "rcx", "rdx", "rbx", "rbp", "rsi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"]


def _sib_forms() -> list[tuple[str, str, str | None, int, int]]:
    displacements = (0, 64, -64, 4096, -4096)
    forms = []
    for n, base in enumerate(_REGISTERS):
        index = _REGISTERS[(n + 5) % len(_REGISTERS)]
        scale, displacement = 1 << n % 4, displacements[n % len(displacements)]
        forms.append((f"{displacement or ''}(%{base},%{index},{scale})", base, index, scale, displacement))
    # No displacement where the encoding has to have one, and no index: every row is the same.
    forms += [("(%rbp,%rax,1)", "rbp", "rax", 1, 0), ("(%r13,%r12,2)", "r13", "r12", 2, 0)]
    forms += [("(%rbx)", "rbx", None, 1, 0), ("64(%r12)", "r12", None, 1, 64)]
    return forms


SIB_FORMS = _sib_forms()
CONFIGURATION_FORMS = {
    "base": ("mov %rdi, %rax", "(%rax)"),
    "base_needs_sib": ("mov %rdi, %r12", "(%r12)"),
    "base_needs_displacement": ("mov %rdi, %r13", "(%r13)"),
    "displacement_8": ("lea -24(%rdi), %r9", "24(%r9)"),
    "displacement_32": ("lea 4096(%rdi), %r9", "-4096(%r9)"),
    "index": ("mov $-6, %r10; lea 16(%rdi), %r9", "8(%r9,%r10,4)"),
    "index_alone": ("mov %rdi, %rax", "(,%rax,1)"),
    "address_of_32_bits": ("mov %edi, %eax", "(%eax)"),
}


def _function(name: str, *lines: str) -> str:
    saved = ("rbx", "rbp", "r12", "r13", "r14", "r15")
    body = "\n    ".join([*(f"push %{r}" for r in saved), *lines, *(f"pop %{r}" for r in reversed(saved)), "ret"])
    return f".globl {name}\n.type {name}, @function\n{name}:\n    {body}\n"


def _source() -> str:
    functions = []
    for name in PRODUCTS:  # (config, a, b, c): c += a b, rows 64 bytes apart
        functions.append(
            _function(
                name,
                "ldtilecfg (%rdi)",
                "mov $64, %eax",
                "tileloadd (%rsi,%rax,1), %tmm1",
                "tileloaddt1 (%rdx,%rax,1), %tmm6",
                "tileloadd (%rcx,%rax,1), %tmm0",
                f"{name} %tmm6, %tmm1, %tmm0",
                "tilestored %tmm0, (%rcx,%rax,1)",
                "tilerelease",
            )
        )
    for n, (text, base, index, _, _) in enumerate(SIB_FORMS):  # (base, index, out)
        store = [f"push %{r}" for r in ("rdi", "rsi", "rdx")]
        move = [f"mov 16(%rsp), %{base}", *([f"mov 8(%rsp), %{index}"] if index else [])]
        out = ["pop %rdx", "pop %rsi", "pop %rdi", "mov $64, %eax", "tilestored %tmm3, (%rdx,%rax,1)"]
        functions.append(_function(f"load_form_{n}", *store, *move, f"tileloadd {text}, %tmm3", *out))
        functions.append(_function(f"store_form_{n}", *store, *move, f"tilestored %tmm3, {text}", *out[:3]))
    simple = ("mov %rdi, %rbx", "mov %rsi, %rcx", "mov $64, %eax")
    for name, text in {"fs": "%fs:(%rbx,%rcx,1)", "gs": "%gs:(%rbx,%rcx,1)", "short": "(%ebx,%ecx,1)"}.items():
        functions.append(
            _function(f"load_{name}", *simple, f"tileloadd {text}, %tmm3", "tilestored %tmm3, (%rdx,%rax,1)")
        )
    functions.append(_function("fs_base", "mov %fs:0, %rax"))
    functions.append(
        _function(  # 1024 bytes from rdi, copied into the frame
            "load_stack",
            "sub $2048, %rsp; cld; mov %rdi, %rsi; lea 192(%rsp), %rdi; mov $1024, %ecx; rep movsb; mov $64, %eax",
            "tileloadd 192(%rsp,%rax,1), %tmm3",
            "tilestored %tmm3, (%rdx,%rax,1)",
            "add $2048, %rsp",
        )
    )
    for name, (before, text) in CONFIGURATION_FORMS.items():  # (config, out)
        functions.append(_function(f"configure_{name}", before, f"ldtilecfg {text}", "sttilecfg (%rsi)"))
    functions.append(
        _function("configure_from_next", "ldtilecfg embedded(%rip)", "sttilecfg embedded_copy(%rip)")
        + _function("embedded_address", "lea embedded(%rip), %rax")
        + _function("embedded_copy_address", "lea embedded_copy(%rip), %rax")
    )
    # MXCSR as the caller has it, changed on purpose, and read again after a product.
    functions.append(
        _function(
            "mxcsr_around_product",  # (config, operands, mxcsr to set) -> mxcsr after it
            "sub $16, %rsp; stmxcsr 8(%rsp); mov %edx, (%rsp); ldmxcsr (%rsp)",
            "ldtilecfg (%rdi); mov $64, %eax; tileloadd (%rsi,%rax,1), %tmm1; tileloadd (%rsi,%rax,1), %tmm2",
            "tilezero %tmm0; tdpbf16ps %tmm2, %tmm1, %tmm0; tilerelease",
            "stmxcsr (%rsp); mov (%rsp), %eax; ldmxcsr 8(%rsp); add $16, %rsp",
        )
    )
    # Registers and flags that no AMX instruction changes: 0 when they survive.
    functions.append(
        _function(
            "flags_around_tilezero",
            "ldtilecfg (%rdi); mov $0x8d7, %eax; push %rax; popfq; tilezero %tmm5; pushfq; pop %rdx; tilerelease",
            "and $0x8d5, %edx; mov $0x8d5, %eax; sub %edx, %eax; cld",
        )
    )
    for name, line in SINGLE.items():  # (config or operand)
        functions.append(_function(name, "mov $64, %eax", line))
    data = ".data\n.balign 64\nembedded: .byte 1, 0\n.zero 14\n.short 64\n.zero 30\n.byte 16\n.zero 15\n"
    return ".text\n" + "".join(functions) + data + 'embedded_copy: .zero 64\n.section .note.GNU-stack,"",@progbits\n'


# One instruction each, to do wrong things with. Those that the assembler refuses are written in bytes.
SINGLE = {
    "configure": "ldtilecfg (%rdi)",
    "read_configuration": "sttilecfg (%rdi)",
    "release": "tilerelease",
    "zero": "tilezero %tmm0",
    "zero_four": "tilezero %tmm4; tilezero %tmm5; tilezero %tmm6; tilezero %tmm7",
    "load": "tileloadd (%rdi,%rax,1), %tmm0",
    "store": "tilestored %tmm0, (%rdi,%rax,1)",
    "multiply": "tdpbf16ps %tmm2, %tmm1, %tmm0",
    "same_tiles": ".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1",  # tdpbf16ps %tmm1, %tmm1, %tmm0
    "tile_eight": ".byte 0xc4, 0x62, 0x7b, 0x49, 0xc0",  # tilezero with VEX.R: tile 8
    "third_operand": ".byte 0xc4, 0xe2, 0x73, 0x49, 0xc0",  # tilezero with VEX.vvvv
    "no_sib": ".byte 0xc4, 0xe2, 0x7b, 0x4b, 0x07",  # tileloadd (%rdi), without SIB
    "other_instruction": "ud2",
}


def assemble(compiler: str, folder: Path) -> Path:
    """Return the library with all of the above, made in `folder`."""
    source, library = folder / "program.S", folder / "program.so"
    source.write_text(_source())
    subprocess.run([compiler, "-shared", "-nostdlib", "-o", str(library), str(source)], check=True)
    return library


def _configure_on_another_thread(program: ctypes.CDLL, config: Configuration) -> None:
    """Return when the thread has ended: ``Thread.join`` waits for what Python does on it only."""
    process, thread = ctypes.CDLL(None), ctypes.c_void_p()
    if process.pthread_create(ctypes.byref(thread), None, program.configure, ctypes.byref(config)) != 0:
        raise OSError("no thread could be started")
    process.pthread_join(thread, None)


def _run(program: ctypes.CDLL, function: str, rows: str) -> None:
    config = Configuration(palette=1)
    for n, size in enumerate(filter(None, rows.split(","))):
        config.rows[n], config.row_bytes[n] = map(int, size.split("x"))
    operand = ctypes.create_string_buffer(4096)
    if function == "palette":
        config.palette = 2
    if function == "reserved":
        config.reserved[3] = 1
    if function in ("palette", "reserved", "configure"):
        program.configure(ctypes.byref(config))
    elif function == "null":
        program.configure(ctypes.byref(config))
        program.load(None)
    elif function == "thread":
        _configure_on_another_thread(program, config)
    else:
        if rows:
            program.configure(ctypes.byref(config))
        getattr(program, function)(operand)
        program.release()


def main() -> int:
    """Call one function."""
    program_path, emulator_path, function, rows, permission = sys.argv[1:]
    emulator = ctypes.CDLL(emulator_path)
    if permission == "permission":
        emulator.amx_emulator_arch_prctl(*PERMISSION)
    _run(ctypes.CDLL(program_path), function, rows)
    print("survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
