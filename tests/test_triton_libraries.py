# SPDX-License-Identifier: Apache-2.0
"""Sequences and convolutions of CUDA tensors on fla-core and causal-conv1d: what is passed, and what comes back.

Stand-ins with the signatures of fla-core 0.6.0 and causal-conv1d 1.7.0 check what those demand of their arguments, and
compute by the reference; what those leave unwritten is NaN.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

import gdn_core
import triton_interpreter
from contract_calls import call, untouched
from gdn_core import reference, triton_backend
from gdn_core.testing import clone, inputs

CHUNK, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
BOTH = pytest.mark.parametrize("op", [CHUNK, RECURRENT])


# --- stand-ins --------------------------------------------------------------------------------------------------------


def _rule(function, q, k, v, g, beta, scale, initial_state, l2norm, v_first, cu_seqlens):
    assert g is None or g.dtype == torch.float32
    assert beta.dtype == torch.float32 and beta.shape == v.shape[:3]
    if cu_seqlens is not None:
        assert cu_seqlens.dtype == torch.int64 and cu_seqlens.is_contiguous()
        assert q.shape[0] == 1
    if initial_state is not None:
        assert initial_state.dtype == torch.float32
        assert len(initial_state) == (len(q) if cu_seqlens is None else len(cu_seqlens) - 1)
    o, states = function(
        q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm, state_v_first=v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if cu_seqlens is not None:
        o[:, : int(cu_seqlens[0])] = math.nan
        o[:, int(cu_seqlens[-1]) :] = math.nan
    return o, states


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert q.dtype != torch.float32 and not kwargs and g is not None
    assert not allow_neg_eigval and not use_beta_sigmoid_in_kernel
    assert bool((g >= -60).all())
    states = (scale, initial_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens)
    o, final = _rule(reference.chunk_gated_delta_rule, q, k, v, g, beta, *states)
    return o, final if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    assert gk is None and gv is None and not use_gate_in_kernel and not kwargs
    states = (scale, initial_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens)
    o, final = _rule(reference.fused_recurrent_gated_delta_rule, q, k, v, g, beta, *states)
    return o, final if output_final_state else None


def causal_conv1d(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert residual is None and cp_context is None and backend == "triton" and not kwargs
    assert cu_seqlens.dtype == torch.int64 and x.shape[0] == 1
    width, rows = weight.shape[1], len(cu_seqlens) - 1
    pool = torch.zeros(rows, x.shape[2], width - 1, dtype=x.dtype)
    if initial_state is not None:
        assert initial_state.shape == (rows, x.shape[2], width) and initial_state.dtype == x.dtype
        pool.copy_(initial_state[:, :, 1:])
    y = reference.causal_conv1d_fn(
        x[0].T, weight, bias, activation=activation, conv_states=pool, query_start_loc=cu_seqlens,
        cache_indices=torch.arange(rows),
    )  # fmt: skip
    y[:, int(cu_seqlens[-1]) :] = math.nan
    final = torch.cat([torch.full((rows, x.shape[2], 1), math.nan), pool], dim=2)
    return y.T[None], final if output_final_state else None


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    assert final_states_out is None and (bias is None or bias.dtype == weight.dtype)
    is_channel_last = x.stride(1) == 1 and x.stride(2) > 1
    assert x.stride(2) == 1 or is_channel_last
    if is_channel_last:
        assert x.shape[1] % 8 == 0 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
    if seq_idx is not None or initial_states is not None or return_final_states:
        assert is_channel_last
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    assert initial_states is None or (initial_states.dtype == x.dtype and initial_states.stride(1) == 1)
    return reference.causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, return_final_states, None, activation)


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    assert conv_state.dtype == x.dtype and (bias is None or bias.dtype == weight.dtype)
    for indices in (cache_seqlens, conv_state_indices):
        assert indices is None or indices.dtype == torch.int32
    return reference.causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


FLA = {
    "fla.ops.gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
    "fla.modules.causal_conv1d": (causal_conv1d,),
}
CAUSAL_CONV1D = {"causal_conv1d": (causal_conv1d_fn, causal_conv1d_update)}


@pytest.fixture
def calls(monkeypatch):
    """Put the stand-ins where the libraries would be, and list the calls of them."""
    seen: list[str] = []
    for name, functions in (FLA | CAUSAL_CONV1D).items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, _recorded(function, seen))
        for package in (name.rpartition(".")[0].split(".")[0], name.rpartition(".")[0]):
            if package:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)
    with triton_interpreter.registered(), gdn_core.use_backend("on_cpu"):
        yield seen


def _recorded(function, seen):
    def run(*args, **kwargs):
        seen.append(function.__name__)
        return function(*args, **kwargs)

    return run


@pytest.mark.parametrize("module", [*FLA, *CAUSAL_CONV1D])
def test_stand_ins_have_the_signatures_of_the_libraries(module):
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    for function in (FLA | CAUSAL_CONV1D)[module]:
        real = getattr(importlib.import_module(module), function.__name__)
        assert list(inspect.signature(real).parameters) == list(inspect.signature(function).parameters)
        for name, parameter in inspect.signature(real).parameters.items():
            assert parameter.default == inspect.signature(function).parameters[name].default


# --- sequences --------------------------------------------------------------------------------------------------------


def agree(op, arguments, written=()):
    """Run a call on the stand-ins and on the reference: the same results, and states."""
    expected_arguments = clone(arguments)
    with untouched(arguments, *written):
        results = call(op, arguments)
    with gdn_core.use_backend("reference"):
        expected = call(op, expected_arguments)
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    for actual, wanted in zip(results, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            assert actual.dtype == wanted.dtype
            assert bool(actual.isfinite().all())
            assert torch.allclose(actual.float(), wanted.float(), rtol=1e-2, atol=1e-3)
    for name in written:
        assert torch.allclose(arguments[name], expected_arguments[name], rtol=1e-4, atol=1e-4, equal_nan=True)
    return results


@BOTH
@pytest.mark.parametrize("state_v_first", [False, True])
def test_batched_sequences(calls, op, state_v_first):
    arguments = inputs.delta_rule_arguments(
        (7, 7), 1, 2, 8, 16, dtype=torch.bfloat16, is_dense=True, state_v_first=state_v_first
    )
    agree(op, arguments | {"scale": 0.3, "allow_neg_eigval": True})
    agree(op, arguments | {"initial_state": None, "use_beta_sigmoid_in_kernel": True})
    agree(op, arguments | {"output_final_state": False, "allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": True})
    assert calls == [op] * 3


@BOTH
def test_packed_sequences_on_a_pool(calls, op):
    """An empty one, a padding slot, a null one, one beyond the pool, a fresh one on a slot of NaN, a token of none."""
    lengths = (3, 0, 2, 4, 1, 2)
    arguments = inputs.delta_rule_arguments(lengths, 1, 2, 8, 16, dtype=torch.bfloat16, initial=False)
    pool = torch.randn(8, 2, 8, 16, generator=torch.Generator().manual_seed(3))
    pool[5] = math.nan
    arguments |= {
        "initial_state": pool,
        "output_final_state": False,
        "state_indices": torch.tensor([4, 2, -1, 5, 7, 0]),
        "has_initial_state": torch.tensor([True, False, True, False, True, True]),
        "null_slot": 7,
        "cu_seqlens": inputs.offsets(lengths) - torch.tensor([0, 0, 0, 0, 0, 0, 1], dtype=torch.int32),
    }
    o, final = agree(op, arguments, written=("initial_state",))
    assert final is None and calls == [op]
    assert bool((o[0, 3:5] == 0).all()) and bool((o[0, 9] == 0).all()) and bool((o[0, -1] == 0).all())


@BOTH
def test_empty_sequences_keep_their_state(calls, op):
    """Fresh ones too: what comes back is what was given."""
    arguments = inputs.delta_rule_arguments((3, 0, 0), 1, 2, 8, 16, dtype=torch.bfloat16)
    arguments["has_initial_state"] = torch.tensor([True, True, False])
    _, final = agree(op, arguments)
    assert torch.equal(final[1:], arguments["initial_state"][1:])


@pytest.mark.report("D01")
def test_the_device_of_the_tensors_is_the_current_one_for_the_call(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or nullcontext())

    class OnSecond(torch.Tensor):
        device = torch.device("cuda:1")

    with triton_backend._on_device([None, torch.zeros(1).as_subclass(OnSecond)]):
        assert devices == [torch.device("cuda:1")]
    with triton_backend._on_device([torch.zeros(1)]):
        assert len(devices) == 1


def test_raw_gates(calls):
    arguments = inputs.delta_rule_arguments((5,), 1, 2, 8, 16)
    arguments |= {"use_gate_in_kernel": True, "A_log": torch.tensor([0.1, 100.0]), "dt_bias": torch.zeros(2)}
    arguments["g"][..., 1] = -200.0
    agree(RECURRENT, arguments)
    agree(RECURRENT, arguments | {"g": None, "beta": None, "use_gate_in_kernel": False})
    assert calls == [RECURRENT] * 2


@pytest.mark.report("A05")
def test_log_decays_of_minus_infinity_reset_the_chunked_rule_too(calls):
    arguments = inputs.delta_rule_arguments((9,), 1, 2, 8, 16, dtype=torch.bfloat16)
    arguments["g"][:, 4] = -math.inf
    agree(CHUNK, arguments)


# --- convolutions -----------------------------------------------------------------------------------------------------


def conv_inputs(*shape, channels=8, width=4, dtype=torch.float32):
    rng = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(*shape, generator=rng).to(dtype),
        "weight": torch.randn(channels, width, generator=rng),
        "bias": torch.randn(channels, generator=rng).to(dtype),
        "activation": "silu",
    }


@pytest.mark.parametrize("is_channel_last", [False, True])
def test_dense_convolution(calls, is_channel_last):
    arguments = conv_inputs(2, 8, 5)
    if is_channel_last:
        arguments["x"] = arguments["x"].mT.contiguous().mT
    agree("causal_conv1d_fn", arguments)
    agree("causal_conv1d_fn", arguments | {"initial_states": torch.randn(2, 8, 3), "return_final_states": True})
    agree("causal_conv1d_fn", arguments | {"seq_idx": torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])})
    assert calls == ["causal_conv1d_fn"] * 3


def test_channels_that_are_no_multiple_of_eight(calls):
    arguments = conv_inputs(2, 6, 5, channels=6)
    agree("causal_conv1d_fn", arguments)
    with pytest.raises(NotImplementedError, match="x: causal-conv1d wants a multiple of 8 channels, got 6"):
        call("causal_conv1d_fn", arguments | {"return_final_states": True})


def test_packed_convolution_on_a_pool(calls):
    lengths = (3, 0, 2, 1, 4)
    arguments = conv_inputs(8, sum(lengths) + 1)
    pool = torch.randn(5, 8, 6)
    pool[3] = math.nan
    arguments |= {
        "conv_states": pool,
        "query_start_loc": inputs.offsets(lengths),
        "cache_indices": torch.tensor([4, 2, -1, 3, 0]),
        "has_initial_state": torch.tensor([True, True, True, False, True]),
    }
    y = agree("causal_conv1d_fn", arguments, written=("conv_states",))[0]
    assert bool((y[:, 3:5] == 0).all()) and bool((y[:, -1] == 0).all())
    agree("causal_conv1d_fn", arguments | {"conv_states": None, "cache_indices": None, "has_initial_state": None})
    assert calls == ["causal_conv1d"] * 2


@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 2)], ids=str)
def test_convolution_update(calls, shape):
    arguments = conv_inputs(*shape) | {"conv_state": torch.randn(5, 8, 6)}
    agree("causal_conv1d_update", arguments, written=("conv_state",))
    arguments |= {"conv_state_indices": torch.tensor([4, -1, 2]), "null_slot": 2}
    y = agree("causal_conv1d_update", arguments, written=("conv_state",))[0]
    assert bool((y[1:] == 0).all())
    agree("causal_conv1d_update", arguments | {"cache_seqlens": torch.tensor([0, 3, 5])}, written=("conv_state",))
    assert calls == ["causal_conv1d_update"] * 3


# --- what is declined -------------------------------------------------------------------------------------------------


def declined(op, arguments, reason):
    with untouched(arguments), pytest.raises(NotImplementedError, match=reason):
        call(op, arguments)


def test_what_the_libraries_do_not_do(calls):
    arguments = inputs.delta_rule_arguments((5,), 1, 2, 8, 16)
    declined(CHUNK, arguments, "float32 activations: fla-core's chunked rule multiplies them in TF32")
    half = inputs.delta_rule_arguments((5,), 1, 2, 8, 16, dtype=torch.float16)
    declined(CHUNK, half | {"output_chunk_states": True}, "output_chunk_states: fla-core does not return them")
    wide = inputs.delta_rule_arguments((5,), 1, 2, 8, 16, dtype=torch.float64)
    declined(RECURRENT, wide, "float64 runs on the reference")
    declined("causal_conv1d_fn", conv_inputs(2, 8, 5, width=5), "weight: causal-conv1d has widths 2 to 4, got 5")
    draft = conv_inputs(3, 8) | {"conv_state": torch.randn(5, 8, 6), "num_accepted_tokens": torch.ones(3).int()}
    declined("causal_conv1d_update", draft, "num_accepted_tokens, query_start_loc: causal-conv1d has neither")
    half_state = conv_inputs(3, 8) | {"conv_state": torch.randn(5, 8, 6).half()}
    declined("causal_conv1d_update", half_state, "conv_state: causal-conv1d wants the dtype of x")
    assert calls == []


@pytest.mark.report("E08")
def test_without_the_libraries_another_backend_runs_and_explain_names_them(monkeypatch):
    for name in ("fla", "fla.ops.gated_delta_rule", "fla.modules.causal_conv1d", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    rule = inputs.delta_rule_arguments((5,), 1, 2, 8, 16, dtype=torch.float16)
    with triton_interpreter.registered():
        explanation = gdn_core.explain(CHUNK, **rule)
        assert "needs fla-core" in explanation.reasons["on_cpu"]
        assert "pip install fla-core" in explanation.reasons["on_cpu"]
        convolution = gdn_core.explain("causal_conv1d_fn", **conv_inputs(2, 8, 5))
        assert "pip install causal-conv1d" in convolution.reasons["on_cpu"]
        with gdn_core.use_backend("on_cpu"):
            declined(CHUNK, rule, "needs fla-core")
    assert call(CHUNK, rule)[0].shape == (1, 5, 2, 16)
