# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the C++ of the chunked rule, each of which these checks have to find.

All are compiled at once, into copies of the headers: a number says which one is in force.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from contract_calls import same_bits
from gdn_core.testing import inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance

SOURCES = Path(__file__).resolve().parents[1] / "packages" / "gdn-cpu" / "csrc"
KERNELS = SOURCES / "kernels"
SCALE = 0.2
GUARD = 1024  # values behind what is written


class Fault(NamedTuple):
    """What stands in a header of the kernel in place of an expression, or of a statement."""

    name: str
    header: str
    old: str
    new: str

    def text(self, number: int) -> str:
        if self.old.endswith(";"):
            return f"if (planted == {number}) {{ {self.new} }} else {{ {self.old} }}"
        return f"(planted == {number} ? {self.new} : {self.old})"


FAULTS = (
    Fault("a token sees the next one", "decays.h", "static_cast<float>(i) + 0.5f", "static_cast<float>(i) + 1.5f"),
    Fault("a token does not see itself", "decays.h", "static_cast<float>(i) + 0.5f", "static_cast<float>(i) - 0.5f"),
    Fault(
        "a part sees the token before it",
        "decays.h",
        "static_cast<float>(segment.begin) - 0.5f",
        "static_cast<float>(segment.begin) - 1.5f",
    ),
    Fault("the mixing has no beta", "decays.h", "-chunk.beta[i] * key.k_factor[i]", "-key.k_factor[i]"),
    Fault("a decay of the row before", "decays.h", "decays.from_last[block][i]", "decays.from_last[block][i - 1]"),
    Fault("a decay of the next row", "decays.h", "load(decays.to_last + j)", "load(decays.to_last + j + 1)"),
    Fault(
        "sums of g in one part", "decays.h", "static_cast<float>(sum - static_cast<double>(chunk.sum_high[i]))", "0.0f"
    ),
    Fault(
        "k of the update is as it came", "decays.h", "mul(exp(difference), load(key.k_factor + i))", "exp(difference)"
    ),
    Fault("rows beside a part are not cleared", "decays.h", "clear_outside(segment, kTokens, chunk.mixing);", ""),
    Fault("factors beside a part are not cleared", "decays.h", "clear_outside(segment, 1, chunk.end_factor);", ""),
    Fault(
        "rows of the last chunk are not cleared",
        "key_operands.h",
        "clear_rows(rows + count * padded, (round_up(count, kRowBlock) - count) * padded);",
        "",
    ),
    Fault("keys beyond the last are not zero", "key_operands.h", "load_n(x + i, dim - i)", "load(x + i)"),
    Fault(
        "q is multiplied in place of k",
        "key_operands.h",
        "multiply_lower<Engine, kRows>(key.k, key.k_columns, row, padded, key.kk);",
        "multiply_lower<Engine, kRows>(key.q, key.k_columns, row, padded, key.kk);",
    ),
    Fault("v has no beta", "rows.h", "task.chunk.beta[row + r]", "1.0f"),
    Fault(
        "the state decays as for the first row",
        "rows.h",
        "-task.chunk.state_factor[row + r] * task.key.k_factor[row + r]",
        "-task.chunk.state_factor[row] * task.key.k_factor[row + r]",
    ),
    Fault(
        "outputs decay as the first row",
        "rows.h",
        "task.chunk.state_factor[row + r] * task.key.q_factor[row + r]",
        "task.chunk.state_factor[row] * task.key.q_factor[row + r]",
    ),
    Fault("u decays as its first row", "rows.h", "task.chunk.end_factor[row + r + i]", "task.chunk.end_factor[row]"),
    Fault("the solve leaves out a row", "rows.h", "s + 1 < kRows", "s + 2 < kRows"),
    Fault("a masked NaN is multiplied", "rows.h", "!is_finite(check)", "false"),
    Fault(
        "outputs overrun their columns",
        "rows.h",
        "store_as(out.dtype, out.data, index + j * kLanes, x[r][j], task.columns - j * kLanes);",
        "store_as(out.dtype, out.data, index + j * kLanes, x[r][j], kLanes);",
    ),
    Fault(
        "the state does not decay",
        "state.h",
        "fma(set1(update.decay), load(values), x[r + i][j])",
        "add(load(values), x[r + i][j])",
    ),
    Fault(
        "states overrun their columns",
        "state.h",
        "return {state, state.data + key * state.key_stride + column * state.column_stride, p.key_dim - key, "
        "columns - column};",
        "return {state, state.data + key * state.key_stride + column * state.column_stride, p.key_dim - key, kLanes};",
    ),
    Fault("states overrun their rows", "state.h", "min_of(kKeys, block.keys)", "kKeys"),
    Fault(
        "all heads share the first q and k",
        "chunk_rule.h",
        "key_head_of(params, head) != key_head_of(params, head - 1)",
        "false",
    ),
    Fault(
        "k before a part is multiplied",
        "chunk_rule.h",
        "if (is_whole_span(segment, count)) return work.key.k_steps + first;",
        "return work.key.k_steps + first;",
    ),
    Fault("u before a part is multiplied", "chunk_rule.h", "clear_before(segment);", ""),
    Fault(
        "a reset keeps the state",
        "chunk_rule.h",
        "if (segment.is_reset) work.has_state[head - task.head_begin] = false;",
        "",
    ),
    Fault(
        "what resets cut is taken as whole",
        "chunk_rule.h",
        "is_whole_span(segment, count_of_step()) && !segment.is_reset",
        "true",
    ),
    Fault(
        "a step forgets that there was a state",
        "chunk_rule.h",
        "kept.summary->has_state = work.has_state[0];",
        "kept.summary->has_state = false;",
    ),
    Fault(
        "a step starts from the next state",
        "chunk_rule.h",
        "work.states[0].packed = kept.state;",
        "work.states[0].packed = next_kept.state != nullptr ? next_kept.state : kept.state;",
    ),
    Fault("outputs of a span from the state before the chunk", "chunk_rule.h", "work.states[0] = computed;", ""),
    Fault(
        "u updates a state again without its decays", "rows.h", "mul(load(chunk.u + i), factor)", "load(chunk.u + i)"
    ),
    Fault(
        "a state decays again as in the first span",
        "chunk_rule.h",
        "work.chunk.summary->decay[segment.begin / Engine::kSpan]",
        "1.0f",
    ),
    Fault("a span has no state before it", "chunk_rule.h", "is_from_state = true;", ""),
    Fault(
        "a span decays as the first one",
        "chunk_rule.h",
        "work.chunk.summary->decay[begin / Engine::kSpan]",
        "work.chunk.summary->decay[0]",
    ),
    Fault(
        "what is not finite before the last span is forgotten",
        "chunk_rule.h",
        "of.segment.begin == 0 ? not_finite : blocks | not_finite",
        "not_finite",
    ),
    Fault(
        "u is kept elsewhere",
        "chunk_rule.h",
        "work.chunk.u_packed = kept.u;",
        "work.chunk.u_packed = kept.u - kTokens;",
    ),
    Fault("the last value head's operands", "workspace.h", "i <= head", "i <= 1"),
    Fault("what is not finite is forgotten", "rows.h", "(not_finite >> (block / kRowBlock) & 1u) != 0", "false"),
    Fault("a turn starts from the call's state", "chunk_rule.h", "task.carried_in != nullptr", "false"),
    Fault(
        "v of the first columns",
        "chunk_rule.h",
        "element_index(params.v, row.batch, token, of.head) + task.v_begin",
        "element_index(params.v, row.batch, token, of.head)",
    ),
)


class Call(ctypes.Structure):
    """What chunk_kernel.cpp calls so."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("sequences", "H", "HV", "K", "V", "columns", "turn", "parts", "state_v_first")
        ),
        *((name, ctypes.c_void_p) for name in ("offsets", "slots", "q", "k", "v", "g", "beta", "out", "states")),
    ]


def _with_faults() -> dict[Path, str]:
    """Return the text of each header with its faults."""
    texts = {KERNELS / "chunk" / fault.header: "" for fault in FAULTS}
    texts = {path: path.read_text() for path in texts}
    for number, fault in enumerate(FAULTS, start=1):
        path = KERNELS / "chunk" / fault.header
        assert texts[path].count(fault.old) == 1, fault.name
        texts[path] = texts[path].replace(fault.old, fault.text(number))
    return texts


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Call], None]:
    """Compile the kernel as far as the baseline goes, with every fault."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("chunk")
    shutil.copytree(KERNELS, folder / "kernels")
    for path, text in _with_faults().items():
        (folder / path.relative_to(SOURCES)).write_text(text)
    library = folder / "chunk.so"
    command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-DGDN_ISA=baseline", f"-I{folder}"]
    subprocess.run([*command, str(Path(__file__).parent / "chunk_kernel.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).chunk_rule
    return lambda fault, call: function(fault, ctypes.byref(call))


class Checks:
    """The checks, of the kernel with one fault or none."""

    def __init__(self, kernel: Callable[[int, Call], None], fault: int) -> None:
        self.kernel, self.fault = kernel, fault

    def run(
        self, arguments: dict[str, Any], columns: int = 1 << 20, turn: int = 0, parts: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and states, from memory that NaN surrounds; from and to no state unless `has_states`."""
        q, k, v, g, beta = (arguments[name].contiguous() for name in ("q", "k", "v", "g", "beta"))
        bounds, initial = arguments["cu_seqlens"].long(), arguments["initial_state"]
        slots = torch.arange(len(initial)) if arguments.get("has_states", True) else torch.full((len(initial),), -1)
        out, states = (torch.full((x.numel() + GUARD,), float("nan")) for x in (v, initial))
        states[: initial.numel()] = initial.flatten()
        dims = (len(initial), q.shape[2], v.shape[2], q.shape[3], v.shape[3])
        pointers = (x.data_ptr() for x in (bounds, slots, q, k, v, g, beta, out, states))
        self.kernel(self.fault, Call(*dims, columns, turn, parts, int(arguments["state_v_first"]), *pointers))
        assert bool(out[v.numel() :].isnan().all() and states[initial.numel() :].isnan().all())
        return out[: v.numel()].view_as(v), states[: initial.numel()].view_as(initial)

    def values(self) -> None:
        for case in CASES:
            arguments, expected_o, expected_states = _expected(**case)
            o, states = self.run(arguments)
            limit = tolerance("extreme_decays" if "decays" in case else "chunk", torch.float32)
            assert packed_relative_error(o, expected_o, arguments["cu_seqlens"]) <= limit
            assert relative_error(states, expected_states, (2, 3)) <= limit

    def division(self) -> None:
        for case in CASES:
            arguments = inputs.delta_rule_arguments(**case)
            whole = self.run(arguments)
            for columns, turn in ((16, 0), (32, 64), (1 << 20, 128)):
                assert all(map(same_bits, self.run(arguments, columns, turn), whole))

    def parts(self) -> None:
        for case in CASES:
            arguments = inputs.delta_rule_arguments(**case)
            clean = self.run(arguments)
            arguments["v"] = arguments["v"].clone()
            arguments["v"][:, 12, 0, 3] = float("inf")
            for changed, whole in ((arguments, self.run(arguments)), (inputs.delta_rule_arguments(**case), clean)):
                for columns, parts in ((16, 1), (16, 2), (1 << 20, 2)):
                    assert all(map(same_bits, self.run(changed, columns, 0, parts), whole))
            stateless = {**arguments, "has_states": False}
            assert all(map(same_bits, self.run(stateless, 16, 0, 2), self.run(stateless)))
            for reset in (0, 20, 64):
                cut = {**arguments, "g": arguments["g"].clone()}
                cut["g"][:, reset, 0] = -float("inf")
                assert all(map(same_bits, self.run(cut, 16, 0, 2), self.run(cut)))

    def isolation(self) -> None:
        arguments = inputs.delta_rule_arguments((100, 70), 1, 2, 37, 45)
        o, states = self.run(arguments)
        for name, cut in ((name, cut) for name in ("q", "k", "v", "beta") for cut in (1, 17, 62, 75)):
            changed = {**arguments, name: arguments[name].clone()}
            changed[name][:, cut:100] = float("nan")
            other_o, other_states = self.run(changed)
            assert same_bits(other_o[:, :cut], o[:, :cut])
            assert same_bits(other_o[:, 100:], o[:, 100:])
            assert same_bits(other_states[1], states[1])

    def resets(self) -> None:
        for reset in (0, 5, 31, 64, 90):
            arguments = inputs.delta_rule_arguments((100, 3), 1, 2, 37, 45)
            arguments["g"][:, reset, 0] = -float("inf")
            o, states = self.run(arguments)
            poisoned = {name: arguments[name].clone() for name in ("q", "k", "v", "beta", "initial_state")}
            for name in ("q", "k", "v", "beta"):
                poisoned[name][:, :reset] = float("nan")
            poisoned["initial_state"][0] = float("nan")
            other_o, other_states = self.run({**arguments, **poisoned})
            assert bool(o.isfinite().all())
            assert same_bits(other_o[:, reset:, 0], o[:, reset:, 0])
            assert same_bits(other_states[:, 0].nan_to_num(), states[:, 0].nan_to_num())

    def __iter__(self) -> Iterator[Callable[[], None]]:
        yield from (self.values, self.division, self.parts, self.isolation, self.resets)


CASES: tuple[dict[str, Any], ...] = (
    {"lengths": (130, 5, 81), "H": 2, "HV": 4, "K": 37, "V": 45},
    {"lengths": (70, 64), "H": 1, "HV": 2, "K": 32, "V": 48, "state_v_first": True},
    {"lengths": (150,), "H": 1, "HV": 2, "K": 64, "V": 32, "decays": "thirds"},
)


@cache
def _expected_of(case: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], Tensor, Tensor]:
    arguments = {**inputs.delta_rule_arguments(**dict(case)), "scale": SCALE}
    o, states = oracle.chunk_gated_delta_rule(**to_float64(arguments))
    return arguments, o, states


def _expected(**case: Any) -> tuple[dict[str, Any], Tensor, Tensor]:
    return _expected_of(tuple(case.items()))


def finds_a_fault(checks: Checks) -> bool:
    try:
        for check in checks:
            check()
    except AssertionError:
        return True
    return False


def test_the_kernel_as_it_is(kernel):
    for check in Checks(kernel, 0):
        check()


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=lambda n: FAULTS[n - 1].name.replace(" ", "_"))
def test_a_planted_fault_is_found(kernel, number):
    assert finds_a_fault(Checks(kernel, number))
