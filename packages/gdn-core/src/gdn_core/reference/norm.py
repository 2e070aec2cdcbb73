# SPDX-License-Identifier: Apache-2.0
"""The gated norm: `y = x * rsqrt(mean(x*x) + eps) * weight * act(gate)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import compute_dtype, deliver


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """Normalise over the last dimension, then gate; operands and result in the compute dtype."""
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y * weight
    if activation == "none":
        return y
    return y * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str = "silu", out: Tensor | None = None
) -> Tensor:
    """Return the gated RMS norm of `x [..., V]`; `activation` is silu, swish, sigmoid or none."""
    dtype = compute_dtype(x)
    y = gated_norm(x.to(dtype), gate.to(dtype), weight.to(dtype), eps, activation)
    return deliver(y, out, x.dtype)
