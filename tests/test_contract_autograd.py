# SPDX-License-Identifier: Apache-2.0
"""Gradients: functional calls differentiate through the reference, calls that update a state raise, none detaches."""

from __future__ import annotations

import logging

import pytest
import torch

import gdn_core
from contract_calls import RULES, call, same_bits, small_call, untouched
from gdn_core.testing import inputs

CHUNK, RECURRENT = RULES
POOL_OPS = tuple(op for op in gdn_core.OPS if op not in ("fused_gdn_gating", "rms_norm_gated"))
FUNCTIONAL = ("fused_gdn_gating", "rms_norm_gated", "causal_conv1d_fn", *RULES, "recurrent with gates")


def functional_call(name, dtype=torch.float32):
    """Return (op, arguments) of a call that writes nothing but what it returns."""
    if name == "fused_gdn_gating":
        return name, inputs.gating_arguments((3, 4), dtype=dtype)
    if name == "rms_norm_gated":
        return name, inputs.norm_arguments((3, 2, 5), dtype=dtype)
    if name == "causal_conv1d_fn":
        arguments, _ = inputs.conv_fn_arguments((5, 5), 3, 4, is_dense=True, dtype=dtype)
        plain = {key: arguments[key] for key in ("x", "weight", "bias", "activation")}
        history = inputs.normal((2, 3, 3), inputs.generator(1), dtype)
        return name, {**plain, "initial_states": history, "return_final_states": True}
    arguments = inputs.delta_rule_arguments((3, 4), 1, 2, 3, 4, dtype=dtype, state_dtype=dtype)
    if name != "recurrent with gates":
        return name, arguments
    gates = inputs.gating_arguments(arguments["g"].shape, dtype=dtype, spread=1.0)
    arguments |= {"g": gates["a"], "beta": gates["b"], "A_log": gates["A_log"], "dt_bias": gates["dt_bias"]}
    return RECURRENT, {**arguments, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def float_inputs(arguments):
    return {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


def outputs_of(function, arguments):
    results = function(**arguments)
    return [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]


def gradients(function, arguments, names):
    """Return the gradients of a fixed weighted sum of all outputs, with respect to `names`."""
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in names}
    outputs = outputs_of(function, {**arguments, **leaves})
    total = sum((x.double() * torch.linspace(-1, 1, x.numel()).double().view(x.shape)).sum() for x in outputs)
    return dict(zip(names, torch.autograd.grad(total, list(leaves.values())), strict=True))


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_gradients_are_the_reference_s(name, backend):
    op, arguments = functional_call(name)
    names = list(float_inputs(arguments))
    expected = gradients(getattr(gdn_core.reference, op), arguments, names)
    with gdn_core.use_backend(backend), gdn_core.record_calls() as calls:
        actual = gradients(getattr(gdn_core, op), arguments, names)
    assert calls == {(op, "reference"): 1}
    for key in names:
        assert same_bits(actual[key], expected[key]), key
        assert bool((actual[key] != 0).any()), key
        assert bool(actual[key].isfinite().all()), key


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_no_input_is_silently_detached(name):
    """Each input alone, since one that requires a gradient hides another that was forgotten."""
    op, arguments = functional_call(name)
    together = gradients(getattr(gdn_core, op), arguments, list(float_inputs(arguments)))
    for key in float_inputs(arguments):
        alone = gradients(getattr(gdn_core, op), arguments, [key])[key]
        torch.testing.assert_close(alone, together[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_gradients_are_right(name):
    op, arguments = functional_call(name, torch.float64)
    names = list(float_inputs(arguments))

    def function(*leaves):
        return tuple(outputs_of(getattr(gdn_core, op), {**arguments, **dict(zip(names, leaves, strict=True))}))

    leaves = [arguments[key].detach().clone().requires_grad_() for key in names]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("op", RULES)
def test_gradients_of_the_options(op):
    """What the gradient path passes on: layout, fresh rows, doubled beta, chunk states."""
    arguments = inputs.delta_rule_arguments((3, 66), 1, 2, 3, 4, state_v_first=True)
    arguments |= {"has_initial_state": torch.tensor([False, True]), "allow_neg_eigval": True, "scale": 0.7}
    arguments |= {"use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": False}
    arguments["k"] = arguments["k"] * 0.1
    if op == CHUNK:
        arguments["output_chunk_states"] = True
    with torch.no_grad():
        expected = call(op, arguments)
    arguments["q"] = arguments["q"].detach().clone().requires_grad_()
    results = call(op, arguments)
    assert results[0].requires_grad
    assert len(results) == len(expected)
    for actual, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_bf16_gradients_keep_the_dtype(name):
    op, arguments = functional_call(name, torch.bfloat16)
    for key, gradient in gradients(getattr(gdn_core, op), arguments, list(float_inputs(arguments))).items():
        assert gradient.dtype == arguments[key].dtype
        assert bool(gradient.isfinite().all())


def test_the_warning_comes_once_with_the_remedy(cpu_backend, caplog):
    op, arguments = functional_call("rms_norm_gated")
    arguments["weight"] = torch.nn.Parameter(arguments["weight"])
    with caplog.at_level(logging.DEBUG, logger="gdn_core"):
        for _ in range(3):
            call(op, arguments)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert op in record.getMessage()
    assert "torch.no_grad()" in record.getMessage()


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_parameters_run_natively(name, mode, cpu_backend, caplog):
    op, arguments = functional_call(name)
    expected = outputs_of(getattr(gdn_core, op), arguments)
    for key, x in float_inputs(arguments).items():
        arguments[key] = torch.nn.Parameter(x)
    with mode(), gdn_core.record_calls() as calls, caplog.at_level(logging.WARNING, logger="gdn_core"):
        results = outputs_of(getattr(gdn_core, op), arguments)
    assert calls == {(op, "cpu"): 1}
    assert not caplog.records
    assert all(same_bits(x, y) and not x.requires_grad for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_forced_backend_without_a_gradient_raises(name, cpu_backend):
    op, arguments = functional_call(name)
    for key, x in float_inputs(arguments).items():
        needs = {**arguments, key: x.detach().clone().requires_grad_()}
        with gdn_core.use_backend("cpu"), pytest.raises(NotImplementedError, match=r"gradient.*torch\.no_grad"):
            call(op, needs)
        explained = gdn_core.explain(op, **needs)
        assert explained.backend == "reference"
        assert "gradient" in explained.reasons["cpu"]


def pool_calls():
    for op in POOL_OPS:
        for name in float_inputs(small_call(op)):
            if name != "out":
                yield pytest.param(op, name, id=f"{op}-{name}")


@pytest.mark.parametrize(("op", "name"), list(pool_calls()))
@pytest.mark.parametrize("backend", [None, "reference", "cpu"])
def test_a_call_that_updates_a_state_raises(op, name, backend, request):
    """Also when it is the state itself that requires the gradient."""
    if backend == "cpu":
        request.getfixturevalue("cpu_backend")
    arguments = small_call(op)
    arguments[name] = arguments[name].detach().requires_grad_()
    with gdn_core.use_backend(backend), untouched(arguments):
        with pytest.raises(RuntimeError, match="gradient") as caught:
            call(op, arguments)
        assert type(caught.value) is RuntimeError
        assert "torch.no_grad()" in str(caught.value)
    if backend is None:
        with torch.no_grad():
            call(op, arguments)


@pytest.mark.parametrize("name", ["rms_norm_gated", *RULES])
def test_out_has_no_gradient(name):
    op, arguments = functional_call(name)
    shape = arguments["x" if name == "rms_norm_gated" else "v"]
    arguments["out"] = torch.zeros_like(shape)
    key = next(iter(float_inputs(arguments)))
    arguments[key] = arguments[key].detach().clone().requires_grad_()
    with untouched(arguments), pytest.raises(RuntimeError, match="'out' in place"):
        call(op, arguments)


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_wrong_arguments_are_reported_before_the_gradient(op):
    """A gradient does not hide a wrong shape, and a wrong shape is not differentiated."""
    if op in POOL_OPS:
        return
    _, arguments = functional_call(op)
    key = next(iter(float_inputs(arguments)))
    arguments[key] = arguments[key].detach().clone().requires_grad_()
    other = "weight" if op == "rms_norm_gated" else "dt_bias"
    arguments[other] = torch.zeros(99)
    with pytest.raises(ValueError, match=f"{other}: expected"):
        call(op, arguments)
