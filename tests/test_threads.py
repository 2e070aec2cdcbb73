# SPDX-License-Identifier: Apache-2.0
"""Threads: torch's OpenMP runtime and no other, its thread count, callers at once, the GIL, and life after a fork."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from contract_calls import DECODE, RULES, TIMEOUT, call, same_bits
from gdn_core.testing import clone, inputs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and forks")

# A call of each native op that has work for 16 threads.
PRELUDE = """
    import os, re, sys, time
    import torch, gdn_core
    from gdn_core.testing import inputs

    POOLS = ("initial_state_source", "conv_states", "conv_state")

    def calls():
        yield "fused_gdn_gating", inputs.gating_arguments((40000, 8))
        yield "rms_norm_gated", inputs.norm_arguments((1024, 2, 128))
        # A pool small enough that torch copies it on one thread.
        yield "fused_sigmoid_gating_delta_rule_update", inputs.decode_arguments((1,) * 8, 2, 4, 32, 16)[0]
        for op in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            yield op, inputs.delta_rule_arguments((9, *(70,) * 7), 4, 8, 64, 64)
        yield "causal_conv1d_fn", inputs.conv_fn_arguments((9, 700), 200, 4)[0]
        yield "causal_conv1d_update", inputs.conv_update_arguments((128,) * 8, 160, 4)[0]
        yield "chunk_gated_delta_rule", inputs.delta_rule_arguments((700,), 1, 3, 64, 64)  # which threads share

    torch.set_num_threads(1)
    cases = list(calls())  # torch's own operators start no worker

    def run_all():
        results = []
        for op, arguments in cases:
            arguments = {**arguments, **{k: x.clone() for k, x in arguments.items() if k in POOLS}}
            out = getattr(gdn_core, op)(**arguments)
            results += [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        return results

    def same(results, expected):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # in a forked child torch's own operators may hang with more
        equal = all(torch.equal(x, y) for x, y in zip(results, expected))
        torch.set_num_threads(threads)
        return equal

    def runtimes():
        paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
        return sorted(path for path in paths if re.match(r"lib(gomp|omp|iomp5)[.-]", os.path.basename(path)))

    def num_tasks():
        return len(os.listdir("/proc/self/task"))
"""


def run_script(body, *, prelude=PRELUDE, timeout=TIMEOUT, **environment):
    """Run a script in a process of its own; return what it printed."""
    script = textwrap.dedent(prelude) + textwrap.dedent(body)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()


# --- one runtime ------------------------------------------------------------------------------------------------------


def test_exactly_one_openmp_runtime_is_mapped(cpu_backend):
    mapped = run_script("import gdn_cpu; run_all(); print(gdn_cpu.openmp(), *runtimes())")
    assert len(mapped) == 2, mapped
    assert Path(mapped[0]).resolve() == Path(mapped[1]).resolve()


def test_torch_set_num_threads_is_honoured(cpu_backend):
    """The workers of a team stay, one fewer than its threads: with one thread more for each op, one more worker."""
    counts = run_script(
        """
        gdn_core.use_backend("cpu")
        alone = num_tasks()
        run_all()
        print(num_tasks() - alone)
        for number, (op, arguments) in enumerate(cases):
            torch.set_num_threads(number + 2)
            getattr(gdn_core, op)(**arguments)
            print(num_tasks() - alone)
        """
    )
    assert counts == ["0", "1", "2", "3", "4", "5", "6", "7", "8"]


def _extension():
    import gdn_cpu

    return gdn_cpu._C.__file__


def _torch_runtime():
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    found += sorted(Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*"))
    if not found:
        pytest.skip("this torch brings no libgomp of its own")
    return found[0]


WITHOUT_TORCH = """
    import ctypes, importlib.util, os, sys

    def openmp(extension):
        spec = importlib.util.spec_from_file_location("gdn_cpu._C", extension)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "torch" not in sys.modules
        return module.openmp() or "none"
"""


def openmp_without_torch(*before, **environment):
    lines = "\n".join(f"ctypes.CDLL({str(path)!r}, mode=ctypes.{mode})" for path, mode in before)
    script = f"{lines}\nprint(openmp({str(_extension())!r}))"
    (path,) = run_script(script, prelude=WITHOUT_TORCH, **environment)
    return path


def test_a_runtime_that_is_mapped_but_not_global_is_used(cpu_backend, tmp_path):
    """Under a wheel's own name, which the system's search would never find."""
    renamed = shutil.copy(_torch_runtime(), tmp_path / "libgomp-0123abcd.so.1.0.0")
    assert openmp_without_torch((renamed, "RTLD_LOCAL")) == str(renamed)


def test_the_global_scope_comes_first(cpu_backend, tmp_path):
    local = shutil.copy(_torch_runtime(), tmp_path / "libgomp-0123abcd.so.1.0.0")
    shared = shutil.copy(_torch_runtime(), tmp_path / "libgomp-4567cdef.so.1.0.0")
    assert openmp_without_torch((local, "RTLD_LOCAL"), (shared, "RTLD_GLOBAL")) == str(shared)


def test_the_system_s_runtime_comes_last(cpu_backend, tmp_path):
    shutil.copy(_torch_runtime(), tmp_path / "libgomp.so.1")
    found = openmp_without_torch(LD_LIBRARY_PATH=str(tmp_path))
    assert found == str(tmp_path / "libgomp.so.1")


def test_no_runtime_at_all(cpu_backend, tmp_path, monkeypatch):
    (tmp_path / "libgomp.so.1").write_text("not a library\n")
    assert openmp_without_torch(LD_LIBRARY_PATH=str(tmp_path)) == "none"
    import gdn_cpu

    monkeypatch.setattr(gdn_cpu, "openmp", lambda: "")
    assert "OpenMP" in gdn_cpu.provider.availability()


# --- callers at once --------------------------------------------------------------------------------------------------


def some_calls():
    yield DECODE, inputs.decode_arguments((1,) * 6, 2, 4, 48, 40)[0]
    for op in RULES:
        yield op, inputs.delta_rule_arguments((9, 70), 2, 4, 48, 40, dtype=torch.bfloat16)
    yield "rms_norm_gated", inputs.norm_arguments((300, 2, 64))
    yield "fused_gdn_gating", inputs.gating_arguments((3000, 5))


def results_of(op, arguments):
    arguments = clone(arguments)
    results = call(op, arguments)
    tensors = list(results if isinstance(results, tuple) else (results,))
    return [*tensors, arguments["initial_state_source"]] if op == DECODE else tensors


def test_python_threads_at_once(native_impl):
    """Four callers with teams of their own; each call has the result that it has alone."""
    torch.set_num_threads(3)
    cases = [(op, arguments, results_of(op, arguments)) for op, arguments in some_calls()]

    def check(number):
        op, arguments, expected = cases[number % len(cases)]
        return all(same_bits(x, y) for x, y in zip(results_of(op, arguments), expected, strict=True))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(check, range(60)))


def test_other_python_threads_run_during_a_kernel(cpu_backend):
    """A counter gets on while a kernel runs; had the kernel kept the GIL, it would stand still."""
    torch.set_num_threads(1)
    arguments = inputs.delta_rule_arguments((4000,), 4, 8, 128, 128)
    started, running = threading.Event(), [True]

    def long_call():
        from gdn_core import use_backend

        with use_backend("cpu"):
            started.set()
            call("fused_recurrent_gated_delta_rule", arguments)
        running[0] = False

    thread = threading.Thread(target=long_call)
    ticks = 0
    thread.start()
    started.wait()
    while running[0]:
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks >= 10


# --- after a fork -----------------------------------------------------------------------------------------------------


def test_a_forked_child_computes_right_and_alone(cpu_backend):
    """The parent's workers do not exist in the child, where an OpenMP region would wait for them for ever."""
    lines = run_script(
        """
        torch.set_num_threads(4)
        gdn_core.use_backend("cpu")
        expected = run_all()
        pid = os.fork()
        if pid == 0:
            alone = num_tasks()  # an emulator may have a thread of its own
            results = run_all()
            os._exit(0 if num_tasks() == alone and same(results, expected) else 1)
        deadline = time.monotonic() + 20
        while (state := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if state[0] == 0:
            os.kill(pid, 9)
        print("exited", os.waitstatus_to_exitcode(state[1]) if state[0] else "never")
        print("parent", same(run_all(), expected))
        """
    )
    assert lines == ["exited", "0", "parent", "True"]


def test_multiprocessing_with_fork(cpu_backend):
    """Several workers at once, forked from a process that has used its threads."""
    lines = run_script(
        """
        import multiprocessing
        torch.set_num_threads(3)
        gdn_core.use_backend("cpu")
        expected = run_all()

        def work(number):
            return same(run_all(), expected)

        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(*pool.map_async(work, range(4)).get(timeout=20))
        """
    )
    assert lines == ["True"] * 4
