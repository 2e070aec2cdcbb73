# SPDX-License-Identifier: Apache-2.0
"""The operations in plain torch: the specification in code, and what runs where no faster backend does.

Arguments are taken as valid; the public functions of `gdn_core`, of the same signatures, check them first.
Activations in float64 are computed in float64, all others in float32. Every operation that updates no pool is
differentiable.
"""

from .chunk import chunk_gated_delta_rule
from .convolution import causal_conv1d_fn, causal_conv1d_update
from .fused import fused_gdn_decode_post_conv_mtp, fused_gdn_decode_post_conv_mtp_replay
from .gating import fused_gdn_gating
from .norm import rms_norm_gated
from .recurrent import fused_recurrent_gated_delta_rule, fused_sigmoid_gating_delta_rule_update
from .speculative import fused_sigmoid_gating_delta_rule_update_replay, fused_sigmoid_gating_delta_rule_update_spec

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_gdn_decode_post_conv_mtp",
    "fused_gdn_decode_post_conv_mtp_replay",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule",
    "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_replay",
    "fused_sigmoid_gating_delta_rule_update_spec",
    "rms_norm_gated",
]
