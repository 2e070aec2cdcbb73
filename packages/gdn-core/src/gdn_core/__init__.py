# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on torch tensors: a reference, and faster backends where they are installed.

The operations run on whichever backend takes the call: see :func:`backends`, :func:`use_backend` and :func:`explain`.
"""

from __future__ import annotations

import os

from . import _schema, reference
from ._dispatch import Explanation, record_calls, use_backend
from ._registry import BackendInfo, backends, core_version
from .attention import GatedDeltaNet, GDNLayerParams, GDNMetadata, GDNStateCache, gdn_attention
from .ops import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    explain,
    fused_gdn_decode_post_conv_mtp,
    fused_gdn_decode_post_conv_mtp_replay,
    fused_gdn_gating,
    fused_recurrent_gated_delta_rule,
    fused_sigmoid_gating_delta_rule_update,
    fused_sigmoid_gating_delta_rule_update_replay,
    fused_sigmoid_gating_delta_rule_update_spec,
    rms_norm_gated,
)
from .records import ReplayRecords

OPS = _schema.OPS
# Ops that update a state in place: a piecewise CUDA-graph compiler must split the graph at them.
SPLITTING_OPS = (
    *(f"gdn::{op}" for op in OPS if op not in ("fused_gdn_gating", "rms_norm_gated")),
    "gdn::gdn_attention",
)

__all__ = [
    "OPS",
    "SPLITTING_OPS",
    "BackendInfo",
    "Explanation",
    "GDNLayerParams",
    "GDNMetadata",
    "GDNStateCache",
    "GatedDeltaNet",
    "ReplayRecords",
    "backends",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "explain",
    "fused_gdn_decode_post_conv_mtp",
    "fused_gdn_decode_post_conv_mtp_replay",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule",
    "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_replay",
    "fused_sigmoid_gating_delta_rule_update_spec",
    "gdn_attention",
    "record_calls",
    "reference",
    "rms_norm_gated",
    "use_backend",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return core_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if os.environ.get("GDN_PATCH_TRANSFORMERS") == "1":
    from .integrations.transformers import patch_for_environment

    patch_for_environment()
