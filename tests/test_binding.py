# SPDX-License-Identifier: Apache-2.0
"""How tensors get into the kernels: both ways through DLPack, tensors without plain memory, and the levels."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import gdn_core
from contract_calls import DECODE, RULES, TIMEOUT, call, same_bits, small_call, untouched
from gdn_core.testing import clone, inputs

gdn_cpu = pytest.importorskip("gdn_cpu")
_C = gdn_cpu._C

CONV, CONV_UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
NATIVE = ("fused_gdn_gating", "rms_norm_gated", DECODE, *RULES, CONV, CONV_UPDATE)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[True, False], ids=["exchange-table", "dlpack-method"])
def path(request):
    """Take tensors through torch's exchange table, where it has one, and through `__dlpack__`."""
    _C.use_exchange_api(request.param)
    if request.param and not _C.has_exchange_api():
        pytest.skip("this torch has no exchange table")
    assert _C.has_exchange_api() == request.param
    with gdn_core.use_backend("cpu"):
        yield
    _C.use_exchange_api(True)


def tensors_of(results, arguments):
    """Return every tensor that a call returned or may have written to."""
    returned = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    return [*returned, *(x for x in arguments.values() if isinstance(x, torch.Tensor))]


def both_paths(op, arguments):
    """Return the tensors of a call through either path."""
    outcomes = []
    for enabled in (True, False):
        own = clone(arguments)
        _C.use_exchange_api(enabled)
        try:
            outcomes.append(tensors_of(call(op, own), own))
        finally:
            _C.use_exchange_api(True)
    return outcomes


@pytest.mark.parametrize("op", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_paths_give_the_same_bits(op, dtype):
    with gdn_core.use_backend("cpu"):
        fast, slow = both_paths(op, small_call(op, dtype))
    assert len(fast) == len(slow)
    for x, y in zip(fast, slow, strict=True):
        assert torch.equal(x, y) if not x.is_floating_point() else same_bits(x, y)


def wrong_calls(op):
    """Yield (label, arguments) of calls that fail."""
    good = small_call(op)
    for name, value in good.items():
        if isinstance(value, torch.Tensor):
            for label, bad in (("None", None), ("text", "x"), ("int16", value.to(torch.int16)), ("dims", value[None])):
                yield f"{name}: {label}", {**good, name: bad}
            yield f"{name}: complex", {**good, name: value.to(torch.complex64)}


@pytest.mark.parametrize("op", NATIVE)
def test_both_paths_raise_the_same_errors(op):
    for label, arguments in wrong_calls(op):
        texts = []
        for enabled in (True, False):
            _C.use_exchange_api(enabled)
            try:
                with torch.no_grad(), gdn_core.use_backend("cpu"):
                    call(op, clone(arguments))
                texts.append("nothing")
            except (TypeError, ValueError) as error:
                texts.append(f"{type(error).__name__}: {error}")
            finally:
                _C.use_exchange_api(True)
        assert texts[0] == texts[1], label


@pytest.mark.parametrize("op", NATIVE)
def test_parameters_without_a_gradient(op, path):
    arguments = small_call(op)
    expected = tensors_of(call(op, own := clone(arguments)), own)
    parameters = clone(arguments)
    for name, x in parameters.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and name not in ("out", *POOLS):
            parameters[name] = torch.nn.Parameter(x)
    with torch.no_grad():
        results = tensors_of(call(op, parameters), parameters)
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


POOLS = ("initial_state", "initial_state_source", "conv_states", "conv_state")


@pytest.mark.parametrize("op", NATIVE)
def test_empty_tensors(op, path):
    """What has no elements may have no memory."""
    if op in RULES:
        arguments = inputs.delta_rule_arguments((0, 0), 1, 2, 3, 4)
    elif op == DECODE:
        arguments, _ = inputs.decode_arguments((0,), 1, 2, 3, 4)
    elif op in (CONV, CONV_UPDATE):
        make = inputs.conv_fn_arguments if op == CONV else inputs.conv_update_arguments
        arguments, _ = make((0, 0), 3, 4)
    else:
        make = inputs.norm_arguments if op == "rms_norm_gated" else inputs.gating_arguments
        arguments = make((0, 4))
    results = call(op, arguments)
    assert (results[0] if isinstance(results, tuple) else results).numel() == 0


@pytest.mark.parametrize("op", NATIVE)
def test_no_reference_to_an_argument_is_kept(op, path):
    """Neither after a call, nor after a failed one, nor where a copy was made."""
    arguments = small_call(op)
    strided = {
        name: torch.stack([x, x], -1)[..., 0] if name in ("q", "k", "v", "a", "b", "x", "gate") else x
        for name, x in arguments.items()
    }
    for use in (arguments, strided):
        call(op, use)
        before = [sys.getrefcount(x) for x in use.values()]
        for _ in range(5):
            call(op, use)
            with pytest.raises((TypeError, ValueError)), torch.no_grad():
                call(op, {**use, next(reversed(use)): "no tensor"})
        assert [sys.getrefcount(x) for x in use.values()] == before


# --- tensors without plain memory -------------------------------------------------------------------------------------


def negated_view(x):
    """A tensor that reads as x and is stored as -x, with torch's lazy negation."""
    lazy = torch._neg_view(-x)
    assert lazy.is_neg() and torch.equal(lazy, x)
    return lazy


def float_arguments(op):
    return [name for name, x in small_call(op).items() if isinstance(x, torch.Tensor) and x.is_floating_point()]


@pytest.mark.parametrize("op", NATIVE)
def test_lazily_negated_arguments(op, path):
    """The kernel declines what is not stored as it reads, before anything changes; an unforced call is right."""
    for name in float_arguments(op):
        arguments, expected_arguments = small_call(op), small_call(op)
        with gdn_core.use_backend(None):
            expected = call(op, expected_arguments)
        lazy = {**arguments, name: negated_view(arguments[name])}
        with untouched(lazy), pytest.raises(NotImplementedError, match=rf"\b{name}\b"):
            call(op, lazy)
        with gdn_core.use_backend(None):
            results = call(op, lazy)
        for x, y in zip(tensors_of(results, lazy), tensors_of(expected, expected_arguments), strict=True):
            torch.testing.assert_close(x.resolve_neg(), y, rtol=1e-5, atol=1e-6)


def broken_storage(x):
    """A tensor whose memory is gone: null, yet not empty."""
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    assert gone.numel() > 0
    return gone


class Captured(TorchDispatchMode):
    """Keep the arguments of the gdn op that a public call reaches, and do not run it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "gdn":
            return function(*args, **(kwargs or {}))
        self.arguments = args
        return None


@pytest.mark.parametrize("op", NATIVE)
def test_kernels_decline_what_has_no_memory(op, path):
    sparse, meta = (lambda x: x.contiguous().to_sparse()), (lambda x: x.to("meta"))
    reason = r": (not a dense tensor|is not on the CPU|a tensor subclass)"
    arguments = small_call(op)
    with Captured() as captured:
        call(op, arguments)
    flat = captured.arguments
    for name in float_arguments(op):
        position = next(i for i, x in enumerate(flat) if x is arguments[name])
        for make in (broken_storage, meta, sparse, FakeTensorMode().from_tensor):
            spoiled = [*flat[:position], make(flat[position]), *flat[position + 1 :]]
            for dry_run in (True, False):
                with pytest.raises(NotImplementedError, match=reason):
                    getattr(_C, op)(*spoiled, dry_run=dry_run)


class Logged(torch.Tensor):
    """A subclass without data of its own: everything has to go through its dispatch."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        inner_args, inner_kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        result = function(*inner_args, **inner_kwargs)
        return tree_map_only(torch.Tensor, cls, result)


@pytest.mark.parametrize("op", NATIVE)
def test_subclasses_are_dispatched(op):
    arguments, expected_arguments = small_call(op), small_call(op)
    expected = call(op, expected_arguments)
    Logged.seen.clear()
    names = [name for name in ("q", "k", "v", "x", "gate") if name in arguments] or ["a", "b"]
    wrapped = {**arguments, **{name: Logged(arguments[name]) for name in names}}
    results = call(op, wrapped)
    assert f"gdn.{op}.default" in Logged.seen
    wrapped = {name: x.inner if isinstance(x, Logged) else x for name, x in wrapped.items()}
    results = tree_map_only(Logged, lambda x: x.inner, results)
    for x, y in zip(tensors_of(results, wrapped), tensors_of(expected, expected_arguments), strict=True):
        assert torch.equal(x, y)


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("op", NATIVE)
def test_a_subclass_that_changes_nothing(op):
    arguments, expected_arguments = small_call(op), small_call(op)
    expected = call(op, expected_arguments)
    for name in float_arguments(op):
        if name not in ("out", *POOLS):
            arguments[name] = arguments[name].as_subclass(Plain)
    results = call(op, arguments)
    for x, y in zip(tensors_of(results, arguments), tensors_of(expected, expected_arguments), strict=True):
        torch.testing.assert_close(x.as_subclass(torch.Tensor), y, rtol=1e-5, atol=1e-6)


def test_numbers_of_numpy_and_torch(impl):
    """Where a Python number is expected, what converts to one is as good."""
    arguments, _ = inputs.decode_arguments((1, 1), 1, 2, 8, 4)
    plain = {**clone(arguments), "scale": 0.5, "null_slot": 3, "softplus_beta": 2.0, "use_qk_l2norm_in_kernel": True}
    other = {**clone(arguments), "scale": numpy.float32(0.5), "null_slot": numpy.int64(3)}
    other |= {"softplus_beta": numpy.float64(2.0), "use_qk_l2norm_in_kernel": numpy.bool_(True)}
    assert same_bits(call(DECODE, other), call(DECODE, plain))
    assert same_bits(other["initial_state_source"], plain["initial_state_source"])


# --- levels -----------------------------------------------------------------------------------------------------------


def supported():
    return [level.name for level in gdn_cpu.levels() if level.supported]


def test_the_levels_and_their_reasons():
    levels = gdn_cpu.levels()
    assert levels[0].name == "baseline"
    assert levels[0].supported
    known = ["baseline", "x86_v3", "x86_v4", "x86_v4_bf16", "x86_amx"], ["baseline", "arm_bf16"]
    assert [level.name for level in levels] in known
    for level in levels:
        assert level.kernels in [lower.name for lower in levels]
        assert level.supported == (level.reason is None)
    assert sum(level.active for level in levels) == 1
    (cpu,) = [backend for backend in gdn_core.backends() if backend.name == "cpu"]
    assert cpu.level == next(level.name for level in levels if level.active)
    assert cpu.details["levels"].split(", ") == supported()


def active():
    return next(level.name for level in gdn_cpu.levels() if level.active)


@pytest.mark.skipif("x86_v4_bf16" not in supported(), reason="needs AVX512-BF16")
def test_dot_products_of_bf16_are_preferred_where_they_are_faster():
    """Intel's take as long for one product as two fused multiply-adds of fp32."""
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    expected = ["portable", "avx512_bf16"] if is_intel else ["avx512_bf16", "portable"]
    for level, tiles in ("x86_v4_bf16", []), ("x86_amx", ["amx"]):
        if level not in supported():
            continue
        with gdn_cpu.isa_level(level):
            assert [name for name in gdn_cpu.gemm_engines() if name != "openblas"] == tiles + expected
            first = (tiles + expected)[0]
            (cpu,) = [backend for backend in gdn_core.backends() if backend.name == "cpu"]
            assert cpu.details["products"] == f"{first} for bf16, portable for fp32 and fp16"


def test_isa_level_caps_and_restores():
    before = active()
    for name in supported():
        with gdn_cpu.isa_level(name) as level:
            assert level == active() == name
            with gdn_cpu.isa_level("baseline"):
                assert active() == "baseline"
            assert active() == name
        assert active() == before
    with pytest.raises(ZeroDivisionError), gdn_cpu.isa_level("baseline"):
        1 / 0  # noqa: B018
    assert active() == before


def test_isa_level_of_a_machine_that_lacks_it():
    """The machine's own limit holds: the highest level below is used."""
    names = [level.name for level in gdn_cpu.levels()]
    with gdn_cpu.isa_level(names[-1]) as level:
        assert level == supported()[-1]


def test_isa_level_of_no_name():
    before = active()
    with pytest.raises(ValueError, match="'x86_v9'"), gdn_cpu.isa_level("x86_v9"):
        pass
    assert active() == before


def run_with(script, **environment):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=TIMEOUT, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_the_environment_caps_the_level():
    cap = supported()[min(1, len(supported()) - 1)]
    printed = run_with(
        f"""
        import gdn_core, gdn_cpu
        (cpu,) = [x for x in gdn_core.backends() if x.name == "cpu"]
        print(cpu.available, cpu.level)
        with gdn_cpu.isa_level("baseline") as level:
            print(level)
        print(gdn_cpu._C.active_level())
        with gdn_cpu.isa_level("{supported()[-1]}") as level:
            print(level)
        """,
        GDN_CPU_ISA=cap,
    )
    assert printed.split() == ["True", cap, "baseline", cap, supported()[-1]]


def test_an_unknown_cap_makes_the_backend_unavailable():
    printed = run_with(
        """
        import gdn_core, torch
        (cpu,) = [x for x in gdn_core.backends() if x.name == "cpu"]
        print("available", cpu.available)
        print("reason", cpu.reason)
        with gdn_core.record_calls() as calls:
            gdn_core.rms_norm_gated(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6)
        print(*calls)
        try:
            gdn_core.use_backend("cpu")
        except RuntimeError as error:
            print("forced", error)
        """,
        GDN_CPU_ISA="avx9",
    )
    lines = dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)
    assert lines["available"] == "False"
    for text in (lines["reason"], lines["forced"]):
        assert "GDN_CPU_ISA" in text
        assert "'avx9'" in text
        assert all(level.name in text for level in gdn_cpu.levels())
    assert "('rms_norm_gated', 'reference')" in printed
    assert printed.count("gdn runs on the slow reference") == 1  # the warning
