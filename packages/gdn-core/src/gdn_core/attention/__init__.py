# SPDX-License-Identifier: Apache-2.0
"""The attention layer: states of requests, the rows of a batch, and the layer over any mix of them."""

from __future__ import annotations

from .cache import GDNSnapshot, GDNStateCache
from .converters import metadata_from_sglang, metadata_from_vllm
from .metadata import GDNMetadata
from .module import GatedDeltaNet
from .op import gdn_attention
from .params import GDNLayerParams

__all__ = [
    "GDNLayerParams",
    "GDNMetadata",
    "GDNSnapshot",
    "GDNStateCache",
    "GatedDeltaNet",
    "gdn_attention",
    "metadata_from_sglang",
    "metadata_from_vllm",
]
