# SPDX-License-Identifier: Apache-2.0
"""What transformers' Gated DeltaNet layers are made of, whatever each family calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Weights(NamedTuple):
    """What the core of a layer reads beside its inputs."""

    conv_weight: torch.Tensor  # [C, W]
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    gate_activation: str

    @classmethod
    def of(cls, layer: Any) -> Weights:
        norm, conv1d = gated_norm(layer), layer.conv1d
        return cls(
            conv1d.weight.squeeze(1), conv1d.bias, layer.A_log, layer.dt_bias, norm.weight, norm.variance_epsilon,
            norm.activation,
        )  # fmt: skip


def gated_norm(layer: Any) -> Any:
    """Return the gated norm, or None."""
    return getattr(layer, "norm", None) or getattr(layer, "o_norm", None)


def layout(layer: Any) -> str | None:
    """Name the projections: Qwen3.5's four, Qwen3-Next's two that interleave heads, or one for each operand."""
    for name in ("in_proj_qkv", "in_proj_qkvz", "q_proj"):
        if hasattr(layer, name):
            return name
    return None


def doubles_beta(layer: Any) -> bool:
    """Tell whether the update strength goes up to 2."""
    return bool(vars(layer).get("allow_neg_eigval", False))


def is_hooked(conv1d: Any, norm: Any) -> bool:
    """Tell whether something waits for a call of the convolution or the norm, whose weights are used without one.

    accelerate moves an offloaded weight in when the module is called.
    """
    # A module that lacks an attribute takes its time to say so: its own dictionary answers at once.
    return (
        "_hf_hook" in vars(conv1d)
        or "_hf_hook" in vars(norm)
        or bool(norm._forward_hooks)
        or bool(norm._forward_pre_hooks)
    )


def projections(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return mixed_qkv [B, T, C], z, a and b."""
    kind = layout(layer)
    if kind == "in_proj_qkv":
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_a(x), layer.in_proj_b(x)
    if kind == "in_proj_qkvz":
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1), z, a, b
    mixed_qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    return mixed_qkv, layer.g_proj(x), layer.a_proj(x), layer.b_proj(x)


def output_projection(layer: Any) -> Any:
    """Return the projection of the core's output."""
    return layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj
