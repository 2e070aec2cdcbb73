# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton``: CUDA tensors on fla-core, causal-conv1d and Triton kernels of our own.

Nothing of these is imported before a call needs it. The first call of a kind compiles kernels: a CUDA graph has to
capture a later one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Kernel = Callable[..., None]

# op -> module here, function there, and what else it takes
_KERNELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "chunk_gated_delta_rule": ("fla", "chunk_gated_delta_rule", {}),
    "fused_recurrent_gated_delta_rule": ("fla", "fused_recurrent_gated_delta_rule", {}),
    "fused_sigmoid_gating_delta_rule_update": (
        "decode", "decode", {"slots_name": "initial_state_indices", "pool_name": "initial_state_source"},
    ),
    "fused_sigmoid_gating_delta_rule_update_spec": (
        "decode", "decode", {"slots_name": "spec_state_indices", "pool_name": "initial_state_source"},
    ),
    "fused_sigmoid_gating_delta_rule_update_replay": (
        "decode", "decode", {"slots_name": "slot_indices", "pool_name": "state"},
    ),
    "causal_conv1d_fn": ("convolution", "causal_conv1d_fn", {}),
    "causal_conv1d_update": ("convolution", "causal_conv1d_update", {}),
    "fused_gdn_decode_post_conv_mtp": ("decode", "fused_decode", {"slots_name": "state_indices"}),
    "fused_gdn_decode_post_conv_mtp_replay": ("decode", "fused_decode", {"slots_name": "slot_indices"}),
}  # fmt: skip


def _kernel(op: str) -> Kernel:
    module, function, options = _KERNELS[op]

    def run(*flat: Any, dry_run: bool = False) -> None:
        arguments = importlib.import_module(".arguments", __name__).by_name(op, flat)
        with _on_device(flat):
            getattr(importlib.import_module(f".{module}", __name__), function)(arguments, **options, dry_run=dry_run)

    return run


def _on_device(flat: Sequence[Any]) -> AbstractContextManager[object]:
    """Make the tensors' device the current one, on which Triton launches, and the one before it again afterwards."""
    device = next(value.device for value in flat if isinstance(value, torch.Tensor))
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class _Provider:
    """What gdn-core asks of a backend; see `gdn_core.backends()`."""

    name = "triton"
    device_types: tuple[str, ...] = ("cuda",)

    def __init__(self) -> None:
        self.ops = {op: _kernel(op) for op in _KERNELS}
        self.version = _version("triton") or ""

    def availability(self) -> str | None:
        """Say why no call can run here, or return None when one can."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "torch finds no CUDA device"

    def level(self) -> str | None:
        """Return the compute capability of the first device, such as "9.0"."""
        major, minor = torch.cuda.get_device_capability(0)
        return f"{major}.{minor}"

    def details(self) -> dict[str, str]:
        """Return which libraries are there, and what goes to the reference without them."""
        return {
            "fla-core": _version("fla-core") or "not installed: prefill and its convolution run on the reference",
            "causal-conv1d": _version("causal-conv1d") or "not installed: its convolutions run on the reference",
        }


provider = _Provider()
