# SPDX-License-Identifier: Apache-2.0
"""Which calls gdn takes: inference, on plain tensors of a device for which there is a native backend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ... import _dispatch, _registry

FLOATING = (torch.bfloat16, torch.float16, torch.float32)
CONV_ACTIVATIONS = (None, "silu", "swish")
GATE_ACTIVATIONS = ("silu", "swish", "sigmoid")

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# (forced backend or "", device type) -> operations with a native kernel. A dictionary, so that a compiled graph reads
# it; filled before a module is patched.
_kernels: dict[tuple[str, str], frozenset[str]] = {}


def learn_kernels() -> None:
    """Load the backends, and note which operations they have for which devices."""
    for name in _registry.loaded():
        provider = _registry.provider(name)
        if provider is None:
            continue
        for device in provider.device_types:
            _kernels[name, device] = frozenset(provider.ops)
            _kernels["", device] = _kernels.get(("", device), frozenset()) | frozenset(provider.ops)


def has_kernels(ops: Collection[str], device: str) -> bool:
    """Tell whether a native backend has all of `ops` for a device type. Where the reference is forced, it has them."""
    forced = "" if torch.compiler.is_compiling() else _dispatch._choice()
    return forced == _registry.REFERENCE or _kernels.get((forced, device), frozenset()).issuperset(ops)


def takes(ops: Collection[str], *tensors: torch.Tensor | None) -> bool:
    """Tell whether gdn runs `ops` on these tensors, of which the first is there."""
    if _is_exporting() or torch._C._get_tracing_state() is not None:
        return False
    device = _device_of(tensors)
    if not has_kernels(ops, device) or (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return False
    with_gradient = torch.is_grad_enabled()
    return all(tensor is None or _is_eligible(tensor, device, with_gradient) for tensor in tensors)


def _device_of(tensors: tuple[torch.Tensor | None, ...]) -> str:
    device: Any = None if tensors[0] is None else tensors[0].device.type
    return str(device)


def _is_eligible(tensor: torch.Tensor, device: str, with_gradient: bool) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == device
        and tensor.dtype in FLOATING
        and not (with_gradient and tensor.requires_grad)
    )


def _is_exporting() -> bool:
    return getattr(torch.compiler, "is_exporting", bool)()  # torch 2.7
