# SPDX-License-Identifier: Apache-2.0
"""What the core of one layer needs beside its inputs: weights, head counts, activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._validate import choice, tensor


@dataclass(frozen=True)
class GDNLayerParams:
    """Hold the weights of a layer's core, between its projections.

    Args:
        conv_weight: [C, W], the depthwise convolution, W from 2 to 5; C = 2*H*K + HV*V, channels q | k | v.
        A_log, dt_bias: [HV], the gates.
        norm_weight: [V], the gated norm.
        norm_eps: eps of the gated norm.
        num_key_heads, num_value_heads: H and HV, of this process where heads are split over several.
        head_k_dim, head_v_dim: K and V.
        conv_bias: [C], or None.
        activation: after the convolution, None, ``"silu"`` or ``"swish"``.
        output_gate_activation: ``"silu"``, ``"swish"``, ``"sigmoid"`` or ``"none"``.

    Raises:
        ValueError, TypeError: a weight does not fit the head counts.

    Example:
        >>> import torch, gdn_core
        >>> layer = gdn_core.GDNLayerParams(torch.randn(128, 4), torch.zeros(4), torch.ones(4), torch.ones(16), 1e-6,
        ...                                 num_key_heads=2, num_value_heads=4, head_k_dim=16, head_v_dim=16)
        >>> layer.conv_channels
        128
    """

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    num_key_heads: int
    num_value_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_bias: Tensor | None = None
    activation: str | None = "silu"
    output_gate_activation: str = "silu"

    def __post_init__(self) -> None:
        check_heads(self.num_key_heads, self.num_value_heads)
        tensor("conv_weight", self.conv_weight, [self.conv_channels, "W"])
        width = self.conv_weight.shape[1]
        if not 2 <= width <= 5:
            raise ValueError(f"conv_weight: expected a width of 2 to 5, got {width}")
        if self.conv_bias is not None:
            tensor("conv_bias", self.conv_bias, [self.conv_channels])
        tensor("A_log", self.A_log, [self.num_value_heads])
        tensor("dt_bias", self.dt_bias, [self.num_value_heads])
        tensor("norm_weight", self.norm_weight, [self.head_v_dim])
        if not self.norm_eps >= 0:
            raise ValueError(f"norm_eps: expected a number >= 0, got {self.norm_eps}")
        choice("activation", self.activation, (None, "silu", "swish"))
        choice("output_gate_activation", self.output_gate_activation, ("silu", "swish", "sigmoid", "none"))

    @property
    def conv_channels(self) -> int:
        """Return C, the channels of the convolution."""
        return conv_channels(self.num_key_heads, self.num_value_heads, self.head_k_dim, self.head_v_dim)

    @property
    def conv_width(self) -> int:
        """Return W, the width of the convolution."""
        return self.conv_weight.shape[1]


def check_heads(num_key_heads: int, num_value_heads: int) -> None:
    """Check that each key head serves a whole number of value heads."""
    if num_key_heads < 1:
        raise ValueError(f"num_key_heads: expected at least 1, got {num_key_heads}")
    if num_value_heads < 1 or num_value_heads % num_key_heads:
        raise ValueError(f"num_value_heads: expected a multiple of {num_key_heads} key heads, got {num_value_heads}")


def conv_channels(num_key_heads: int, num_value_heads: int, head_k_dim: int, head_v_dim: int) -> int:
    """Return C = 2*H*K + HV*V."""
    return 2 * num_key_heads * head_k_dim + num_value_heads * head_v_dim
