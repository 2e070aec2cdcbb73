// SPDX-License-Identifier: Apache-2.0
//
// The operations as Python calls them: the arguments of torch.ops.gdn.<name> in order, and dry_run, which only checks.
#pragma once

#include "check.h"

namespace gdn::cuda {

using nb::handle;

void fused_sigmoid_gating_delta_rule_update(TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k,
                                            TensorView& v, TensorView& a, TensorView& b,
                                            TensorView& initial_state_source, TensorView& initial_state_indices,
                                            TensorView& cu_seqlens, handle use_qk_l2norm_in_kernel,
                                            handle softplus_beta, handle softplus_threshold, handle scale,
                                            handle state_v_first, handle null_slot, TensorView& out, bool dry_run);
void fused_sigmoid_gating_delta_rule_update_spec(TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k,
                                                 TensorView& v, TensorView& a, TensorView& b,
                                                 TensorView& initial_state_source, TensorView& spec_state_indices,
                                                 TensorView& num_accepted_tokens, TensorView& cu_seqlens,
                                                 handle use_qk_l2norm_in_kernel, handle softplus_beta,
                                                 handle softplus_threshold, handle scale, handle state_v_first,
                                                 handle null_slot, TensorView& out, bool dry_run);
void fused_sigmoid_gating_delta_rule_update_replay(
    TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k, TensorView& v, TensorView& a, TensorView& b,
    TensorView& state, TensorView& slot_indices, TensorView& records_k, TensorView& records_u,
    TensorView& records_decay, TensorView& records_live, TensorView& num_accepted_tokens, TensorView& cu_seqlens,
    handle use_qk_l2norm_in_kernel, handle softplus_beta, handle softplus_threshold, handle scale, handle state_v_first,
    handle null_slot, TensorView& out, bool dry_run);
void fused_gdn_decode_post_conv_mtp(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log,
                                    TensorView& dt_bias, TensorView& state_indices, TensorView& cu_seqlens,
                                    TensorView& num_accepted_tokens, TensorView& state, TensorView& output_gate,
                                    TensorView& norm_weight, handle scale, handle norm_eps,
                                    handle output_gate_activation, handle num_key_heads, handle head_k_dim,
                                    handle state_v_first, handle null_slot, TensorView& out, bool dry_run);
void fused_gdn_decode_post_conv_mtp_replay(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log,
                                           TensorView& dt_bias, TensorView& slot_indices, TensorView& records_k,
                                           TensorView& records_u, TensorView& records_decay, TensorView& records_live,
                                           TensorView& cu_seqlens, TensorView& num_accepted_tokens, TensorView& state,
                                           TensorView& output_gate, TensorView& norm_weight, handle scale,
                                           handle norm_eps, handle output_gate_activation, handle num_key_heads,
                                           handle head_k_dim, handle state_v_first, handle null_slot, TensorView& out,
                                           bool dry_run);

// Puts them into a module.
void bind_ops(nb::module_& m);

}  // namespace gdn::cuda
