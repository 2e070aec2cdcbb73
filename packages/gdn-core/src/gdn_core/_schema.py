# SPDX-License-Identifier: Apache-2.0
"""The ops as ``torch.library`` sees them.

Every op writes to outputs that its caller allocated and returns nothing, and its schema names each argument that it may
change: true mutation schemas, which functionalisation, fake tensors and CUDA-graph capture can trust. ``Library`` calls
are used rather than the ``custom_op`` decorator, which costs tens of microseconds a call.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _dispatch, _validate, reference
from .records import ReplayRecords

_SEQUENCE_STATE = "Tensor? initial_state, Tensor(a!)? state"
_SEQUENCE_ROWS = "Tensor? cu_seqlens, Tensor? state_indices, Tensor? has_initial_state, int? null_slot"
_DECODE_INPUTS = "Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b"
_DECODE_OPTIONS = (
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold, float? scale, bool state_v_first, "
    "int? null_slot, Tensor(b!) out"
)
_RECORDS = "Tensor(c!) records_k, Tensor(d!) records_u, Tensor(e!) records_decay, Tensor(f!) records_live"
_FUSED_OPTIONS = (
    "Tensor output_gate, Tensor norm_weight, float? scale, float norm_eps, str output_gate_activation, "
    "int? num_key_heads, int head_k_dim, bool state_v_first, int? null_slot, Tensor? row_indices, Tensor(b!) out"
)

SCHEMAS = {
    "fused_gdn_gating": (
        "Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float softplus_beta, float softplus_threshold, "
        "Tensor(a!) g, Tensor(b!) beta"
    ),
    "chunk_gated_delta_rule": (
        f"Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, {_SEQUENCE_STATE}, "
        "bool use_qk_l2norm_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
        f"{_SEQUENCE_ROWS}, Tensor(b!) out, Tensor(c!)? final_state, Tensor(d!)? chunk_states"
    ),
    "fused_recurrent_gated_delta_rule": (
        f"Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, float? scale, {_SEQUENCE_STATE}, "
        "bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, Tensor? A_log, Tensor? dt_bias, "
        "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
        f"{_SEQUENCE_ROWS}, Tensor(b!) out, Tensor(c!)? final_state"
    ),
    "fused_sigmoid_gating_delta_rule_update": (
        f"{_DECODE_INPUTS}, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor? cu_seqlens, "
        f"{_DECODE_OPTIONS}"
    ),
    "fused_sigmoid_gating_delta_rule_update_spec": (
        f"{_DECODE_INPUTS}, Tensor(a!) initial_state_source, Tensor spec_state_indices, Tensor? num_accepted_tokens, "
        f"Tensor cu_seqlens, {_DECODE_OPTIONS}"
    ),
    "fused_sigmoid_gating_delta_rule_update_replay": (
        f"{_DECODE_INPUTS}, Tensor(a!) state, Tensor slot_indices, {_RECORDS}, Tensor? num_accepted_tokens, "
        f"Tensor cu_seqlens, {_DECODE_OPTIONS}"
    ),
    "causal_conv1d_fn": (
        "Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, str? activation, "
        "Tensor(a!)? conv_states, Tensor? query_start_loc, Tensor? cache_indices, Tensor? has_initial_state, "
        "int? null_slot, Tensor(b!) out, Tensor(c!)? final_states"
    ),
    "causal_conv1d_update": (
        "Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, Tensor? cache_seqlens, "
        "Tensor? conv_state_indices, Tensor? num_accepted_tokens, Tensor? query_start_loc, int? null_slot, "
        "Tensor? row_indices, Tensor(b!) out"
    ),
    "rms_norm_gated": "Tensor x, Tensor gate, Tensor weight, float eps, str activation, Tensor(a!) out",
    "fused_gdn_decode_post_conv_mtp": (
        "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor cu_seqlens, "
        f"Tensor? num_accepted_tokens, Tensor(a!) state, {_FUSED_OPTIONS}"
    ),
    "fused_gdn_decode_post_conv_mtp_replay": (
        f"Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor slot_indices, {_RECORDS}, "
        f"Tensor cu_seqlens, Tensor? num_accepted_tokens, Tensor(a!) state, {_FUSED_OPTIONS}"
    ),
}

OPS = tuple(SCHEMAS)


def arguments_of(op: str) -> Callable[..., tuple[Any, ...]]:
    """Return the type of an op's arguments: a tuple in the order of its schema that is made by name, with all names."""
    names = [argument.split()[-1] for argument in SCHEMAS[op].split(", ")]
    return namedtuple(op, names)


# --- the reference, over the arguments of the schemas -----------------------------------------------------------------


def _gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *options: Any) -> None:
    softplus_beta, softplus_threshold, g, beta = options
    results = reference.fused_gdn_gating(
        A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold
    )
    g.copy_(results[0])
    beta.copy_(results[1])


def _initial(initial_state: Tensor | None, state: Tensor | None) -> Tensor | None:
    return state if state is not None else initial_state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, initial_state: Tensor | None,
    state: Tensor | None, l2norm: bool, beta_sigmoid: bool, allow_neg_eigval: bool, state_v_first: bool,
    cu_seqlens: Tensor | None, state_indices: Tensor | None, has_initial_state: Tensor | None, null_slot: int | None,
    out: Tensor, final_state: Tensor | None, chunk_states: Tensor | None,
) -> None:  # fmt: skip
    results: tuple[Any, ...] = reference.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, _initial(initial_state, state), final_state is not None, l2norm, beta_sigmoid,
        allow_neg_eigval, state_v_first, cu_seqlens, state_indices=state_indices, has_initial_state=has_initial_state,
        null_slot=null_slot, output_chunk_states=chunk_states is not None, out=out,
    )  # fmt: skip
    if final_state is not None:
        final_state.copy_(results[1])
    if chunk_states is not None:
        chunk_states.copy_(results[2])


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float | None,
    initial_state: Tensor | None, state: Tensor | None, l2norm: bool, gate_in_kernel: bool, A_log: Tensor | None,
    dt_bias: Tensor | None, beta_sigmoid: bool, allow_neg_eigval: bool, state_v_first: bool,
    cu_seqlens: Tensor | None, state_indices: Tensor | None, has_initial_state: Tensor | None, null_slot: int | None,
    out: Tensor, final_state: Tensor | None,
) -> None:  # fmt: skip
    results: tuple[Any, ...] = reference.fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, scale, _initial(initial_state, state), final_state is not None, l2norm,
        gate_in_kernel, A_log, dt_bias, beta_sigmoid, allow_neg_eigval, state_v_first, cu_seqlens,
        state_indices=state_indices, has_initial_state=has_initial_state, null_slot=null_slot, out=out,
    )  # fmt: skip
    if final_state is not None:
        final_state.copy_(results[1])


def _keywords(values: tuple[Any, ...]) -> dict[str, Any]:
    scale, state_v_first, null_slot, out = values
    return {"scale": scale, "state_v_first": state_v_first, "null_slot": null_slot, "out": out}


def _update(*flat: Any) -> None:
    reference.fused_sigmoid_gating_delta_rule_update(*flat[:13], **_keywords(flat[13:]))


def _update_spec(*flat: Any) -> None:
    reference.fused_sigmoid_gating_delta_rule_update_spec(*flat[:14], **_keywords(flat[14:]))


def _update_replay(*flat: Any) -> None:
    arguments = [*flat[:9], ReplayRecords.from_tensors(*flat[9:13]), *flat[13:18]]
    reference.fused_sigmoid_gating_delta_rule_update_replay(*arguments, **_keywords(flat[18:]))


@contextmanager
def _only_rows(
    row_indices: Tensor | None, cu_seqlens: Tensor | None, slots: Tensor | None, out: Tensor
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Yield slots, in which rows other than ``row_indices`` are padding, and what to write instead of ``out``.

    Afterwards the tokens of those rows are in ``out``, and nothing else of it has changed.
    """
    if row_indices is None or cu_seqlens is None or slots is None:
        yield slots, out
        return
    is_named = torch.zeros(len(slots) + 1, dtype=torch.bool, device=out.device)
    is_named.index_fill_(0, row_indices.to(torch.int64), True)
    result = torch.empty_like(out)
    yield slots.masked_fill(~is_named[:-1].view(-1, *[1] * (slots.dim() - 1)), -1), result
    # Tokens before the first row and after the last belong to the row that no index names.
    row_of_token = torch.searchsorted(cu_seqlens, torch.arange(len(out), device=out.device), right=True) - 1
    is_written = is_named[row_of_token.masked_fill(row_of_token < 0, len(slots))]
    out.copy_(torch.where(is_written.view(-1, *[1] * (out.dim() - 1)), result, out))


def _conv_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
    activation: str | None, conv_states: Tensor | None, query_start_loc: Tensor | None, cache_indices: Tensor | None,
    has_initial_state: Tensor | None, null_slot: int | None, out: Tensor, final_states: Tensor | None,
) -> None:  # fmt: skip
    reference.causal_conv1d_fn(
        x, weight, bias, seq_idx, initial_states, final_states is not None, final_states, activation,
        conv_states=conv_states, query_start_loc=query_start_loc, cache_indices=cache_indices,
        has_initial_state=has_initial_state, null_slot=null_slot, out=out,
    )  # fmt: skip


def _conv_update(*flat: Any) -> None:
    slots, num_accepted_tokens, query_start_loc, null_slot, row_indices, out = flat[6:]
    with _only_rows(row_indices, query_start_loc, slots, out) as (slots, result):
        arguments: tuple[Any, ...] = (*flat[:6], slots)
        reference.causal_conv1d_update(
            *arguments, num_accepted_tokens=num_accepted_tokens, query_start_loc=query_start_loc,
            null_slot=null_slot, out=result,
        )  # fmt: skip


def _rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor) -> None:
    reference.rms_norm_gated(x, gate, weight, eps, activation=activation, out=out)


def _fused_keywords(values: tuple[Any, ...], out: Tensor) -> dict[str, Any]:
    scale, norm_eps, activation, num_key_heads, head_k_dim, state_v_first, null_slot = values
    return {
        "out": out, "scale": scale, "norm_eps": norm_eps, "output_gate_activation": activation,
        "num_key_heads": num_key_heads, "head_k_dim": head_k_dim, "state_v_first": state_v_first,
        "null_slot": null_slot,
    }  # fmt: skip


def _fused_decode(*flat: Any) -> None:
    slots, cu_seqlens = flat[5:7]
    with _only_rows(flat[-2], cu_seqlens, slots, flat[-1]) as (slots, result):
        arguments = (*flat[:5], slots, *flat[6:11])
        reference.fused_gdn_decode_post_conv_mtp(*arguments, **_fused_keywords(flat[11:-2], result))


def _fused_decode_replay(*flat: Any) -> None:
    slots, records, cu_seqlens = flat[5], ReplayRecords.from_tensors(*flat[6:10]), flat[10]
    with _only_rows(flat[-2], cu_seqlens, slots, flat[-1]) as (slots, result):
        arguments = (*flat[:5], slots, records, *flat[10:15])
        reference.fused_gdn_decode_post_conv_mtp_replay(*arguments, **_fused_keywords(flat[15:-2], result))


_dispatch.reference_kernels.update(
    fused_gdn_gating=_gating,
    chunk_gated_delta_rule=_chunk,
    fused_recurrent_gated_delta_rule=_recurrent,
    fused_sigmoid_gating_delta_rule_update=_update,
    fused_sigmoid_gating_delta_rule_update_spec=_update_spec,
    fused_sigmoid_gating_delta_rule_update_replay=_update_replay,
    causal_conv1d_fn=_conv_fn,
    causal_conv1d_update=_conv_update,
    rms_norm_gated=_rms_norm_gated,
    fused_gdn_decode_post_conv_mtp=_fused_decode,
    fused_gdn_decode_post_conv_mtp_replay=_fused_decode_replay,
)


# --- registration -----------------------------------------------------------------------------------------------------


def _implementation(op: str) -> Callable[..., None]:
    def run(*flat: Any) -> None:
        _dispatch.run_on_backend(op, flat)

    return run


def _fake(op: str) -> Callable[..., None]:
    def check(*flat: Any) -> None:
        _validate.check(op, flat)

    return check


def refuse_gradient(op: str, flat: Sequence[Any], remedy: str = "call it under torch.no_grad()") -> None:
    """Raise where a gradient is required of a call that cannot give one."""
    if torch.is_grad_enabled() and (_dispatch.any_requires_grad(*flat) or _dispatch.any_tangent(flat)):
        raise RuntimeError(f"{op} has no gradient and an input requires one; {remedy}")


def autograd_kernel(op: str) -> Callable[..., None]:
    """Return what runs an op under autograd: the op itself, unless a gradient is required."""
    remedy = "call it under torch.no_grad()"
    if op in OPS:
        remedy = f"call gdn_core.{op}, which differentiates through the reference, or {remedy}"

    def refuse_or_redispatch(*flat: Any) -> None:
        refuse_gradient(f"torch.ops.gdn.{op}", flat, remedy)
        with torch._C._AutoDispatchBelowAutograd():
            getattr(torch.ops.gdn, op).default(*flat)

    return refuse_or_redispatch


_library = torch.library.Library("gdn", "DEF")
for _op, _arguments in SCHEMAS.items():
    _library.define(f"{_op}({_arguments}) -> ()")
    _library.impl(_op, _implementation(_op), "CompositeExplicitAutograd")
    _library.impl(_op, autograd_kernel(_op), "Autograd")
    torch.library.register_fake(f"gdn::{_op}", _fake(_op), lib=_library)
