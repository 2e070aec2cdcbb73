# SPDX-License-Identifier: Apache-2.0
"""The entries of a transformers cache that hold several requests by slot, for packed batches.

Imported with transformers, when a model becomes a target of speculation, and not before.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ...attention import GDNLayerParams, GDNMetadata, GDNStateCache, gdn_attention

_FIRST_CAPACITY = 64


class GDNStates(LinearAttentionLayer):  # type: ignore[misc]
    """The states of a Gated DeltaNet layer in a GDNStateCache, and the core on them."""

    def __init__(self, params: GDNLayerParams, cache: GDNStateCache) -> None:
        super().__init__()
        self._params, self._cache = params, cache
        self.metadata: GDNMetadata | None = None  # of the batch

    def run_core(self, mixed_qkv: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Run the packed rows of a batch, mixed_qkv [1, T, C]; return [1, T, HV * V]."""
        assert self.metadata is not None
        heads = (self._params.num_value_heads, self._params.head_v_dim)
        core = gdn_attention(
            mixed_qkv[0], a.reshape(-1, heads[0]), b.reshape(-1, heads[0]), z.reshape(-1, *heads), self._params,
            self._cache, self.metadata,
        )  # fmt: skip
        return core.flatten(1)[None]


class Context(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of an attention layer, by slot; a row's overwrite those from its position on."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, int, int, int]] = []  # of the batch
        self._held: dict[int, torch.Tensor] = {}  # keys and values [2, heads, capacity, head_dim]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: slots are filled as they come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the keys and values [1, heads, T, head_dim] of a batch; return those of all its rows' texts in turn."""
        parts = [
            self._extended(slot, key_states[0, :, start:end], value_states[0, :, start:end], position)
            for slot, start, end, position in self.spans
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return whole[0][None], whole[1][None]

    def _extended(self, slot: int, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
        end = position + keys.shape[1]
        held = self._held.get(slot)
        if held is None or held.shape[2] < end:
            heads, _, head_dim = keys.shape
            grown = keys.new_empty(2, heads, max(2 * position, end + _FIRST_CAPACITY), head_dim)
            if held is not None:
                grown[:, :, :position] = held[:, :, :position]
            self._held[slot] = held = grown
        held[0, :, position:end], held[1, :, position:end] = keys, values
        return held[:, :, :end]

    def get_seq_length(self) -> int:
        """Return 0: rows of several lengths share a batch, and bring their positions."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a text without a past: batches bring their masks."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1
