// SPDX-License-Identifier: Apache-2.0
//
// The bound operations: the arguments of torch.ops.gdn.<name> in order, then `dry_run`, which stops after the checks.
#pragma once

#include "arguments.h"
#include "decode_ops.h"

namespace gdn::cpu {

void fused_gdn_gating(TensorView& A_log, TensorView& a, TensorView& b, TensorView& dt_bias, handle softplus_beta,
                      handle softplus_threshold, TensorView& g, TensorView& beta, bool dry_run);

void rms_norm_gated(TensorView& x, TensorView& gate, TensorView& weight, handle eps, handle activation, TensorView& out,
                    bool dry_run);

// The decode operations, which decode_ops.h binds.
struct Decode {
  static void run_single(const DecodeArguments& args, const RowArguments& rows, bool dry_run);
  static void run_several_slots(const DecodeArguments& args, const RowArguments& rows, bool dry_run);
  static void run_several_slots(const FusedArguments& args, const RowArguments& rows, bool dry_run);
  static void run_replay(const DecodeArguments& args, const RowArguments& rows, const RecordTensors& records,
                         bool dry_run);
  static void run_replay(const FusedArguments& args, const RowArguments& rows, const RecordTensors& records,
                         bool dry_run);
};

void fused_recurrent_gated_delta_rule(TensorView& q, TensorView& k, TensorView& v, TensorView& g, TensorView& beta,
                                      handle scale, TensorView& initial_state, TensorView& state,
                                      handle use_qk_l2norm_in_kernel, handle use_gate_in_kernel, TensorView& A_log,
                                      TensorView& dt_bias, handle use_beta_sigmoid_in_kernel, handle allow_neg_eigval,
                                      handle state_v_first, TensorView& cu_seqlens, TensorView& state_indices,
                                      TensorView& has_initial_state, handle null_slot, TensorView& out,
                                      TensorView& final_state, bool dry_run);

void chunk_gated_delta_rule(TensorView& q, TensorView& k, TensorView& v, TensorView& g, TensorView& beta, handle scale,
                            TensorView& initial_state, TensorView& state, handle use_qk_l2norm_in_kernel,
                            handle use_beta_sigmoid_in_kernel, handle allow_neg_eigval, handle state_v_first,
                            TensorView& cu_seqlens, TensorView& state_indices, TensorView& has_initial_state,
                            handle null_slot, TensorView& out, TensorView& final_state, TensorView& chunk_states,
                            bool dry_run);

void causal_conv1d_fn(TensorView& x, TensorView& weight, TensorView& bias, TensorView& seq_idx,
                      TensorView& initial_states, handle activation, TensorView& conv_states,
                      TensorView& query_start_loc, TensorView& cache_indices, TensorView& has_initial_state,
                      handle null_slot, TensorView& out, TensorView& final_states, bool dry_run);

void causal_conv1d_update(TensorView& x, TensorView& conv_state, TensorView& weight, TensorView& bias,
                          handle activation, TensorView& cache_seqlens, TensorView& conv_state_indices,
                          TensorView& num_accepted_tokens, TensorView& query_start_loc, handle null_slot,
                          TensorView& row_indices, TensorView& out, bool dry_run);

// The rows come as `layout` [N, 3] on the host: kind, first and end token; query_start_loc says the same.
void gdn_attention(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& z, TensorView& conv_weight,
                   TensorView& conv_bias, TensorView& A_log, TensorView& dt_bias, TensorView& norm_weight,
                   handle norm_eps, handle num_key_heads, handle head_k_dim, handle activation,
                   handle output_gate_activation, TensorView& conv_states, TensorView& state, TensorView& records_k,
                   TensorView& records_u, TensorView& records_decay, TensorView& records_live, handle state_v_first,
                   handle null_slot, TensorView& layout, handle query_start_loc, TensorView& slots,
                   TensorView& num_accepted_tokens, TensorView& has_initial_state, TensorView& out, bool dry_run);

}  // namespace gdn::cpu
