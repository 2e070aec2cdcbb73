# SPDX-License-Identifier: Apache-2.0
# Made by tools/check_stubs.py --write from the compiled module.
"""The CUDA driver and its devices, and the operations that run on them."""

import torch


def version() -> str: ...

class Device:
    @property
    def name(self) -> str: ...

    @property
    def capability_major(self) -> int: ...

    @property
    def capability_minor(self) -> int: ...

class DriverInfo:
    @property
    def problem(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def devices(self) -> list[Device]: ...

class DeviceCode:
    @property
    def architecture(self) -> str: ...

    @property
    def is_ptx(self) -> bool: ...

    @property
    def data(self) -> bytes: ...

def query_driver() -> DriverInfo:
    """Ask the CUDA driver for its version and devices."""

def launch_problem() -> str:
    """Why nothing can run on this machine, or ''."""

def device_code() -> list[DeviceCode]:
    """The device code in this module."""

def device_compiler() -> tuple[str, int, int]:
    """What compiled it: the name, or '', and CUDA's major and minor version."""

def code_for(major: int, minor: int) -> str:
    """
    The architecture whose code a device of this compute capability runs, with 'PTX ' in front of it where its driver compiles that; '' where there is none.
    """

def kernel_names() -> list[str]: ...

def prepare_device(ordinal: int) -> None: ...

def fused_sigmoid_gating_delta_rule_update(A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, initial_state_source: torch.Tensor | None, initial_state_indices: torch.Tensor | None, cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, softplus_beta: object | None, softplus_threshold: object | None, scale: object | None, state_v_first: object | None, null_slot: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_sigmoid_gating_delta_rule_update_spec(A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, initial_state_source: torch.Tensor | None, spec_state_indices: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, softplus_beta: object | None, softplus_threshold: object | None, scale: object | None, state_v_first: object | None, null_slot: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_sigmoid_gating_delta_rule_update_replay(A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, state: torch.Tensor | None, slot_indices: torch.Tensor | None, records_k: torch.Tensor | None, records_u: torch.Tensor | None, records_decay: torch.Tensor | None, records_live: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, use_qk_l2norm_in_kernel: object | None, softplus_beta: object | None, softplus_threshold: object | None, scale: object | None, state_v_first: object | None, null_slot: object | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_gdn_decode_post_conv_mtp(mixed_qkv: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, state_indices: torch.Tensor | None, cu_seqlens: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, state: torch.Tensor | None, output_gate: torch.Tensor | None, norm_weight: torch.Tensor | None, scale: object | None, norm_eps: object | None, output_gate_activation: object | None, num_key_heads: object | None, head_k_dim: object | None, state_v_first: object | None, null_slot: object | None, row_indices: torch.Tensor | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...

def fused_gdn_decode_post_conv_mtp_replay(mixed_qkv: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, slot_indices: torch.Tensor | None, records_k: torch.Tensor | None, records_u: torch.Tensor | None, records_decay: torch.Tensor | None, records_live: torch.Tensor | None, cu_seqlens: torch.Tensor | None, num_accepted_tokens: torch.Tensor | None, state: torch.Tensor | None, output_gate: torch.Tensor | None, norm_weight: torch.Tensor | None, scale: object | None, norm_eps: object | None, output_gate_activation: object | None, num_key_heads: object | None, head_k_dim: object | None, state_v_first: object | None, null_slot: object | None, row_indices: torch.Tensor | None, out: torch.Tensor | None, dry_run: bool = False) -> None: ...
