# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: the exception, its message (which argument, what was expected, what came), and nothing changed."""

from __future__ import annotations

import inspect
import math
import re
from contextlib import nullcontext

import numpy
import pytest
import torch

import gdn_core
from contract_calls import DECODE, FLOATS, HV, RULES, C, H, K, S, V, call, small_call, untouched
from gdn_core import ReplayRecords, _dispatch, _registry
from gdn_core.testing import oracle, relative_error, to_float64

CHUNK, RECURRENT = RULES
SPEC, REPLAY = f"{DECODE}_spec", f"{DECODE}_replay"
FUSED, FUSED_REPLAY = "fused_gdn_decode_post_conv_mtp", "fused_gdn_decode_post_conv_mtp_replay"
BACKENDS = (None, "reference", "cpu")


def params(cases):
    """One pytest parameter for each backend and each `(op, label, ...)`."""
    return [
        pytest.param(backend, op, *rest, id=f"{op}-{label}-{backend or 'default'}")
        for op, label, *rest in cases
        for backend in BACKENDS
    ]


@pytest.fixture(autouse=True)
def _needs_cpu(request):
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == "cpu":
        request.getfixturevalue("cpu_backend")


def raises(backend, op, arguments, error, *fragments):
    """Assert that the call raises `error`, that its message has the fragments, and that nothing has changed."""
    with untouched(arguments), gdn_core.use_backend(backend), pytest.raises(error) as caught:
        call(op, arguments)
    message = str(caught.value)
    assert caught.type is error, message
    for fragment in ("expected", "got", *fragments):
        assert fragment in message, message


def fault(backend, op, arguments, error, pattern):
    """Return what is wrong with the way a wrong call fails, or None."""
    try:
        with untouched(arguments), gdn_core.use_backend(backend):
            call(op, arguments)
    except Exception as raised:
        text = f"{type(raised).__name__}: {raised}"
        is_right = type(raised) is error and all(re.search(x, str(raised)) for x in (pattern, "expected", "got"))
        return None if is_right else text
    return "raised nothing"


# --- every tensor of every op -----------------------------------------------------------------------------------------


def tensor_arguments(op):
    for name, value in small_call(op).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def is_optional(op, name):
    return "None" in str(inspect.signature(getattr(gdn_core, op)).parameters[name].annotation)


def wrong_kinds(name, value, is_required):
    """Yield (what, bad value, exception)."""
    yield "text", "text", TypeError
    yield "a list", value.tolist(), TypeError
    yield "a number", 1, TypeError
    yield "numpy", numpy.zeros(tuple(value.shape)), TypeError
    yield "sparse", value.contiguous().to_sparse(), TypeError
    yield "on meta", value.to("meta"), ValueError
    if is_required:
        yield "None", None, TypeError
    wrong = (torch.int32, torch.complex64, torch.bool, torch.uint8)
    if value.dtype == torch.bool:
        wrong = (torch.int32, torch.float32)
    elif not value.is_floating_point():
        wrong = (torch.float32, torch.int16, torch.bool)
    for dtype in wrong:
        yield str(dtype), value.to(dtype), TypeError


def tensor_cases():
    for op in gdn_core.OPS:
        for name, _ in tensor_arguments(op):
            yield op, name, name


@pytest.mark.parametrize(("backend", "op", "name"), params(tensor_cases()))
def test_a_wrong_kind_of_argument(backend, op, name):
    value = small_call(op)[name]
    faults = {}
    for what, bad, error in wrong_kinds(name, value, not is_optional(op, name)):
        found = fault(backend, op, {**small_call(op), name: bad}, error, rf"\b{name}\b")
        if found is not None:
            faults[what] = found
    assert not faults


def wrong_shapes(op, name, value):
    if name not in ("a", "x", "gate") or op not in ("fused_gdn_gating", "rms_norm_gated"):  # any leading dimensions
        yield "one more dimension", value[None]
        yield "none of its dimensions", value.flatten()[0]
    # A longer convolution state, a wider convolution and more columns of a table are legal.
    if name not in ("conv_states", "conv_state", "weight", "spec_state_indices", "state_indices"):
        yield "a longer last dimension", torch.cat([value, value[..., :1]], dim=-1)


@pytest.mark.parametrize(("backend", "op", "name"), params(tensor_cases()))
def test_a_wrong_shape(backend, op, name):
    """Of two arguments that do not match either may be named."""
    names = "|".join(inspect.signature(getattr(gdn_core, op)).parameters)
    faults = {}
    for what, bad in wrong_shapes(op, name, small_call(op)[name]):
        found = fault(backend, op, {**small_call(op), name: bad}, ValueError, rf"^({names}):")
        if found is not None:
            faults[what] = found
    assert not faults


# --- by meaning -------------------------------------------------------------------------------------------------------


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def replaced(**changes):
    return lambda arguments: changes


def changed(name, change):
    return lambda arguments: {name: change(arguments[name])}


def packed_ops():
    """(op, name of the offsets, tokens)"""
    yield from ((CHUNK, "cu_seqlens", 8), (RECURRENT, "cu_seqlens", 8), (DECODE, "cu_seqlens", 3))
    yield from ((SPEC, "cu_seqlens", 5), (REPLAY, "cu_seqlens", 5), (FUSED, "cu_seqlens", 5))
    yield from ((FUSED_REPLAY, "cu_seqlens", 5), ("causal_conv1d_fn", "query_start_loc", 8))
    yield ("causal_conv1d_update", "query_start_loc", 5)


def slot_ops():
    """(op, name of the slots, name of the pool)"""
    yield from ((CHUNK, "state_indices", "initial_state"), (RECURRENT, "state_indices", "initial_state"))
    yield from ((DECODE, "initial_state_indices", "initial_state_source"), (REPLAY, "slot_indices", "state"))
    yield from ((SPEC, "spec_state_indices", "initial_state_source"), (FUSED, "state_indices", "state"))
    yield from ((FUSED_REPLAY, "slot_indices", "state"), ("causal_conv1d_fn", "cache_indices", "conv_states"))
    yield ("causal_conv1d_update", "conv_state_indices", "conv_state")


def offsets_cases():
    for op, name, T in packed_ops():
        yield op, "decreasing", replaced(**{name: ints(0, 2, 1)}), ValueError, f"{name}:"
        yield op, "beyond T", replaced(**{name: ints(0, 1, T + 1)}), ValueError, f"{name}:"
        yield op, "beyond T in int64", replaced(**{name: torch.tensor([0, 1, 2**40])}), ValueError, f"{name}:"
        yield op, "negative start", replaced(**{name: ints(-1, 1, 2)}), ValueError, f"{name}:"
        yield op, "no offsets", replaced(**{name: ints()}), ValueError, f"{name}:"
        yield op, "more rows than slots", replaced(**{name: ints(0, 1, 2, 3)}), ValueError, ":"


def slots_cases():
    for op, name, pool in slot_ops():
        P = small_call(op)[pool].shape[0]
        for label, slot in (("P", P), ("far", 2**31 - 1), ("farther", 2**40)):

            def change(slots, slot=slot):
                slots = slots.long().clone()
                slots.view(-1)[-1] = slot
                return slots

            yield (
                op,
                f"slot {label}",
                changed(name, change),
                IndexError,
                f"{name}: expected slots below {P}, got {slot}",
            )
        yield op, "rows", changed(name, lambda slots: slots[:1]), ValueError, ":"
        if not op.startswith("causal"):  # whose pool may have any strides
            unpacked = changed(pool, lambda pool: torch.stack([pool, pool], -1)[..., 0])
            yield op, "pool not packed", unpacked, ValueError, f"{pool}:"


def spec_cases():
    for op in (SPEC, FUSED):
        yield op, "accepted > S", replaced(num_accepted_tokens=ints(1, S + 1)), ValueError, "num_accepted_tokens:"
        table = "spec_state_indices" if op == SPEC else "state_indices"
        wide = torch.full((2, 17), -1)
        yield op, "S > 16", replaced(**{table: wide}), ValueError, f"{table}:"
    for op in (SPEC, REPLAY, FUSED, FUSED_REPLAY):
        yield op, "a row longer than S", replaced(cu_seqlens=ints(0, S + 1, S + 2)), ValueError, "cu_seqlens:"
        yield op, "accepted of other rows", replaced(num_accepted_tokens=ints(1, 1, 1)), ValueError, "num_accepted"
    for op in (REPLAY, FUSED_REPLAY):
        yield op, "accepted > live", replaced(num_accepted_tokens=ints(3, 3)), ValueError, "num_accepted_tokens:"
        other = ReplayRecords(2, S, H, HV, K, V, torch.float32)
        yield op, "records of another pool", replaced(records=other), ValueError, "records.k:"
        half = ReplayRecords(5, S, H, HV, K, V, torch.bfloat16)
        yield op, "records of another dtype", replaced(records=half), TypeError, "records.k:"
        yield op, "records of no kind", replaced(records=None), TypeError, "records:"
        yield op, "records as a tuple", replaced(records=(1, 2, 3, 4)), TypeError, "records:"


def qkv_cases():
    tokens = {CHUNK: 8, RECURRENT: 8, DECODE: 3, SPEC: 5, REPLAY: 5}
    for op, T in tokens.items():
        yield op, "HV % H", replaced(v=torch.zeros(1, T, 3, V)), ValueError, "v: expected a multiple of the 2 key heads"
        no_K = {"q": torch.zeros(1, T, H, 0), "k": torch.zeros(1, T, H, 0)}
        yield (
            op,
            "K 0",
            replaced(**no_K),
            ValueError,
            f"q: expected a last dimension of at least 1, got float32 [1, {T}",
        )
        no_V = replaced(v=torch.zeros(1, T, HV, 0))
        yield op, "V 0", no_V, ValueError, f"v: expected a last dimension of at least 1, got float32 [1, {T}"
        yield op, "no key heads", replaced(q=torch.zeros(1, T, 0, K), k=torch.zeros(1, T, 0, K)), ValueError, "v:"
        k = torch.zeros(1, T, H, K + 1)
        text = f"k: expected [1, {T}, {H}, {K}], got float32 [1, {T}, {H}, {K + 1}]"
        yield op, "K of k", replaced(k=k), ValueError, text
        yield op, "dtype of k", changed("k", torch.Tensor.bfloat16), TypeError, "k: expected the dtype of q"
        yield op, "dtype of v", changed("v", torch.Tensor.half), TypeError, "v: expected the dtype of q"
        yield op, "float64 k", changed("k", torch.Tensor.double), TypeError, "k:"
    for op in RULES:
        batch = {name: torch.zeros(2, 8, H, K) for name in ("q", "k")} | {"v": torch.zeros(2, 8, HV, V)}
        batch |= {"g": torch.zeros(2, 8, HV), "beta": torch.zeros(2, 8, HV), "out": torch.zeros(2, 8, HV, V)}
        yield op, "a batch with cu_seqlens", replaced(**batch), ValueError, "q: expected a batch of 1 with cu_seqlens"
        yield op, "slots without a pool", replaced(initial_state=None), ValueError, "initial_state:"
        yield op, "g of the key heads", replaced(g=torch.zeros(1, 8, H)), ValueError, "g: expected [1, 8, 4]"
        yield op, "beta of the key heads", replaced(beta=torch.zeros(1, 8, H)), ValueError, "beta: expected [1, 8, 4]"
        start = {"state_indices": None, "initial_state": torch.zeros(3, HV, K, V)}
        yield (
            op,
            "an initial state of other rows",
            replaced(**start),
            ValueError,
            "initial_state: expected [2, 4, 6, 5]",
        )
        start["initial_state"] = torch.zeros(2, HV, V, K)
        yield op, "a transposed initial state", replaced(**start), ValueError, "initial_state: expected [2, 4, 6, 5]"
        yield op, "a transposed pool", replaced(initial_state=torch.zeros(6, HV, V, K)), ValueError, "initial_state:"
        fresh = torch.ones(3, dtype=torch.bool)
        yield op, "fresh flags of other rows", replaced(has_initial_state=fresh), ValueError, "has_initial_state:"
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    for missing in ("g", "A_log", "dt_bias"):
        yield RECURRENT, f"no {missing}", replaced(**{**gate, missing: None}), ValueError, f"{missing}: expected"
    yield RECURRENT, "A_log of H", replaced(**{**gate, "A_log": torch.zeros(H)}), ValueError, "A_log: expected [4]"
    yield (
        RECURRENT,
        "dt_bias of H",
        replaced(**{**gate, "dt_bias": torch.zeros(H)}),
        ValueError,
        "dt_bias: expected [4]",
    )
    no_beta = {"beta": None, "use_beta_sigmoid_in_kernel": True}
    yield RECURRENT, "no beta", replaced(**no_beta), ValueError, "beta: expected"
    yield DECODE, "a transposed pool", replaced(initial_state_source=torch.zeros(6, HV, V, K)), ValueError, "_source:"
    yield DECODE, "a of the key heads", replaced(a=torch.zeros(3, H)), ValueError, "a: expected [3, 4]"
    yield DECODE, "b of the key heads", replaced(b=torch.zeros(3, H)), ValueError, "b: expected [3, 4]"


def scalar_cases():
    for op in ("fused_gdn_gating", DECODE, SPEC, REPLAY):
        for bad in (0.0, -1.0, math.nan):
            yield op, f"softplus_beta {bad}", replaced(softplus_beta=bad), ValueError, "softplus_beta:"
        for bad in ("1", None, [1.0]):
            yield op, f"softplus_beta {bad!r}", replaced(softplus_beta=bad), TypeError, "softplus_beta:"
        yield op, "softplus_threshold", replaced(softplus_threshold="20"), TypeError, "softplus_threshold:"
    for op in (CHUNK, RECURRENT, DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY):
        for bad in ("1", [1.0], torch.ones(V), torch.ones(0), numpy.ones(V), torch.tensor(1j)):
            yield op, f"scale {bad!r}", replaced(scale=bad), TypeError, "scale:"
    for op, *_ in slot_ops():
        for bad in ("0", 0.5, torch.tensor([1, 2]), torch.tensor(0.5)):
            yield op, f"null_slot {bad!r}", replaced(null_slot=bad), TypeError, "null_slot:"
        for bad in (2**70, -(2**63) - 1):
            text = f"null_slot: expected an int of 64 bits, got {bad}"
            yield op, f"null_slot {bad}", replaced(null_slot=bad), ValueError, text
    for bad in ("relu", "", None, 1, "SILU"):
        yield (
            "rms_norm_gated",
            f"activation {bad!r}",
            replaced(activation=bad),
            ValueError,
            "activation: expected one of",
        )
    for op in ("causal_conv1d_fn", "causal_conv1d_update"):
        for bad in ("relu", "", True):
            yield op, f"activation {bad!r}", replaced(activation=bad), ValueError, "activation: expected one of"
    for op in (FUSED, FUSED_REPLAY):
        bad_gate = replaced(output_gate_activation="relu")
        yield op, "activation", bad_gate, ValueError, "output_gate_activation: expected one of"
        yield op, "norm_eps", replaced(norm_eps=-1.0), ValueError, "norm_eps:"
        yield op, "norm_eps text", replaced(norm_eps="1e-6"), TypeError, "norm_eps:"
        yield op, "channels", replaced(num_key_heads=1), ValueError, "mixed_qkv:"
        yield op, "head_k_dim", replaced(head_k_dim=K + 1), ValueError, "mixed_qkv:"
        for bad in (0, -1):
            text = f"head_k_dim: expected at least 1, got {bad}"
            yield op, f"head_k_dim {bad}", replaced(head_k_dim=bad), ValueError, text
        for name in ("head_k_dim", "num_key_heads"):
            yield op, f"{name} 2**70", replaced(**{name: 2**70}), ValueError, f"{name}: expected an int of 64 bits"
            yield op, f"{name} 2**62", replaced(**{name: 2**62}), ValueError, "mixed_qkv:"
        yield op, "V 0", replaced(**no_value_dim(op)), ValueError, "output_gate: expected a last dimension of at least"
        yield op, "head_k_dim text", replaced(head_k_dim="6"), TypeError, "head_k_dim:"
    yield "rms_norm_gated", "eps", replaced(eps=-1e-6), ValueError, "eps:"
    yield "rms_norm_gated", "eps nan", replaced(eps=math.nan), ValueError, "eps:"
    for bad in ("1e-6", None):
        yield "rms_norm_gated", f"eps {bad!r}", replaced(eps=bad), TypeError, "eps:"


def no_value_dim(op):
    T, P = 5, small_call(op)["state"].shape[0]
    empty = {
        "mixed_qkv": torch.zeros(T, 2 * H * K),
        "output_gate": torch.zeros(T, HV, 0),
        "norm_weight": torch.zeros(0),
    }
    empty |= {"state": torch.zeros(P, HV, 0, K), "out": torch.zeros(T, HV, 0)}
    return empty if op == FUSED else {**empty, "records": ReplayRecords(P, S, H, HV, K, 0, torch.float32)}


FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
         "state_v_first")  # fmt: skip


def flag_cases():
    for op in gdn_core.OPS:
        for name in FLAGS:
            if name in inspect.signature(getattr(gdn_core, op)).parameters:
                for bad in ("no", "", [], [1], {}, torch.tensor([True, False]), numpy.zeros(2)):
                    yield op, f"{name} {bad!r}", replaced(**{name: bad}), TypeError, f"{name}: expected a bool"


def out_cases():
    for op in gdn_core.OPS:
        if "out" not in small_call(op):
            continue
        shape = small_call(op)["out"].shape
        yield op, "out of another shape", replaced(out=torch.zeros(*shape[:-1], shape[-1] + 1)), ValueError, "out:"
        yield op, "out of integers", replaced(out=torch.zeros(shape, dtype=torch.int32)), TypeError, "out:"
        if not op.startswith("causal"):
            strided = torch.zeros(*shape, 2)[..., 0]
            yield (
                op,
                "out with a strided last dimension",
                replaced(out=strided),
                ValueError,
                "out: expected a unit stride",
            )


def conv_cases():
    for op, pool in (("causal_conv1d_fn", "conv_states"), ("causal_conv1d_update", "conv_state")):
        yield op, "W 1", replaced(weight=torch.zeros(C, 1)), ValueError, "weight: expected a width of 2 to 5"
        yield op, "W 6", replaced(weight=torch.zeros(C, 6)), ValueError, "weight: expected a width of 2 to 5"
        yield op, "channels of weight", replaced(weight=torch.zeros(C + 1, 4)), ValueError, "weight: expected [7, W]"
        yield op, "channels of bias", replaced(bias=torch.zeros(C + 1)), ValueError, "bias: expected [7]"
        yield op, "channels of the pool", replaced(**{pool: torch.zeros(4, C + 1, 6)}), ValueError, f"{pool}:"
        yield op, "a short state", replaced(**{pool: torch.zeros(4, C, 2)}), ValueError, f"{pool}: expected a state_len"
    fn = "causal_conv1d_fn"
    both = {"initial_states": torch.zeros(2, C, 3)}
    yield fn, "two states", replaced(**both), ValueError, "initial_states:"
    yield fn, "seq_idx on a pool", replaced(seq_idx=torch.zeros(1, 8).int()), ValueError, "seq_idx:"
    alone = {"conv_states": None, "cache_indices": None, "initial_states": torch.zeros(2, C, 2)}
    yield fn, "initial_states of another width", replaced(**alone), ValueError, "initial_states:"
    yield fn, "slots without a pool", replaced(conv_states=None), ValueError, "conv_states:"
    few = {"conv_states": torch.zeros(1, C, 6), "cache_indices": None}
    yield fn, "fewer slots than rows", replaced(**few), ValueError, "conv_states:"
    final = {"final_states_out": torch.zeros(2, C, 4), "return_final_states": True}
    yield fn, "final_states_out of another width", replaced(**final), ValueError, "final_states_out:"
    wanted = {"return_final_states": True}
    for bad in ([0, 3, 8], 1, "text", ints(0, 3, 8).float()):
        yield fn, f"query_start_loc {bad!r}", replaced(**wanted, query_start_loc=bad), TypeError, "query_start_loc:"
    for bad in (ints(), ints(0, 8)[None]):
        yield fn, f"query_start_loc {bad!r}", replaced(**wanted, query_start_loc=bad), ValueError, "query_start_loc:"
    for bad in ([0, 3, 8], 1, "text", ints(0, 3, 8).float()):  # a wrong query_start_loc says nothing of x
        unpacked = {"x": torch.zeros(2, C, 4), "query_start_loc": bad}
        yield fn, f"query_start_loc {bad!r} of a batch", replaced(**unpacked), TypeError, "query_start_loc:"
        yield (
            "causal_conv1d_update", f"query_start_loc {bad!r} of a batch", replaced(**unpacked), TypeError,
            "query_start_loc:",
        )  # fmt: skip
    for rank in (0, 1, 3, 4):
        yield fn, f"{rank} dimensions", replaced(**wanted, x=torch.zeros([2] * rank)), ValueError, "x: expected [C, T]"
    dense = {**wanted, "query_start_loc": None, "x": torch.zeros(C, 8)}
    yield fn, "two dimensions", replaced(**dense), ValueError, "x: expected [B, C, T]"
    yield fn, "no width", replaced(**wanted, weight=torch.zeros(C, 0)), ValueError, "weight:"
    for bad in (None, 1, [[1.0]]):
        yield fn, f"x {bad!r}", replaced(**wanted, x=bad), TypeError, "x: expected"
        yield fn, f"x {bad!r} without out", replaced(**wanted, x=bad, out=None), TypeError, "x: expected"
        yield fn, f"weight {bad!r}", replaced(**wanted, weight=bad), TypeError, "weight: expected"
    update = "causal_conv1d_update"
    few = {"conv_state": torch.zeros(1, C, 6), "conv_state_indices": None}
    yield update, "fewer slots than rows", replaced(**few), ValueError, "conv_state:"
    yield update, "a ring with accepted", replaced(cache_seqlens=ints(0, 0)), ValueError, "cache_seqlens:"
    yield update, "accepted > columns", replaced(num_accepted_tokens=ints(5, 1)), ValueError, "num_accepted_tokens:"
    long_row = {"query_start_loc": ints(0, 5, 5), "num_accepted_tokens": ints(1, 1)}
    yield update, "a row longer than the state holds", replaced(**long_row), ValueError, "x:"


def host_offsets_cases():
    name = "cu_seqlens_cpu"
    for bad in ([0, 3, 8], 3, "text", ints(0, 3, 8).float(), ints(0, 1).bool()):
        yield CHUNK, f"{bad!r}", replaced(cu_seqlens_cpu=bad), TypeError, f"{name}: expected"
        yield CHUNK, f"{bad!r} for the states", replaced(cu_seqlens_cpu=bad, output_chunk_states=True), TypeError, name
    for bad in (ints(0, 4, 8), ints(0, 8), ints(), torch.tensor([0, 3, 9]), ints(0, 3, 8)[None]):
        yield CHUNK, f"{bad!r}", replaced(cu_seqlens_cpu=bad), ValueError, f"{name}: expected"
    alone = {"cu_seqlens": None, "cu_seqlens_cpu": ints(0, 8), "state_indices": None, "initial_state": None}
    yield CHUNK, "alone", replaced(**alone, has_initial_state=None), ValueError, f"{name}: expected None"


def meaning_cases():
    makers = (
        offsets_cases,
        host_offsets_cases,
        slots_cases,
        spec_cases,
        qkv_cases,
        scalar_cases,
        flag_cases,
        out_cases,
    )
    for make in (*makers, conv_cases):
        yield from make()


@pytest.mark.parametrize(("backend", "op", "change", "error", "fragment"), params(meaning_cases()))
def test_a_wrong_value(backend, op, change, error, fragment):
    arguments = small_call(op)
    arguments |= change(arguments)
    raises(backend, op, arguments, error, fragment)


@pytest.mark.parametrize(
    ("backend", "op", "name", "pool"), params((op, pool, slots, pool) for op, slots, pool in slot_ops())
)
def test_a_pool_whose_slots_overlap(backend, op, name, pool):
    arguments = small_call(op)
    arguments[pool] = arguments[pool][:1].expand_as(arguments[pool])
    raises(backend, op, arguments, ValueError, f"{pool}:")


@pytest.mark.parametrize(("op", "name"), [(RECURRENT, "gk"), (RECURRENT, "gv"), (CHUNK, "cp_context")])
def test_inputs_that_no_rule_here_has(op, name):
    raises(None, op, {**small_call(op), name: torch.zeros(1)}, NotImplementedError, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [CHUNK, RECURRENT, DECODE, SPEC, REPLAY, FUSED, FUSED_REPLAY])
@pytest.mark.parametrize("scale", [2**63, 10**30, 10**400], ids=["2**63", "10**30", "10**400"])
def test_an_int_that_torch_cannot_take_as_a_scale(backend, op, scale):
    text = f"scale: expected an int of 64 bits, got {scale}"
    raises(backend, op, {**small_call(op), "scale": scale}, ValueError, text)


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_dtype_of_eight_bits_is_named(backend, dtype):
    arguments = small_call("rms_norm_gated")
    x = arguments["x"].to(dtype)
    name = str(dtype).removeprefix("torch.")
    raises(backend, "rms_norm_gated", {**arguments, "x": x}, TypeError, "x: expected float32", f"got {name} [")


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_have_no_final_states(backend):
    arguments = {
        "x": torch.zeros(1, C, 3),
        "weight": torch.zeros(C, 4),
        "seq_idx": torch.zeros(1, 3, dtype=torch.int32),
    }
    arguments["return_final_states"] = True
    raises(backend, "causal_conv1d_fn", arguments, ValueError, "seq_idx: expected None with return_final_states")


def test_a_dense_batch_has_as_many_slots_as_rows():
    for op in RULES:
        arguments = {**small_call(op), "cu_seqlens": None}
        raises(None, op, arguments, ValueError, "has_initial_state: expected [1]")
        del arguments["has_initial_state"]
        raises(None, op, arguments, ValueError, "state_indices: expected [1]")


def test_decode_rows_and_slots_by_count():
    """8 rows and 5 slots: the message has both."""
    arguments = small_call(DECODE)
    arguments |= {"cu_seqlens": None, "initial_state_indices": ints(0, 1)}
    for backend in (None, "reference"):
        raises(backend, DECODE, arguments, ValueError, "initial_state_indices: expected [3], got int32 [2]")


@pytest.mark.parametrize(("backend", "op"), params((op, "") for op in gdn_core.OPS))
def test_tensors_without_values(backend, op):
    """All on the meta device: no backend runs that, and the message says which argument."""
    arguments = {}
    for name, value in small_call(op).items():
        if isinstance(value, ReplayRecords):
            value = ReplayRecords.from_tensors(*(part.to("meta") for part in vars(value).values()))
        arguments[name] = value.to("meta") if isinstance(value, torch.Tensor) else value
    for options in [{}, {"output_chunk_states": True}] if op == CHUNK else [{}]:
        with (
            gdn_core.use_backend(backend),
            pytest.raises(NotImplementedError, match=r"^\w+: expected .*values, got .* meta"),
        ):
            call(op, arguments | options)


@pytest.mark.parametrize(("backend", "op"), params((op, "") for op in gdn_core.OPS))
def test_numbers_of_other_libraries(backend, op):
    """A number of numpy, or a tensor of one element, is as good as Python's; whatever has a truth is a flag."""
    values = {"scale": 0.25, "softplus_beta": 2.0, "softplus_threshold": 5.0, "eps": 1e-3, "norm_eps": 1e-3}
    values |= {"null_slot": 2, "head_k_dim": K, "num_key_heads": H, "use_qk_l2norm_in_kernel": True}
    names = inspect.signature(getattr(gdn_core, op)).parameters
    values = {name: value for name, value in values.items() if name in names}
    expected = small_call(op) | values
    with gdn_core.use_backend(backend):
        results = call(op, expected)
        for convert in (torch.tensor, lambda x: torch.tensor([x]), lambda x: numpy.asarray(x)[()]):
            actual = call(op, small_call(op) | {name: convert(value) for name, value in values.items()})
            for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, results)), strict=True):
                assert (x is None and y is None) or torch.equal(x, y)


# --- float64 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_float64_runs_on_the_reference(op, cpu_backend):
    with gdn_core.use_backend("cpu"):
        raises_declined(op, to_float64(small_call(op)), "float64")
    arguments, expected_arguments = to_float64(small_call(op)), to_float64(small_call(op))
    with gdn_core.record_calls() as calls:
        results = call(op, arguments)
    assert calls == {(op, "reference"): 1}
    expected = getattr(oracle, op)(**expected_arguments)
    results, expected = (x if isinstance(x, tuple) else (x,) for x in (results, expected))
    for actual, wanted in zip(results, expected, strict=True):
        if wanted is not None:
            assert actual.dtype == torch.float64
            assert relative_error(actual, wanted, tuple(range(wanted.dim()))) <= 1e-12
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "out":
            wanted = expected_arguments[name]
            assert relative_error(value, wanted, tuple(range(wanted.dim()))) <= 1e-12, name


def raises_declined(op, arguments, *fragments):
    with untouched(arguments), pytest.raises(NotImplementedError) as caught:
        call(op, arguments)
    for fragment in (op, "cpu", *fragments):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_a_forced_backend_without_the_op_says_so(op, cpu_backend, monkeypatch):
    monkeypatch.delitem(_registry.provider("cpu").ops, op)
    monkeypatch.setattr(_dispatch, "_fast", {})
    with gdn_core.use_backend("cpu"):
        raises_declined(op, small_call(op), "no kernel")


@pytest.mark.parametrize("op", [DECODE, *RULES])
def test_heads_beyond_256_run_on_the_reference(op, cpu_backend):
    arguments = small_call(op)
    rows = arguments["q"].shape[1]
    arguments |= {"q": torch.randn(1, rows, H, 300), "k": torch.randn(1, rows, H, 300)}
    pool = "initial_state_source" if op == DECODE else "initial_state"
    arguments[pool] = torch.randn(6, HV, 300, V)
    with gdn_core.use_backend("cpu"):
        raises_declined(op, arguments, "256")
    with gdn_core.record_calls() as calls:
        call(op, arguments)
    assert calls == {(op, "reference"): 1}


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=r"expected one of .*reference, got 'gpu'"):
        gdn_core.use_backend("gpu")
    with pytest.raises(ValueError, match=r"op: expected one of .*rms_norm_gated.*, got 'nothing'"):
        gdn_core.explain("nothing")


# --- GDN_DEBUG=1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "op", "name"), params((op, name, name) for op, name, _ in slot_ops() if op not in (SPEC, FUSED))
)
def test_two_rows_with_one_slot_are_an_error_in_debug(backend, op, name, monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    arguments = small_call(op)
    with gdn_core.use_backend(backend):
        call(op, small_call(op))
    raises(backend, op, {**arguments, name: ints(2, 2)}, ValueError, f"{name}: expected distinct slots", "2")
    with gdn_core.use_backend(backend):  # two rows of padding share nothing
        call(op, {**arguments, name: ints(-1, -1)})
        call(op, {**arguments, name: ints(0, 0), "null_slot": 0})


@pytest.mark.parametrize(("backend", "op", "dtype"), params((op, str(x), x) for op in RULES for x in FLOATS))
def test_a_linear_decay_is_an_error_in_debug(backend, op, dtype, monkeypatch):
    arguments = small_call(op)
    arguments["g"] = torch.full_like(arguments["g"], -0.5).to(dtype)
    arguments["g"][0, 5, 2] = 0.875
    with gdn_core.use_backend(backend):
        call(op, dict(arguments))
        monkeypatch.setenv("GDN_DEBUG", "1")
        call(op, small_call(op))
    raises(backend, op, arguments, ValueError, "g: expected log decays <= 0", "0.875")


@pytest.mark.parametrize("backend", [None, "reference", "cpu"])
def test_a_raw_gate_may_be_positive_in_debug(backend, monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    arguments = small_call(RECURRENT)
    arguments |= {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    arguments["g"] = torch.ones_like(arguments["g"])
    with gdn_core.use_backend(backend) if backend else nullcontext():
        call(RECURRENT, arguments)
