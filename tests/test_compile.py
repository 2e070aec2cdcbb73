# SPDX-License-Identifier: Apache-2.0
"""The operations under torch.compile, tracing, functorch and autograd, and the schemas that all of these rely on."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_core
from contract_calls import same_bits, small_call
from gdn_core import ReplayRecords
from gdn_core.testing import clone, inputs

ALL = pytest.mark.parametrize("op", gdn_core.OPS)
RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
# What each op may change, in the words of its torch.ops schema.
RECORDS = {"records_k", "records_u", "records_decay", "records_live"}
WRITES = {
    "fused_gdn_gating": {"g", "beta"},
    "chunk_gated_delta_rule": {"state", "out", "final_state", "chunk_states"},
    "fused_recurrent_gated_delta_rule": {"state", "out", "final_state"},
    "fused_sigmoid_gating_delta_rule_update": {"initial_state_source", "out"},
    "fused_sigmoid_gating_delta_rule_update_spec": {"initial_state_source", "out"},
    "fused_sigmoid_gating_delta_rule_update_replay": {"state", "out"} | RECORDS,
    "causal_conv1d_fn": {"conv_states", "out", "final_states"},
    "causal_conv1d_update": {"conv_state", "out"},
    "rms_norm_gated": {"out"},
    "fused_gdn_decode_post_conv_mtp": {"state", "out"},
    "fused_gdn_decode_post_conv_mtp_replay": {"state", "out"} | RECORDS,
}
WITHOUT_A_STATE = ("fused_gdn_gating", "rms_norm_gated")


def stateless_call(op):
    """A call of an op that can do without a pool, which then returns its last states."""
    if op in RULES:
        if op == "chunk_gated_delta_rule":
            # Dense: of packed sequences the number of chunk states depends on data, which no graph can hold.
            return inputs.delta_rule_arguments((70, 70), 1, 2, 8, 4, is_dense=True) | {"output_chunk_states": True}
        return inputs.delta_rule_arguments((3, 7), 1, 2, 8, 4)
    if op == "causal_conv1d_fn":
        arguments, _ = inputs.conv_fn_arguments((3, 5), 7, 4)
        return {k: v for k, v in arguments.items() if k not in ("conv_states", "cache_indices")} | {
            "return_final_states": True
        }
    return {name: value for name, value in small_call(op).items() if name != "out"}


CALLS = pytest.mark.parametrize("call", [small_call, stateless_call])


class Capture(TorchDispatchMode):
    """Keep the arguments with which torch.ops.gdn.<op> is called, instead of running it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gdn":
            self.flat = args
            return None
        return func(*args, **(kwargs or {}))


def flat_arguments(op, arguments):
    with Capture() as captured:
        getattr(gdn_core, op)(**arguments)
    return captured.flat


def overload(op):
    return getattr(torch.ops.gdn, op).default


def tensors(value):
    """List the tensors among results or arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, ReplayRecords):
        return [value.k, value.u, value.decay, value.live]
    if isinstance(value, dict):
        value = value.values()
    return [x for item in value for x in tensors(item)] if isinstance(value, (tuple, list, type({}.values()))) else []


def assert_same_effect(compiled, op, arguments):
    """Call eagerly and compiled: the same results, the same arguments afterwards, in the same memory."""
    eager, traced = clone(arguments), clone(arguments)
    expected = getattr(gdn_core, op)(**eager)
    places = [x.data_ptr() for x in tensors(traced)]
    with torch.no_grad():
        results = compiled(**traced)
    for actual, wanted in zip(tensors(results), tensors(expected), strict=True):
        assert same_bits(actual, wanted)
    assert [x.data_ptr() for x in tensors(traced)] == places
    for actual, wanted in zip(tensors(traced), tensors(eager), strict=True):
        assert same_bits(actual, wanted) if actual.is_floating_point() else torch.equal(actual, wanted)


# --- schemas and fake kernels -----------------------------------------------------------------------------------------


@ALL
def test_the_schema_names_exactly_what_may_change(op):
    schema = overload(op)._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == WRITES[op]
    assert not schema.returns


@ALL
def test_every_schema_argument_is_a_parameter_or_made_from_one(op):
    made = RECORDS | {"g", "beta", "state", "final_state", "final_states", "chunk_states", "out"}
    names = {argument.name for argument in overload(op)._schema.arguments}
    # The rows that a call is about are named by gdn_attention only.
    assert names - made - {"row_indices"} <= set(inspect.signature(getattr(gdn_core, op)).parameters)


def test_splitting_ops_are_the_ops_that_write_to_a_state():
    expected = {f"gdn::{op}" for op in gdn_core.OPS if op not in WITHOUT_A_STATE} | {"gdn::gdn_attention"}
    assert set(gdn_core.SPLITTING_OPS) == expected
    assert len(gdn_core.SPLITTING_OPS) == len(expected)


@pytest.mark.report("D02")
@ALL
@CALLS
def test_opcheck(op, call):
    torch.library.opcheck(overload(op), flat_arguments(op, call(op)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ALL
def test_opcheck_of_the_schema_in_half_precision(op, dtype):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(overload(op), flat_arguments(op, small_call(op, dtype)), test_utils=checks)


def fake(arguments, mode):
    return {
        name: ReplayRecords.from_tensors(*map(mode.from_tensor, tensors(value)))
        if isinstance(value, ReplayRecords)
        else mode.from_tensor(value)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


@ALL
@CALLS
def test_fake_results_look_like_real_ones(op, call):
    arguments = call(op)
    mode = FakeTensorMode()
    with mode:
        results = getattr(gdn_core, op)(**fake(arguments, mode))
    for actual, wanted in zip(tensors(results), tensors(getattr(gdn_core, op)(**arguments)), strict=True):
        assert (actual.shape, actual.dtype, actual.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


# An argument of each op with one row, head or dimension too many.
BAD_SHAPES = {
    "fused_gdn_gating": "dt_bias",
    "chunk_gated_delta_rule": "beta",
    "fused_recurrent_gated_delta_rule": "k",
    "fused_sigmoid_gating_delta_rule_update": "a",
    "fused_sigmoid_gating_delta_rule_update_spec": "num_accepted_tokens",
    "fused_sigmoid_gating_delta_rule_update_replay": "slot_indices",
    "causal_conv1d_fn": "weight",
    "causal_conv1d_update": "conv_state_indices",
    "rms_norm_gated": "weight",
    "fused_gdn_decode_post_conv_mtp": "state",
    "fused_gdn_decode_post_conv_mtp_replay": "norm_weight",
}


@ALL
def test_fake_kernels_reject_bad_shapes(op):
    arguments = small_call(op)
    value = arguments[BAD_SHAPES[op]]
    arguments[BAD_SHAPES[op]] = torch.cat([value, value[-1:]]) if op != "fused_gdn_decode_post_conv_mtp" else value[0]
    mode = FakeTensorMode()
    with mode, pytest.raises((ValueError, RuntimeError), match="expected"):
        getattr(gdn_core, op)(**fake(arguments, mode))


@ALL
def test_make_fx_keeps_the_op_whole(op):
    arguments = small_call(op)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in arguments.items() if name not in names}

    def step(*values):
        return getattr(gdn_core, op)(**dict(zip(names, values, strict=True)), **rest)

    values = [arguments[name].clone() for name in names]
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*values)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(overload(op)) == 1


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compiled(op, backend, **options):
    torch._dynamo.reset()
    return torch.compile(getattr(gdn_core, op), fullgraph=True, backend=backend, **options)


@pytest.mark.report("D02")
@ALL
@CALLS
def test_compiled_with_aot_eager(op, call):
    assert_same_effect(compiled(op, "aot_eager"), op, call(op))


QUICK = ("fused_sigmoid_gating_delta_rule_update", "rms_norm_gated")


@pytest.mark.report("D02")
@pytest.mark.parametrize("op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in gdn_core.OPS])
def test_compiled_with_inductor(op):
    assert_same_effect(compiled(op, "inductor"), op, small_call(op))


def test_a_compiled_decode_step_of_any_batch_is_one_graph():
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    step = compiled("fused_sigmoid_gating_delta_rule_update", counting, dynamic=True)
    for batch in (3, 5, 9, 2):  # the first one differs from the other sizes, which would be taken for the same
        arguments, _ = inputs.decode_arguments([1] * batch, 2, 4, 8, 8, seed=batch)
        assert_same_effect(step, "fused_sigmoid_gating_delta_rule_update", arguments)
    assert len(graphs) == 1


def test_a_compiled_layer_keeps_states_between_steps():
    """Convolution, gates, recurrence and norm in one graph, called repeatedly on the same pools."""
    torch._dynamo.reset()
    conv, _ = inputs.conv_update_arguments([1, 1], 2 * 2 * 8 + 4 * 8, 4, is_dense=True)
    decode, _ = inputs.decode_arguments([1, 1], 2, 4, 8, 8)
    gate = inputs.normal((1, 2, 4, 8), inputs.generator(5), torch.float32)

    def layer(x, conv_state, pool):
        y = gdn_core.causal_conv1d_update(
            x, conv_state, conv["weight"], conv["bias"], "silu", conv_state_indices=conv["conv_state_indices"]
        )
        q, k, v = y[None].split([16, 16, 32], dim=-1)
        o = gdn_core.fused_sigmoid_gating_delta_rule_update(
            decode["A_log"], decode["dt_bias"], q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)),
            v.unflatten(-1, (4, 8)), decode["a"], decode["b"], pool, decode["initial_state_indices"],
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return gdn_core.rms_norm_gated(o, gate, torch.ones(8), 1e-6)

    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    states = [[conv["conv_state"].clone(), decode["initial_state_source"].clone()] for _ in range(2)]
    for step in range(3):
        x = conv["x"] + step
        assert same_bits(traced(x, *states[0]), layer(x, *states[1]))
    for ours, theirs in zip(*states, strict=True):
        assert same_bits(ours, theirs)


def test_a_compiled_call_that_needs_a_gradient_has_it():
    arguments = inputs.norm_arguments((3, 8))
    leaf = arguments["x"].clone().requires_grad_()
    gdn_core.reference.rms_norm_gated(**arguments | {"x": leaf}).sum().backward()
    x = arguments["x"].clone().requires_grad_()
    compiled("rms_norm_gated", "aot_eager")(**arguments | {"x": x}).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


# --- autograd and functorch -------------------------------------------------------------------------------------------

DIFFERENTIABLE = {
    "fused_gdn_gating": "a",
    "chunk_gated_delta_rule": "v",
    "fused_recurrent_gated_delta_rule": "k",
    "causal_conv1d_fn": "x",
    "rms_norm_gated": "gate",
}


def scalar(results):
    return sum((x * torch.linspace(1, 2, x.numel()).view(x.shape)).sum() for x in tensors(results))


@pytest.mark.report("C22")
@ALL
def test_the_op_itself_never_detaches_silently(op):
    """Whoever calls torch.ops.gdn past the public function gets an error where a gradient is required."""
    flat = list(flat_arguments(op, small_call(op)))
    names = [argument.name for argument in overload(op)._schema.arguments]
    position = names.index({"causal_conv1d_update": "weight"}.get(op, DIFFERENTIABLE.get(op, "b")))
    flat[position] = flat[position].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"no gradient.*torch\.no_grad"):
        overload(op)(*flat)
    with torch.no_grad():
        overload(op)(*flat)
    with torch.inference_mode():
        overload(op)(*flat)


@pytest.mark.parametrize(("op", "name"), DIFFERENTIABLE.items())
def test_torch_func_grad_goes_through_the_reference(op, name):
    arguments = stateless_call(op)

    def loss(function, value):
        return scalar(function(**arguments | {name: value}))

    value = arguments[name].contiguous()
    with gdn_core.record_calls() as calls:
        gradient = torch.func.grad(lambda x: loss(getattr(gdn_core, op), x))(value)
    assert set(calls) == {(op, "reference")}
    leaf = value.clone().requires_grad_()
    loss(getattr(gdn_core.reference, op), leaf).backward()
    torch.testing.assert_close(gradient, leaf.grad)
    assert bool(gradient.any())


@pytest.mark.parametrize("op", WITHOUT_A_STATE)
def test_vmap_goes_through_the_reference(op):
    arguments = stateless_call(op)
    name = DIFFERENTIABLE[op]
    batch = torch.stack([arguments[name], 2 * arguments[name], -arguments[name]])
    with gdn_core.record_calls() as calls:
        results = torch.func.vmap(lambda x: getattr(gdn_core, op)(**arguments | {name: x}))(batch)
    assert set(calls) == {(op, "reference")}
    for i, value in enumerate(batch):
        expected = getattr(gdn_core.reference, op)(**arguments | {name: value})
        for actual, wanted in zip(tensors(results), tensors(expected), strict=True):
            torch.testing.assert_close(actual[i], wanted)


@pytest.mark.parametrize("op", [op for op in gdn_core.OPS if op not in DIFFERENTIABLE])
def test_an_op_that_updates_a_pool_raises_where_a_gradient_is_required(op):
    arguments = small_call(op)
    before = clone(arguments)
    arguments["weight" if "conv1d" in op else "b"].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"{op}: an input requires a gradient, but the call updates .* in place"):
        getattr(gdn_core, op)(**arguments)
    for actual, wanted in zip(tensors(arguments), tensors(before), strict=True):
        assert torch.equal(actual, wanted)
    with torch.no_grad():
        getattr(gdn_core, op)(**arguments)
