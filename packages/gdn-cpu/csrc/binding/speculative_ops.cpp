// SPDX-License-Identifier: Apache-2.0
//
// Decode steps that verify draft tokens.
#include "ops.h"
#include "recurrence_call.h"

namespace gdn::cpu {
namespace {

// Rows that resume after the tokens that were accepted, and store the state after every token in a slot of its own.
void plan_several_slots(const TensorView& table_view, Name table_name, const TensorView& num_accepted_tokens,
                        const TensorView& cu_seqlens, handle null_slot, std::int64_t pool_size, const Sizes& s,
                        RecurrenceParams& params, RowPlan& plan) {
  const SlotTable table = slot_table(table_view, table_name, pool_size, optional_integer(null_slot, "null_slot"));
  plan.offsets = short_row_offsets(cu_seqlens, "cu_seqlens", table.rows, table.columns, s.tokens);
  const Indices accepted = accepted_tokens(num_accepted_tokens, "num_accepted_tokens", table.rows, table.columns);
  params.num_sequences = table.rows;
  params.destination_columns = table.columns;
  plan.destinations = table.slots;
  for (std::int64_t row = 0; row < table.rows; ++row) {
    const auto i = static_cast<std::size_t>(row);
    const std::int64_t source = table.slots[static_cast<std::size_t>(row * table.columns + accepted[i] - 1)];
    plan.sources.push_back(source);
    plan.padding.push_back(source < 0 || plan.offsets[i] == plan.offsets[i + 1]);
  }
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
  plan_several_slots(spec_state_indices, "spec_state_indices", num_accepted_tokens, cu_seqlens, null_slot,
                     initial_state_source.size(0), s, params, plan);
  if (dry_run || s.tokens == 0) return;
  set_qkv(params, q, k, v);
  execute(params, plan, s.tokens);
}

}  // namespace gdn::cpu
