# SPDX-License-Identifier: Apache-2.0
"""rms_norm_gated: ``y = x * rsqrt(mean(x * x) + eps) * weight * act(gate)``, fp32 until the store."""

from __future__ import annotations

import math

import pytest
import torch

import gdn_core
from contract_calls import FLOATS, THREADS, agree, call, same_bits, untouched
from gdn_core.testing import inputs, oracle, relative_error, to_float64, tolerance

OP = "rms_norm_gated"
SIZES = (1, 3, 16, 48, 64, 80, 96, 128, 256, 300)


def check(arguments, y):
    """Each row is a slice of its own."""
    expected = oracle.rms_norm_gated(**to_float64(arguments))
    assert relative_error(y, expected, -1) <= tolerance("gated_norm", y.dtype, slice_size=y.shape[-1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "activation"), list(zip(FLOATS, ("silu", "swish", "sigmoid"), strict=True)), ids=str)
def test_values(impl, size, dtype, activation):
    arguments = inputs.norm_arguments((3, 2, size), dtype=dtype, activation=activation, seed=size)
    with untouched(arguments):
        y = call(OP, arguments)
    assert y.dtype == dtype
    check(arguments, y)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_activations_in_fp32(impl, activation):
    arguments = inputs.norm_arguments((4, 2, 70), activation=activation)
    check(arguments, call(OP, arguments))


def test_without_an_activation_the_gate_is_not_read(impl):
    arguments = inputs.norm_arguments((4, 2, 70), activation="none")
    arguments["gate"].fill_(torch.nan)
    check(arguments, call(OP, arguments))


def test_silu_is_the_default(impl):
    arguments = inputs.norm_arguments((2, 64), activation="silu")
    expected = call(OP, arguments)
    del arguments["activation"]
    assert same_bits(call(OP, arguments), expected)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-5, 0.5])
def test_eps_is_the_caller_s(impl, eps):
    """With a mean square near 1e-6, a wrong eps shows."""
    arguments = inputs.norm_arguments((5, 64), eps=eps)
    arguments["x"] *= 1e-3
    check(arguments, call(OP, arguments))


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_weights_of_any_dtype_and_stride(impl, weight_dtype):
    arguments = inputs.norm_arguments((3, 40), dtype=torch.bfloat16)
    weight = arguments["weight"].to(weight_dtype)
    arguments["weight"] = torch.stack([weight, weight * torch.nan], dim=-1)[:, 0]
    check(arguments, call(OP, arguments))


def test_x_gate_and_out_of_different_dtypes(impl):
    arguments = inputs.norm_arguments((3, 2, 80))
    arguments["x"] = arguments["x"].bfloat16()
    arguments["gate"] = arguments["gate"].half()
    out = torch.full((3, 2, 80), torch.nan)
    y = call(OP, {**arguments, "out": out})
    assert y is out
    check(arguments, y)  # rounded to fp32, not to bf16 on the way
    for dtype in FLOATS:
        rounded = torch.full((3, 2, 80), torch.nan, dtype=dtype)
        call(OP, {**arguments, "out": rounded})
        assert agree(impl, rounded, out.to(dtype))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 0, 64), (1, 64), (2, 3, 4, 64), (2, 1, 3, 2, 2, 64)], ids=str)
def test_any_leading_shape(impl, shape):
    arguments = inputs.norm_arguments(shape)
    y = call(OP, arguments)
    assert y.shape == shape
    check(arguments, y)


def _views(shape):
    """Views of x and gate, by name: what models pass, and worse."""
    arguments = inputs.norm_arguments(shape)
    x, gate = arguments["x"], arguments["gate"]
    T, HV, V = shape
    wide = torch.full((T, HV * V + 9), torch.nan)
    wide[:, 4 : 4 + HV * V] = gate.flatten(1)
    yield "gate of a projection", x, wide[:, 4 : 4 + HV * V].view(T, HV, V)
    yield "heads first", x.transpose(0, 1).contiguous().transpose(0, 1), gate
    yield "last dimension strided", torch.stack([x, x * torch.nan], -1)[..., 0], gate
    yield "both transposed", x.mT.contiguous().mT, gate.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    yield "expanded", x[:1].expand(T, HV, V), gate[:, :1].expand(T, HV, V)
    yield "every other token", torch.stack([x, x * torch.nan], 1)[:, 0], torch.stack([gate, gate], 1)[:, 1]


@pytest.mark.parametrize("number", range(6))
def test_any_strides(impl, number):
    arguments = inputs.norm_arguments((5, 3, 48))
    _, x, gate = list(_views((5, 3, 48)))[number]
    packed = {**arguments, "x": x.contiguous(), "gate": gate.contiguous()}
    strided = {**arguments, "x": x, "gate": gate}
    assert not (x.is_contiguous() and gate.is_contiguous())
    with untouched(strided):
        y = call(OP, strided)
    assert agree(impl, y, call(OP, packed))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_out_of_any_strides_and_nothing_around_it(impl, dtype):
    arguments = inputs.norm_arguments((5, 3, 48))
    canvas = torch.full((3, 7, 60), 7.0, dtype=dtype)
    out = canvas[:, 1:6, 4:52].transpose(0, 1)
    assert call(OP, {**arguments, "out": out}) is out
    assert agree(impl, out.contiguous(), call(OP, arguments).to(dtype))
    out.fill_(7.0)
    assert bool((canvas == 7.0).all())


@pytest.mark.parametrize("alias", ["x", "gate"])
@pytest.mark.parametrize("size", [20, 128, 256])
def test_out_may_be_an_input(impl, alias, size):
    arguments = inputs.norm_arguments((4, 2, size), dtype=torch.bfloat16)
    expected = call(OP, arguments)
    y = call(OP, {**arguments, "out": arguments[alias]})
    assert y is arguments[alias]
    assert same_bits(y, expected)


def test_more_leading_dimensions_than_a_kernel_merges():
    """An unforced call succeeds whatever the strides; which backend ran it is what `explain` says."""
    x = torch.randn(2, 2, 2, 2, 2, 2, 8).permute(5, 4, 3, 2, 1, 0, 6)
    gate, out = torch.randn(2, 2, 2, 2, 2, 2, 8), torch.full((2, 2, 2, 2, 2, 2, 8), torch.nan)
    arguments = {"x": x, "gate": gate, "weight": torch.rand(8), "eps": 1e-6, "out": out}
    explained = gdn_core.explain(OP, **arguments).backend
    with gdn_core.record_calls() as calls:
        check({name: value for name, value in arguments.items() if name != "out"}, call(OP, arguments))
    assert calls == {(OP, explained): 1}


def test_zeros_give_zeros(impl):
    arguments = inputs.norm_arguments((2, 64))
    y = call(OP, {**arguments, "x": torch.zeros(2, 64)})
    assert bool((y == 0).all())


def test_large_and_small_gates(impl):
    """Sigmoid of a large negative gate underflows to 0, and its SiLU with it: neither is NaN."""
    arguments = inputs.norm_arguments((6, 64))
    arguments["gate"] = torch.tensor([-1e4, -88.0, -20.0, 20.0, 88.0, 1e4])[:, None].expand(6, 64)
    for activation in ("silu", "sigmoid"):
        y = call(OP, {**arguments, "activation": activation})
        expected = oracle.rms_norm_gated(**to_float64({**arguments, "activation": activation}))
        torch.testing.assert_close(y.double(), expected, rtol=3e-6, atol=1e-35)


@pytest.mark.parametrize("name", ["x", "gate"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_stays_alone(impl, name, bad):
    arguments = inputs.norm_arguments((5, 3, 48))
    clean = call(OP, arguments)
    arguments[name][2, 1, 30] = bad
    spoiled = call(OP, arguments)
    others = torch.ones(5, 3, dtype=torch.bool)
    others[2, 1] = False
    assert same_bits(clean[others], spoiled[others])
    assert not bool(spoiled[2, 1].isfinite().all())


@pytest.mark.parametrize("size", [3, 48, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_their_company(native_impl, size, dtype):
    arguments = inputs.norm_arguments((170, 3, size), dtype=dtype)
    torch.set_num_threads(1)
    everything = call(OP, arguments)
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert same_bits(call(OP, arguments), everything)
    for rows in (slice(0, 1), slice(63, 66), slice(169, 170)):
        for heads in (slice(0, 3), slice(2, 3)):
            some = {**arguments, "x": arguments["x"][rows, heads], "gate": arguments["gate"][rows, heads]}
            assert same_bits(call(OP, some), everything[rows, heads])
