// SPDX-License-Identifier: Apache-2.0
//
// Decode steps that verify draft tokens, from q, k and v or straight from the convolution's output.
#include <algorithm>

#include "ops.h"
#include "records.h"
#include "recurrence_call.h"

namespace gdn::cpu {
namespace {

// Rows that resume after the tokens that were accepted, and store the state after every token in a slot of its own.
void plan_several_slots(const TensorView& table_view, Name table_name, const TensorView& num_accepted_tokens,
                        const TensorView& cu_seqlens, const TensorView& row_indices, handle null_slot,
                        std::int64_t pool_size, const Sizes& s, RecurrenceParams& params, RowPlan& plan) {
  const SlotTable table = slot_table(table_view, table_name, pool_size, optional_integer(null_slot, "null_slot"));
  plan.offsets = row_offsets(cu_seqlens, "cu_seqlens", s.tokens, table.rows + 1);
  plan.name_rows(row_indices, table.rows);
  const Indices accepted = accepted_tokens(num_accepted_tokens, "num_accepted_tokens", table.rows, table.columns,
                                           plan.names_rows ? &plan.named : nullptr);
  params.num_sequences = table.rows;
  params.destination_columns = table.columns;
  plan.destinations = table.slots;
  for (std::int64_t row = 0; row < table.rows; ++row) {
    const auto i = static_cast<std::size_t>(row);
    const std::int64_t source = table.slots[static_cast<std::size_t>(row * table.columns + accepted[i] - 1)];
    plan.sources.push_back(source);
    plan.padding.push_back(source < 0 || plan.offsets[i] == plan.offsets[i + 1]);
  }
  check_row_lengths(plan, "cu_seqlens", table.rows, table.columns);
}

// Rows that resume after the tokens that were accepted by replaying their records.
void plan_replay(const TensorView& slots, const RecordTensors& records, const TensorView& activations,
                 const TensorView& num_accepted_tokens, const TensorView& cu_seqlens, const TensorView& row_indices,
                 handle null_slot, std::int64_t pool_size, const Sizes& s, RecurrenceParams& params, RowPlan& plan,
                 ReplayPlan& replay_plan) {
  const std::int64_t columns = check_records(records, activations, pool_size, s, replay_plan.replay);
  plan.sources = slot_indices(slots, "slot_indices", "N", pool_size, optional_integer(null_slot, "null_slot"));
  plan.destinations = plan.sources;
  params.num_sequences = static_cast<std::int64_t>(plan.sources.size());
  plan.offsets = row_offsets(cu_seqlens, "cu_seqlens", s.tokens, params.num_sequences + 1);
  plan.name_rows(row_indices, params.num_sequences);
  const Indices accepted = accepted_tokens(num_accepted_tokens, "num_accepted_tokens", params.num_sequences, columns,
                                           plan.names_rows ? &plan.named : nullptr);
  for (std::size_t row = 0; row < plan.sources.size(); ++row) {
    plan.padding.push_back(plan.sources[row] < 0 || plan.offsets[row] == plan.offsets[row + 1]);
    replay_plan.counts.push_back(0);
  }
  plan.for_each_row(params.num_sequences, [&](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    replay_plan.counts[i] = replayed_records(records.live, plan.sources[i], accepted[i]);
  });
  check_row_lengths(plan, "cu_seqlens", params.num_sequences, columns);
}

void execute_replay(RecurrenceParams& params, RowPlan& plan, ReplayPlan& replay_plan, const RecordTensors& records,
                    const Sizes& s) {
  replay_plan.attach(params, s.tokens);
  execute(params, plan, s.tokens);
  plan.for_each_row(params.num_sequences, [&](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    if (plan.padding[i]) return;
    live_records(records.live, plan.sources[i]) = static_cast<std::int32_t>(plan.offsets[i + 1] - plan.offsets[i]);
  });
}

// What both forms of the fused step take, but the rows and their slots.
struct FusedArguments {
  TensorView &mixed_qkv, &a, &b, &A_log, &dt_bias, &state, &output_gate, &norm_weight;
  handle scale, norm_eps, output_gate_activation, num_key_heads, head_k_dim, state_v_first;
  TensorView& out;
};

// Channels q | k | v of mixed_qkv [T, C]; HV and V are those of output_gate [T, HV, V].
Sizes check_channels(const FusedArguments& args) {
  check_floating(args.mixed_qkv, "mixed_qkv", {"T", "C"});
  const std::int64_t tokens = args.mixed_qkv.size(0), channels = args.mixed_qkv.size(1);
  check_floating(args.output_gate, "output_gate", {tokens, "HV", "V"});
  const std::int64_t value_heads = args.output_gate.size(1), value_dim = args.output_gate.size(2);
  const std::int64_t key_dim = integer(args.head_k_dim, "head_k_dim");
  if (key_dim < 1) raise_value("head_k_dim: expected at least 1, got " + std::to_string(key_dim));
  const std::int64_t key_channels = std::max<std::int64_t>(0, channels - value_heads * value_dim);
  const std::int64_t key_heads =
      optional_integer(args.num_key_heads, "num_key_heads").value_or(key_channels / (2 * key_dim));
  // More heads or wider ones than there are channels: the product need not fit 64 bits.
  const bool too_many = key_heads < 0 || key_heads > channels || key_dim > channels;
  if (too_many || channels != 2 * key_heads * key_dim + value_heads * value_dim) {
    raise_value(cat({"mixed_qkv: expected [", std::to_string(tokens), ", 2 * ", std::to_string(key_heads), " * ",
                     std::to_string(key_dim), " + ", std::to_string(value_heads), " * ", std::to_string(value_dim),
                     "], got ", describe(args.mixed_qkv)}));
  }
  const Sizes s{1, tokens, key_heads, key_dim, value_heads, value_dim};
  check_heads(s, "output_gate");
  check_not_empty(args.output_gate, "output_gate");
  return s;
}

Sizes check_fused(const FusedArguments& args, RecurrenceParams& params, GatedNorm& norm) {
  const Sizes s = check_channels(args);
  set_sizes(params, s);
  set_scale(params, args.scale);
  set_raw_gates(params, s, args.A_log, args.dt_bias, args.a, args.b);
  params.normalize_qk = true;
  norm.weight = head_vector(args.norm_weight, "norm_weight", s.value_dim);
  norm.activation = gate_activation(args.output_gate_activation, "output_gate_activation");
  norm.eps = static_cast<float>(non_negative(args.norm_eps, "norm_eps"));
  set_pool(params, args.state, "state", s, args.state_v_first);
  params.out = output_operand(args.out, "out", {s.tokens, s.value_heads, s.value_dim});
  params.norm = &norm;
  return s;
}

// q, k and v as parts of mixed_qkv, where it lies or in a copy of it; after all checks.
void set_fused_operands(const FusedArguments& args, const Sizes& s, RecurrenceParams& params, GatedNorm& norm) {
  make_unit_stride(args.mixed_qkv);
  const DType dtype = *floating_dtype(args.mixed_qkv);
  const auto part = [&](std::int64_t channel, std::int64_t head_dim) {
    const std::int64_t bytes = channel * (dtype == DType::kFloat32 ? 4 : 2);
    return Operand{static_cast<const char*>(args.mixed_qkv.data()) + bytes, dtype, 0, args.mixed_qkv.stride(0),
                   head_dim};
  };
  params.q = part(0, s.key_dim);
  params.k = part(s.key_heads * s.key_dim, s.key_dim);
  params.v = part(2 * s.key_heads * s.key_dim, s.value_dim);
  norm.gate = heads_operand(args.output_gate);
}

}  // namespace

void fused_sigmoid_gating_delta_rule_update_spec(TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k,
                                                 TensorView& v, TensorView& a, TensorView& b,
                                                 TensorView& initial_state_source, TensorView& spec_state_indices,
                                                 TensorView& num_accepted_tokens, TensorView& cu_seqlens,
                                                 handle use_qk_l2norm_in_kernel, handle softplus_beta,
                                                 handle softplus_threshold, handle scale, handle state_v_first,
                                                 handle null_slot, TensorView& out, bool dry_run) {
  RecurrenceParams params;
  RowPlan plan;
  const Sizes s = check_decode({A_log, dt_bias, q, k, v, a, b, initial_state_source, "initial_state_source",
                                use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first, out},
                               params);
  plan_several_slots(spec_state_indices, "spec_state_indices", num_accepted_tokens, cu_seqlens, TensorView(), null_slot,
                     initial_state_source.size(0), s, params, plan);
  if (dry_run || s.tokens == 0) return;
  set_qkv(params, q, k, v);
  execute(params, plan, s.tokens);
}

void fused_sigmoid_gating_delta_rule_update_replay(
    TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k, TensorView& v, TensorView& a, TensorView& b,
    TensorView& state, TensorView& slot_indices, TensorView& records_k, TensorView& records_u,
    TensorView& records_decay, TensorView& records_live, TensorView& num_accepted_tokens, TensorView& cu_seqlens,
    handle use_qk_l2norm_in_kernel, handle softplus_beta, handle softplus_threshold, handle scale, handle state_v_first,
    handle null_slot, TensorView& out, bool dry_run) {
  RecurrenceParams params;
  RowPlan plan;
  ReplayPlan replay_plan;
  const RecordTensors records{records_k, records_u, records_decay, records_live};
  const Sizes s = check_decode({A_log, dt_bias, q, k, v, a, b, state, "state", use_qk_l2norm_in_kernel, softplus_beta,
                                softplus_threshold, scale, state_v_first, out},
                               params);
  plan_replay(slot_indices, records, q, num_accepted_tokens, cu_seqlens, TensorView(), null_slot, state.size(0), s,
              params, plan, replay_plan);
  if (dry_run || s.tokens == 0) return;
  set_qkv(params, q, k, v);
  execute_replay(params, plan, replay_plan, records, s);
}

void fused_gdn_decode_post_conv_mtp(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log,
                                    TensorView& dt_bias, TensorView& state_indices, TensorView& cu_seqlens,
                                    TensorView& num_accepted_tokens, TensorView& state, TensorView& output_gate,
                                    TensorView& norm_weight, handle scale, handle norm_eps,
                                    handle output_gate_activation, handle num_key_heads, handle head_k_dim,
                                    handle state_v_first, handle null_slot, TensorView& row_indices, TensorView& out,
                                    bool dry_run) {
  const FusedArguments args{mixed_qkv,
                            a,
                            b,
                            A_log,
                            dt_bias,
                            state,
                            output_gate,
                            norm_weight,
                            scale,
                            norm_eps,
                            output_gate_activation,
                            num_key_heads,
                            head_k_dim,
                            state_v_first,
                            out};
  RecurrenceParams params;
  GatedNorm norm;
  RowPlan plan;
  const Sizes s = check_fused(args, params, norm);
  plan_several_slots(state_indices, "state_indices", num_accepted_tokens, cu_seqlens, row_indices, null_slot,
                     state.size(0), s, params, plan);
  if (dry_run || s.tokens == 0) return;
  set_fused_operands(args, s, params, norm);
  execute(params, plan, s.tokens);
}

void fused_gdn_decode_post_conv_mtp_replay(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log,
                                           TensorView& dt_bias, TensorView& slot_indices, TensorView& records_k,
                                           TensorView& records_u, TensorView& records_decay, TensorView& records_live,
                                           TensorView& cu_seqlens, TensorView& num_accepted_tokens, TensorView& state,
                                           TensorView& output_gate, TensorView& norm_weight, handle scale,
                                           handle norm_eps, handle output_gate_activation, handle num_key_heads,
                                           handle head_k_dim, handle state_v_first, handle null_slot,
                                           TensorView& row_indices, TensorView& out, bool dry_run) {
  const FusedArguments args{mixed_qkv,
                            a,
                            b,
                            A_log,
                            dt_bias,
                            state,
                            output_gate,
                            norm_weight,
                            scale,
                            norm_eps,
                            output_gate_activation,
                            num_key_heads,
                            head_k_dim,
                            state_v_first,
                            out};
  RecurrenceParams params;
  GatedNorm norm;
  RowPlan plan;
  ReplayPlan replay_plan;
  const RecordTensors records{records_k, records_u, records_decay, records_live};
  const Sizes s = check_fused(args, params, norm);
  plan_replay(slot_indices, records, mixed_qkv, num_accepted_tokens, cu_seqlens, row_indices, null_slot, state.size(0),
              s, params, plan, replay_plan);
  if (dry_run || s.tokens == 0) return;
  set_fused_operands(args, s, params, norm);
  execute_replay(params, plan, replay_plan, records, s);
}

}  // namespace gdn::cpu
