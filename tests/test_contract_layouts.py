# SPDX-License-Identifier: Apache-2.0
"""Strides and dtypes of inputs and outputs of the recurrence: views of one projection, and worse."""

from __future__ import annotations

import math

import pytest
import torch

from contract_calls import DECODE, FLOATS, RULES, agree, call, untouched
from gdn_core.testing import clone, inputs, oracle, relative_error, to_float64, tolerance

H, HV, K, V = 2, 4, 12, 20
OPS = (DECODE, *RULES)


def build(op, dtype=torch.float32, **options):
    """Arguments of packed tensors: sequences of 3, 1 and 5 tokens."""
    if op == DECODE:
        return inputs.decode_arguments((3, 1, 5), H, HV, K, V, dtype=dtype, is_packed=True, **options)[0]
    return inputs.delta_rule_arguments((3, 1, 5), H, HV, K, V, dtype=dtype, is_packed=True, **options)


def results_of(op, arguments):
    """Return every result: o and the states."""
    if op == DECODE:
        arguments = {**arguments, "initial_state_source": arguments["initial_state_source"].clone()}
        return call(op, arguments), arguments["initial_state_source"]
    return call(op, arguments)


def every_other(x, dim):
    """The same values with NaN between them along `dim`."""
    return torch.stack([x, torch.full_like(x, math.nan)], dim=dim + 1).flatten(dim, dim + 1)[
        (slice(None),) * dim + (slice(None, None, 2),)
    ]


def heads_first(x):
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def reversed_layout(x):
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def offset_by_one(x):
    """Aligned to its element and to nothing more."""
    buffer = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
    return buffer[1:].view(x.shape).copy_(x)


VIEWS = {
    "heads first": heads_first,
    "reversed": reversed_layout,
    "misaligned": offset_by_one,
    "last dimension strided": lambda x: every_other(x, x.dim() - 1),
    "heads strided": lambda x: every_other(x, x.dim() - 2),
    "tokens strided": lambda x: every_other(x, x.dim() - 3),
}
GATE_VIEWS = {
    "reversed": reversed_layout,
    "misaligned": offset_by_one,
    "heads strided": lambda x: every_other(x, x.dim() - 1),
    "tokens strided": lambda x: every_other(x, x.dim() - 2),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_of_q_k_v(impl, op, view, dtype):
    arguments = build(op, dtype)
    expected = results_of(op, arguments)
    for names in (("q",), ("k",), ("v",), ("q", "k", "v")):
        strided = {**arguments, **{name: VIEWS[view](arguments[name]) for name in names}}
        with untouched(strided):
            results = results_of(op, strided)
        assert all(agree(impl, x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", GATE_VIEWS)
def test_any_strides_of_the_gates(impl, op, view):
    arguments = build(op)
    expected = results_of(op, arguments)
    names = ("a", "b") if op == DECODE else ("g", "beta")
    strided = {**arguments, **{name: GATE_VIEWS[view](arguments[name]) for name in names}}
    with untouched(strided):
        results = results_of(op, strided)
    assert all(agree(impl, x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_of_one_projection(impl, op, dtype):
    """q, k, v, a and b as slices of one row, its pitch no multiple of a vector, NaN in the columns between."""
    arguments = build(op, dtype)
    gates = ("a", "b") if op == DECODE else ("g", "beta")
    parts = [arguments[name].reshape(9, -1).to(dtype) for name in ("q", "k", "v", *gates)]
    gap = torch.full((9, 1), math.nan, dtype=dtype)
    row = torch.cat([piece for part in parts for piece in (gap, part)], dim=1)
    views, column = {}, 0
    for name, part in zip(("q", "k", "v", *gates), parts, strict=True):
        columns = row[:, column + 1 : column + 1 + part.shape[1]]
        column += 1 + part.shape[1]
        shape = arguments[name].shape
        views[name] = columns.unflatten(1, shape[2:])[None] if len(shape) > 2 else columns
    packed = {**arguments, **{name: view.contiguous() for name, view in views.items()}}
    strided = {**arguments, **views}
    assert all(view.data_ptr() != packed[name].data_ptr() and not view.is_contiguous() for name, view in views.items())
    with untouched(strided):
        results = results_of(op, strided)
    assert all(agree(impl, x, y) for x, y in zip(results, results_of(op, packed), strict=True))


@pytest.mark.parametrize("op", OPS)
def test_expanded_inputs(impl, op):
    """One q, k, v for all tokens and one gate for all heads: strides of 0."""
    arguments = build(op)
    gates = ("a", "b") if op == DECODE else ("g", "beta")
    expanded = dict(arguments)
    for name in ("q", "k", "v"):
        expanded[name] = arguments[name][:, :1].expand_as(arguments[name])
    for name in gates:
        expanded[name] = arguments[name][..., :1].expand_as(arguments[name])
    packed = {name: x.contiguous() if name in ("q", "k", "v", *gates) else x for name, x in expanded.items()}
    results = results_of(op, expanded)
    assert all(agree(impl, x, y) for x, y in zip(results, results_of(op, packed), strict=True))


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_any_strides_of_an_initial_state_that_is_only_read(impl, op, state_v_first):
    arguments = build(op, state_v_first=state_v_first)
    expected = call(op, arguments)
    for view in (reversed_layout, offset_by_one, lambda x: x.mT.contiguous().mT, lambda x: every_other(x, 1)):
        strided = {**arguments, "initial_state": view(arguments["initial_state"])}
        with untouched(strided):
            results = call(op, strided)
        assert all(agree(impl, x, y) for x, y in zip(results, expected, strict=True))
    one = {**arguments, "initial_state": arguments["initial_state"][:1].expand_as(arguments["initial_state"])}
    packed = {**one, "initial_state": one["initial_state"].contiguous()}
    assert all(agree(impl, x, y) for x, y in zip(call(op, one), call(op, packed), strict=True))


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_out_of_any_activation_dtype(impl, op, dtype, out_dtype):
    """o is rounded once, to out's dtype: an fp32 out shows no rounding to the activation dtype."""
    arguments = build(op, dtype)
    wide = to_float64(arguments)
    expected = getattr(oracle, op)(**wide)
    expected = expected if op == DECODE else expected[0]
    full = torch.full((1, 9, HV, V), math.nan)
    results_of(op, {**arguments, "out": full})
    bound = tolerance("decode_output" if op != RULES[0] else "chunk", torch.float32)
    assert relative_error(full, expected, (1, 3)) <= bound
    out = torch.full((1, 9, HV, V), math.nan, dtype=out_dtype)
    o = results_of(op, {**arguments, "out": out})[0]
    assert o is out
    assert agree(impl, out, full.to(out_dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_of_any_strides_and_nothing_around_it(impl, op, dtype):
    arguments = build(op, dtype)
    arguments["cu_seqlens"] = torch.tensor([1, 3, 4, 8])  # tokens 0 and 8 belong to no row
    expected = results_of(op, arguments)[0]
    canvas = torch.full((2, HV + 2, 11, V + 3), 7.0, dtype=dtype)
    for view in (canvas[:1, 1:-1, 1:10, 2:-1].transpose(1, 2), canvas[1:, 1 : HV + 1, :9, :V].transpose(1, 2)):
        o = results_of(op, {**arguments, "out": view})[0]
        assert o.data_ptr() == view.data_ptr()
        assert agree(impl, o.contiguous(), expected)
        view.fill_(7.0)
        assert bool((canvas == 7.0).all())


@pytest.mark.parametrize("op", RULES)
def test_out_of_a_batch_with_strides(impl, op):
    arguments = inputs.delta_rule_arguments((5, 5), H, HV, K, V, is_dense=True)
    expected = call(op, arguments)
    canvas = torch.full((5, 2, HV + 1, V + 1), 7.0)
    out = canvas[:, :, :HV, 1:].transpose(0, 1)
    o, final_state = call(op, {**arguments, "out": out})
    assert agree(impl, o.contiguous(), expected[0])
    assert agree(impl, final_state, expected[1])
    out.fill_(7.0)
    assert bool((canvas == 7.0).all())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes_and_shapes_of_results(impl, op, dtype):
    for state_dtype in FLOATS:
        for v_first in (False, True):
            arguments = clone(build(op, dtype, state_dtype=state_dtype, state_v_first=v_first))
            o, state = results_of(op, arguments)
            assert (o.dtype, o.shape) == (dtype, (1, 9, HV, V))
            assert o.is_contiguous()
            assert (state.dtype, state.shape[1:]) == (state_dtype, (HV, V, K) if v_first else (HV, K, V))
    if op != DECODE:
        without = {**arguments, "initial_state": None}
        assert call(op, without)[1].dtype == torch.float32
        assert call(op, {**without, "output_final_state": False})[1] is None
        assert call(op, {**arguments, "output_final_state": False})[1] is None


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_pool_is_updated_and_not_returned(impl, op, state_v_first):
    arguments = build(op, state_v_first=state_v_first)
    expected = call(op, arguments)
    pool = torch.full((5, *arguments["initial_state"].shape[1:]), 7.0)
    slots = torch.tensor([3, 0, 4])
    pool[slots] = arguments["initial_state"]
    o, final_state = call(op, {**arguments, "initial_state": pool, "state_indices": slots})
    assert final_state is None
    assert agree(impl, o, expected[0])
    assert agree(impl, pool[slots], expected[1])
    assert bool((pool[[1, 2]] == 7.0).all())
