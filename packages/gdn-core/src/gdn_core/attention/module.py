# SPDX-License-Identifier: Apache-2.0
"""The whole layer: projections, core, output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .cache import GDNStateCache
from .checkpoint import Heads, own_weights
from .core import split_heads
from .metadata import GDNMetadata
from .op import gdn_attention
from .params import check_heads, conv_channels


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet as in Qwen3-Next and Qwen3.5, for packed batches of any mix of rows.

    ``load_state_dict`` takes the entries of a checkpoint's layer as they are named there, of both families: one
    projection for q, k, v and z interleaved by key head (Qwen3-Next), or separate ones (Qwen3.5). Inside there is one
    projection for everything, and ``state_dict`` has that.

    For tensor parallelism each process makes the layer with a range of key heads and loads the whole layer's entries:
    it keeps what belongs to these heads, and the sum of all processes' outputs is the layer's.

    Args:
        hidden_size: width of the model.
        num_key_heads, num_value_heads: of the whole layer, H and HV.
        head_k_dim, head_v_dim: K and V.
        conv_width: W.
        norm_eps: eps of the gated norm.
        conv_bias: whether the convolution has a bias.
        activation: after the convolution.
        output_gate_activation: of the gated norm.
        key_heads: (first, end) of the key heads that this process has, with their value heads; all by default.
        device, dtype: of the weights; A_log is always fp32.

    Example:
        >>> import torch, gdn_core
        >>> layer = gdn_core.GatedDeltaNet(32, num_key_heads=2, num_value_heads=4, head_k_dim=16, head_v_dim=16)
        >>> cache = layer.make_cache(8)
        >>> rows = gdn_core.GDNMetadata.build([0, 5], [3], has_initial_state=[False])
        >>> with torch.no_grad():
        ...     prompt = layer(torch.randn(5, 32), cache, rows)
        ...     token = layer(torch.randn(1, 32), cache, gdn_core.GDNMetadata.build([0, 1], [3]))
        >>> prompt.shape, token.shape
        (torch.Size([5, 32]), torch.Size([1, 32]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        *,
        conv_width: int = 4,
        norm_eps: float = 1e-6,
        conv_bias: bool = False,
        activation: str = "silu",
        output_gate_activation: str = "silu",
        key_heads: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_key_heads, num_value_heads)
        first, end = (0, num_key_heads) if key_heads is None else key_heads
        if not 0 <= first < end <= num_key_heads:
            raise ValueError(f"key_heads: expected a range of the {num_key_heads} key heads, got ({first}, {end})")
        self.heads = Heads(num_key_heads, num_value_heads, head_k_dim, head_v_dim, first, end)
        self.num_key_heads, self.num_value_heads = self.heads.num_own_key_heads, self.heads.num_own_value_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.norm_eps, self.conv_width = norm_eps, conv_width
        self.activation, self.output_gate_activation = activation, output_gate_activation

        options: dict[str, Any] = {"device": device, "dtype": dtype}
        channels, values = self.conv_channels, self.num_value_heads * head_v_dim
        self.in_proj = nn.Linear(hidden_size, channels + values + 2 * self.num_value_heads, bias=False, **options)
        self.conv1d = nn.Conv1d(channels, channels, conv_width, groups=channels, bias=conv_bias, **options)
        rates = torch.empty(self.num_value_heads, device=device, dtype=torch.float32).uniform_(0.01, 16)
        self.A_log = nn.Parameter(rates.log())
        self.dt_bias = nn.Parameter(torch.ones(self.num_value_heads, **options))
        self.norm = _NormWeight(head_v_dim, options)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, **options)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> GatedDeltaNet:
        """Make the layer of a transformers config (of the text model, where a config has several)."""
        gate = getattr(config, "output_gate_type", None) or "swish"
        defaults = {
            "conv_width": config.linear_conv_kernel_dim,
            "norm_eps": config.rms_norm_eps,
            "activation": config.hidden_act,
            "output_gate_activation": gate,
        }
        return cls(
            config.hidden_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            **{**defaults, **options},
        )

    def make_cache(self, num_slots: int, **options: Any) -> GDNStateCache:
        """Make a :class:`GDNStateCache` for this layer's own heads; options are those of its constructor."""
        weight = self.in_proj.weight
        defaults = {"conv_width": self.conv_width, "device": weight.device, "dtype": weight.dtype}
        return GDNStateCache(
            num_slots, self.num_key_heads, self.num_value_heads, self.head_k_dim, self.head_v_dim,
            **{**defaults, **options},
        )  # fmt: skip

    @property
    def conv_channels(self) -> int:
        """Return C, the channels of the convolution of this process's heads."""
        return conv_channels(self.num_key_heads, self.num_value_heads, self.head_k_dim, self.head_v_dim)

    @property
    def conv_weight(self) -> Tensor:
        """Return the convolution's weight, [C, W]."""
        return self.conv1d.weight.squeeze(1)

    @property
    def conv_bias(self) -> Tensor | None:
        """Return the convolution's bias, [C] or None."""
        return self.conv1d.bias

    @property
    def norm_weight(self) -> Tensor:
        """Return the gated norm's weight, [V]."""
        return self.norm.weight

    def forward(
        self, hidden_states: Tensor, cache: GDNStateCache | None = None, metadata: GDNMetadata | None = None
    ) -> Tensor:
        """Run the layer on the packed rows of a batch, or without a cache on whole sequences.

        Args:
            hidden_states: [T, hidden_size] with a cache, [B, T, hidden_size] without.
            cache: this layer's states, updated in place; under ``torch.no_grad()`` or ``torch.inference_mode()`` only.
            metadata: the rows of the batch.

        Returns:
            The output, shaped as ``hidden_states``; with a range of key heads this process's part of the sum.
        """
        if (cache is None) != (metadata is None):
            raise ValueError("metadata: expected it together with cache, got one without the other")
        mixed_qkv, z, b, a = self.in_proj(hidden_states).split(
            [self.conv_channels, self.num_value_heads * self.head_v_dim, self.num_value_heads, self.num_value_heads],
            dim=-1,
        )
        z = z.unflatten(-1, (self.num_value_heads, self.head_v_dim))
        if cache is None or metadata is None:
            core = self._whole_sequences(mixed_qkv, a, b, z)
        else:
            core = gdn_attention(mixed_qkv, a, b, z, self, cache, metadata)
        output: Tensor = self.out_proj(core.flatten(-2))
        return output

    def _whole_sequences(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        convolved = ops.causal_conv1d_fn(
            mixed_qkv.transpose(1, 2), self.conv_weight, self.conv_bias, activation=self.activation
        )
        assert isinstance(convolved, Tensor)
        q, k, v = split_heads(convolved.transpose(1, 2), self.num_key_heads, self.head_k_dim, self.head_v_dim)
        g, beta = ops.fused_gdn_gating(self.A_log, a, b, self.dt_bias)
        o = ops.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
        return ops.rms_norm_gated(o, z, self.norm_weight, self.norm_eps, activation=self.output_gate_activation)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        own_weights(state_dict, prefix, self.heads)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Describe the heads, as modules print themselves."""
        own = "" if self.heads.num_own_key_heads == self.heads.num_key_heads else f", key_heads={self.heads[4:]}"
        return (
            f"num_key_heads={self.heads.num_key_heads}, num_value_heads={self.heads.num_value_heads}, "
            f"head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}{own}"
        )


class _NormWeight(nn.Module):
    def __init__(self, size: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **options))
