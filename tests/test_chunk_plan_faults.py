# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the plan of the chunked rule, each of which the checks of plans have to find."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import chunk_plan_checks

SOURCES = Path(__file__).resolve().parents[1] / "packages" / "gdn-cpu" / "csrc"
PLAN = SOURCES / "runtime" / "chunk_plan.cpp"
MOST_CHAINS = 1 << 15


class Fault(NamedTuple):
    name: str
    old: str
    new: str


FAULTS = (
    Fault(
        "heads that do not fill a span are left out",
        "first < work.num_value_heads; first += span",
        "first < span; first += span",
    ),
    Fault(
        "columns after the first tile are left out",
        "v < work.value_dim; v += division.columns",
        "v < division.columns; v += division.columns",
    ),
    Fault(
        "shared sequences lack a key head",
        "first < work.num_value_heads; first += group",
        "first + group < work.num_value_heads; first += group",
    ),
    Fault(
        "shared heads lack their last columns",
        "std::min(v + columns, work.value_dim)",
        "std::min(v + columns, work.value_dim - 1)",
    ),
    Fault("sequences beside shared ones are left out", "if (is_shared || work.lengths[n] == 0)", "if (n > 0)"),
    Fault("nothing is shared", "has_shared = !shared.plan.chains.empty()", "has_shared = false"),
    Fault("shared chains compute all their outputs", "if (chains < work.threads)", "if (false)"),
    Fault(
        "tiles overlap",
        "std::min(v + division.columns, work.value_dim)",
        "std::min(v + division.columns + 16, work.value_dim)",
    ),
    Fault("columns are never divided", "columns > work.column_step;)", "columns > work.value_dim;)"),
    Fault("only whole chains", "{std::int64_t{0}, kTurnChunks * kChunkTokens}", "{std::int64_t{0}}"),
    Fault("the coarsest plan is taken", "if (!is_better(candidate, best_estimate)) continue;", "continue;"),
    Fault("a balanced plan has to be faster too", "candidate.time <= kAcceptable", "candidate.time <= 0.5"),
    Fault("what is left of a chain is forgotten", "previous->token_end < plan_.chains", "0 > plan_.chains"),
)


def load(source: Path, folder: Path):
    """Compile that plan; return it with the signature of gdn_cpu's own."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler")
    library = folder / "plan.so"
    others = (Path(__file__).parent / "chunk_plan.cpp", PLAN.with_name("chunk_schedule.cpp"))
    sources = [str(source), *map(str, others)]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{SOURCES}", *sources, "-o", str(library)]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).chunk_plan
    function.restype = ctypes.c_int64

    def plan(lengths, H, HV, K, V, threads):
        time, work = ctypes.c_double(), (ctypes.c_double * threads)()
        chains = (ctypes.c_int64 * (6 * MOST_CHAINS))()
        sizes = [ctypes.c_int64(size) for size in (len(lengths), H, HV, K, V)]
        results = (ctypes.byref(time), work, chains)
        counted = function((ctypes.c_int64 * len(lengths))(*lengths), *sizes, threads, *results, MOST_CHAINS)
        return time.value, list(work), [tuple(chains[6 * i : 6 * i + 6]) for i in range(counted)], 0

    return plan


def is_right(plan) -> bool:
    for case in itertools.product(chunk_plan_checks.PACKS, chunk_plan_checks.HEADS, chunk_plan_checks.THREADS):
        try:
            chunk_plan_checks.check(plan, *case)
        except AssertionError:
            return False
    return True


@pytest.mark.slow
def test_the_plan_as_it_is(tmp_path):
    assert is_right(load(PLAN, tmp_path))


@pytest.mark.slow  # compiles each
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_is_found(fault, tmp_path):
    text = PLAN.read_text()
    assert text.count(fault.old) == 1
    source = tmp_path / PLAN.name
    source.write_text(text.replace(fault.old, fault.new))
    assert not is_right(load(source, tmp_path))
