# SPDX-License-Identifier: Apache-2.0
"""Checks of every op's arguments, in Python, for the backends that do not check for themselves (the reference).

Each ``_check_<op>`` takes the arguments of ``torch.ops.gdn.<op>`` and raises before anything has changed. Native
backends make the same checks in C++, with the same errors.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SPEC_COLUMNS = 16
CHUNK = 64

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_ACTIVATIONS = (None, "silu", "swish")
_GATE_ACTIVATIONS = ("silu", "swish", "sigmoid", "none")

_reads_values: ContextVar[bool] = ContextVar("gdn_reads_values", default=True)


def device_of(flat: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor among the arguments."""
    for value in flat:
        if isinstance(value, Tensor):
            return value.device
    raise TypeError("expected at least one torch.Tensor argument")


def check(op: str, flat: Sequence[Any]) -> None:
    """Raise what is wrong with a call of ``op``, if anything is."""
    _check_kinds(op, flat)
    _CHECKS[op](*flat)
    _check_written(op, flat)


# --- kinds ------------------------------------------------------------------------------------------------------------

# Arguments of torch.ops.gdn whose public name is another.
_PUBLIC_NAMES = {
    "records_k": "records.k",
    "records_u": "records.u",
    "records_decay": "records.decay",
    "records_live": "records.live",
    "final_states": "final_states_out",
}


class _Scalar(NamedTuple):
    expected: str
    method: str  # what the value must offer: numbers of numpy and torch, and symbolic ones, are as good as Python's
    convert: Callable[[Any], object]


_SCALARS = {
    "float": _Scalar("a number", "__float__", float),
    "int": _Scalar("an int", "__index__", operator.index),
    "bool": _Scalar("a bool", "__bool__", bool),
}
_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)


class _Argument(NamedTuple):
    name: str
    kind: str
    is_optional: bool
    is_written: bool


@cache
def _arguments(op: str) -> tuple[_Argument, ...]:
    """Return what the schema of ``op`` says of each argument, under its public name."""
    schema = getattr(torch.ops.gdn, op).default._schema
    names = {argument.name for argument in schema.arguments}
    arguments = []
    for argument in schema.arguments:
        kind = str(argument.type)
        name = _PUBLIC_NAMES.get(argument.name, argument.name)
        if name == "state" and "initial_state" in names:
            name = "initial_state"
        optional = kind.removeprefix("Optional[").removesuffix("]")
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        arguments.append(_Argument(name, optional, optional != kind, is_written))
    return tuple(arguments)


def _check_kinds(op: str, flat: Sequence[Any]) -> None:
    """Check what every op needs alike: the Python types, dense tensors, one device."""
    first: tuple[str, Tensor] | None = None
    for argument, value in zip(_arguments(op), flat, strict=True):
        if value is None and argument.is_optional:
            continue
        if argument.kind in _SCALARS:
            _scalar(argument.name, argument.kind, value)
        elif argument.kind == "Tensor":
            first = first or (argument.name, value)
            dense_tensor(argument.name, value, first)
    if first is not None and type(first[1]) is Tensor and first[1].device.type == "meta":
        raise NotImplementedError(f"{first[0]}: expected a tensor with values, got {describe(first[1])} on device meta")


def _scalar(name: str, kind: str, value: object) -> None:
    expected, method, convert = _SCALARS[kind]
    if isinstance(value, _SYMBOLIC):
        return
    if isinstance(value, Tensor):
        wrong = value.is_complex() or (kind == "int" and value.is_floating_point())
        if value.numel() != 1 or value.device.type == "meta" or wrong:
            raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
        if not has_data(value):
            return
    # torch takes a Python int as a number of 64 bits, where a float of that size would do.
    if kind == "float" and isinstance(value, int):
        convert = operator.index
    try:
        converted = convert(value) if hasattr(value, method) else None
    except (TypeError, ValueError, OverflowError):  # an array of several, for one
        converted = None
    if converted is None:
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    if convert is operator.index and not -(2**63) <= operator.index(value) < 2**63:  # type: ignore[arg-type]
        raise ValueError(f"{name}: expected an int of 64 bits, got {operator.index(value)}")  # type: ignore[arg-type]


def dense_tensor(name: str, value: object, first: tuple[str, Tensor]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
    if value.device != first[1].device:
        raise ValueError(f"{name}: expected device {first[1].device} (of {first[0]}), got {value.device}")


def _check_written(op: str, flat: Sequence[Any]) -> None:
    """Check what torch would complain about only when it writes: too late, with half of the outputs written."""
    for argument, value in zip(_arguments(op), flat, strict=True):
        if not argument.is_written or value is None or not _is_plain(value):
            continue
        separate_elements(argument.name, value)
        updatable(argument.name, value)


# --- pieces -----------------------------------------------------------------------------------------------------------


def describe(value: object) -> str:
    """Say what came, the way the errors say it: ``bfloat16 [2, 8]``."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value) if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def tensor(name: str, value: object, shape: Sequence[int | str], dtypes: Sequence[torch.dtype] = _FLOATS) -> None:
    """Check that ``value`` is a tensor of ``shape`` (a string stands for any size) and of one of ``dtypes``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")
    wanted = f"[{', '.join(str(size) for size in shape)}]"
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {allowed} {wanted}, got {describe(value)}")
    matches = value.dim() == len(shape) and all(
        isinstance(size, str) or actual == size for actual, size in zip(value.shape, shape, strict=False)
    )
    if not matches:
        raise ValueError(f"{name}: expected {wanted}, got {describe(value)}")


def same_dtype(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.dtype != other.dtype:
        raise TypeError(f"{name}: expected the dtype of {other_name}, {describe(other)}, got {describe(value)}")


def positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def packed_slots(name: str, pool: Tensor) -> None:
    """Check that the inside of each slot is packed; the stride between slots is free."""
    expected = 1
    for size, stride in zip(reversed(pool.shape[1:]), reversed(pool.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(
                f"{name}: expected the inside of a slot to be packed, got strides {list(pool.stride())} "
                f"for {describe(pool)}"
            )
        expected *= size
    if pool.shape[0] > 1 and pool.numel() > 0 and pool.stride(0) < expected:
        raise ValueError(f"{name}: expected slots that do not overlap, got a slot stride of {pool.stride(0)}")


def separate_elements(name: str, value: Tensor) -> None:
    """Check that no two elements share memory, whatever the order of the dimensions."""
    span = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and value.numel() > 0:
            if stride < span:
                raise ValueError(f"{name}: expected elements that do not overlap, got strides {list(value.stride())}")
            span += stride * (size - 1)


def writable(name: str, value: Tensor, shape: Sequence[int | str]) -> None:
    """Check an output: its shape, a floating dtype, a unit last stride."""
    tensor(name, value, shape)
    if value.numel() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: expected a unit stride in the last dimension, got strides {list(value.stride())}")


def updatable(name: str, value: Tensor) -> None:
    """Check that torch lets this tensor be written here."""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name}: expected a tensor that may be updated outside torch.inference_mode(), got one made inside, "
            f"{describe(value)}"
        )


def _is_plain(value: Tensor) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.device.type != "meta"


def has_data(value: Tensor) -> bool:
    """Tell whether there are values to look at, and checks may."""
    return _is_plain(value) and _reads_values.get()


@contextmanager
def values_unread() -> Iterator[None]:
    """Check shapes, dtypes and strides only: to read what lies on a device is to wait for it."""
    token = _reads_values.set(False)
    try:
        yield
    finally:
        _reads_values.reset(token)


def offsets(name: str, value: Tensor | None, total: int) -> None:
    """Check ``cu_seqlens``: non-decreasing, inside [0, total]."""
    if value is None:
        return
    tensor(name, value, ["N+1"], _INTEGERS)
    if value.numel() < 1:
        raise ValueError(f"{name}: expected at least one offset, got {describe(value)}")
    if not has_data(value):
        return
    ends = value.tolist()
    if ends[0] < 0 or ends[-1] > total or any(end < start for start, end in pairwise(ends)):
        raise ValueError(f"{name}: expected non-decreasing offsets in [0, {total}], got {_short(ends)}")


def _longest_row(lengths: Tensor, sources: Tensor, null_slot: int | None) -> int:
    """Return the most tokens that a row has which is no padding."""
    if not (has_data(lengths) and has_data(sources)) or sources.numel() == 0:
        return 0
    is_padding = (sources < 0) | (sources == null_slot) if null_slot is not None else sources < 0
    return int(lengths.masked_fill(is_padding, 0).max())


def row_indices(value: Tensor | None, rows: int) -> None:
    """Check which of a call's rows it is about."""
    if value is None:
        return
    tensor("row_indices", value, ["M"], _INTEGERS)
    if has_data(value) and value.numel() > 0 and not (int(value.min()) >= 0 and int(value.max()) < rows):
        raise IndexError(f"row_indices: expected rows in [0, {rows}), got {_short(value.tolist())}")


def _named(indices: Tensor | None, values: Tensor) -> Tensor:
    """Return what a call's own rows have of ``values``: nobody looks at the others."""
    return values if indices is None or not has_data(indices) else values.index_select(0, indices)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 16 else f"[{', '.join(map(str, values[:16]))}, ...]"


def slots(name: str, value: Tensor, shape: Sequence[int | str], pool_size: int, null_slot: int | None) -> None:
    """Check slot indices: negative and null ones are padding, the others must lie in the pool."""
    tensor(name, value, shape, _INTEGERS)
    if not has_data(value):
        return
    live = value.reshape(-1)
    if null_slot is not None:
        live = live[live != null_slot]
    if live.numel() > 0 and int(live.max()) >= pool_size:
        raise IndexError(f"{name}: expected slots below {pool_size}, got {int(live.max())}")
    if debugging():
        distinct_slots(name, value, null_slot)


def distinct_slots(name: str, value: Tensor, null_slot: int | None) -> None:
    """Check that no two rows share a slot; the columns of one row of a table may."""
    owner: dict[int, int] = {}
    for row, slots_of_row in enumerate(value.reshape(value.shape[0], -1).tolist()):
        for slot in slots_of_row:
            if slot >= 0 and slot != null_slot and owner.setdefault(slot, row) != row:
                raise ValueError(f"{name}: expected distinct slots, got {slot} in rows {owner[slot]} and {row}")


def accepted(value: Tensor | None, rows: int, columns: int, indices: Tensor | None = None) -> None:
    """Check ``num_accepted_tokens``: at most the columns of the table (0 acts as 1)."""
    if value is None:
        return
    tensor("num_accepted_tokens", value, [rows], _INTEGERS)
    value = _named(indices, value)
    if not has_data(value) or value.numel() == 0:
        return
    if int(value.min()) < 0 or int(value.max()) > columns:
        raise ValueError(f"num_accepted_tokens: expected values in [0, {columns}], got {_short(value.tolist())}")


def debugging() -> bool:
    return os.environ.get("GDN_DEBUG") == "1"


def _log_decay(g: Tensor | None) -> None:
    """Under GDN_DEBUG=1, catch a linear decay passed where its logarithm is wanted."""
    if g is not None and debugging() and has_data(g) and g.numel() > 0 and bool((g > 0).any()):
        raise ValueError(f"g: expected log decays <= 0, got {float(g.max())}")


def _grouped(name: str, num_value_heads: int, num_key_heads: int) -> None:
    if num_key_heads < 1 or num_value_heads % num_key_heads != 0:
        raise ValueError(
            f"{name}: expected a multiple of the {num_key_heads} key heads as value heads, got {num_value_heads}"
        )


def not_empty(name: str, value: Tensor) -> None:
    if value.shape[-1] < 1:
        raise ValueError(f"{name}: expected a last dimension of at least 1, got {describe(value)}")


def _state_shape(first: int | str, hv: int, k: int, v: int, state_v_first: bool) -> list[int | str]:
    return [first, hv, v, k] if state_v_first else [first, hv, k, v]


def _pool(name: str, pool: Tensor, hv: int, k: int, v: int, state_v_first: bool) -> None:
    tensor(name, pool, _state_shape("P", hv, k, v, state_v_first))
    packed_slots(name, pool)


def _qkv(q: Tensor, k: Tensor, v: Tensor, batch: int | str) -> tuple[int, int, int, int, int, int]:
    """Check q, k and v; return (B, T, H, K, HV, V)."""
    tensor("q", q, [batch, "T", "H", "K"])
    tensor("k", k, list(q.shape))
    tensor("v", v, [*q.shape[:2], "HV", "V"])
    same_dtype("k", k, "q", q)
    same_dtype("v", v, "q", q)
    b, t, h, key_dim = q.shape
    _grouped("v", v.shape[2], h)
    not_empty("q", q)
    not_empty("v", v)
    return b, t, h, key_dim, v.shape[2], v.shape[3]


def _head_vectors(hv: int, A_log: Tensor, dt_bias: Tensor) -> None:
    tensor("A_log", A_log, [hv])
    tensor("dt_bias", dt_bias, [hv])


def gate_inputs(a: Tensor, b: Tensor, shape: Sequence[int], activations: torch.dtype) -> None:
    """Check what the gates of a decode step come from: float64 only where the step computes in float64."""
    dtypes = [dtype for dtype in _FLOATS if dtype != torch.float64 or activations == torch.float64]
    tensor("a", a, shape, dtypes)
    tensor("b", b, shape, dtypes)


# --- one check an op --------------------------------------------------------------------------------------------------


def _check_fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, softplus_beta: float, softplus_threshold: float,
    g: Tensor, beta: Tensor,
) -> None:  # fmt: skip
    tensor("A_log", A_log, ["HV"])
    hv = A_log.shape[0]
    tensor("dt_bias", dt_bias, [hv])
    if isinstance(a, Tensor) and a.dim() < 1:
        raise ValueError(f"a: expected [..., {hv}], got {describe(a)}")
    tensor("a", a, [*a.shape[:-1], hv] if isinstance(a, Tensor) else [hv])
    tensor("b", b, list(a.shape))
    positive("softplus_beta", softplus_beta)


def _check_sequences(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: Tensor | None, state: Tensor | None,
    state_v_first: bool, cu_seqlens: Tensor | None, state_indices: Tensor | None, has_initial_state: Tensor | None,
    null_slot: int | None, out: Tensor, final_state: Tensor | None,
) -> tuple[int, ...]:  # fmt: skip
    b, t, _, key_dim, hv, value_dim = dims = _qkv(q, k, v, "B")
    if cu_seqlens is not None and b != 1:
        raise ValueError(f"q: expected a batch of 1 with cu_seqlens, got {describe(q)}")
    offsets("cu_seqlens", cu_seqlens, t)
    n = b if cu_seqlens is None else cu_seqlens.numel() - 1
    if has_initial_state is not None:
        tensor("has_initial_state", has_initial_state, [n], (torch.bool,))
    if initial_state is not None:
        tensor("initial_state", initial_state, _state_shape(n, hv, key_dim, value_dim, state_v_first))
    if state_indices is not None:
        if state is None:
            raise ValueError("initial_state: expected a pool with state_indices, got None")
        _pool("initial_state", state, hv, key_dim, value_dim, state_v_first)
        slots("state_indices", state_indices, [n], state.shape[0], null_slot)
    writable("out", out, [b, t, hv, value_dim])
    return dims


def _check_chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, initial_state: Tensor | None,
    state: Tensor | None, use_qk_l2norm_in_kernel: bool, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool,
    state_v_first: bool, cu_seqlens: Tensor | None, state_indices: Tensor | None, has_initial_state: Tensor | None,
    null_slot: int | None, out: Tensor, final_state: Tensor | None, chunk_states: Tensor | None,
) -> None:  # fmt: skip
    b, t, _, _, hv, _ = _check_sequences(
        q, k, v, scale, initial_state, state, state_v_first, cu_seqlens, state_indices, has_initial_state, null_slot,
        out, final_state,
    )  # fmt: skip
    tensor("g", g, [b, t, hv])
    tensor("beta", beta, [b, t, hv])
    _log_decay(g)


def _check_fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float | None,
    initial_state: Tensor | None, state: Tensor | None, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    A_log: Tensor | None, dt_bias: Tensor | None, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool,
    state_v_first: bool, cu_seqlens: Tensor | None, state_indices: Tensor | None, has_initial_state: Tensor | None,
    null_slot: int | None, out: Tensor, final_state: Tensor | None,
) -> None:  # fmt: skip
    b, t, _, _, hv, _ = _check_sequences(
        q, k, v, scale, initial_state, state, state_v_first, cu_seqlens, state_indices, has_initial_state, null_slot,
        out, final_state,
    )  # fmt: skip
    if g is not None:
        tensor("g", g, [b, t, hv])
    if beta is not None:
        tensor("beta", beta, [b, t, hv])
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("g: expected the raw gate input a with use_gate_in_kernel, got None")
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is None:
                raise ValueError(f"{name}: expected [{hv}] with use_gate_in_kernel, got None")
            tensor(name, value, [hv])
    else:
        _log_decay(g)
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError("beta: expected the raw input b with use_beta_sigmoid_in_kernel, got None")


def _check_decode(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, pool_name: str,
    pool: Tensor, softplus_beta: float, state_v_first: bool, out: Tensor,
) -> tuple[int, int, int, int, int]:  # fmt: skip
    _, t, h, key_dim, hv, value_dim = _qkv(q, k, v, 1)
    _head_vectors(hv, A_log, dt_bias)
    gate_inputs(a, b, [t, hv], q.dtype)
    positive("softplus_beta", softplus_beta)
    _pool(pool_name, pool, hv, key_dim, value_dim, state_v_first)
    writable("out", out, [1, t, hv, value_dim])
    return t, h, key_dim, hv, value_dim


def _check_fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor, cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool, softplus_beta: float, softplus_threshold: float, scale: float | None,
    state_v_first: bool, null_slot: int | None, out: Tensor,
) -> None:  # fmt: skip
    t, *_ = _check_decode(
        A_log, dt_bias, q, k, v, a, b, "initial_state_source", initial_state_source, softplus_beta, state_v_first, out
    )
    offsets("cu_seqlens", cu_seqlens, t)
    n = t if cu_seqlens is None else cu_seqlens.numel() - 1
    slots("initial_state_indices", initial_state_indices, [n], initial_state_source.shape[0], null_slot)


def _spec_table(name: str, table: Tensor, pool_size: int, null_slot: int | None) -> int:
    slots(name, table, ["N", "S"], pool_size, null_slot)
    columns = table.shape[1]
    if not 1 <= columns <= MAX_SPEC_COLUMNS:
        raise ValueError(f"{name}: expected 1 to {MAX_SPEC_COLUMNS} columns, got {describe(table)}")
    return columns


def _check_fused_sigmoid_gating_delta_rule_update_spec(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, spec_state_indices: Tensor, num_accepted_tokens: Tensor | None, cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool, softplus_beta: float, softplus_threshold: float, scale: float | None,
    state_v_first: bool, null_slot: int | None, out: Tensor,
) -> None:  # fmt: skip
    t, *_ = _check_decode(
        A_log, dt_bias, q, k, v, a, b, "initial_state_source", initial_state_source, softplus_beta, state_v_first, out
    )
    columns = _spec_table("spec_state_indices", spec_state_indices, initial_state_source.shape[0], null_slot)
    _spec_rows(spec_state_indices, columns, num_accepted_tokens, cu_seqlens, t, null_slot)


def _spec_rows(
    slots: Tensor, columns: int, num_accepted_tokens: Tensor | None, cu_seqlens: Tensor, total: int,
    null_slot: int | None, indices: Tensor | None = None,
) -> None:  # fmt: skip
    """Check rows on slots ``[N]`` or ``[N, S]``; those whose source is padding may have any length."""
    rows = slots.shape[0]
    tensor("cu_seqlens", cu_seqlens, [rows + 1], _INTEGERS)
    offsets("cu_seqlens", cu_seqlens, total)
    row_indices(indices, rows)
    accepted(num_accepted_tokens, rows, columns, indices)
    slots = _named(indices, slots)
    sources = slots if slots.dim() == 1 else slots[:, 0]
    if slots.dim() == 2 and num_accepted_tokens is not None and has_data(num_accepted_tokens):
        columns_of_rows = _named(indices, num_accepted_tokens).to(torch.int64).clamp(min=1)[:, None] - 1
        sources = slots.gather(1, columns_of_rows)[:, 0]
    longest = _longest_row(_named(indices, cu_seqlens.diff()), sources, null_slot)
    if longest > columns:
        raise ValueError(f"cu_seqlens: expected rows of at most {columns} tokens, got one of {longest}")


def _records(
    records_k: Tensor, records_u: Tensor, records_decay: Tensor, records_live: Tensor, pool_size: int, h: int,
    key_dim: int, hv: int, value_dim: int, activations: torch.dtype,
) -> int:  # fmt: skip
    wide = torch.float64 if activations == torch.float64 else torch.float32
    tensor("records.k", records_k, [pool_size, "S", h, key_dim], (activations,))
    columns = records_k.shape[1]
    tensor("records.u", records_u, [pool_size, columns, hv, value_dim], (wide, torch.float32))
    tensor("records.decay", records_decay, [pool_size, columns, hv], (wide, torch.float32))
    tensor("records.live", records_live, [pool_size], (torch.int32,))
    return columns


def _replay_accepted(
    slot_indices: Tensor, num_accepted_tokens: Tensor | None, live: Tensor, null_slot: int | None,
    indices: Tensor | None = None,
) -> None:  # fmt: skip
    if num_accepted_tokens is None or not has_data(slot_indices):
        return
    slots_of_rows, counts = (_named(indices, x).tolist() for x in (slot_indices, num_accepted_tokens))
    for slot, count in zip(slots_of_rows, counts, strict=True):
        if slot < 0 or slot == null_slot:
            continue
        recorded = int(live[slot])
        if 0 < recorded < count:
            raise ValueError(
                f"num_accepted_tokens: expected at most the {recorded} live records of slot {slot}, got {count}"
            )


def _check_fused_sigmoid_gating_delta_rule_update_replay(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
    slot_indices: Tensor, records_k: Tensor, records_u: Tensor, records_decay: Tensor, records_live: Tensor,
    num_accepted_tokens: Tensor | None, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool, softplus_beta: float,
    softplus_threshold: float, scale: float | None, state_v_first: bool, null_slot: int | None, out: Tensor,
) -> None:  # fmt: skip
    t, h, key_dim, hv, value_dim = _check_decode(
        A_log, dt_bias, q, k, v, a, b, "state", state, softplus_beta, state_v_first, out
    )
    columns = _records(records_k, records_u, records_decay, records_live, state.shape[0], h, key_dim, hv, value_dim,
                       q.dtype)  # fmt: skip
    slots("slot_indices", slot_indices, ["N"], state.shape[0], null_slot)
    _spec_rows(slot_indices, columns, num_accepted_tokens, cu_seqlens, t, null_slot)
    _replay_accepted(slot_indices, num_accepted_tokens, records_live, null_slot)


def _conv_weight(weight: Tensor, bias: Tensor | None, channels: int) -> int:
    tensor("weight", weight, [channels, "W"])
    width = weight.shape[1]
    if not 2 <= width <= 5:
        raise ValueError(f"weight: expected a width of 2 to 5, got {describe(weight)}")
    if bias is not None:
        tensor("bias", bias, [channels])
    return width


def _conv_pool(name: str, pool: Tensor, channels: int, width: int) -> None:
    tensor(name, pool, ["P", channels, "state_len"])
    if pool.shape[2] < width - 1:
        raise ValueError(f"{name}: expected a state_len of at least {width - 1}, got {describe(pool)}")


def _check_causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
    activation: str | None, conv_states: Tensor | None, query_start_loc: Tensor | None, cache_indices: Tensor | None,
    has_initial_state: Tensor | None, null_slot: int | None, out: Tensor, final_states: Tensor | None,
) -> None:  # fmt: skip
    if query_start_loc is None:
        tensor("x", x, ["B", "C", "T"])
        batch, channels, total = x.shape
    else:
        tensor("query_start_loc", query_start_loc, ["N+1"], _INTEGERS)
        tensor("x", x, ["C", "T"])
        (channels, total), batch = x.shape, query_start_loc.numel() - 1
    width = _conv_weight(weight, bias, channels)
    choice("activation", activation, _ACTIVATIONS)
    offsets("query_start_loc", query_start_loc, total)
    if seq_idx is not None:
        others = {"query_start_loc": query_start_loc, "conv_states": conv_states, "initial_states": initial_states,
                  "has_initial_state": has_initial_state, "return_final_states": final_states}  # fmt: skip
        for name, other in others.items():
            if other is not None:
                raise ValueError(f"seq_idx: expected None with {name}, got a tensor")
        tensor("seq_idx", seq_idx, [batch, total], _INTEGERS)
    if initial_states is not None:
        if conv_states is not None:
            raise ValueError("initial_states: expected None with conv_states, got a tensor")
        tensor("initial_states", initial_states, [batch, channels, width - 1])
    if conv_states is not None:
        _conv_pool("conv_states", conv_states, channels, width)
        if cache_indices is None and conv_states.shape[0] < batch:
            raise ValueError(f"conv_states: expected at least {batch} slots, got {describe(conv_states)}")
    if cache_indices is not None:
        if conv_states is None:
            raise ValueError("conv_states: expected a pool with cache_indices, got None")
        slots("cache_indices", cache_indices, [batch], conv_states.shape[0], null_slot)
    if has_initial_state is not None:
        tensor("has_initial_state", has_initial_state, [batch], (torch.bool,))
    tensor("out", out, list(x.shape))
    if final_states is not None:
        tensor("final_states_out", final_states, [batch, channels, width - 1])


def _check_causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    cache_seqlens: Tensor | None, conv_state_indices: Tensor | None, num_accepted_tokens: Tensor | None,
    query_start_loc: Tensor | None, null_slot: int | None, indices: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    if query_start_loc is not None:
        tensor("query_start_loc", query_start_loc, ["N+1"], _INTEGERS)
        tensor("x", x, ["T", "C"])
        offsets("query_start_loc", query_start_loc, x.shape[0])
        rows = query_start_loc.numel() - 1
        row_indices(indices, rows)
    else:
        tensor("x", x, ["B", "C", "q"] if isinstance(x, Tensor) and x.dim() == 3 else ["B", "C"])
        rows = x.shape[0]
    channels = x.shape[1]
    width = _conv_weight(weight, bias, channels)
    choice("activation", activation, _ACTIVATIONS)
    _conv_pool("conv_state", conv_state, channels, width)
    state_len = conv_state.shape[2]
    if indices is not None and (query_start_loc is None or conv_state_indices is None):
        raise ValueError("row_indices: expected query_start_loc and conv_state_indices with it, got None")
    if conv_state_indices is not None:
        slots("conv_state_indices", conv_state_indices, [rows], conv_state.shape[0], null_slot)
    elif conv_state.shape[0] < rows:
        raise ValueError(f"conv_state: expected at least {rows} slots, got {describe(conv_state)}")
    if num_accepted_tokens is not None:
        accepted(num_accepted_tokens, rows, state_len - width + 2, indices)
        longest = x.shape[2] if x.dim() == 3 else 1
        if query_start_loc is not None:
            sources = torch.arange(rows) if conv_state_indices is None else conv_state_indices
            lengths, sources = _named(indices, query_start_loc.diff()), _named(indices, sources)
            longest = _longest_row(lengths, sources, null_slot)
        if longest > state_len - width + 2:
            raise ValueError(
                f"x: expected rows of at most {state_len - width + 2} tokens for a state_len of {state_len}, "
                f"got {longest}"
            )
    if cache_seqlens is not None:
        if num_accepted_tokens is not None or query_start_loc is not None:
            raise ValueError("cache_seqlens: expected None with num_accepted_tokens or query_start_loc, got a tensor")
        tensor("cache_seqlens", cache_seqlens, [rows], _INTEGERS)
    tensor("out", out, list(x.shape))


def _check_rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise (ValueError if isinstance(x, Tensor) else TypeError)(f"x: expected [..., V], got {describe(x)}")
    tensor("x", x, list(x.shape))
    tensor("gate", gate, list(x.shape))
    tensor("weight", weight, [x.shape[-1]])
    choice("activation", activation, _GATE_ACTIVATIONS)
    if not eps >= 0:
        raise ValueError(f"eps: expected a number >= 0, got {eps}")
    writable("out", out, list(x.shape))


def _check_fused_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor,
    output_gate: Tensor | None, norm_weight: Tensor | None, norm_eps: float, output_gate_activation: str,
    num_key_heads: int | None, head_k_dim: int, state_v_first: bool, out: Tensor,
) -> tuple[int, int, int, int, int]:  # fmt: skip
    tensor("mixed_qkv", mixed_qkv, ["T", "C"])
    t, channels = mixed_qkv.shape
    tensor("output_gate", output_gate, [t, "HV", "V"])
    assert output_gate is not None
    hv, value_dim = output_gate.shape[1:]
    if head_k_dim < 1:
        raise ValueError(f"head_k_dim: expected at least 1, got {head_k_dim}")
    h = (channels - hv * value_dim) // (2 * head_k_dim) if num_key_heads is None else num_key_heads
    if channels != 2 * h * head_k_dim + hv * value_dim:
        raise ValueError(
            f"mixed_qkv: expected [{t}, 2 * {h} * {head_k_dim} + {hv} * {value_dim}], got {describe(mixed_qkv)}"
        )
    _grouped("output_gate", hv, h)
    not_empty("output_gate", output_gate)
    _head_vectors(hv, A_log, dt_bias)
    gate_inputs(a, b, [t, hv], mixed_qkv.dtype)
    tensor("norm_weight", norm_weight, [value_dim])
    choice("output_gate_activation", output_gate_activation, _GATE_ACTIVATIONS)
    if not norm_eps >= 0:
        raise ValueError(f"norm_eps: expected a number >= 0, got {norm_eps}")
    _pool("state", state, hv, head_k_dim, value_dim, state_v_first)
    writable("out", out, [t, hv, value_dim])
    return t, h, head_k_dim, hv, value_dim


def _check_fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state_indices: Tensor,
    cu_seqlens: Tensor, num_accepted_tokens: Tensor | None, state: Tensor, output_gate: Tensor, norm_weight: Tensor,
    scale: float | None, norm_eps: float, output_gate_activation: str, num_key_heads: int | None, head_k_dim: int,
    state_v_first: bool, null_slot: int | None, rows: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    t, *_ = _check_fused_decode(
        mixed_qkv, a, b, A_log, dt_bias, state, output_gate, norm_weight, norm_eps, output_gate_activation,
        num_key_heads, head_k_dim, state_v_first, out,
    )  # fmt: skip
    columns = _spec_table("state_indices", state_indices, state.shape[0], null_slot)
    _spec_rows(state_indices, columns, num_accepted_tokens, cu_seqlens, t, null_slot, rows)


def _check_fused_gdn_decode_post_conv_mtp_replay(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, slot_indices: Tensor, records_k: Tensor,
    records_u: Tensor, records_decay: Tensor, records_live: Tensor, cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None, state: Tensor, output_gate: Tensor, norm_weight: Tensor, scale: float | None,
    norm_eps: float, output_gate_activation: str, num_key_heads: int | None, head_k_dim: int, state_v_first: bool,
    null_slot: int | None, rows: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    t, h, key_dim, hv, value_dim = _check_fused_decode(
        mixed_qkv, a, b, A_log, dt_bias, state, output_gate, norm_weight, norm_eps, output_gate_activation,
        num_key_heads, head_k_dim, state_v_first, out,
    )  # fmt: skip
    columns = _records(records_k, records_u, records_decay, records_live, state.shape[0], h, key_dim, hv, value_dim,
                       mixed_qkv.dtype)  # fmt: skip
    slots("slot_indices", slot_indices, ["N"], state.shape[0], null_slot)
    _spec_rows(slot_indices, columns, num_accepted_tokens, cu_seqlens, t, null_slot, rows)
    _replay_accepted(slot_indices, num_accepted_tokens, records_live, null_slot, rows)


_CHECKS: dict[str, Callable[..., None]] = {
    "fused_gdn_gating": _check_fused_gdn_gating,
    "chunk_gated_delta_rule": _check_chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": _check_fused_recurrent_gated_delta_rule,
    "fused_sigmoid_gating_delta_rule_update": _check_fused_sigmoid_gating_delta_rule_update,
    "fused_sigmoid_gating_delta_rule_update_spec": _check_fused_sigmoid_gating_delta_rule_update_spec,
    "fused_sigmoid_gating_delta_rule_update_replay": _check_fused_sigmoid_gating_delta_rule_update_replay,
    "causal_conv1d_fn": _check_causal_conv1d_fn,
    "causal_conv1d_update": _check_causal_conv1d_update,
    "rms_norm_gated": _check_rms_norm_gated,
    "fused_gdn_decode_post_conv_mtp": _check_fused_gdn_decode_post_conv_mtp,
    "fused_gdn_decode_post_conv_mtp_replay": _check_fused_gdn_decode_post_conv_mtp_replay,
}
