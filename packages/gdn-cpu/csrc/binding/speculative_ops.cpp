// SPDX-License-Identifier: Apache-2.0
//
// Decode steps that verify draft tokens, from q, k and v or straight from the convolution's output.
#include "ops.h"
#include "records.h"
#include "recurrence_call.h"

namespace gdn::cpu {
namespace {

// Rows that resume after the tokens that were accepted, and store the state after every token in a slot of its own.
void plan_several_slots(const RowArguments& rows, std::int64_t pool_size, const Sizes& s, RecurrenceParams& params,
                        RowPlan& plan) {
  const SlotTable table =
      slot_table(rows.slots, rows.slots_name, pool_size, optional_integer(rows.null_slot, "null_slot"));
  plan.offsets = row_offsets(rows.cu_seqlens, "cu_seqlens", s.tokens, table.rows + 1);
  plan.name_rows(rows.row_indices, table.rows);
  const Indices accepted = accepted_tokens(rows.num_accepted_tokens, "num_accepted_tokens", table.rows, table.columns,
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
void plan_replay(const RowArguments& rows, const RecordTensors& records, const TensorView& activations,
                 std::int64_t pool_size, const Sizes& s, RecurrenceParams& params, RowPlan& plan,
                 ReplayPlan& replay_plan) {
  const std::int64_t columns = set_records(records, activations, pool_size, s, replay_plan.replay);
  plan.sources =
      slot_indices(rows.slots, rows.slots_name, "N", pool_size, optional_integer(rows.null_slot, "null_slot"));
  plan.destinations = plan.sources;
  params.num_sequences = static_cast<std::int64_t>(plan.sources.size());
  plan.offsets = row_offsets(rows.cu_seqlens, "cu_seqlens", s.tokens, params.num_sequences + 1);
  plan.name_rows(rows.row_indices, params.num_sequences);
  const Indices accepted = accepted_tokens(rows.num_accepted_tokens, "num_accepted_tokens", params.num_sequences,
                                           columns, plan.names_rows ? &plan.named : nullptr);
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

Sizes check_fused(const FusedArguments& args, RecurrenceParams& params, GatedNorm& norm) {
  const Sizes s = check_channels(args, check_floating);
  check_head_dims(s);
  set_sizes(params, s);
  set_scale(params, args.scale);
  set_raw_gates(params, s, args.A_log, args.dt_bias, args.a, args.b);
  params.normalize_qk = true;
  norm.weight = head_vector(args.norm_weight, "norm_weight", s.value_dim);
  norm.activation = gate_activation<GateActivation>(args.output_gate_activation, "output_gate_activation");
  norm.eps = static_cast<float>(non_negative(args.norm_eps, "norm_eps"));
  set_pool(params, args.pool, "state", s, args.state_v_first);
  params.out = output_operand(args.out, "out", {s.tokens, s.value_heads, s.value_dim});
  params.norm = &norm;
  return s;
}

// q, k and v as parts of mixed_qkv, where it lies or in a copy of it; after all checks.
void set_fused_operands(const FusedArguments& args, const Sizes& s, RecurrenceParams& params, GatedNorm& norm) {
  for (TensorView* input : {&args.mixed_qkv, &args.output_gate}) keep_from(args.out, *input);
  keep_gates(params, args.a, args.b, args.out);
  make_unit_stride(args.mixed_qkv);
  const DType dtype = *floating_dtype<DType>(args.mixed_qkv);
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

// Of a call of either kind: what is checked before its rows are, and what is done after. Stays where it is made.
struct QkvCall {
  const DecodeArguments& args;
  RecurrenceParams params{};
  Sizes s = check_decode(args, params);

  [[nodiscard]] const TensorView& activations() const { return args.q; }
  void set_operands() {
    set_qkv(params, args.q, args.k, args.v, args.out);
    keep_gates(params, args.a, args.b, args.out);
  }
};
struct FusedCall {
  const FusedArguments& args;
  RecurrenceParams params{};
  GatedNorm norm{};
  Sizes s = check_fused(args, params, norm);

  [[nodiscard]] const TensorView& activations() const { return args.mixed_qkv; }
  void set_operands() { set_fused_operands(args, s, params, norm); }
};

template <class Call>
void run_slots(Call&& call, const RowArguments& rows, bool dry_run) {
  RowPlan plan;
  plan_several_slots(rows, call.args.pool.size(0), call.s, call.params, plan);
  if (dry_run || call.s.tokens == 0) return;
  call.set_operands();
  execute(call.params, plan, call.s.tokens);
}

template <class Call>
void run_records(Call&& call, const RowArguments& rows, const RecordTensors& records, bool dry_run) {
  RowPlan plan;
  ReplayPlan replay_plan;
  plan_replay(rows, records, call.activations(), call.args.pool.size(0), call.s, call.params, plan, replay_plan);
  if (dry_run || call.s.tokens == 0) return;
  call.set_operands();
  execute_replay(call.params, plan, replay_plan, records, call.s);
}

}  // namespace

void Decode::run_several_slots(const DecodeArguments& args, const RowArguments& rows, bool dry_run) {
  run_slots(QkvCall{args}, rows, dry_run);
}
void Decode::run_several_slots(const FusedArguments& args, const RowArguments& rows, bool dry_run) {
  run_slots(FusedCall{args}, rows, dry_run);
}
void Decode::run_replay(const DecodeArguments& args, const RowArguments& rows, const RecordTensors& records,
                        bool dry_run) {
  run_records(QkvCall{args}, rows, records, dry_run);
}
void Decode::run_replay(const FusedArguments& args, const RowArguments& rows, const RecordTensors& records,
                        bool dry_run) {
  run_records(FusedCall{args}, rows, records, dry_run);
}

}  // namespace gdn::cpu
