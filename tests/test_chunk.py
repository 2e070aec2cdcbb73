# SPDX-License-Identifier: Apache-2.0
"""The chunked rule on gdn-cpu, at every level with every engine: values, and what holds bit for bit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import chunk_plan_checks
import gdn_core
from contract_calls import THREADS, same_bits
from gdn_core.testing import inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance

gdn_cpu = pytest.importorskip("gdn_cpu")
from gdn_cpu import _openblas  # noqa: E402

OP = "chunk_gated_delta_rule"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _engines() -> list[tuple[str, str]]:
    """List every (level, engine) that runs here."""
    found = []
    for level in gdn_cpu.levels():
        if level.supported and level.kernels == level.name:
            with gdn_cpu.isa_level(level.name):
                found += [(level.name, engine) for engine in gdn_cpu.gemm_engines()]
    # An engine of a lower level is the same code there.
    return [pair for pair in found if pair == next(other for other in found if _same_engine(other, pair))]


def _same_engine(one: tuple[str, str], other: tuple[str, str]) -> bool:
    return one[1] == other[1] and (one[1] not in FP32_ENGINES or one[0] == other[0])


# On the vectors of their level, whatever is around the products. On Arm OpenBLAS has products of bf16 as well.
FP32_ENGINES = ("portable", "openblas")
ENGINES = _engines()


@contextmanager
def selected(level: str, engine: str) -> Iterator[None]:
    with gdn_cpu.isa_level(level) as active, gdn_cpu.gemm_engine(engine), gdn_core.use_backend("cpu"):
        assert active == level
        yield


@pytest.fixture(params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one engine after the other; yields its name."""
    with selected(*request.param):
        yield request.param[1]


@pytest.fixture(params=ENGINES, ids="-".join)
def own_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Force one engine after the other; yields a dtype of activations that it multiplies."""
    with selected(*request.param):
        yield torch.float32 if request.param[1] in FP32_ENGINES else torch.bfloat16


def run(arguments: dict[str, Any]) -> Any:
    return gdn_core.chunk_gated_delta_rule(**arguments)


@cache
def expected(**case: Any) -> Any:
    return oracle.chunk_gated_delta_rule(**to_float64(inputs.delta_rule_arguments(**case)))


def check(case: dict[str, Any], what: str = "chunk") -> None:
    """Compare a call with float64."""
    arguments = inputs.delta_rule_arguments(**case)
    o, state = run(arguments)
    expected_o, expected_state = expected(**case)
    assert packed_relative_error(o, expected_o, arguments["cu_seqlens"]) <= tolerance(what, arguments["q"].dtype)
    assert relative_error(state, expected_state, (2, 3)) <= tolerance(what, arguments["q"].dtype)


def tokens(arguments: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the arguments of some tokens of a call of one sequence."""
    part = {name: arguments[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
    return {**arguments, **part, "cu_seqlens": None}


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length(engine, dtype):
    lengths = (0, *range(1, 131), 0)
    check({"lengths": lengths, "H": 1, "HV": 2, "K": 64, "V": 48, "dtype": dtype})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("correlation, what", [(0.9, "chunk_correlated_keys"), (0.999, "chunk_parallel_keys")])
def test_similar_keys(engine, dtype, correlation, what):
    keys = {"key_correlation": correlation, "beta": 0.98, "decays": "none"}
    check({"lengths": (130, 300), "H": 1, "HV": 2, "K": 128, "V": 128, "dtype": dtype, **keys}, what)


@pytest.mark.parametrize("dims", [(33, 65), (40, 96), (100, 36), (128, 33), (256, 200), (1, 3), (65, 256)], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_odd_sizes(own_dtype, dims, state_v_first):
    K, V = dims
    case = {"lengths": (130, 0, 9, 77), "H": 2, "HV": 6, "K": K, "V": V, "state_v_first": state_v_first}
    if min(dims) < 32 and own_dtype == torch.bfloat16:
        pytest.skip("small heads are not multiplied in bf16")
    check({**case, "dtype": own_dtype})


@pytest.mark.parametrize("decays", ["none", "strong", "vanishing", "thirds", "wild"])
def test_extreme_decays(own_dtype, decays):
    what = "extreme_decays" if own_dtype == torch.float32 else "chunk"
    check({"lengths": (150, 64), "H": 1, "HV": 2, "K": 64, "V": 64, "decays": decays, "dtype": own_dtype}, what)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_states_are_rounded_once(own_dtype, state_dtype, state_v_first):
    case = {"lengths": (67, 130, 3, 64), "H": 1, "HV": 2, "K": 64, "V": 96, "dtype": own_dtype}
    arguments = inputs.delta_rule_arguments(**case, state_dtype=state_dtype, state_v_first=state_v_first)
    wide = {**arguments, "initial_state": arguments["initial_state"].float()}
    o, state = run(arguments)
    expected_o, expected_state = run(wide)
    assert same_bits(o, expected_o)
    assert same_bits(state, expected_state.to(state_dtype))


def test_states_between_chunks(own_dtype):
    case = {"lengths": (200, 0, 66, 64, 5), "H": 1, "HV": 2, "K": 64, "V": 64, "dtype": own_dtype}
    arguments = inputs.delta_rule_arguments(**case)
    o, state, chunk_states = run({**arguments, "output_chunk_states": True})
    wide = to_float64({**arguments, "output_chunk_states": True})
    expected_states = oracle.chunk_gated_delta_rule(**wide)[2]
    assert relative_error(chunk_states, expected_states, (2, 3)) <= tolerance("chunk", own_dtype)
    plain_o, plain_state = run(arguments)
    assert same_bits(o, plain_o) and same_bits(state, plain_state)


def test_beta_options(own_dtype):
    case = {"lengths": (100,), "H": 1, "HV": 2, "K": 64, "V": 64, "dtype": own_dtype}
    arguments = inputs.delta_rule_arguments(**case)
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "scale": 0.3}
    arguments |= {"beta": torch.logit(arguments["beta"]), **options}
    o, state = run(arguments)
    expected_o, expected_state = oracle.chunk_gated_delta_rule(**to_float64(arguments))
    assert relative_error(o, expected_o, (1, 3)) <= tolerance("chunk", own_dtype)
    assert relative_error(state, expected_state, (2, 3)) <= tolerance("chunk", own_dtype)


# --- isolation --------------------------------------------------------------------------------------------------------

CUTS = (0, 1, 5, 15, 16, 17, 31, 33, 47, 50, 63, 64, 65, 70, 99)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3.38e38])
def test_no_token_changes_an_earlier_output(own_dtype, name, poison):
    arguments = inputs.delta_rule_arguments((100,), 1, 2, 64, 80, dtype=own_dtype)
    o, _ = run(arguments)
    for cut in CUTS:
        changed = {**arguments, name: arguments[name].clone()}
        changed[name][:, cut:] = poison
        assert same_bits(run(changed)[0][:, :cut], o[:, :cut]), cut
        one = {**arguments, name: arguments[name].clone()}
        one[name][:, cut] = poison
        assert same_bits(run(one)[0][:, :cut], o[:, :cut]), cut


@pytest.mark.parametrize("reset", CUTS)
def test_nothing_passes_a_reset(own_dtype, reset):
    arguments = inputs.delta_rule_arguments((100,), 1, 2, 64, 80, dtype=own_dtype)
    arguments["g"][:, reset, 0] = -float("inf")
    clean_o, clean_state = run(arguments)
    poisoned = {name: arguments[name].clone() for name in ("q", "k", "v", "beta", "initial_state")}
    for name in ("q", "k", "v", "beta"):
        poisoned[name][:, :reset] = float("nan")
    poisoned["initial_state"][:] = float("nan")
    o, state = run({**arguments, **poisoned})
    assert same_bits(o[:, reset:, 0], clean_o[:, reset:, 0])
    assert same_bits(state[:, 0], clean_state[:, 0])
    assert not bool(o[:, :reset].isfinite().any())
    assert not bool(state[:, 1].isfinite().any())
    restart_o, restart_state = run({**tokens(arguments, reset, 100), "initial_state": None})
    assert relative_error(o[:, reset:, :1], restart_o[:, :, :1], (1, 3)) <= tolerance("chunk", own_dtype)
    assert relative_error(state[:, :1], restart_state[:, :1], (2, 3)) <= tolerance("chunk", own_dtype)


def test_many_resets(own_dtype):
    arguments = inputs.delta_rule_arguments((140,), 1, 2, 64, 64, dtype=own_dtype)
    arguments["g"][:, ::3, 0] = -float("inf")
    arguments["g"][:, :, 1] = -float("inf")
    o, state = run(arguments)
    expected_o, expected_state = oracle.chunk_gated_delta_rule(**to_float64(arguments))
    assert relative_error(o, expected_o, (1, 3)) <= tolerance("chunk", own_dtype)
    assert relative_error(state, expected_state, (2, 3)) <= tolerance("chunk", own_dtype)


def test_a_sequence_of_nan_stays_alone(own_dtype):
    lengths = (70, 90, 5)
    arguments = inputs.delta_rule_arguments(lengths, 1, 2, 64, 64, dtype=own_dtype)
    o, state = run(arguments)
    poisoned = {name: arguments[name].clone() for name in ("q", "k", "v")}
    for x in poisoned.values():
        x[:, 70:160] = float("nan")
    other_o, other_state = run({**arguments, **poisoned})
    for begin, end in ((0, 70), (160, 165)):
        assert same_bits(other_o[:, begin:end], o[:, begin:end])
    assert same_bits(other_state[[0, 2]], state[[0, 2]])


# --- bit for bit ------------------------------------------------------------------------------------------------------


def test_alone_as_in_a_batch(own_dtype):
    lengths = (1, 7, 8, 9, 15, 16, 17, 0, 33, 63, 64, 65, 127, 130)
    arguments = inputs.delta_rule_arguments(lengths, 2, 4, 64, 80, dtype=own_dtype)
    o, state = run(arguments)
    start = 0
    for n, length in enumerate(lengths):
        alone = tokens(arguments, start, start + length)
        alone_o, alone_state = run({**alone, "initial_state": arguments["initial_state"][n : n + 1]})
        assert same_bits(alone_o, o[:, start : start + length])
        assert same_bits(alone_state, state[n : n + 1])
        start += length


# The second and third make the plan divide columns, and take turns.
@pytest.mark.parametrize(
    "case", [((17, 64, 0, 129, 300), 2, 4, 80), ((700,), 1, 2, 128), ((1000, 40), 1, 3, 64)], ids=str
)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_any_number_of_threads(own_dtype, case, state_v_first):
    lengths, H, HV, V = case
    arguments = inputs.delta_rule_arguments(lengths, H, HV, 64, V, dtype=own_dtype, state_v_first=state_v_first)
    arguments["output_chunk_states"] = True
    torch.set_num_threads(1)
    results = run(arguments)
    for threads in THREADS[1:]:
        torch.set_num_threads(threads)
        for x, y in zip(run(arguments), results, strict=True):
            assert same_bits(x, y), threads


@pytest.mark.parametrize("state_v_first", [False, True])
def test_cut_at_multiples_of_64(own_dtype, state_v_first):
    arguments = inputs.delta_rule_arguments((197,), 1, 2, 64, 80, dtype=own_dtype, state_v_first=state_v_first)
    o, state = run(arguments)
    for ends in ((64, 197), (128, 197), (192, 197), (64, 128, 192, 197)):
        begin, between, parts = 0, arguments["initial_state"], []
        for end in ends:
            part, between = run({**tokens(arguments, begin, end), "initial_state": between})
            parts.append(part)
            begin = end
        assert same_bits(torch.cat(parts, dim=1), o)
        assert same_bits(between, state)


def test_a_pool_in_place(own_dtype):
    arguments = inputs.delta_rule_arguments((70, 9, 64, 0), 1, 2, 64, 80, dtype=own_dtype)
    o, state = run(arguments)
    guarded = inputs.guarded_pool(6, (2, 64, 80), torch.float32)
    slots = [4, 0, 5, 2]
    guarded.pool[slots] = arguments["initial_state"]
    pooled = {"initial_state": guarded.pool, "state_indices": torch.tensor(slots), "output_final_state": False}
    pooled_o, _ = run({**arguments, **pooled})
    assert same_bits(pooled_o, o)
    assert same_bits(guarded.pool[slots], state)
    guarded.check()


def test_two_callers_at_once(own_dtype):
    calls = [inputs.delta_rule_arguments((200 + 30 * i, 7), 1, 2, 64, 80, dtype=own_dtype, seed=i) for i in range(2)]
    results = [run(arguments) for arguments in calls]
    failures: list[int] = []

    def repeat(i: int) -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            if not all(same_bits(x, y) for x, y in zip(run(calls[i]), results[i], strict=True)):
                failures.append(i)

    callers = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


# --- sequences that threads share -------------------------------------------------------------------------------------


def shared_arguments(lengths: tuple[int, ...], sizes: tuple[int, ...], threads: int, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call whose plan shares a sequence among so many threads."""
    arguments = inputs.delta_rule_arguments(lengths, *sizes, **options)
    plan = gdn_cpu._C.chunk_plan(list(lengths), *sizes, threads, options["dtype"] == torch.bfloat16)
    assert plan[3] > 0
    return arguments


# Chains with a thread each, fewer and more; heads and columns that do not divide evenly; a tail that is no chunk.
@pytest.mark.parametrize("threads", [8, 12, 64])
@pytest.mark.parametrize(
    "case",
    [
        ((700,), (1, 2, 64, 128)),
        ((1000, 40), (1, 3, 128, 128)),
        ((300, 290, 9), (2, 4, 96, 80)),
        ((333,), (1, 1, 33, 65)),
    ],
    ids=str,
)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_shared_sequences(own_dtype, case, threads, state_v_first):
    state_dtype = torch.bfloat16 if state_v_first else torch.float32
    options = {"dtype": own_dtype, "state_v_first": state_v_first, "state_dtype": state_dtype}
    arguments = shared_arguments(*case, threads, **options)
    assert arguments["g"].shape[1] > 200
    # Resets within chunks and between them, and u that is not finite.
    arguments["g"][:, 70, 0] = arguments["g"][:, 64, -1] = -float("inf")
    arguments["g"][:, 130:190:7, 0] = -float("inf")
    arguments["v"][:, 77, -1, 3] = float("nan")
    arguments["v"][:, 200, -1, 5] = float("inf")
    arguments["output_chunk_states"] = True
    torch.set_num_threads(1)
    results = run(arguments)
    torch.set_num_threads(threads)
    for x, y in zip(run(arguments), results, strict=True):
        assert same_bits(x, y)


def test_more_threads_than_a_shared_sequence_has_chains(own_dtype):
    arguments = shared_arguments((520,), (1, 2, 64, 64), 192, dtype=own_dtype)
    torch.set_num_threads(1)
    results = run(arguments)
    torch.set_num_threads(192)
    for _ in range(3):
        for x, y in zip(run(arguments), results, strict=True):
            assert same_bits(x, y)


def test_two_callers_share_their_sequences(own_dtype):
    calls = [shared_arguments((400 + 90 * i,), (1, 2, 64, 80), 12, dtype=own_dtype, seed=i) for i in range(2)]
    results = [run(arguments) for arguments in calls]

    def repeat(i: int) -> bool:
        torch.set_num_threads(12)
        again = [run(calls[i]) for _ in range(10)]
        return all(same_bits(x, y) for result in again for x, y in zip(result, results[i], strict=True))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(repeat, range(2)))


# --- which engine -----------------------------------------------------------------------------------------------------


def test_an_engine_that_the_level_lacks(cpu_backend):
    arguments = inputs.delta_rule_arguments((64,), 1, 1, 64, 64, dtype=torch.bfloat16)
    bf16_engines = [engine for _, engine in ENGINES if engine not in FP32_ENGINES]
    if not bf16_engines:
        pytest.skip("no engine of bf16 here")
    out = torch.full((1, 64, 1, 64), 7.0, dtype=torch.bfloat16)
    message = f"GDN_CPU_GEMM: level baseline has no engine '{bf16_engines[0]}'"
    with selected("baseline", bf16_engines[0]), pytest.raises(ValueError, match=message):
        run({**arguments, "out": out})
    assert bool((out == 7).all())


def test_an_unknown_engine(cpu_backend):
    with (
        pytest.raises(ValueError, match="no level of this architecture has an engine 'mkl'"),
        gdn_cpu.gemm_engine("mkl"),
    ):
        pass
    assert "portable" in gdn_cpu.gemm_engines()


def test_other_dtypes_are_never_rounded_to_bfloat16(engine):
    if engine == "openblas":
        pytest.skip("multiplies them itself")
    arguments = inputs.delta_rule_arguments((130,), 1, 2, 64, 64, dtype=torch.float32)
    o, state = run(arguments)
    with gdn_cpu.gemm_engine("portable"):
        portable_o, portable_state = run(arguments)
    assert same_bits(o, portable_o) and same_bits(state, portable_state)


# --- OpenBLAS ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(cpu_backend: None) -> ctypes.CDLL:
    """Return the library, as others in the process see it."""
    if "openblas" not in gdn_cpu.gemm_engines():
        pytest.skip("scipy-openblas32 is not installed")
    return ctypes.CDLL(str(_openblas.path()))


def test_openblas_gets_its_threads_back(library):
    calls = [inputs.delta_rule_arguments((200, 70), 1, 2, 64, 80, dtype=torch.float32, seed=i) for i in range(2)]
    torch.set_num_threads(2)
    with selected("baseline", "openblas"):
        results = [run(arguments) for arguments in calls]
        for threads in (1, 3):
            library.scipy_openblas_set_num_threads(threads)
            with ThreadPoolExecutor(2) as pool:
                again = list(pool.map(run, calls * 10))
            assert library.scipy_openblas_get_num_threads() == threads
            for n, result in enumerate(again):
                assert all(same_bits(x, y) for x, y in zip(result, results[n % 2], strict=True))


def test_an_openblas_that_is_not_there(cpu_backend, monkeypatch, tmp_path):
    monkeypatch.setattr(_openblas, "path", lambda: None)
    with pytest.raises(ImportError, match="scipy-openblas32 is not installed"), gdn_cpu.gemm_engine("openblas"):
        pass
    (tmp_path / "scipy_openblas32").mkdir()
    (tmp_path / "scipy_openblas32" / "__init__.py").touch()
    program = "import gdn_core; print([b.reason for b in gdn_core.backends() if b.name == 'cpu'])"
    environment = {**os.environ, "GDN_CPU_GEMM": "openblas", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "GDN_CPU_GEMM=openblas: the package scipy-openblas32 is not installed" in done.stdout
    (tmp_path / "scipy_openblas32" / "lib").mkdir()
    (tmp_path / "scipy_openblas32" / "lib" / "libscipy_openblas.so").write_text("no library")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "GDN_CPU_GEMM=openblas: " in done.stdout and "libscipy_openblas.so" in done.stdout


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", chunk_plan_checks.THREADS)
@pytest.mark.parametrize("lengths", chunk_plan_checks.PACKS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize("heads", chunk_plan_checks.HEADS, ids=str)
@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_the_plan_keeps_every_thread_busy(cpu_backend, lengths, heads, threads, is_bfloat16):
    chunk_plan_checks.check(partial(gdn_cpu._C.chunk_plan, is_bfloat16=is_bfloat16), lengths, heads, threads)


# With estimated costs, which chunk_plan.h names.
@pytest.mark.parametrize(
    "HV, threads, cost", [(16, 64, 47), (16, 192, 28), (32, 64, 76), (32, 192, 31), (64, 64, 141), (64, 192, 57)]
)
def test_a_long_sequence_is_shared(cpu_backend, HV, threads, cost):
    time, _, chains, shared = gdn_cpu._C.chunk_plan([4096], 16, HV, 128, 128, threads, is_bfloat16=True)
    assert shared == len(chains) <= threads
    assert time < cost * 4096


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 8, 64, 192])
@pytest.mark.parametrize("HV", [16, 32, 64])
def test_workspace_is_bounded_by_threads(engine, HV, threads):
    for is_bfloat16 in (False, True):
        needed, of_short = (
            gdn_cpu._C.chunk_memory([length], 16, HV, 128, 128, threads, is_bfloat16) for length in (32768, 4096)
        )
        assert 0 < needed == of_short
        assert needed <= 64 << 20


def _peak_after_reset() -> int:
    """Return the most bytes that this process had at once since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 16])
def test_workspace_as_the_system_sees_it(cpu_backend, threads):
    arguments = inputs.delta_rule_arguments((64,), 16, 32, 128, 128, dtype=torch.bfloat16)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = torch.cat([arguments[name]] * 512, dim=1)
    arguments["cu_seqlens"] = None
    pool = arguments["initial_state"].clone()
    out = torch.zeros_like(arguments["v"])
    slots = {"state_indices": torch.tensor([0]), "output_final_state": False}
    torch.set_num_threads(threads)
    torch.zeros(1 << 22).add_(1)  # starts the threads
    _peak_after_reset()
    before = _peak_after_reset()
    with gdn_core.use_backend("cpu"):
        run({**arguments, **slots, "initial_state": pool, "out": out})
    assert _peak_after_reset() - before <= 64 << 20


# --- AMX, counted -----------------------------------------------------------------------------------------------------


def _emulator() -> ctypes.CDLL:
    """Return the AMX emulator, where this process runs on it."""
    program = ctypes.CDLL(None)
    if ("x86_amx", "amx") not in ENGINES or not hasattr(program, "amx_emulator_count"):
        pytest.skip("AMX is not emulated here")
    if program.amx_emulator_is_native():
        pytest.skip("the CPU has AMX, and does not count")
    program.amx_emulator_count.restype = ctypes.c_uint64
    return program


def test_amx_multiplies_no_more_tiles_than_it_needs():
    emulator = _emulator()
    length, K, V = 130, 128, 128
    arguments = inputs.delta_rule_arguments((length,), 1, 1, K, V, dtype=torch.bfloat16)
    emulator.amx_emulator_reset()
    with selected("x86_amx", "amx"):
        run(arguments)
    products, loads = (emulator.amx_emulator_count(name) for name in (b"TDPBF16PS", b"TILELOADD"))
    # Of a whole chunk, in tiles of 16 rows, 16 columns and 32 elements between: k k^T and q k^T up to the diagonal, k M
    # and q M, attention u up to the diagonal, k^T u. The last two tokens are run one by one.
    lower, by_state = 2 * 10 * (K // 32), 2 * 4 * (V // 16) * (K // 32)
    attention, update = (1 + 1 + 2 + 2) * (V // 16), (K // 16) * (V // 16) * 2
    needed = length // 64 * (lower + by_state + attention + update)
    assert needed <= products <= 1.1 * needed
    assert loads <= 1.25 * products
    assert emulator.amx_emulator_configured_threads() == 0
