# SPDX-License-Identifier: Apache-2.0
"""The gates: `g = -exp(A_log) * softplus(a + dt_bias)` and `beta = sigmoid(b)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import compute_dtype


def log_decay(
    A_log: Tensor, a: Tensor, dt_bias: Tensor | None, softplus_beta: float = 1.0, softplus_threshold: float = 20.0
) -> Tensor:
    """Return the log decay `g [..., HV]`, never rounded to the activation dtype.

    The arithmetic is float64, since `exp(A_log)` overflows fp32 where the product with softplus may still be small.
    """
    dtype = compute_dtype(a)
    x = a.double() if dt_bias is None else a.double() + dt_bias.double()
    softplus = F.softplus(x, float(softplus_beta), float(softplus_threshold))
    g = -A_log.double().exp() * softplus
    # Where softplus is 0 in the result's dtype the decay is exactly 1, however large exp(A_log): inf * 0 must not show.
    return torch.where(softplus.to(dtype) == 0, -0.0, g).to(dtype)


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    *,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return the log decay g and the step size beta, both fp32 and of the shape of a and b, `[..., HV]`."""
    g = log_decay(A_log, a, dt_bias, softplus_beta, softplus_threshold)
    beta = b.to(compute_dtype(b)).sigmoid()
    return g, beta
