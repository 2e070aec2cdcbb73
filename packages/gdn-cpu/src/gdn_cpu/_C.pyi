# SPDX-License-Identifier: Apache-2.0
# Made by tools/check_stubs.py --write from the compiled module.
from collections.abc import Sequence

import torch


def version() -> str: ...

def levels() -> list[tuple[str, str, str]]:
    """
    (name, level whose kernels it runs, why it cannot run here or '') of each level, lowest first.
    """

def active_level() -> str: ...

def set_level(name: str) -> None:
    """Cap the level; an empty name restores the cap of GDN_CPU_ISA."""

def chunk_engines() -> list[str]:
    """
    The engines of the chunked rule at the level in use, the preferred one first.
    """

def chunk_engine(is_bfloat16: bool) -> str:
    """
    The engine that multiplies in the chunked rule for activations of bf16, or others; '' where none can.
    """

def set_gemm(name: str) -> None:
    """Force that engine; an empty name restores GDN_CPU_GEMM."""

def forced_gemm() -> str:
    """The forced engine, or ''."""

def load_openblas(path: str) -> str:
    """Open that library for the engine 'openblas'; '' or what went wrong."""

def openblas_config() -> str:
    """What OpenBLAS says of itself, or ''."""

def chunk_plan(lengths: Sequence[int], num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, threads: int, is_bfloat16: bool) -> tuple[float, list[float], list[tuple[int, int, int, int, int, int]], int]:
    """
    Estimated time and work of each thread, (sequence, heads, columns, tokens) of each chain of chunks, and how many of the chains share what does not depend on their states.
    """

def chunk_memory(lengths: Sequence[int], num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, threads: int, is_bfloat16: bool) -> int:
    """Bytes that such a call allocates, all threads together, at most."""

def environment_error() -> str:
    """What is wrong with GDN_CPU_ISA or GDN_CPU_GEMM, or ''."""

def openmp() -> str:
    """Path of the OpenMP runtime in use, or ''."""

def recurrence_plan(lengths: Sequence[int], num_heads: int, value_dim: int, num_threads: int) -> tuple[int, int, bool]:
    """
    How the recurrence over rows of these lengths is shared out: columns of an item, threads, and whether the items go longest first to whoever is free (else in equal contiguous shares).
    """

def use_exchange_api(enabled: bool) -> None:
    """
    Take tensors through the DLPack exchange table (the default, where torch has one) or through __dlpack__.
    """

def has_exchange_api() -> bool: ...

def fused_gdn_gating(A_log: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, dt_bias: torch.Tensor | None, softplus_beta: object | None, softplus_threshold: object | None, g: torch.Tensor | None, beta: torch.Tensor | None, dry_run: bool = False) -> None: ...

def rms_norm_gated(x: torch.Tensor | None, gate: torch.Tensor | None, weight: torch.Tensor | None, eps: object | None, activation: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_sigmoid_gating_delta_rule_update(A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, initial_state_source: torch.Tensor | None, initial_state_indices: torch.Tensor | None, cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, softplus_beta: object | None, softplus_threshold: object | None, scale: object | None, state_v_first: object | None, null_slot: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_sigmoid_gating_delta_rule_update_spec(A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, initial_state_source: torch.Tensor | None, spec_state_indices: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, softplus_beta: object | None, softplus_threshold: object | None, scale: object | None, state_v_first: object | None, null_slot: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_sigmoid_gating_delta_rule_update_replay(A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, state: torch.Tensor | None, slot_indices: torch.Tensor | None, records_k: torch.Tensor | None, records_u: torch.Tensor | None, records_decay: torch.Tensor | None, records_live: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, softplus_beta: object | None, softplus_threshold: object | None, scale: object | None, state_v_first: object | None, null_slot: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_gdn_decode_post_conv_mtp(mixed_qkv: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, state_indices: torch.Tensor | None, cu_seqlens: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, state: torch.Tensor | None, output_gate: torch.Tensor | None, norm_weight: torch.Tensor | None, scale: object | None, norm_eps: object | None, output_gate_activation: object | None, num_key_heads: object | None, head_k_dim: object | None, state_v_first: object | None, null_slot: object | None, row_indices: torch.Tensor | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_gdn_decode_post_conv_mtp_replay(mixed_qkv: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, slot_indices: torch.Tensor | None, records_k: torch.Tensor | None, records_u: torch.Tensor | None, records_decay: torch.Tensor | None, records_live: torch.Tensor | None, cu_seqlens: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, state: torch.Tensor | None, output_gate: torch.Tensor | None, norm_weight: torch.Tensor | None, scale: object | None, norm_eps: object | None, output_gate_activation: object | None, num_key_heads: object | None, head_k_dim: object | None, state_v_first: object | None, null_slot: object | None, row_indices: torch.Tensor | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_recurrent_gated_delta_rule(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, g: torch.Tensor | None, beta: torch.Tensor | None, scale: object | None, initial_state: torch.Tensor | None, state: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, use_gate_in_kernel: object | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, use_beta_sigmoid_in_kernel: object | None, allow_neg_eigval: object | None, state_v_first: object | None, cu_seqlens: torch.Tensor | None, state_indices: torch.Tensor | None, has_initial_state: torch.Tensor | None, null_slot: object | None, out: torch.Tensor | None, final_state: torch.Tensor | None, dry_run: bool = False) -> None: ...

def chunk_gated_delta_rule(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, g: torch.Tensor | None, beta: torch.Tensor | None, scale: object | None, initial_state: torch.Tensor | None, state: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, use_beta_sigmoid_in_kernel: object | None, allow_neg_eigval: object | None, state_v_first: object | None, cu_seqlens: torch.Tensor | None, state_indices: torch.Tensor | None, has_initial_state: torch.Tensor | None, null_slot: object | None, out: torch.Tensor | None, final_state: torch.Tensor | None, chunk_states: torch.Tensor | None, dry_run: bool = False) -> None: ...

def causal_conv1d_fn(x: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, seq_idx: torch.Tensor | None, initial_states: torch.Tensor | None, activation: object | None, conv_states: torch.Tensor | None, query_start_loc: torch.Tensor | None, cache_indices: torch.Tensor | None, has_initial_state: torch.Tensor | None, null_slot: object | None, out: torch.Tensor | None, final_states: torch.Tensor | None, dry_run: bool = False) -> None: ...

def causal_conv1d_update(x: torch.Tensor | None, conv_state: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, activation: object | None, cache_seqlens: torch.Tensor | None, conv_state_indices: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, query_start_loc: torch.Tensor | None, null_slot: object | None, row_indices: torch.Tensor | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def gdn_attention(mixed_qkv: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, z: torch.Tensor | None, conv_weight: torch.Tensor | None, conv_bias: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, norm_weight: torch.Tensor | None, norm_eps: object | None, num_key_heads: object | None, head_k_dim: object | None, activation: object | None, output_gate_activation: object | None, conv_states: torch.Tensor | None, state: torch.Tensor | None, records_k: torch.Tensor | None, records_u: torch.Tensor | None, records_decay: torch.Tensor | None, records_live: torch.Tensor | None, state_v_first: object | None, null_slot: object | None, layout: torch.Tensor | None, query_start_loc: object | None, slots: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, has_initial_state: torch.Tensor | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...
