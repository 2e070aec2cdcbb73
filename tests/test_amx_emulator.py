# SPDX-License-Identifier: Apache-2.0
"""tools/amx_emulator against what the documentation of the instructions says, in exact arithmetic.

On a CPU with AMX the same programs run on the hardware; only what asks for counts is skipped there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
import torch

import amx_program
from amx_program import Configuration, configuration

ROOT = Path(__file__).resolve().parents[1]
UNDEFINED, PROTECTION = -signal.SIGILL, -signal.SIGSEGV


def _build_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_amx_emulator", ROOT / "tools" / "amx_emulator" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = _build_tool()
try:
    LIBRARY = BUILD.build()
except BUILD.CannotBuildError as error:
    pytest.skip(f"no AMX emulator: {error}", allow_module_level=True)


def _load_emulator() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.amx_emulator_count.restype = ctypes.c_uint64
    library.amx_emulator_signals.restype = ctypes.c_uint64
    library.amx_emulator_arch_prctl.restype = ctypes.c_long
    return library


EMULATOR = _load_emulator()
IS_NATIVE = bool(EMULATOR.amx_emulator_is_native())
emulated_only = pytest.mark.skipif(IS_NATIVE, reason="this CPU has AMX: nothing is emulated")


@pytest.fixture(scope="module")
def program_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return amx_program.assemble(BUILD.compiler(), tmp_path_factory.mktemp("amx"))
    except subprocess.CalledProcessError:
        pytest.skip("the assembler does not know AMX")


@pytest.fixture(scope="module")
def program(program_path: Path) -> Iterator[ctypes.CDLL]:
    """Strict: what the tests do wrong by mistake does not pass."""
    assert EMULATOR.amx_emulator_arch_prctl(*amx_program.PERMISSION) == 0
    EMULATOR.amx_emulator_install()
    EMULATOR.amx_emulator_set_strict(1)
    yield ctypes.CDLL(str(program_path))
    EMULATOR.amx_emulator_set_strict(0)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def multiply(program: ctypes.CDLL, name: str, config: Configuration, *operands: torch.Tensor) -> None:
    """Run ``c += a b`` on three tensors of 16 rows of 64 bytes."""
    assert all(operand.nbytes == 1024 and operand.is_contiguous() for operand in operands)
    getattr(program, name)(ctypes.byref(config), *map(pointer, operands))


# --- TDPBF16PS: exact arithmetic, rounded as documented ---------------------------------------------------------------

SMALLEST_NORMAL = Fraction(1, 2**126)


def flushed(value: float) -> float:
    """Return the value as an operand: a denormal is a zero of its sign."""
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def rounded(exact: Fraction) -> float:
    """Round a number that is not zero to fp32: to nearest even, tiny results to a zero of their sign."""
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    result = round(magnitude / unit) * unit
    sign = 1.0 if exact > 0 else -1.0
    if result < SMALLEST_NORMAL:
        return sign * 0.0
    return sign * (math.inf if result >= 2**128 else float(result))


def fused(a: float, b: float, c: float) -> float:
    """Return a b + c with one rounding, for finite numbers."""
    a, b, c = flushed(a), flushed(b), flushed(c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact != 0:
        return rounded(exact)
    product_sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    both_negative = product_sign < 0 and math.copysign(1.0, c) < 0 and (a == 0 or b == 0) and c == 0
    return -0.0 if both_negative else 0.0


def expected_bf16(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rows: int, pairs: int, columns: int
) -> torch.Tensor:
    left, right, result = a.tolist(), b.tolist(), c.clone()
    for m in range(rows):
        for n in range(columns):
            chains = [0.0, 0.0]
            for k in range(pairs):
                for odd in (0, 1):
                    chains[odd] = fused(left[m][2 * k + odd], right[k][2 * n + odd], chains[odd])
            result[m, n] = fused(1.0, c[m, n].item(), fused(1.0, chains[0], chains[1]))
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def random_bf16(seed: int, low: int, high: int) -> torch.Tensor:
    """Return [16, 32] bf16 with exponents in [low, high), which may be those of denormals, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(-255, 256, (16, 32), generator=generator).double()
    exponent = torch.randint(low, high, (16, 32), generator=generator).double()
    return (mantissa * 2.0**exponent).to(torch.bfloat16)


RANGES = {
    # of the exponents of a and b, before mantissas of 8 bits
    "alike": (-8, -7, -8, -7),
    "normal": (-12, -4, -12, -4),
    "wide": (-60, 40, -60, 40),
    "sums_near_the_smallest": (-72, -62, -76, -66),
    "operands_may_be_denormal": (-137, -128, 90, 110),
}


@pytest.mark.parametrize("name", RANGES)
def test_bf16_products_are_exact(program: ctypes.CDLL, name: str) -> None:
    of_a, of_b = RANGES[name][:2], RANGES[name][2:]
    a, b = random_bf16(1, *of_a), random_bf16(2, *of_b)
    c = (random_bf16(3, *of_a)[:, :16].double() * random_bf16(4, *of_b)[:, :16].double()).float()
    expected = expected_bf16(a, b, c, 16, 16, 16)
    assert expected.abs().max() > 0
    multiply(program, "tdpbf16ps", configuration(), a, b, c)
    assert torch.equal(bits(c), bits(expected))


def test_bf16_operands_that_are_denormal_count_as_zeros(program: ctypes.CDLL) -> None:
    tiny = torch.full((16, 32), 2.0**-130, dtype=torch.bfloat16)
    huge = torch.full((16, 32), 2.0**120, dtype=torch.bfloat16)
    assert (tiny.view(torch.int16) != 0).all()
    c = torch.full((16, 16), -(2.0**-130))
    multiply(program, "tdpbf16ps", configuration(), tiny, huge, c)
    # The accumulator is one too, and loses all but its sign; +0 and -0 make +0.
    assert torch.equal(bits(c), torch.zeros(16, 16, dtype=torch.int32))


def test_bf16_results_that_are_denormal_become_zeros_of_their_sign(program: ctypes.CDLL) -> None:
    a, b = torch.zeros(16, 32, dtype=torch.bfloat16), torch.zeros(16, 32, dtype=torch.bfloat16)
    a[:, 0], b[0, 0::2] = 2.0**-60, -1.5 * 2.0**-66
    c = torch.full((16, 16), 2.0**-126)
    multiply(program, "tdpbf16ps", configuration(), a, b, c)
    assert torch.equal(bits(c), torch.full((16, 16), -(2**31), dtype=torch.int32))


def test_bf16_sums_that_cancel_are_exact(program: ctypes.CDLL) -> None:
    a, b = random_bf16(5, -10, 10), random_bf16(6, -10, 10)
    a[:, 16:] = -a[:, :16]
    b[8:] = b[:8]
    c = torch.zeros(16, 16)
    c[::2] = -0.0
    expected = expected_bf16(a, b, c, 16, 16, 16)
    multiply(program, "tdpbf16ps", configuration(), a, b, c)
    assert torch.equal(bits(c), bits(expected))


def test_bf16_even_and_odd_elements_are_summed_apart(program: ctypes.CDLL) -> None:
    """One chain over all of them would lose the small terms: the large ones cancel in the end only."""
    a = torch.ones(16, 32, dtype=torch.bfloat16)
    b = torch.zeros(16, 32, dtype=torch.bfloat16)
    b[0, 0::2], b[0, 1::2] = 2.0**30, -(2.0**30)
    b[1:, 1::2] = 1.0
    c = torch.zeros(16, 16)
    multiply(program, "tdpbf16ps", configuration(), a, b, c)
    assert (c == 0).all()  # 15 ones vanish beside 2^30 in the chain of the odd ones


def test_bf16_infinities_and_nans_pass_through(program: ctypes.CDLL) -> None:
    a = torch.zeros(16, 32, dtype=torch.bfloat16)
    b = torch.ones(16, 32, dtype=torch.bfloat16)
    a[0, 3], a[1, 2], a[2, 0], a[2, 1], a[3, 5] = math.inf, -math.inf, math.inf, -math.inf, math.nan
    c = torch.zeros(16, 16)
    multiply(program, "tdpbf16ps", configuration(), a, b, c)
    assert (c[0] == math.inf).all() and (c[1] == -math.inf).all() and c[2:4].isnan().all() and (c[4:] == 0).all()


def test_bf16_overflow_is_infinite(program: ctypes.CDLL) -> None:
    a = torch.full((16, 32), 2.0**100, dtype=torch.bfloat16)
    c = torch.zeros(16, 16)
    multiply(program, "tdpbf16ps", configuration(), a, a.clone(), c)
    assert (c == math.inf).all()


@pytest.mark.parametrize(("rows", "pairs", "columns"), [(1, 1, 1), (3, 16, 5), (16, 2, 16), (7, 5, 11), (16, 16, 1)])
def test_partial_tiles_touch_nothing_else(program: ctypes.CDLL, rows: int, pairs: int, columns: int) -> None:
    a, b = random_bf16(7, -8, 0), random_bf16(8, -8, 0)
    c = torch.randn(16, 16, generator=torch.Generator().manual_seed(9))
    expected = expected_bf16(a, b, c, rows, pairs, columns)
    config = configuration(t0=(rows, 4 * columns), t1=(rows, 4 * pairs), t6=(pairs, 4 * columns))
    multiply(program, "tdpbf16ps", config, a, b, c)
    assert torch.equal(bits(c), bits(expected))


@pytest.mark.parametrize("mxcsr", [0x1F80, 0x9FC0, 0x7F80, 0x1FBF])
def test_mxcsr_is_neither_used_nor_changed(program: ctypes.CDLL, mxcsr: int) -> None:
    """With other rounding, flushing, or exception flags that are set already."""
    operands = random_bf16(10, -70, 20)
    assert program.mxcsr_around_product(ctypes.byref(configuration()), pointer(operands), mxcsr) == mxcsr


def test_flags_survive(program: ctypes.CDLL) -> None:
    assert program.flags_around_tilezero(ctypes.byref(configuration())) == 0


# --- TDPB..D ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"])
@pytest.mark.parametrize(("rows", "quads", "columns"), [(16, 16, 16), (5, 3, 7)])
def test_int8_products_are_exact_modulo_2_to_32(
    program: ctypes.CDLL, name: str, rows: int, quads: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(11)
    a, b = (torch.randint(-128, 128, (16, 64), dtype=torch.int8, generator=generator) for _ in range(2))
    c = torch.randint(-(2**31), 2**31, (16, 16), generator=generator).to(torch.int32)
    c[0] = 2**31 - 1  # wraps around
    left = (a if name[4] == "s" else a.view(torch.uint8)).long()[:rows, : 4 * quads]
    right = (b if name[5] == "s" else b.view(torch.uint8)).long()[:quads, : 4 * columns]
    right = right.reshape(quads, columns, 4).transpose(1, 2).reshape(4 * quads, columns)
    expected = c.long()
    expected[:rows, :columns] += left @ right
    config = configuration(t0=(rows, 4 * columns), t1=(rows, 4 * quads), t6=(quads, 4 * columns))
    multiply(program, name, config, a, b, c)
    assert torch.equal(c, expected.to(torch.int32))


# --- addresses --------------------------------------------------------------------------------------------------------

STRIDE = 80  # bytes from row to row


def _rows(memory: torch.Tensor, start: int, step: int) -> torch.Tensor:
    return torch.stack([memory[start + row * step : start + row * step + 64] for row in range(16)])


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.randint(0, 256, (65536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(12))


@pytest.fixture
def tiles(program: ctypes.CDLL) -> Iterator[None]:
    """Configure tile 3 at full size, around the test."""
    program.configure(ctypes.byref(configuration(t3=(16, 64))))
    yield
    program.release()


@pytest.mark.parametrize("form", range(len(amx_program.SIB_FORMS)), ids=[form[0] for form in amx_program.SIB_FORMS])
@pytest.mark.parametrize("stride", [STRIDE, -STRIDE])
def test_every_form_of_an_address(
    program: ctypes.CDLL, tiles: None, memory: torch.Tensor, form: int, stride: int
) -> None:
    _, _, index, scale, displacement = amx_program.SIB_FORMS[form]
    base, step = 32768, stride * scale if index else 0
    out = torch.zeros(16, 64, dtype=torch.uint8)
    address = ctypes.c_void_p(memory.data_ptr() + base)
    getattr(program, f"load_form_{form}")(address, ctypes.c_void_p(stride), pointer(out))
    expected = _rows(memory, base + displacement, step)
    assert torch.equal(out, expected)

    target, copy = torch.zeros_like(memory), torch.zeros_like(memory)
    address = ctypes.c_void_p(target.data_ptr() + base)
    getattr(program, f"store_form_{form}")(address, ctypes.c_void_p(stride))
    for row in range(16):
        start = base + displacement + row * step
        copy[start : start + 64] = expected[row]
    assert torch.equal(target, copy)


def test_the_stack_pointer_as_base(program: ctypes.CDLL, tiles: None, memory: torch.Tensor) -> None:
    out = torch.zeros(16, 64, dtype=torch.uint8)
    program.load_stack(pointer(memory), None, pointer(out))
    assert torch.equal(out.flatten(), memory[:1024])


def test_thread_local_addresses(program: ctypes.CDLL, tiles: None, memory: torch.Tensor) -> None:
    out = torch.zeros(16, 64, dtype=torch.uint8)
    program.fs_base.restype = ctypes.c_uint64
    distance = (memory.data_ptr() - program.fs_base()) % 2**64
    program.load_fs(ctypes.c_void_p(distance), ctypes.c_void_p(STRIDE), pointer(out))
    assert torch.equal(out, _rows(memory, 0, STRIDE))


def test_addresses_from_the_other_segment(program: ctypes.CDLL, tiles: None, memory: torch.Tensor) -> None:
    set_gs, get_gs, previous = 0x1001, 0x1004, ctypes.c_uint64()
    out = torch.zeros(16, 64, dtype=torch.uint8)
    EMULATOR.amx_emulator_arch_prctl(get_gs, ctypes.byref(previous))
    assert EMULATOR.amx_emulator_arch_prctl(set_gs, ctypes.c_void_p(memory.data_ptr() + 4096)) == 0
    try:
        program.load_gs(ctypes.c_void_p(128), ctypes.c_void_p(STRIDE), pointer(out))
    finally:
        EMULATOR.amx_emulator_arch_prctl(set_gs, previous)
    assert torch.equal(out, _rows(memory, 4224, STRIDE))


LOW_ADDRESS = 0x20000000


@pytest.fixture
def low_memory() -> Iterator[int]:
    """Map 64 KiB below 2^31, where an address of 32 bits reaches."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x100000  # MAP_FIXED_NOREPLACE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    address = libc.mmap(LOW_ADDRESS, 65536, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address != LOW_ADDRESS:
        pytest.skip("the address space has no room there")
    yield address
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(65536))


def test_addresses_of_32_bits(program: ctypes.CDLL, tiles: None, memory: torch.Tensor, low_memory: int) -> None:
    """The upper halves of the registers do not count, and the stride may be negative."""
    ctypes.memmove(low_memory, memory.data_ptr(), 65536)
    out = torch.zeros(16, 64, dtype=torch.uint8)
    upper = 0x1234 << 32
    program.load_short(ctypes.c_void_p(low_memory + 4096 + upper), ctypes.c_void_p(2**32 - STRIDE), pointer(out))
    assert torch.equal(out, _rows(memory, 4096, -STRIDE))


@pytest.mark.parametrize("form", amx_program.CONFIGURATION_FORMS)
def test_every_form_of_the_configurations_address(program: ctypes.CDLL, low_memory: int, form: str) -> None:
    config = configuration(t0=(3, 20), t7=(16, 64))
    config.start_row = 5
    ctypes.memmove(low_memory, ctypes.byref(config), 64)
    copy = ctypes.create_string_buffer(64)
    getattr(program, f"configure_{form}")(ctypes.c_void_p(low_memory), copy)
    program.release()
    assert copy.raw == bytes(config)


def test_a_configuration_beside_the_code(program: ctypes.CDLL) -> None:
    program.embedded_address.restype = program.embedded_copy_address.restype = ctypes.c_void_p
    program.configure_from_next()
    program.release()
    original, copy = (ctypes.string_at(f(), 64) for f in (program.embedded_address, program.embedded_copy_address))
    assert original == copy and original[0] == 1


# --- configuration ----------------------------------------------------------------------------------------------------


def read_configuration(program: ctypes.CDLL) -> bytes:
    copy = ctypes.create_string_buffer(b"x" * 64, 64)
    program.read_configuration(copy)
    return copy.raw


def test_released_tiles_have_an_empty_configuration(program: ctypes.CDLL) -> None:
    program.configure(ctypes.byref(configuration()))
    assert read_configuration(program) == bytes(configuration())
    program.release()
    assert read_configuration(program) == bytes(64)
    program.configure(ctypes.byref(configuration()))
    program.configure(ctypes.byref(Configuration(palette=0, start_row=9)))
    assert read_configuration(program) == bytes(64)


def test_a_new_configuration_clears_the_tiles(program: ctypes.CDLL, memory: torch.Tensor) -> None:
    program.configure(ctypes.byref(configuration()))
    program.load(pointer(memory))
    program.configure(ctypes.byref(configuration()))
    out = torch.ones(16, 64, dtype=torch.uint8)
    program.store(pointer(out))
    program.release()
    assert (out == 0).all()


def test_a_load_clears_what_the_tile_held_before(program: ctypes.CDLL, memory: torch.Tensor) -> None:
    """A row that loading skips, since start_row is behind it, keeps what it had."""
    config = configuration(t0=(16, 64))
    config.start_row = 4
    program.configure(ctypes.byref(config))
    program.load(pointer(memory))
    out = torch.ones(16, 64, dtype=torch.uint8)
    program.store(pointer(out))
    program.release()
    assert (out[:4] == 0).all() and torch.equal(out[4:].flatten(), memory[256:1024])


# --- threads and counts -----------------------------------------------------------------------------------------------


def test_every_thread_has_tiles_of_its_own(program: ctypes.CDLL) -> None:
    def task(seed: int) -> bool:
        ok = True
        for _ in range(20):
            a, b = random_bf16(seed, -8, 0), random_bf16(seed + 1, -8, 0)
            c = torch.zeros(16, 16)
            pairs = 1 + seed % 16
            rows = 1 + seed % 16
            config = configuration(t0=(rows, 64), t1=(rows, 4 * pairs), t6=(pairs, 64))
            multiply(program, "tdpbf16ps", config, a, b, c)
            by_depth = b.double().reshape(16, 16, 2).transpose(1, 2).reshape(32, 16)[: 2 * pairs]
            exact = a[:rows, : 2 * pairs].double() @ by_depth
            ok = ok and torch.allclose(c[:rows].double(), exact, rtol=1e-5, atol=1e-2) and bool((c[rows:] == 0).all())
        return ok

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(task, range(0, 64, 3)))
    assert EMULATOR.amx_emulator_configured_threads() == 0
    assert EMULATOR.amx_emulator_unreleased_exits() == 0


@pytest.mark.skipif(not IS_NATIVE, reason="needs a CPU with AMX")
def test_bf16_products_are_those_of_the_cpu_bit_for_bit(tmp_path: Path) -> None:
    program = tmp_path / "amx_silicon"
    includes = f"-I{ROOT / 'tools' / 'amx_emulator'}"
    source = str(ROOT / "tests" / "amx_silicon.c")
    build = [BUILD.compiler(), "-O2", "-Wall", "-Wextra", "-Werror", includes, "-o", str(program), source]
    subprocess.run([*build, "-ldl", "-lpthread"], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    compared, different, other_nans = map(int, result.stdout.split())
    assert compared > 3_000_000
    assert different == 0
    assert other_nans < compared / 1000  # the payloads of NaNs are not emulated


def count(name: str | None = None) -> int:
    return int(EMULATOR.amx_emulator_count(None if name is None else name.encode()))


@emulated_only
def test_instructions_and_signals_are_counted(program: ctypes.CDLL) -> None:
    EMULATOR.amx_emulator_reset()
    assert count() == EMULATOR.amx_emulator_signals() == 0
    operand = torch.zeros(16, 64, dtype=torch.uint8)
    for _ in range(3):
        multiply(program, "tdpbf16ps", configuration(), operand, operand, operand)
    expected = {"LDTILECFG": 3, "TILELOADD": 6, "TILELOADDT1": 3, "TDPBF16PS": 3, "TILESTORED": 3, "TILERELEASE": 3}
    assert {name: count(name) for name in expected} == expected
    assert count() == 21 and count("TDPBSSD") == 0 and count("VDPBF16PS") == 2**64 - 1
    # Of seven instructions, only the first two are not adjacent.
    assert EMULATOR.amx_emulator_signals() == 6


@emulated_only
def test_configured_threads_are_counted(program: ctypes.CDLL) -> None:
    program.configure(ctypes.byref(configuration()))
    assert EMULATOR.amx_emulator_configured_threads() == 1
    program.release()
    assert EMULATOR.amx_emulator_configured_threads() == 0


# --- what has to fail, in processes that die of it --------------------------------------------------------------------

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: str, preload: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "AMX_EMULATOR_STRICT")}
    if preload:
        environment["LD_PRELOAD"] = str(LIBRARY)
    # No core files, which the tests for these signals would leave behind.
    limited = ["/bin/sh", "-c", 'ulimit -c 0; exec "$@"', "sh", sys.executable, *command]
    return subprocess.run(limited, env=inherited | environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(params=["ctypes", "preload"])
def runner(request: pytest.FixtureRequest, program_path: Path) -> Runner:
    """Run one function of amx_program.py in a process, with the emulator loaded late or early."""

    def start(
        function: str, rows: str = "", permission: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        script = [amx_program.__file__, str(program_path), str(LIBRARY), function, rows]
        script.append("permission" if permission else "none")
        return run(*script, preload=request.param == "preload", **environment)

    return start


FULL = "16x64,16x64,16x64"
FAULTS = [
    # function, tiles configured before it, status, words
    ("zero", "", UNDEFINED, "no tile is configured"),
    ("zero", "0x0,16x64", UNDEFINED, "tile 0 is not configured"),
    ("load", "", UNDEFINED, "no tile is configured"),
    ("store", "0x0,4x4", UNDEFINED, "tile 0 is not configured"),
    ("same_tiles", FULL, UNDEFINED, "three different ones"),
    ("tile_eight", FULL, UNDEFINED, "no tile 8"),
    ("third_operand", FULL, UNDEFINED, "VEX.vvvv"),
    ("no_sib", FULL, UNDEFINED, ""),
    ("multiply", "", UNDEFINED, "no tile is configured"),
    ("multiply", "16x64,16x64", UNDEFINED, "tile 2 is not configured"),
    ("multiply", "16x64,16x62,16x64", UNDEFINED, "not a multiple of 4"),
    ("multiply", "15x64,16x64,16x64", UNDEFINED, "do not multiply"),
    ("multiply", "16x64,16x64,15x64", UNDEFINED, "do not multiply"),
    ("multiply", "16x60,16x64,16x64", UNDEFINED, "do not multiply"),
    ("configure", "17x64", PROTECTION, "at most 16 rows, got 17"),
    ("configure", "16x65", PROTECTION, "at most 64 bytes a row, got 65"),
    ("configure", "16x0", PROTECTION, "both zero or neither"),
    ("configure", "0x4", PROTECTION, "both zero or neither"),
    ("configure", "1x4," * 8 + "1x4", PROTECTION, "expected zeros"),
    ("palette", FULL, PROTECTION, "palette 2"),
    ("reserved", FULL, PROTECTION, "bytes 2 to 15"),
    ("null", FULL, PROTECTION, ""),
]


@pytest.mark.parametrize(("function", "rows", "status", "words"), FAULTS)
def test_faults_end_the_process_and_say_why(runner: Runner, function: str, rows: str, status: int, words: str) -> None:
    done = runner(function, rows)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    if not IS_NATIVE:
        assert words in done.stderr


def test_what_is_right_passes(runner: Runner) -> None:
    done = runner("multiply", FULL, AMX_EMULATOR_STRICT="1")
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_the_permission_is_needed_when_strict(runner: Runner) -> None:
    done = runner("multiply", FULL, permission=False, AMX_EMULATOR_STRICT="1")
    assert done.returncode == UNDEFINED
    if not IS_NATIVE:
        assert "ARCH_REQ_XCOMP_PERM" in done.stderr
        assert runner("multiply", FULL, permission=False).returncode == 0


@emulated_only
def test_tiles_that_are_never_released_fail_when_strict(runner: Runner) -> None:
    done = runner("configure", FULL, AMX_EMULATOR_STRICT="1")
    assert done.returncode == 86 and "1 threads never released" in done.stderr
    done = runner("thread", FULL, AMX_EMULATOR_STRICT="1")
    assert done.returncode == 86 and "a thread ended without TILERELEASE" in done.stderr
    assert runner("configure", FULL).returncode == 0


@emulated_only
def test_counts_are_printed_on_request(runner: Runner) -> None:
    done = runner("multiply", FULL, AMX_EMULATOR_COUNTS="1")
    assert "TDPBF16PS   1" in done.stderr and "LDTILECFG   1" in done.stderr


def test_other_illegal_instructions_end_the_process(runner: Runner) -> None:
    done = runner("other_instruction", PYTHONFAULTHANDLER="")
    assert done.returncode == UNDEFINED and "#UD" not in done.stderr


def test_other_illegal_instructions_reach_faulthandler(runner: Runner) -> None:
    """Which Python has started before this library comes by ctypes, and after it where it is preloaded."""
    done = runner("other_instruction", PYTHONFAULTHANDLER="1")
    assert done.returncode == UNDEFINED
    assert "Fatal Python error: Illegal instruction" in done.stderr and "amx_program.py" in done.stderr


def test_faults_of_amx_reach_faulthandler_too(runner: Runner) -> None:
    done = runner("zero", PYTHONFAULTHANDLER="1")
    assert done.returncode == UNDEFINED
    assert "Fatal Python error: Illegal instruction" in done.stderr


@pytest.mark.parametrize("preload", [False, True])
def test_a_handler_of_the_program_gets_signals_that_were_sent(preload: bool) -> None:
    script = f"""
import ctypes, os, signal
got = []
signal.signal(signal.SIGILL, lambda number, frame: got.append(number))
library = ctypes.CDLL({str(LIBRARY)!r})
os.kill(os.getpid(), signal.SIGILL)
print(got == [signal.SIGILL], signal.getsignal(signal.SIGILL) is not signal.SIG_DFL)
signal.signal(signal.SIGILL, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGILL)
print(len(got))
"""
    done = run("-c", script, preload=preload)
    assert (done.returncode, done.stdout) == (0, "True True\n1\n"), done.stderr


# --- as the whole process sees it -------------------------------------------------------------------------------------


def test_everything_holds_where_the_emulator_is_preloaded() -> None:
    """The tests above once more, in one process that started with it."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "not ctypes and not preload"]
    done = run(*command, preload=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


SHOW_LEVELS = """
import gdn_cpu
supported = {level.name for level in gdn_cpu.levels() if level.supported}
active = [level.name for level in gdn_cpu.levels() if level.active]
print("x86_v4_bf16" in supported, "x86_amx" in supported, *active)
"""


def shown_levels(level: str, preload: bool, **environment: str) -> list[str]:
    done = run("-c", SHOW_LEVELS, preload=preload, GDN_CPU_ISA=level, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@emulated_only
def test_gdn_cpu_runs_its_amx_level_where_the_emulator_is_loaded(cpu_backend: None) -> None:
    """It asks for the permission, or the emulator would refuse it: and only above a level that the CPU really has."""
    has_bf16, has_amx, active = shown_levels("x86_amx", preload=False)
    assert (has_amx, active == "x86_amx") == ("False", False)
    if has_bf16 != "True":
        assert shown_levels("x86_amx", preload=True)[1:] == ["False", active]
        pytest.skip("this CPU lacks the level below AMX")
    assert shown_levels("x86_amx", preload=True, AMX_EMULATOR_STRICT="1") == ["True", "True", "x86_amx"]
    assert shown_levels("x86_v4", preload=True) == ["True", "True", "x86_v4"]


@emulated_only
def test_gdn_cpu_asks_for_the_permission(cpu_backend: None) -> None:
    script = f"""
import ctypes
emulator = ctypes.CDLL({str(LIBRARY)!r}, mode=ctypes.RTLD_GLOBAL)
def granted():
    mask = ctypes.c_uint64()
    assert emulator.amx_emulator_arch_prctl(0x1022, ctypes.byref(mask)) == 0
    return mask.value >> 18 & 1
before = granted()
import gdn_cpu
supported = {{level.name: level.supported for level in gdn_cpu.levels()}}
print(before, granted() == supported["x86_v4_bf16"] == supported["x86_amx"])
"""
    done = run("-c", script)
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr
