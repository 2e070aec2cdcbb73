# SPDX-License-Identifier: Apache-2.0
"""What surrounds a call: autocast, dispatch modes, forward-mode gradients, version counters, other threads."""

import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gdn_core
from gdn_core import _dispatch

H, HV, K, V = 2, 4, 16, 24


def sequences(tokens=70):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, tokens, H, K, generator=generator) for _ in range(2))
    v = torch.randn(1, tokens, HV, V, generator=generator)
    g, beta = -torch.rand(1, tokens, HV, generator=generator), torch.rand(1, tokens, HV, generator=generator)
    return q, k, v, g, beta


def decode_arguments():
    q, k, v, g, beta = sequences(3)
    pool = torch.randn(5, HV, K, V, generator=torch.Generator().manual_seed(6))
    return [torch.zeros(HV), torch.ones(HV), q, k, v, g[0], beta[0], pool, torch.tensor([4, 0, 2])]


def norm_arguments():
    x = torch.randn(3, V, generator=torch.Generator().manual_seed(7))
    return x, x.flip(0), torch.ones(V), 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_into_an_operation(impl, dtype):
    arguments = sequences()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = gdn_core.chunk_gated_delta_rule(*arguments, **options)
    with torch.autocast("cpu", dtype):
        actual = gdn_core.chunk_gated_delta_rule(*arguments, **options)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


def test_autocast_does_not_reach_into_a_gradient():
    def gradient(is_autocast):
        q, k, v, g, beta = sequences()
        v.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            o, _ = gdn_core.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return torch.autograd.grad(o.square().sum(), v)[0]

    assert torch.equal(gradient(True), gradient(False))


def test_a_with_block_is_invisible_to_other_threads(cpu_backend):
    """The other thread calls an operation that cannot run at all on a backend forced elsewhere."""
    forced, failures = threading.Event(), []
    double = torch.ones(2, V, dtype=torch.float64)

    def other():
        while not forced.is_set():
            try:
                gdn_core.rms_norm_gated(double, double, double[0], 1e-6)
            except NotImplementedError as error:
                failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(2000):
        with gdn_core.use_backend("cpu"):
            pass
    forced.set()
    thread.join()
    assert not failures


def test_a_plain_call_reaches_other_threads():
    gdn_core.use_backend("reference")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(_dispatch._choice()))
    thread.start()
    thread.join()
    assert seen == ["reference"]


def test_entering_a_choice_twice_leaves_nothing_behind():
    choice = gdn_core.use_backend("reference")
    with choice, choice:
        assert _dispatch._choice() == "reference"
    assert _dispatch._choice() == ""
    with choice:
        assert _dispatch._choice() == "reference"
    assert _dispatch._choice() == ""


def test_a_block_can_restore_the_default():
    gdn_core.use_backend("reference")
    with gdn_core.use_backend(None):
        assert _dispatch._choice() == ""
    assert _dispatch._choice() == "reference"


def test_a_generator_closed_in_another_thread_raises_nothing():
    def generator():
        with gdn_core.use_backend("reference"):
            yield

    suspended, errors = generator(), []
    next(suspended)

    def close():
        try:
            suspended.close()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not errors


def test_recorders_nest():
    with gdn_core.record_calls() as outer:
        with gdn_core.record_calls():
            pass
        gdn_core.explain("rms_norm_gated", *norm_arguments())
        gdn_core.rms_norm_gated(*norm_arguments())
    assert sum(outer.values()) == 1
    assert not _dispatch._recorders


def test_explain_runs_nothing_under_a_dispatch_mode():
    arguments = decode_arguments()
    before = arguments[7].clone()
    with FlopCounterMode(display=False):
        assert gdn_core.explain("fused_sigmoid_gating_delta_rule_update", *arguments).backend is not None
    assert torch.equal(arguments[7], before)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [("rms_norm_gated", ("x", 1, 2, 3)), ("chunk_gated_delta_rule", [torch.ones(2, 2)] * 5)],
)
def test_explain_answers_for_a_call_that_raises(op, arguments):
    explanation = gdn_core.explain(op, *arguments)
    assert explanation.backend is None
    assert all("Error: " in reason for reason in explanation.reasons.values())


class Seen(TorchDispatchMode):
    """Note which ops are dispatched."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_a_call_of_plain_tensors():
    with Seen() as seen:
        gdn_core.rms_norm_gated(*norm_arguments())
    assert torch.ops.gdn.rms_norm_gated.default in seen.ops


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_jit_trace_holds_the_op():
    x, gate, weight, eps = norm_arguments()
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: gdn_core.rms_norm_gated(x, gate, weight, eps), (x,))
        assert "gdn::rms_norm_gated" in str(traced.graph)
        assert torch.equal(traced(2 * x), gdn_core.rms_norm_gated(2 * x, gate, weight, eps))


def test_a_transform_sees_a_call_of_plain_tensors():
    x, state, weight = torch.ones(2, 8), torch.zeros(2, 8, 3), torch.ones(8, 4)
    with pytest.raises(RuntimeError, match=r"a torch\.func transform is active"):
        torch.vmap(lambda _: gdn_core.causal_conv1d_update(x, state, weight))(torch.arange(2))
    assert not state.any()


def test_forward_mode_keeps_its_tangent():
    x, gate, weight, eps = norm_arguments()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(gdn_core.rms_norm_gated(dual, gate, weight, eps)).tangent
    step = 1e-3
    wide = [value.double() for value in (x, gate, weight)]
    above, below = (gdn_core.rms_norm_gated(wide[0] + d, *wide[1:], eps) for d in (step, -step))
    torch.testing.assert_close(tangent.double(), (above - below) / (2 * step), rtol=1e-3, atol=1e-4)


def test_forward_mode_is_refused_where_a_backend_is_forced(cpu_backend):
    x, gate, weight, eps = norm_arguments()
    with forward_ad.dual_level(), gdn_core.use_backend("cpu"):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="has no gradient"):
            gdn_core.rms_norm_gated(dual, gate, weight, eps)


def test_autograd_sees_what_was_overwritten(impl):
    """Also under no_grad: a tensor saved for a backward pass is no longer what it was."""
    hidden = torch.ones(3, V, requires_grad=True).exp()
    loss = (hidden * hidden).sum()
    with torch.no_grad():
        gdn_core.rms_norm_gated(hidden, hidden, torch.ones(V), 1e-6, out=hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    arguments = decode_arguments()
    loss = (torch.ones(1, requires_grad=True) * arguments[7]).sum()
    with torch.no_grad():
        gdn_core.fused_sigmoid_gating_delta_rule_update(*arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_transform_over_a_pool_is_called_by_its_name():
    x, weight = torch.ones(2, 8), torch.ones(8, 4)
    with pytest.raises(RuntimeError, match=r"torch\.func transform"):
        torch.vmap(lambda state: gdn_core.causal_conv1d_update(x, state, weight))(torch.zeros(3, 2, 8, 3))
