# SPDX-License-Identifier: Apache-2.0
"""Corners of the reference, and of the way to it, that no other test would notice: found by tools/mutants.py."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn_core
from gdn_core import _dispatch, _registry, reference
from gdn_core.testing import clone, inputs, oracle, packed_relative_error, relative_error, to_float64, tolerance

SHAPE = {"H": 2, "HV": 4, "K": 5, "V": 7}
NAN = float("nan")
RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
DECODE = "fused_sigmoid_gating_delta_rule_update"
SPEC, REPLAY = f"{DECODE}_spec", f"{DECODE}_replay"
FUSED, FUSED_REPLAY = "fused_gdn_decode_post_conv_mtp", "fused_gdn_decode_post_conv_mtp_replay"
CONV, CONV_UPDATE = "causal_conv1d_fn", "causal_conv1d_update"


def decode_call(op: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], Tensor]:
    """Return a call of any form of decode, two rows of 3 and 2 tokens, and its pool."""
    options: dict[str, Any] = {**SHAPE, "dtype": dtype, "state_dtype": dtype}
    lengths, accepted, live = (3, 2), (2, 1), (3, 2)
    if op == DECODE:
        arguments, guarded = inputs.decode_arguments(lengths, **options)
    elif op == SPEC:
        arguments, guarded = inputs.spec_arguments(lengths, 3, accepted=accepted, **options)
    elif op == REPLAY:
        arguments, guarded = inputs.replay_arguments(lengths, 3, accepted=accepted, live=live, **options)
    else:
        arguments, guarded = inputs.fused_decode_arguments(
            lengths, 3, accepted=accepted, live=live, replay=op == FUSED_REPLAY, **options
        )
    return arguments, guarded.pool


def check_against_float64(op: str, arguments: dict[str, Any], pool: Tensor) -> None:
    """Compare the output, of a call in float64, and the pool that it updates, with the oracle."""
    wide = to_float64(arguments)
    (pool_name,) = (name for name, value in arguments.items() if value is pool)
    expected = getattr(oracle, op)(**wide)
    actual = getattr(reference, op)(**arguments)
    assert relative_error(actual, expected, -1) <= 1e-12
    assert relative_error(pool, wide[pool_name], -1) <= 1e-12


# --- decode -----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.3},
    "no norm of q and k": {"use_qk_l2norm_in_kernel": False},
    "softplus beta": {"softplus_beta": 2.5},
    "softplus threshold": {"softplus_threshold": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("op", [DECODE, SPEC, REPLAY])
def test_decode_options(op: str, name: str) -> None:
    arguments, pool = decode_call(op)
    # Inputs of softplus on either side of the threshold, and still decays that are neither 0 nor 1.
    arguments |= {"a": arguments["a"] + 4, "A_log": arguments["A_log"] - 3}
    check_against_float64(op, {**arguments, **OPTIONS[name]}, pool)


@pytest.mark.parametrize("op", [FUSED, FUSED_REPLAY])
def test_decode_options_before_the_norm(op: str) -> None:
    """The norm hides the scale of its input, but for eps."""
    arguments, pool = decode_call(op)
    check_against_float64(op, {**arguments, "scale": 0.3, "norm_eps": 0.1}, pool)


@pytest.mark.parametrize("op", [*RULES, DECODE, SPEC, REPLAY])
def test_a_scale_of_zero_is_a_scale(op: str) -> None:
    arguments = inputs.delta_rule_arguments([3, 2], **SHAPE) if op in RULES else decode_call(op)[0]
    result = getattr(reference, op)(**{**arguments, "scale": 0.0})
    assert not (result[0] if op in RULES else result).any()


def test_padding_is_judged_by_the_source() -> None:
    """The column that a row resumes from decides whether it is padding; the others only whether to store."""
    arguments, pool = decode_call(SPEC)
    table = arguments["spec_state_indices"]
    table[0, 0] = table[1, 1] = -1
    arguments["num_accepted_tokens"] = torch.tensor([2, 2])
    before = pool.clone()
    expected = to_float64(arguments)
    o = reference.fused_sigmoid_gating_delta_rule_update_spec(**arguments)
    assert packed_relative_error(o, oracle.fused_sigmoid_gating_delta_rule_update_spec(**expected),
                                 arguments["cu_seqlens"]) <= 1e-12  # fmt: skip
    assert o[:, :3].any() and not o[:, 3:].any()
    assert torch.equal(pool[table[1, 0]], before[table[1, 0]])
    assert relative_error(pool, expected["initial_state_source"], (-1, -2)) <= 1e-12


@pytest.mark.parametrize("op", [FUSED, FUSED_REPLAY])
def test_fused_decode_rounds_once(op: str) -> None:
    """With an fp32 out, activations in bf16 cost no accuracy: nothing between the input and out is rounded."""
    arguments, _ = decode_call(op, torch.bfloat16)
    arguments["state"] = arguments["state"].float()
    arguments["out"] = torch.empty(arguments["output_gate"].shape)
    expected = getattr(oracle, op)(**to_float64(arguments))
    actual = getattr(reference, op)(**arguments)
    assert relative_error(actual, expected, -1) <= tolerance("fused_decode", torch.float32)


# --- whole sequences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", RULES)
def test_fresh_sequences_without_a_pool(op: str) -> None:
    arguments = inputs.delta_rule_arguments([3, 66, 2], **SHAPE, dtype=torch.float64, state_dtype=torch.float64)
    arguments["has_initial_state"] = torch.tensor([True, False, False])
    expected, expected_final = getattr(oracle, op)(**to_float64(arguments))
    arguments["initial_state"][1:] = NAN
    actual, final = getattr(reference, op)(**arguments)
    assert packed_relative_error(actual, expected, arguments["cu_seqlens"]) <= 1e-12
    assert relative_error(final, expected_final, (-1, -2)) <= 1e-12


def test_sums_of_log_decays_are_wider_than_fp32() -> None:
    """A sum of thousands has an error of 1e-4 in fp32, and so has the decay between two tokens, its exp."""
    arguments = inputs.delta_rule_arguments([64], **SHAPE)
    arguments["g"][:, 2::3] = -80  # strong, and no reset: exp(-80) is no 0 in fp32
    expected, _ = oracle.chunk_gated_delta_rule(**to_float64(arguments))
    actual, _ = reference.chunk_gated_delta_rule(**arguments)
    assert relative_error(actual, expected, (1, 3)) <= tolerance("decode_output", torch.float32)


@pytest.mark.parametrize("decays", ["strong", "thirds", "wild"])
def test_gradients_with_strong_decays(decays: str) -> None:
    """A decay that is masked after its exp is an infinity in the backward pass, and times 0 it is NaN."""
    arguments = inputs.delta_rule_arguments(
        [70, 3], **SHAPE, dtype=torch.float64, state_dtype=torch.float64, decays=decays
    )
    names = ("q", "k", "v", "g", "beta", "initial_state")
    gradients = []
    for op in RULES:
        leaves = {name: arguments[name].detach().clone().requires_grad_() for name in names}
        o, final = getattr(reference, op)(**{**arguments, **leaves})
        gradients.append(torch.autograd.grad(o.square().sum() + final.square().sum(), list(leaves.values())))
    for name, chunk, recurrent in zip(names, *gradients, strict=True):
        assert relative_error(chunk, recurrent, tuple(range(chunk.dim()))) <= 1e-9, name


# --- convolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [CONV, CONV_UPDATE])
def test_conv_accumulates_in_fp32(op: str) -> None:
    """With an fp32 out, activations in bf16 cost no accuracy."""
    make = inputs.conv_fn_arguments if op == CONV else inputs.conv_update_arguments
    arguments, _ = make([6] * 3, 16, 4, is_dense=True, dtype=torch.bfloat16)
    arguments["out"] = torch.empty(arguments["x"].shape)
    expected = getattr(oracle, op)(**to_float64(arguments))
    actual = getattr(reference, op)(**arguments)
    assert relative_error(actual, expected, 1) <= tolerance("convolution", torch.float32)


@pytest.mark.parametrize("op", [CONV, CONV_UPDATE])
def test_null_slot_of_the_convolution(op: str) -> None:
    make = inputs.conv_fn_arguments if op == CONV else inputs.conv_update_arguments
    arguments, guarded = make([2, 3, 1], 7, 4, dtype=torch.float64)
    slots = arguments["cache_indices" if op == CONV else "conv_state_indices"]
    for null_slot in (int(slots[1]), 99):
        slots[1] = null_slot
        y = getattr(reference, op)(**{**arguments, "null_slot": null_slot})
        y = y.mT if op == CONV else y
        assert not y[2:5].any() and y[:2].any(dim=1).all() and y[5:].any()
    untouched = [slot for slot in range(len(guarded.pool)) if slot not in slots.tolist()]
    fresh = make([2, 3, 1], 7, 4, dtype=torch.float64)[1].pool
    assert torch.equal(guarded.pool[untouched], fresh[untouched])
    guarded.check()


# --- the way to the reference, past a backend that would take every call ----------------------------------------------


class Eager:
    """A backend for every op on CPU tensors, which only counts its calls and declines those that `reason` names."""

    name, version, device_types = "eager", "1", ("cpu",)

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.reason: str | None = None
        self.ops = {op: self._kernel(op) for op in gdn_core.OPS}

    def _kernel(self, op: str) -> Callable[..., None]:
        def run(*flat: Any, dry_run: bool = False) -> None:
            if self.reason is not None:
                raise NotImplementedError(self.reason)
            self.calls[op] += not dry_run

        return run

    def availability(self) -> None:
        return None

    def level(self) -> None:
        return None

    def details(self) -> dict[str, str]:
        return {}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Eager]:
    """Let that backend be the only one besides the reference."""
    provider = Eager()
    info = _registry.BackendInfo(provider.name, provider.version, True)
    monkeypatch.setattr(_registry, "_backends", {provider.name: _registry._Backend(info, provider)})
    monkeypatch.setattr(_dispatch, "_fast", {"": {}, "reference": {}, provider.name: {}})
    gdn_core.use_backend(None)
    yield provider
    gdn_core.use_backend(None)


def functional_call(op: str) -> dict[str, Any]:
    """Return a call that updates nothing."""
    if op == "fused_gdn_gating":
        return inputs.gating_arguments((3, 4))
    if op == "rms_norm_gated":
        return inputs.norm_arguments((3, 5))
    if op == CONV:
        arguments, _ = inputs.conv_fn_arguments([5, 5], 3, 4, is_dense=True)
        history = inputs.normal((2, 3, 3), inputs.generator(1), torch.float32)
        return {**arguments, "conv_states": None, "cache_indices": None, "initial_states": history}
    arguments = inputs.delta_rule_arguments([3, 4], **SHAPE)
    if op == "fused_recurrent_gated_delta_rule":
        A_log, dt_bias = inputs.gate_parameters(SHAPE["HV"], inputs.generator(1))
        arguments |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    return arguments


FUNCTIONAL = ("fused_gdn_gating", "rms_norm_gated", CONV, *RULES)
FLOAT_INPUTS = [
    (op, name)
    for op in FUNCTIONAL
    for name, value in functional_call(op).items()
    if isinstance(value, Tensor) and value.is_floating_point()
]


@pytest.mark.parametrize(("op", "name"), FLOAT_INPUTS)
def test_gradient_of_any_input_takes_the_reference(eager: Eager, op: str, name: str) -> None:
    """Each alone: an input that a list of them forgot would be detached by every native backend."""
    arguments = functional_call(op)
    arguments[name] = arguments[name].detach().clone().requires_grad_()
    results = getattr(gdn_core, op)(**arguments)
    result = results if isinstance(results, Tensor) else next(x for x in results if x.requires_grad)
    assert result.requires_grad and not eager.calls
    (gradient,) = torch.autograd.grad(result.square().sum(), arguments[name])
    assert gradient.any()
    with torch.no_grad():
        getattr(gdn_core, op)(**arguments)
    assert eager.calls == {op: 1}


def test_gradient_is_a_warning_once(eager: Eager, caplog: pytest.LogCaptureFixture) -> None:
    arguments = functional_call("rms_norm_gated")
    arguments["weight"].requires_grad_()
    with caplog.at_level(logging.INFO, "gdn_core"):
        for _ in range(2):
            gdn_core.rms_norm_gated(**arguments)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "torch.no_grad()" in caplog.text


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_forced_backend_without_a_gradient_raises(eager: Eager, op: str) -> None:
    arguments = functional_call(op)
    name = next(name for other, name in FLOAT_INPUTS if other == op)
    arguments[name] = arguments[name].detach().clone().requires_grad_()
    with gdn_core.use_backend("eager"), pytest.raises(NotImplementedError, match="'eager' has no gradient"):
        getattr(gdn_core, op)(**arguments)
    assert not eager.calls


@pytest.mark.parametrize("op", [DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY])
def test_gradient_of_a_call_that_updates_a_pool_raises(eager: Eager, op: str) -> None:
    arguments, pool = decode_call(op, torch.float32)
    before = pool.clone()
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            needs = {**arguments, name: value.detach().requires_grad_()}
            with pytest.raises(RuntimeError, match=r"requires a gradient.* in place.*torch\.no_grad"):
                getattr(gdn_core, op)(**needs)
    assert torch.equal(pool, before) and not eager.calls


def test_forced_backend_that_declines_raises(eager: Eager) -> None:
    eager.reason = "K: eager knows 128 only"
    arguments, pool = decode_call(DECODE, torch.float32)
    before = pool.clone()
    with gdn_core.use_backend("eager"), pytest.raises(NotImplementedError, match=r"'eager'.*K: eager knows 128 only"):
        gdn_core.fused_sigmoid_gating_delta_rule_update(**arguments)
    assert torch.equal(pool, before)
    expected = reference.fused_sigmoid_gating_delta_rule_update(**clone(arguments))
    assert torch.equal(gdn_core.fused_sigmoid_gating_delta_rule_update(**arguments), expected)


def test_forced_backend_holds_for_its_block(eager: Eager) -> None:
    arguments = functional_call("rms_norm_gated")
    with gdn_core.use_backend("reference"):
        gdn_core.rms_norm_gated(**arguments)
    assert not eager.calls
    gdn_core.rms_norm_gated(**arguments)
    assert eager.calls == {"rms_norm_gated": 1}
