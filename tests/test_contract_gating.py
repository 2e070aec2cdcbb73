# SPDX-License-Identifier: Apache-2.0
"""fused_gdn_gating: ``g = -exp(A_log) * softplus(a + dt_bias)``, ``beta = sigmoid(b)``, both fp32."""

from __future__ import annotations

import math

import pytest
import torch

from contract_calls import FLOATS, THREADS, agree, call, same_bits, untouched
from gdn_core.testing import inputs, oracle, relative_error, to_float64, tolerance

OP = "fused_gdn_gating"


def check(arguments, results):
    """Every value on its own, which is a sequence of one token."""
    expected = oracle.fused_gdn_gating(**to_float64(arguments))
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual[None], wanted[None], 0) <= tolerance("gating", torch.float32)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 16, 17, 48])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values(impl, num_heads, dtype):
    arguments = inputs.gating_arguments((7, num_heads), dtype=dtype, seed=num_heads)
    with untouched(arguments):
        results = call(OP, arguments)
    check(arguments, results)


@pytest.mark.parametrize("A_log_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dt_bias_dtype", FLOATS, ids=str)
def test_head_vectors_of_any_dtype_and_stride(impl, A_log_dtype, dt_bias_dtype):
    arguments = inputs.gating_arguments((5, 6), dtype=torch.bfloat16)
    A_log, dt_bias = arguments["A_log"].to(A_log_dtype), arguments["dt_bias"].to(dt_bias_dtype)
    arguments["A_log"] = torch.stack([A_log, A_log * 0], dim=-1)[:, 0]
    arguments["dt_bias"] = torch.stack([dt_bias * 0, dt_bias], dim=-1)[:, 1]
    assert arguments["A_log"].stride() == arguments["dt_bias"].stride() == (2,)
    check(arguments, call(OP, arguments))


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 0, 6), (1, 6), (2, 3, 6), (2, 3, 2, 6)], ids=str)
def test_any_leading_shape(impl, shape):
    arguments = inputs.gating_arguments(shape)
    g, beta = call(OP, arguments)
    assert g.shape == beta.shape == shape
    check(arguments, (g, beta))


def test_a_and_b_of_different_dtypes(impl):
    arguments = inputs.gating_arguments((5, 6))
    arguments["b"] = arguments["b"].bfloat16()
    check(arguments, call(OP, arguments))


def test_any_strides(impl):
    packed = {name: x.contiguous() for name, x in inputs.gating_arguments((2, 3, 6)).items()}
    expected = call(OP, packed)
    strided = dict(packed)
    strided["a"] = torch.empty(6, 2, 3).permute(1, 2, 0).copy_(packed["a"])
    strided["b"] = torch.full((2, 3, 12), torch.nan)[..., ::2].copy_(packed["b"])
    assert strided["a"].stride(-1) == 6 and strided["b"].stride(-1) == 2
    with untouched(strided):
        results = call(OP, strided)
    assert all(agree(impl, x, y) for x, y in zip(results, expected, strict=True))


def test_an_expanded_input(impl):
    arguments = inputs.gating_arguments((1, 6))
    expected = call(OP, arguments)
    arguments["a"], arguments["b"] = arguments["a"].expand(4, 6), arguments["b"].expand(4, 6)
    for actual, wanted in zip(call(OP, arguments), expected, strict=True):
        assert agree(impl, actual, wanted.expand(4, 6))


def test_beta_is_not_rounded_to_the_activation_dtype(impl):
    b = torch.full((1, 2), 0.5, dtype=torch.bfloat16)
    _, beta = call(OP, {"A_log": torch.zeros(2), "a": b, "b": b, "dt_bias": torch.zeros(2)})
    assert torch.allclose(beta, torch.full((1, 2), 0.62245935), rtol=2e-7, atol=0)


@pytest.mark.parametrize("a", [-100.0, -87.5, -30.0, -16.0, -15.0, -1e-3, 0.0, 1e-3, 14.0, 19.99, 20.01, 88.0, 1e4])
def test_softplus_over_its_whole_range(impl, a):
    arguments = {"A_log": torch.tensor([-9.0, -1.0, 0.0, 2.75]), "dt_bias": torch.tensor([0.0, -1e-2, 1e-2, 0.5])}
    arguments |= {"a": torch.full((1, 4), a), "b": torch.full((1, 4), a)}
    g, beta = call(OP, arguments)
    expected_g, expected_beta = oracle.fused_gdn_gating(**to_float64(arguments))
    # Below the smallest normal number nothing has a relative error.
    tiny = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(g.double(), expected_g, rtol=2e-6, atol=tiny)
    torch.testing.assert_close(beta.double(), expected_beta, rtol=2e-6, atol=tiny)
    assert bool((g <= 0).all())


@pytest.mark.parametrize(("softplus_beta", "softplus_threshold"), [(1.0, 20.0), (0.5, 20.0), (3.0, 20.0), (1.0, 2.0)])
def test_softplus_parameters(impl, softplus_beta, softplus_threshold):
    arguments = inputs.gating_arguments((9, 6), spread=5.0)
    arguments |= {"softplus_beta": softplus_beta, "softplus_threshold": softplus_threshold}
    check(arguments, call(OP, arguments))


def test_the_threshold_applies_to_the_scaled_input(impl):
    """Beyond it, softplus is the identity: 3 * 4 > 10, while 3 * 3 < 10 is not."""
    arguments = {"A_log": torch.zeros(2), "a": torch.tensor([[4.0, 3.0]]), "b": torch.zeros(1, 2)}
    arguments |= {"dt_bias": torch.zeros(2), "softplus_beta": 3.0, "softplus_threshold": 10.0}
    g, _ = call(OP, arguments)
    assert g[0, 0].item() == -4.0
    assert g[0, 1].item() == pytest.approx(-math.log1p(math.exp(9.0)) / 3, rel=2e-7)
    assert g[0, 1].item() != -3.0


@pytest.mark.parametrize(("A_log", "a"), [(100.0, -200.0), (80.0, -1000.0), (500.0, -120.0), (0.0, -200.0)])
def test_an_underflowing_softplus_beats_an_overflowing_rate(impl, A_log, a):
    arguments = {"A_log": torch.tensor([A_log]), "a": torch.tensor([[a]]), "b": torch.zeros(1, 1)}
    g, _ = call(OP, {**arguments, "dt_bias": torch.zeros(1)})
    assert g.exp().item() == 1.0
    assert math.copysign(1.0, g.item()) == -1.0


@pytest.mark.parametrize(("A_log", "a"), [(89.0, 0.0), (100.0, 5.0), (1000.0, 30.0)])
def test_an_overflowing_rate_is_a_reset(impl, A_log, a):
    arguments = {"A_log": torch.tensor([A_log]), "a": torch.tensor([[a]]), "b": torch.zeros(1, 1)}
    g, _ = call(OP, {**arguments, "dt_bias": torch.zeros(1)})
    assert g.exp().item() == 0.0


@pytest.mark.parametrize(("A_log", "a"), [(100.0, -80.0), (95.0, -85.0), (88.0, -20.0)])
def test_the_product_may_be_small_where_the_rate_overflows(impl, A_log, a):
    """exp(100) is no fp32 number, exp(100) * exp(-80) is one."""
    arguments = {"A_log": torch.tensor([A_log]), "a": torch.tensor([[a]]), "b": torch.zeros(1, 1)}
    arguments["dt_bias"] = torch.zeros(1)
    g, _ = call(OP, arguments)
    expected = oracle.fused_gdn_gating(**to_float64(arguments))[0]
    torch.testing.assert_close(g.exp().double(), expected.exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_stays_where_it_is(impl, bad):
    arguments = {name: x.contiguous() for name, x in inputs.gating_arguments((5, 19)).items()}
    clean = call(OP, arguments)
    arguments["a"][2, 7] = arguments["b"][2, 7] = bad
    spoiled = call(OP, arguments)
    others = torch.ones(5, 19, dtype=torch.bool)
    others[2, 7] = False
    for before, after in zip(clean, spoiled, strict=True):
        assert same_bits(before[others], after[others])
    if math.isnan(bad):
        assert all(x[2, 7].isnan() for x in spoiled)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_and_heads_do_not_depend_on_their_company(native_impl, dtype):
    arguments = inputs.gating_arguments((27000, 5), dtype=dtype)  # enough for several threads
    torch.set_num_threads(1)
    everything = call(OP, arguments)
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert all(same_bits(x, y) for x, y in zip(call(OP, arguments), everything, strict=True))
    for row in (0, 1, 12345, 26999):
        alone = call(OP, {**arguments, "a": arguments["a"][row : row + 1], "b": arguments["b"][row : row + 1]})
        assert all(same_bits(x[0], y[row]) for x, y in zip(alone, everything, strict=True))
    for head in range(5):
        columns = slice(head, head + 1)
        alone = {name: x[..., columns] for name, x in arguments.items()}
        results = call(OP, alone)
        assert all(same_bits(x, y[:, columns]) for x, y in zip(results, everything, strict=True))
