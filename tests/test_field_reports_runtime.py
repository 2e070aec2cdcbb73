# SPDX-License-Identifier: Apache-2.0
"""Faults of processors, threads and OpenMP that others had."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import gdn_core
from gdn_core.testing import inputs
from report_calls import DECODE, GATING, NORM, RULES, expect, on, run

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run_python(code, **env):
    """Run `code` in a new interpreter and return what it printed as JSON."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GDN_", "OMP_"))} | env
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.report("D05")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on(DECODE)
def test_every_level_keeps_the_state_in_fp32(impl, op, dtype):
    """Dot products of bf16 in hardware, with tiles or without, must not round the state."""
    arguments, guarded = inputs.decode_arguments([64], 1, 2, 128, 128, dtype=dtype)
    _, wide = expect(op, arguments)
    run(op, arguments)
    pool = guarded.pool.double()
    assert guarded.pool.dtype == torch.float32
    assert float((pool - wide["initial_state_source"]).norm() / pool.norm()) <= 2e-6


@pytest.mark.report("D05")
def test_a_level_is_used_only_where_all_that_it_needs_is_there(cpu_backend):
    import gdn_cpu

    levels = gdn_cpu.levels()
    active = next(level for level in levels if level.active)
    assert active.supported
    for level in levels:
        assert level.supported == (level.reason is None)
        with gdn_cpu.isa_level(level.name) as used:
            assert next(x for x in levels if x.name == used).supported


@pytest.mark.report("D11")
@on("chunk_gated_delta_rule")
def test_prefill_calls_nothing_of_torch_a_chunk(impl, op):
    """bf16 costs what fp32 costs, a long prompt what a short one does: no conversions, no LAPACK, in any number."""
    if not impl.is_native:
        pytest.skip("the reference is made of torch's operations")
    used = {}
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (64, 512):
            arguments = inputs.delta_rule_arguments([tokens], 2, 4, 128, 128, dtype=dtype)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                run(op, arguments)
            names = {event.key: event.count for event in profile.key_averages()}
            used[dtype, tokens] = {name: count for name, count in names.items() if name.startswith("aten::")}
    assert used[torch.bfloat16, 512]  # outputs are allocated, and so are seen
    assert len({tuple(sorted(counts.items())) for counts in used.values()}) == 1
    # A torch without the exchange table hands out its tensors by views of them.
    views = () if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else ("aten::detach", "aten::as_strided")
    assert all(name.startswith(("aten::empty", *views)) for name in used[torch.bfloat16, 512]), used


EVERY_OP = """
    import json, sys
    import torch, gdn_core, gdn_cpu
    from gdn_core.testing import inputs

    def calls():
        yield "fused_gdn_gating", inputs.gating_arguments((3, 5))
        yield "rms_norm_gated", inputs.norm_arguments((3, 9))
        yield "fused_sigmoid_gating_delta_rule_update", inputs.decode_arguments([1, 2], 1, 2, 17, 9)[0]
        yield "fused_recurrent_gated_delta_rule", inputs.delta_rule_arguments([3, 70], 1, 2, 17, 9)
        yield "chunk_gated_delta_rule", inputs.delta_rule_arguments([3, 70], 1, 2, 17, 9)

    level = next(x.name for x in gdn_cpu.levels() if x.active)
    with gdn_core.record_calls() as counts:
        for op, arguments in calls():
            getattr(gdn_core, op)(**arguments)
    print(json.dumps([level, sorted(map(list, counts))]))
"""


@pytest.mark.report("D06")
@pytest.mark.parametrize("level", ["baseline", "x86_v3", "x86_v4"])
def test_every_native_op_exists_on_older_processors(cpu_backend, level):
    import gdn_cpu

    known = {x.name: x for x in gdn_cpu.levels()}
    if level not in known:
        pytest.skip("levels of another architecture")
    used, counts = run_python(EVERY_OP, GDN_CPU_ISA=level)
    assert used == level or not known[level].supported
    assert {name for _, name in counts} == {"cpu"}
    assert {op for op, _ in counts} == {GATING, NORM, DECODE, *RULES}


THREADS = """
    import json, os, torch
    import gdn_core
    from gdn_core.testing import inputs

    def count():
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(3)
    torch.ones(3000, 3000).sum()  # torch's own team of three, from the OpenMP runtime that is shared
    start = count()
    arguments = inputs.delta_rule_arguments([70] * 6, 2, 4, 32, 32)
    counts = []
    for _ in range(10):
        gdn_core.chunk_gated_delta_rule(**arguments)
        counts.append(count())
    print(json.dumps([start, counts]))
"""


@linux
@pytest.mark.report("D07")
def test_prefill_starts_no_threads_of_its_own(cpu_backend):
    """The heads are the parallel work: nothing inside of a head may start a team for itself."""
    start, counts = run_python(THREADS, GDN_BACKEND="cpu")
    assert len(set(counts)) == 1, "the number of threads grows"
    assert counts[0] <= start + 2, "more than one team of three"


MAPS = """
    import json, re, torch
    {first}
    import gdn_core
    torch.ones(1000, 1000).sum()
    x = torch.ones(64, 512)
    gdn_core.rms_norm_gated(x, x, x[0], 1e-6)
    paths = {{line.split()[-1] for line in open("/proc/self/maps") if "/" in line}}
    print(json.dumps(sorted(p for p in paths if re.search(r"lib(gomp|iomp5|omp)[-.\\w]*$", p))))
"""


@linux
@pytest.mark.report("D08")
@pytest.mark.parametrize("first", ["import gdn_cpu", "pass"])
def test_one_openmp_runtime_is_mapped(cpu_backend, first):
    import gdn_cpu

    mapped = run_python(textwrap.dedent(MAPS).format(first=first))
    assert len(mapped) == 1
    assert os.path.realpath(gdn_cpu.openmp()) == os.path.realpath(mapped[0])


@pytest.mark.slow
@pytest.mark.report("D10")
@pytest.mark.parametrize("state_v_first", [False, True])
def test_decode_moves_its_states_at_a_fair_part_of_the_speed_of_a_copy(cpu_backend, state_v_first):
    """A walk across the rows of a state would cost a cache line an element, several times this bound."""
    torch.set_num_threads(1)
    arguments, guarded = inputs.decode_arguments([1] * 32, 8, 16, 128, 128, state_v_first=state_v_first)
    target = torch.empty_like(guarded.pool)

    def fastest(function):
        times = []
        for _ in range(15):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    with gdn_core.use_backend("cpu"):
        decode = fastest(lambda: run(DECODE, arguments))
    # Both read and write every state once.
    assert decode <= 8 * fastest(lambda: target.copy_(guarded.pool))
