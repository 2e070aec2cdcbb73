# SPDX-License-Identifier: Apache-2.0
"""The public operations: allocate the outputs, then let a backend fill them.

Shapes in the docstrings: B batch, T tokens, N sequences, H key heads, HV value heads (value head h reads key head
h // (HV // H)), K key dim, V value dim, P slots of a pool, S columns of a speculative table, C = 2*H*K + HV*V
convolution channels ordered q | k | v, W convolution width.

The recurrence, per value head, with the state M [K, V]::

    M   = exp(g_t) * M
    u_t = beta_t * (v_t - k_t @ M)
    M   = M + outer(k_t, u_t)
    o_t = scale * (q_t @ M)

Every operation raises TypeError, ValueError or IndexError, naming the argument, what was expected and what came, before
anything has changed; NotImplementedError when a forced backend cannot run the call; and RuntimeError when an input
requires a gradient of a call that updates a state in place. Elsewhere such a call is differentiated through the
reference. Padding: a negative slot index, or one equal to ``null_slot``, makes a row whose outputs are 0 and whose
state is neither read nor written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import reference
from ._dispatch import Explanation, intercept, run_eager, run_update, run_watched, wants_gradient
from ._validate import CHUNK, describe, has_data, offsets, tensor
from .records import ReplayRecords

_empty_like = torch.empty_like
_PACKED = torch.contiguous_format
_STRIDED = torch.strided

_Result2 = tuple[Tensor, Tensor | None]
_Result3 = tuple[Tensor, Tensor | None, Tensor]


def _like(name: str, model: Tensor) -> Tensor:
    """Allocate a packed output of the shape and dtype of ``model``."""
    try:
        if model.is_contiguous():
            return _empty_like(model)
        return _empty_like(model, memory_format=_PACKED)
    except AttributeError:
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe(model)}") from None


def _like_in_memory(name: str, model: Tensor) -> Tensor:
    """Allocate a packed output of the shape, dtype and order of dimensions in memory of ``model``."""
    if not isinstance(model, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe(model)}")
    return _empty_like(model)


def _fused_output(output_gate: Tensor, mixed_qkv: Tensor) -> Tensor:
    """Allocate the output of a fused decode: shaped like the gate, in the dtype of the activations."""
    for name, value in (("output_gate", output_gate), ("mixed_qkv", mixed_qkv)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {describe(value)}")
    return _empty_like(output_gate, dtype=mixed_qkv.dtype, layout=_STRIDED, memory_format=_PACKED)


def _wide(activations: Tensor) -> torch.dtype:
    """Return the dtype of gates and states: fp32, or float64 where the activations are."""
    return torch.float64 if activations.dtype == torch.float64 else torch.float32


def _unsupported(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, this rule has no such input; got {describe(value)}")


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    *,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Compute the log decay and the update strength of each token and value head.

    ``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, both in fp32 and never rounded to the
    activation dtype (Yang et al., Gated Delta Networks, 2024; the gates of Mamba-2). ``g`` is -0 where softplus
    underflows, even if ``exp(A_log)`` overflows; elsewhere it may be -inf, a hard reset.

    Args:
        A_log: [HV], fp32, bf16 or fp16.
        a: [..., HV], the raw decay input, any strides.
        b: [..., HV], the raw update input, any strides.
        dt_bias: [HV].
        softplus_beta: sharpness of the softplus, positive.
        softplus_threshold: where ``softplus_beta * x`` exceeds it, softplus is the identity.

    Returns:
        (g, beta), both fp32 (float64 for float64 inputs) and of the shape of ``a``.

    Example:
        >>> import torch, gdn_core
        >>> g, beta = gdn_core.fused_gdn_gating(torch.zeros(4), torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(4))
        >>> g.shape, float(beta[0, 0])
        (torch.Size([3, 4]), 0.5)
    """
    if not isinstance(a, Tensor):
        raise TypeError(f"a: expected a torch.Tensor, got {describe(a)}")
    dtype = _wide(a)
    g = _empty_like(a, dtype=dtype, layout=_STRIDED, memory_format=_PACKED)
    beta = _empty_like(g)
    flat = (A_log, a, b, dt_bias, softplus_beta, softplus_threshold, g, beta)
    inputs = (a, b, A_log, dt_bias)
    if not run_eager("fused_gdn_gating", inputs, flat):
        if wants_gradient("fused_gdn_gating", inputs, flat, writes=None):
            return reference.fused_gdn_gating(
                A_log, a, b, dt_bias, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold
            )
        run_watched("fused_gdn_gating", flat)
    return g, beta


def _rows(batch: Tensor, name: str, bounds: Tensor | None) -> int:
    if bounds is None:
        return batch.shape[0]
    tensor(name, bounds, ["N+1"], (torch.int32, torch.int64))
    return max(bounds.numel() - 1, 0)


def _final_state(
    q: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, state_v_first: bool
) -> Tensor:
    _four_dimensions(q=q, v=v)
    k_dim, (hv, v_dim) = q.shape[-1], v.shape[-2:]
    inner = (hv, v_dim, k_dim) if state_v_first else (hv, k_dim, v_dim)
    if initial_state is not None and not isinstance(initial_state, Tensor):
        raise TypeError(f"initial_state: expected a torch.Tensor, got {describe(initial_state)}")
    dtype = _wide(q) if initial_state is None else initial_state.dtype
    return torch.empty((_rows(q, "cu_seqlens", cu_seqlens), *inner), dtype=dtype, device=v.device)


def _four_dimensions(**tensors: object) -> None:
    """Check what the output shapes are computed from."""
    for name, value in tensors.items():
        tensor(name, value, ["B", "T", "heads", "dim"])


def _same_bounds(cu_seqlens: Tensor | None, host: Tensor | None) -> None:
    """Check ``cu_seqlens_cpu``; its values only where ``cu_seqlens`` can be read without waiting."""
    if host is None:
        return
    tensor("cu_seqlens_cpu", host, ["N+1"], (torch.int32, torch.int64))
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens_cpu: expected None without cu_seqlens, got {describe(host)}")
    if host.shape != cu_seqlens.shape:
        raise ValueError(f"cu_seqlens_cpu: expected {list(cu_seqlens.shape)}, got {describe(host)}")
    if torch.compiler.is_compiling() or not all(x.is_cpu and has_data(x) for x in (cu_seqlens, host)):
        return
    if cu_seqlens.tolist() != host.tolist():
        raise ValueError("cu_seqlens_cpu: expected the values of cu_seqlens, got others")


def _chunk_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, host: Tensor | None, state_v_first: bool) -> Tensor:
    _four_dimensions(q=q, v=v)
    if cu_seqlens is None:
        total = q.shape[0] * -(-q.shape[1] // CHUNK)
    else:
        offsets("cu_seqlens", cu_seqlens, q.shape[1])
        name, bounds = ("cu_seqlens", cu_seqlens) if host is None else ("cu_seqlens_cpu", host)
        if bounds.is_meta:
            raise NotImplementedError(f"{name}: expected a tensor with values, got {describe(bounds)} on device meta")
        total = sum(-(-(end - start) // CHUNK) for start, end in pairwise(bounds.tolist()))
    k_dim, (hv, v_dim) = q.shape[-1], v.shape[-2:]
    inner = (hv, v_dim, k_dim) if state_v_first else (hv, k_dim, v_dim)
    return torch.empty((total, *inner), dtype=_wide(q), device=v.device)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    output_chunk_states: bool = False,
    out: Tensor | None = None,
) -> _Result2 | _Result3:
    """Run the gated delta rule over whole sequences (prefill).

    The recurrence of this module, in any algorithm that meets its tolerances; chunks of 64 tokens restart at each
    sequence (Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024).

    Args:
        q, k: [B, T, H, K], fp32, bf16 or fp16.
        v: [B, T, HV, V], the dtype of q.
        g: [B, T, HV], log decays <= 0 (not linear ones), fp32, bf16 or fp16; -inf is a hard reset.
        beta: [B, T, HV], update strengths, or their logits with ``use_beta_sigmoid_in_kernel``.
        scale: of the output, K ** -0.5 by default.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with ``state_v_first``), not modified; or with ``state_indices`` a
            pool [P, HV, K, V] that is updated in place.
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: first normalise q and k, ``x * rsqrt(sum(x * x) + 1e-6)``.
        allow_neg_eigval: double beta (after the sigmoid, where that is asked for).
        cu_seqlens: [N + 1], int32 or int64: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1].
        cu_seqlens_cpu: the same on the host, which spares a synchronisation where sizes depend on it.
        chunk_indices: accepted for callers of fla, whose kernels need it; ours derive it from ``cu_seqlens``.
        cp_context: must be None.
        state_indices: [N] slots of the pool; negative or ``null_slot`` is padding.
        has_initial_state: [N] bool, True by default; where False the state starts at zero and is not read.
        output_chunk_states: also return the states at the start of each chunk.
        out: [B, T, HV, V], written instead of a new tensor.

    Returns:
        (o, final_state) or (o, final_state, chunk_states): o [B, T, HV, V] in q's dtype; final_state [N, HV, K, V] in
        the dtype of ``initial_state`` (fp32 without one) or None; chunk_states fp32 [total, HV, K, V], ceil(len / 64)
        a sequence, number i being the state after 64 * i tokens.

    Example:
        >>> import torch, gdn_core
        >>> q = k = torch.randn(1, 100, 2, 16)
        >>> v, beta = torch.randn(1, 100, 4, 32), torch.rand(1, 100, 4)
        >>> o, state = gdn_core.chunk_gated_delta_rule(q, k, v, -beta, beta, output_final_state=True,
        ...                                            use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 16, 32]))
    """
    # What a plain call does not need is not looked at: after other work, Python's own code has left the caches.
    if getattr(q, "ndim", 0) != 4 or getattr(v, "ndim", 0) != 4:
        _four_dimensions(q=q, v=v)
    if cp_context is not None:
        _unsupported(cp_context=cp_context)
    if cu_seqlens_cpu is not None:
        _same_bounds(cu_seqlens, cu_seqlens_cpu)
    pool, start = (None, initial_state) if state_indices is None else (initial_state, None)
    final_state = chunk_states = None
    if output_final_state and pool is None:
        final_state = _final_state(q, v, start, cu_seqlens, state_v_first)
    if output_chunk_states:
        chunk_states = _chunk_states(q, v, cu_seqlens, cu_seqlens_cpu, state_v_first)
    o = _like("v", v) if out is None else out
    flat = (
        q, k, v, g, beta, scale, start, pool, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens, state_indices, has_initial_state, null_slot, o, final_state, chunk_states,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, initial_state, o)
    if not run_eager("chunk_gated_delta_rule", inputs, flat):
        writes = "initial_state" if state_indices is not None else "out" if out is not None else None
        if wants_gradient("chunk_gated_delta_rule", inputs, flat, writes=writes):
            return reference.chunk_gated_delta_rule(
                q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
                has_initial_state=has_initial_state, output_chunk_states=output_chunk_states,
            )  # fmt: skip
        run_watched("chunk_gated_delta_rule", flat)
    return (o, final_state) if chunk_states is None else (o, final_state, chunk_states)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> _Result2:
    """Run the gated delta rule token by token.

    The recurrence of this module as it stands. Arguments that :func:`chunk_gated_delta_rule` has too mean the same.

    Args:
        q, k: [B, T, H, K], fp32, bf16 or fp16.
        v: [B, T, HV, V], the dtype of q.
        g: [B, T, HV], log decays; None means 0; with ``use_gate_in_kernel`` the raw input a.
        gk, gv: must be None.
        beta: [B, T, HV]; None means 1; with ``use_beta_sigmoid_in_kernel`` the raw input b.
        initial_state: [N, HV, K, V], not modified; or with ``state_indices`` a pool, updated in place.
        use_gate_in_kernel: ``g = -exp(A_log) * softplus(g + dt_bias)``, with A_log and dt_bias [HV].
        out: [B, T, HV, V], written instead of a new tensor.

    Returns:
        (o, final_state): o [B, T, HV, V] in q's dtype; final_state [N, HV, K, V] in the dtype of ``initial_state``
        (fp32 without one), or None.

    Example:
        >>> import torch, gdn_core
        >>> q, v = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 4, 8)
        >>> o, state = gdn_core.fused_recurrent_gated_delta_rule(q, q, v, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 4, 8]), torch.Size([2, 4, 16, 8]))
    """
    if getattr(q, "ndim", 0) != 4 or getattr(v, "ndim", 0) != 4:
        _four_dimensions(q=q, v=v)
    if gk is not None or gv is not None:
        _unsupported(gk=gk, gv=gv)
    pool, start = (None, initial_state) if state_indices is None else (initial_state, None)
    final_state = None
    if output_final_state and pool is None:
        final_state = _final_state(q, v, start, cu_seqlens, state_v_first)
    o = _like("v", v) if out is None else out
    flat = (
        q, k, v, g, beta, scale, start, pool, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, state_indices, has_initial_state,
        null_slot, o, final_state,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias, o)
    if not run_eager("fused_recurrent_gated_delta_rule", inputs, flat):
        writes = "initial_state" if state_indices is not None else "out" if out is not None else None
        if wants_gradient("fused_recurrent_gated_delta_rule", inputs, flat, writes=writes):
            return reference.fused_recurrent_gated_delta_rule(
                q, k, v, g, None, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                cu_seqlens, has_initial_state=has_initial_state,
            )  # fmt: skip
        run_watched("fused_recurrent_gated_delta_rule", flat)
    return o, final_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode: gate and run the recurrence on a pool of states, one slot a row.

    The gates of :func:`fused_gdn_gating` and the recurrence of this module in one pass over each state.

    Args:
        A_log, dt_bias: [HV], fp32, bf16 or fp16.
        q, k: [1, T, H, K], fp32, bf16 or fp16; any strides with a unit last one.
        v: [1, T, HV, V], the dtype of q.
        a, b: [T, HV], raw gate inputs, any strides.
        initial_state_source: pool [P, HV, K, V] ([P, HV, V, K] with ``state_v_first``), fp32, bf16 or fp16, updated in
            place; the slot stride is free, the inside of a slot is packed.
        initial_state_indices: [N], int32 or int64, slot of each row; negative or ``null_slot`` is padding.
        cu_seqlens: [N + 1]; None means one token a row (N = T). The state after a row's last token is stored.
        use_qk_l2norm_in_kernel: first normalise q and k, ``x * rsqrt(sum(x * x) + 1e-6)``.
        scale: of the output, K ** -0.5 by default.
        out: [1, T, HV, V], any activation dtype, written instead of a new tensor.

    Returns:
        o [1, T, HV, V] in q's dtype; rows outside every span of ``cu_seqlens``, and padding rows, are 0.

    Raises:
        IndexError: a slot index is P or more.
        ValueError: ``cu_seqlens`` decreases or ends beyond T, among others.

    Example:
        >>> import torch, gdn_core
        >>> pool = torch.zeros(8, 4, 16, 16)
        >>> q, v, a = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 4, 16), torch.randn(2, 4)
        >>> o = gdn_core.fused_sigmoid_gating_delta_rule_update(
        ...     torch.zeros(4), torch.ones(4), q, q, v, a, a, pool, torch.tensor([5, -1]), use_qk_l2norm_in_kernel=True)
        >>> o.shape, bool(pool[5].any()), bool(o[0, 1].any())
        (torch.Size([1, 2, 4, 16]), True, False)
    """
    o = _like("v", v) if out is None else out
    flat = (
        A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,
        use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first, null_slot, o,
    )  # fmt: skip
    inputs = (A_log, dt_bias, q, k, v, a, b, initial_state_source, o)
    if not run_eager("fused_sigmoid_gating_delta_rule_update", inputs, flat):
        run_update("fused_sigmoid_gating_delta_rule_update", inputs, flat, writes="initial_state_source")
    return o


def fused_sigmoid_gating_delta_rule_update_spec(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode draft tokens with one slot a draft, so that the next step can resume after any of them.

    Row n resumes from slot ``spec_state_indices[n, num_accepted_tokens[n] - 1]`` and stores the state after its token t
    in slot ``spec_state_indices[n, t]``. Arguments that :func:`fused_sigmoid_gating_delta_rule_update` has too mean the
    same.

    Args:
        initial_state_source: pool [P, HV, K, V], updated in place; the slot that a row reads may be one that it writes.
        spec_state_indices: [N, S], int32 or int64, S up to 16; padding in a destination column skips that store,
            padding as the source makes the row padding.
        num_accepted_tokens: [N], tokens accepted in the previous step; 0 acts as 1, None means 1 everywhere.
        cu_seqlens: [N + 1]; rows of at most S tokens.

    Returns:
        o [1, T, HV, V] in q's dtype.

    Raises:
        IndexError: a slot index is P or more.
        ValueError: ``num_accepted_tokens`` exceeds S, or a row is longer than S, among others.

    Example:
        >>> import torch, gdn_core
        >>> pool = torch.zeros(8, 4, 16, 16)
        >>> q, v, a = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 4, 16), torch.randn(3, 4)
        >>> o = gdn_core.fused_sigmoid_gating_delta_rule_update_spec(
        ...     torch.zeros(4), torch.ones(4), q, q, v, a, a, pool, torch.tensor([[1, 2, 3]]), torch.tensor([1]),
        ...     torch.tensor([0, 3]), use_qk_l2norm_in_kernel=True)
        >>> [slot for slot in range(8) if pool[slot].any()]
        [1, 2, 3]
    """
    o = _like("v", v) if out is None else out
    flat = (
        A_log, dt_bias, q, k, v, a, b, initial_state_source, spec_state_indices, num_accepted_tokens, cu_seqlens,
        use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first, null_slot, o,
    )  # fmt: skip
    inputs = (A_log, dt_bias, q, k, v, a, b, initial_state_source, o)
    if not run_eager("fused_sigmoid_gating_delta_rule_update_spec", inputs, flat):
        run_update("fused_sigmoid_gating_delta_rule_update_spec", inputs, flat, writes="initial_state_source")
    return o


def _record_tensors(records: ReplayRecords) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not isinstance(records, ReplayRecords):
        raise TypeError(f"records: expected a gdn_core.ReplayRecords, got {describe(records)}")
    return records.k, records.u, records.decay, records.live


def fused_sigmoid_gating_delta_rule_update_replay(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    slot_indices: Tensor,
    records: ReplayRecords,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode draft tokens with one slot a request: replay the accepted ones of the last step, then run the new ones.

    A step replays the first ``num_accepted_tokens`` live records of a row's slot into its state, stores the state once,
    runs the row's tokens from it, and leaves their records. Same values as the form with several slots, bit for bit on
    native backends. Arguments that :func:`fused_sigmoid_gating_delta_rule_update` has too mean the same.

    Args:
        state: pool [P, HV, K, V], updated in place.
        slot_indices: [N], int32 or int64; negative or ``null_slot`` is padding.
        records: of the pool's P slots, updated in place. Whoever reuses a slot resets its records.
        num_accepted_tokens: [N], at most the slot's live records unless those are 0; 0 acts as 1, None means 1.
        cu_seqlens: [N + 1]; rows of at most S tokens, S being that of ``records``.
        use_qk_l2norm_in_kernel: must not change between the steps of a request.

    Returns:
        o [1, T, HV, V] in q's dtype.

    Example:
        >>> import torch, gdn_core
        >>> pool, records = torch.zeros(8, 4, 16, 16), gdn_core.ReplayRecords(8, 3, 2, 4, 16, 16, torch.float32)
        >>> q, v, a = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 4, 16), torch.randn(3, 4)
        >>> o = gdn_core.fused_sigmoid_gating_delta_rule_update_replay(
        ...     torch.zeros(4), torch.ones(4), q, q, v, a, a, pool, torch.tensor([2]), records, torch.tensor([1]),
        ...     torch.tensor([0, 3]), use_qk_l2norm_in_kernel=True)
        >>> int(records.live[2])
        3
    """
    o = _like("v", v) if out is None else out
    parts = _record_tensors(records)
    flat = (
        A_log, dt_bias, q, k, v, a, b, state, slot_indices, *parts, num_accepted_tokens, cu_seqlens,
        use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first, null_slot, o,
    )  # fmt: skip
    inputs = (A_log, dt_bias, q, k, v, a, b, state, *parts, o)
    if not run_eager("fused_sigmoid_gating_delta_rule_update_replay", inputs, flat):
        run_update("fused_sigmoid_gating_delta_rule_update_replay", inputs, flat, writes="state")
    return o


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel of whole sequences causally (prefill).

    ``y_t = act(bias + sum_j weight[:, j] * x[t - W + 1 + j])``, accumulated in fp32 (the depthwise convolution of
    Mamba; positional order of the causal-conv1d package).

    Args:
        x: [B, C, T], or packed [C, T] with ``query_start_loc``; fp32, bf16 or fp16, any strides; not modified.
        weight: [C, W], W from 2 to 5.
        bias: [C].
        seq_idx: [B, T], int32 or int64: tokens see only tokens of the same index before them.
        initial_states: [B, C, W - 1], the inputs before the first token, oldest first; not together with conv_states.
        return_final_states: also return the last W - 1 inputs of each sequence, [B, C, W - 1].
        final_states_out: [B, C, W - 1], written instead of a new tensor.
        activation: None, ``"silu"`` or ``"swish"``.
        conv_states: pool [P, C, state_len], state_len >= W - 1; columns 0 to W - 2 are read and updated in place.
        query_start_loc: [N + 1], the bounds of packed sequences.
        cache_indices: [N] slots of the pool (slot n by default); negative or ``null_slot`` is padding.
        has_initial_state: [N] bool, True by default; where False the slot is not read.
        out: the shape of x, written instead of a new tensor.

    Returns:
        y, of the shape, dtype and order in memory of x, or (y, final_states).

    Example:
        >>> import torch, gdn_core
        >>> gdn_core.causal_conv1d_fn(torch.randn(2, 8, 5), torch.randn(8, 4), activation="silu").shape
        torch.Size([2, 8, 5])
    """
    y = _like_in_memory("x", x) if out is None else out
    final_states = final_states_out
    if return_final_states and final_states is None:
        tensor("x", x, ["B", "C", "T"] if query_start_loc is None else ["C", "T"])
        tensor("weight", weight, ["C", "W"])
        width = max(weight.shape[1], 1)
        shape = (_rows(x, "query_start_loc", query_start_loc), x.shape[-2], width - 1)
        final_states = torch.empty(shape, dtype=x.dtype, device=x.device)
    flat = (
        x, weight, bias, seq_idx, initial_states, activation, conv_states, query_start_loc, cache_indices,
        has_initial_state, null_slot, y, final_states,
    )  # fmt: skip
    inputs = (x, weight, bias, initial_states, conv_states, y, final_states)
    if not run_eager("causal_conv1d_fn", inputs, flat):
        targets = {"conv_states": conv_states, "final_states_out": final_states_out, "out": out}
        writes = next((name for name, target in targets.items() if target is not None), None)
        if wants_gradient("causal_conv1d_fn", inputs, flat, writes=writes):
            return reference.causal_conv1d_fn(
                x, weight, bias, seq_idx, initial_states, return_final_states, None, activation,
                query_start_loc=query_start_loc, has_initial_state=has_initial_state, null_slot=null_slot,
            )  # fmt: skip
        run_watched("causal_conv1d_fn", flat)
    return (y, final_states) if return_final_states and final_states is not None else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve new tokens with the inputs before them, held in a pool (decode).

    The sum of :func:`causal_conv1d_fn`. Without ``num_accepted_tokens`` the history is the last W - 1 columns of the
    state, which becomes the last state_len columns of ``cat(state, x)``. With it, the history is columns
    ``accepted - 1`` to ``accepted + W - 3``, and columns 0 to ``W - 2 + q - 1`` become history[1:] and the q new
    inputs, left-aligned; columns beyond them keep no promise.

    Args:
        x: [B, C], [B, C, q], or [T, C] with ``query_start_loc``; not modified.
        conv_state: pool [P, C, state_len], updated in place; row b is slot b without indices.
        weight: [C, W], W from 2 to 5.
        bias: [C].
        activation: None, ``"silu"`` or ``"swish"``.
        cache_seqlens: [B]: the state is a ring, and row b's next column is ``cache_seqlens[b] % state_len``.
        conv_state_indices: [B] slots; negative or ``null_slot`` is padding.
        num_accepted_tokens: [B], tokens accepted in the previous step; 0 acts as 1.
        query_start_loc: [B + 1], the bounds of ragged rows.
        out: the shape of x, written instead of a new tensor.

    Returns:
        y, of the shape, dtype and order in memory of x.

    Example:
        >>> import torch, gdn_core
        >>> state = torch.zeros(2, 8, 3)
        >>> gdn_core.causal_conv1d_update(torch.ones(2, 8), state, torch.ones(8, 4)).sum().item(), state[0, 0].tolist()
        (16.0, [0.0, 0.0, 1.0])
    """
    y = _like_in_memory("x", x) if out is None else out
    flat = (
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices, num_accepted_tokens,
        query_start_loc, null_slot, None, y,
    )  # fmt: skip
    inputs = (x, conv_state, weight, bias, y)
    if not run_eager("causal_conv1d_update", inputs, flat):
        run_update("causal_conv1d_update", inputs, flat, writes="conv_state")
    return y


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Normalise, scale and gate the last dimension.

    ``y = x * rsqrt(mean(x * x) + eps) * weight * act(gate)``: the norm comes before the gate, and everything is fp32
    until the result is stored (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).

    Args:
        x, gate: [..., V], fp32, bf16 or fp16, any strides.
        weight: [V].
        eps: added to the mean square.
        activation: ``"silu"``, ``"swish"`` (the same), ``"sigmoid"`` or ``"none"``, which does not read the gate.
        out: [..., V], any activation dtype, written instead of a new tensor; may be x or gate.

    Returns:
        y [..., V] in x's dtype.

    Example:
        >>> import torch, gdn_core
        >>> gdn_core.rms_norm_gated(torch.randn(3, 4, 16), torch.randn(3, 4, 16), torch.ones(16), 1e-6).shape
        torch.Size([3, 4, 16])
    """
    y = _like("x", x) if out is None else out
    flat = (x, gate, weight, eps, activation, y)
    inputs = (x, gate, weight, y)
    if not run_eager("rms_norm_gated", inputs, flat):
        if wants_gradient("rms_norm_gated", inputs, flat, writes=None if out is None else "out"):
            return reference.rms_norm_gated(x, gate, weight, eps, activation=activation)
        run_watched("rms_norm_gated", flat)
    return y


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    *,
    output_gate_activation: str = "silu",
    num_key_heads: int | None = None,
    head_k_dim: int = 128,
    state_v_first: bool = True,
    null_slot: int | None = None,
) -> Tensor:
    """Run everything of a decode step that follows the convolution, in one call.

    Gating, normalisation of q and k, the recurrence with rollback over several slots (as in
    :func:`fused_sigmoid_gating_delta_rule_update_spec`) and the gated norm (as in :func:`rms_norm_gated`), in fp32
    until the result is stored.

    Args:
        mixed_qkv: [T, C], the convolution's output, channels q | k | v; fp32, bf16 or fp16.
        a, b: [T, HV], raw gate inputs, any strides.
        A_log, dt_bias: [HV].
        state_indices: [N, S] slots, S up to 16; negative or ``null_slot`` is padding.
        cu_seqlens: [N + 1]; rows of at most S tokens.
        num_accepted_tokens: [N], tokens accepted in the previous step; 0 acts as 1, None means 1.
        state: pool [P, HV, V, K], or [P, HV, K, V] with ``state_v_first=False``; updated in place.
        output_gate: [T, HV, V], the input z of the gated norm.
        norm_weight: [V].
        out: [T, HV, V], any activation dtype, written instead of a new tensor.
        scale: of the output before the norm, K ** -0.5 by default.
        norm_eps: eps of the gated norm.
        output_gate_activation: ``"silu"``, ``"swish"``, ``"sigmoid"`` or ``"none"``, which does not read the gate.
        num_key_heads: H; by default it follows from C, HV, V and ``head_k_dim``.
        head_k_dim: K.

    Returns:
        out [T, HV, V] in mixed_qkv's dtype.

    Example:
        >>> import torch, gdn_core
        >>> pool, z, a = torch.zeros(8, 4, 16, 16), torch.randn(2, 4, 16), torch.randn(2, 4)
        >>> gdn_core.fused_gdn_decode_post_conv_mtp(
        ...     torch.randn(2, 2 * 2 * 16 + 4 * 16), a, a, torch.zeros(4), torch.ones(4), torch.tensor([[1], [2]]),
        ...     torch.tensor([0, 1, 2]), None, pool, z, torch.ones(16), head_k_dim=16).shape
        torch.Size([2, 4, 16])
    """
    y = _fused_output(output_gate, mixed_qkv) if out is None else out
    flat = (
        mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state, output_gate,
        norm_weight, scale, norm_eps, output_gate_activation, num_key_heads, head_k_dim, state_v_first, null_slot, None,
        y,
    )  # fmt: skip
    inputs = (mixed_qkv, a, b, A_log, dt_bias, state, output_gate, norm_weight, y)
    if not run_eager("fused_gdn_decode_post_conv_mtp", inputs, flat):
        run_update("fused_gdn_decode_post_conv_mtp", inputs, flat, writes="state")
    return y


def fused_gdn_decode_post_conv_mtp_replay(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slot_indices: Tensor,
    records: ReplayRecords,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    *,
    output_gate_activation: str = "silu",
    num_key_heads: int | None = None,
    head_k_dim: int = 128,
    state_v_first: bool = True,
    null_slot: int | None = None,
) -> Tensor:
    """Run everything of a decode step that follows the convolution, with one slot a request.

    :func:`fused_gdn_decode_post_conv_mtp` with the rollback of
    :func:`fused_sigmoid_gating_delta_rule_update_replay`: the arguments that those have too mean the same.

    Args:
        slot_indices: [N] slots; negative or ``null_slot`` is padding.
        records: a :class:`ReplayRecords` of the pool's P slots, updated in place.
        state: pool [P, HV, V, K], or [P, HV, K, V] with ``state_v_first=False``; updated in place.

    Returns:
        out [T, HV, V] in mixed_qkv's dtype.

    Example:
        >>> import torch, gdn_core
        >>> pool, z, a = torch.zeros(8, 4, 16, 16), torch.randn(2, 4, 16), torch.randn(2, 4)
        >>> records = gdn_core.ReplayRecords(8, 1, 2, 4, 16, 16, torch.float32)
        >>> gdn_core.fused_gdn_decode_post_conv_mtp_replay(
        ...     torch.randn(2, 2 * 2 * 16 + 4 * 16), a, a, torch.zeros(4), torch.ones(4), torch.tensor([1, 2]),
        ...     records, torch.tensor([0, 1, 2]), None, pool, z, torch.ones(16), head_k_dim=16).shape
        torch.Size([2, 4, 16])
    """
    y = _fused_output(output_gate, mixed_qkv) if out is None else out
    parts = _record_tensors(records)
    flat = (
        mixed_qkv, a, b, A_log, dt_bias, slot_indices, *parts, cu_seqlens, num_accepted_tokens,
        state, output_gate, norm_weight, scale, norm_eps, output_gate_activation, num_key_heads, head_k_dim,
        state_v_first, null_slot, None, y,
    )  # fmt: skip
    inputs = (mixed_qkv, a, b, A_log, dt_bias, state, output_gate, norm_weight, *parts, y)
    if not run_eager("fused_gdn_decode_post_conv_mtp_replay", inputs, flat):
        run_update("fused_gdn_decode_post_conv_mtp_replay", inputs, flat, writes="state")
    return y


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would run a call, and why each other one would not, without running it.

    Args:
        op: name of an operation of this module.
        *args, **kwargs: the call's arguments.

    Returns:
        An :class:`Explanation`: ``backend`` (None: the call would raise), ``reasons`` by backend name (None: it could
        run the call), and a readable text as ``str()``.

    Example:
        >>> import torch, gdn_core
        >>> x = torch.ones(2, 8, dtype=torch.float64)
        >>> gdn_core.explain("rms_norm_gated", x, x, x[0], 1e-6).backend
        'reference'
    """
    from ._schema import OPS

    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    return intercept(globals()[op], args, kwargs)
