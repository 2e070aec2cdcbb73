# SPDX-License-Identifier: Apache-2.0
"""The operations in plain torch: the specification in code, and what runs where no faster backend does.

Arguments are taken as valid; the public functions of `gdn_core`, of the same signatures, check them first.
Activations in float64 are computed in float64, all others in float32. Every operation that updates no pool is
differentiable.
"""

from . import chunk, convolution, fused, gating, norm, recurrent, speculative
from ._precision import without_autocast

causal_conv1d_fn = without_autocast(convolution.causal_conv1d_fn)
causal_conv1d_update = without_autocast(convolution.causal_conv1d_update)
chunk_gated_delta_rule = without_autocast(chunk.chunk_gated_delta_rule)
fused_gdn_decode_post_conv_mtp = without_autocast(fused.fused_gdn_decode_post_conv_mtp)
fused_gdn_decode_post_conv_mtp_replay = without_autocast(fused.fused_gdn_decode_post_conv_mtp_replay)
fused_gdn_gating = without_autocast(gating.fused_gdn_gating)
fused_recurrent_gated_delta_rule = without_autocast(recurrent.fused_recurrent_gated_delta_rule)
fused_sigmoid_gating_delta_rule_update = without_autocast(recurrent.fused_sigmoid_gating_delta_rule_update)
fused_sigmoid_gating_delta_rule_update_replay = without_autocast(
    speculative.fused_sigmoid_gating_delta_rule_update_replay
)
fused_sigmoid_gating_delta_rule_update_spec = without_autocast(speculative.fused_sigmoid_gating_delta_rule_update_spec)
rms_norm_gated = without_autocast(norm.rms_norm_gated)

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
