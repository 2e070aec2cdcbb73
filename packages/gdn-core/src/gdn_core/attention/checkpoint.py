# SPDX-License-Identifier: Apache-2.0
"""From the projections that checkpoints hold to the one that the layer uses, for all of its heads or a range of them.

The layer's own projection gives ``q | k | v | z | b | a``. Checkpoints hold it in two layouts:

- separate (Qwen3.5): ``in_proj_qkv`` (q | k | v), ``in_proj_z``, ``in_proj_b``, ``in_proj_a``;
- interleaved (Qwen3-Next): ``in_proj_qkvz`` and ``in_proj_ba``, for each key head its q, k and the v and z of its value
  heads, and their b and a.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """The heads of a whole layer, and which key heads (with their value heads) a process has."""

    num_key_heads: int
    num_value_heads: int
    head_k_dim: int
    head_v_dim: int
    first_key_head: int
    end_key_head: int

    @property
    def ratio(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def num_own_key_heads(self) -> int:
        return self.end_key_head - self.first_key_head

    @property
    def num_own_value_heads(self) -> int:
        return self.num_own_key_heads * self.ratio

    def sizes(self) -> list[int]:
        """Return the widths of q, k, v, z, b and a of the whole layer."""
        key, value = self.num_key_heads * self.head_k_dim, self.num_value_heads * self.head_v_dim
        return [key, key, value, value, self.num_value_heads, self.num_value_heads]

    def own(self, x: Tensor, is_value: bool, dim: int = 0) -> Tensor:
        """Cut the own heads out of a dimension that holds all key heads, or all value heads, one after the other."""
        width = x.shape[dim] // (self.num_value_heads if is_value else self.num_key_heads)
        scale = width * (self.ratio if is_value else 1)
        return x.narrow(dim, self.first_key_head * scale, self.num_own_key_heads * scale)

    def own_parts(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Join the own heads of q and k, then of any number of value parts."""
        return torch.cat([self.own(part, is_value=i >= 2) for i, part in enumerate(parts)])


def own_weights(state: dict[str, Tensor], prefix: str, heads: Heads) -> None:
    """Replace a checkpoint's entries of a layer by the layer's own; what is there already, or missing, stays so."""
    projection = _projection(state, prefix, heads)
    if projection is not None:
        state[f"{prefix}in_proj.weight"] = heads.own_parts(projection)
    if heads.num_own_key_heads == heads.num_key_heads:
        return
    sizes = heads.sizes()
    for name in ("conv1d.weight", "conv1d.bias"):
        channels = state.get(prefix + name)
        if channels is not None and channels.shape[0] == sum(sizes[:3]):
            state[prefix + name] = heads.own_parts(channels.split(sizes[:3]))
    for name in ("A_log", "dt_bias"):
        vector = state.get(prefix + name)
        if vector is not None and vector.shape[0] == heads.num_value_heads:
            state[prefix + name] = heads.own(vector, is_value=True)
    output = state.get(f"{prefix}out_proj.weight")
    if output is not None and output.shape[1] == sizes[2]:
        state[f"{prefix}out_proj.weight"] = heads.own(output, is_value=True, dim=1)


def _projection(state: dict[str, Tensor], prefix: str, heads: Heads) -> tuple[Tensor, ...] | None:
    """Take the projection of all heads out of ``state``, as q, k, v, z, b and a; None where no layout is there."""
    separate = [f"{prefix}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")]
    if all(name in state for name in separate):
        qkv, z, b, a = (state.pop(name) for name in separate)
        return (*qkv.split(heads.sizes()[:3]), z, b, a)
    interleaved = [f"{prefix}in_proj_{name}.weight" for name in ("qkvz", "ba")]
    if all(name in state for name in interleaved):
        qkvz, ba = (state.pop(name) for name in interleaved)
        return _deinterleave(qkvz, ba, heads)
    own = state.get(f"{prefix}in_proj.weight")
    if own is not None and own.shape[0] == sum(heads.sizes()):
        return tuple(own.split(heads.sizes()))
    return None


def _deinterleave(qkvz: Tensor, ba: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    values = heads.ratio * heads.head_v_dim
    groups = qkvz.unflatten(0, (heads.num_key_heads, -1))
    q, k, v, z = groups.split([heads.head_k_dim, heads.head_k_dim, values, values], dim=1)
    b, a = ba.unflatten(0, (heads.num_key_heads, -1)).split(heads.ratio, dim=1)
    return tuple(part.flatten(0, 1) for part in (q, k, v, z, b, a))
