// SPDX-License-Identifier: Apache-2.0
//
// The core of a layer over any mix of rows, in one call.
#include "runtime/attention.h"

#include <algorithm>

#include "convolution_call.h"
#include "dispatch/levels.h"
#include "ops.h"
#include "records.h"
#include "recurrence_call.h"

namespace gdn::cpu {
namespace {

// As gdn_core.attention numbers them.
enum RowKind : std::int64_t { kPrefill, kStep, kReplay };

struct Row {
  std::int64_t kind, begin, end;
  [[nodiscard]] std::int64_t length() const { return end - begin; }
};

// [N, 3]: kind, first and end token; rows in order, which do not overlap.
SmallVector<Row> check_layout(const TensorView& view, std::int64_t tokens, bool has_records) {
  check_exact(view, "layout", {dlpack::kInt, 64, 1}, {"N", 3});
  SmallVector<Row> rows;
  std::int64_t end = 0;
  for (std::int64_t n = 0; n < view.size(0); ++n) {
    const auto at = [&](std::int64_t column) {
      return static_cast<const std::int64_t*>(view.data())[n * view.stride(0) + column * view.stride(1)];
    };
    const Row row{at(0), at(1), at(2)};
    if (row.begin < end || row.end < row.begin || row.end > tokens) {
      raise_value(cat({"layout: expected rows one after the other in [0, ", std::to_string(tokens), "], got [",
                       std::to_string(row.begin), ", ", std::to_string(row.end), ")"}));
    }
    if (row.kind < kPrefill || row.kind > (has_records ? kReplay : kStep)) {
      raise_value(cat({"layout: expected a kind of row, got ", std::to_string(row.kind)}));
    }
    end = row.end;
    rows.push_back(row);
  }
  return rows;
}

struct AttentionArguments {
  TensorView &mixed_qkv, &a, &b, &z, &conv_weight, &conv_bias, &A_log, &dt_bias, &norm_weight, &conv_states, &state;
  RecordTensors records;
  TensorView &layout, &slots, &num_accepted_tokens, &has_initial_state, &out;
  handle norm_eps, num_key_heads, head_k_dim, activation, output_gate_activation, state_v_first, null_slot;
};

// Checks everything, then holds what the kernels are given.
class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionArguments& args) : args_(args) {
    check_operands();
    check_rows();
  }

  void run() {
    set_operands();
    const bool has_prefills = !call_.prefills.live.empty();
    const ChunkKernel* chunk = has_prefills ? &chunk_kernel_of(call_.prefills.params, dtype_) : nullptr;
    const KernelTable& kernels = *active_level().kernels;
    const int threads = num_threads();
    nb::gil_scoped_release unlocked;
    zero_uncovered();
    run_attention(kernels, chunk, call_, threads);
    leave_records();
  }

 private:
  void check_operands() {
    check_floating(args_.A_log, "A_log", {"HV"});
    check_floating(args_.norm_weight, "norm_weight", {"V"});
    s_ = {1,
          0,
          integer(args_.num_key_heads, "num_key_heads"),
          integer(args_.head_k_dim, "head_k_dim"),
          args_.A_log.size(0),
          args_.norm_weight.size(0)};
    check_head_groups(s_, "A_log");
    check_head_dims(s_);
    if (s_.key_dim < 1 || s_.value_dim < 1) decline("K and V: from 1 to " + std::to_string(kMaxHeadDim));
    const std::int64_t channels = 2 * s_.key_heads * s_.key_dim + s_.value_heads * s_.value_dim;
    dtype_ = check_floating(args_.mixed_qkv, "mixed_qkv", {"T", channels});
    s_.tokens = args_.mixed_qkv.size(0);
    check_floating(args_.z, "z", {s_.tokens, s_.value_heads, s_.value_dim});
    set_params();
    set_convolution();
  }

  void set_params() {
    RecurrenceParams& params = call_.steps.params;
    set_sizes(params, s_);
    set_scale(params, nb::none());
    set_raw_gates(params, s_, args_.A_log, args_.dt_bias, args_.a, args_.b);
    params.normalize_qk = true;
    set_pool(params, args_.state, "cache.state", s_, args_.state_v_first);
    params.out = output_operand(args_.out, "out", {s_.tokens, s_.value_heads, s_.value_dim});
    norm_.weight = head_vector(args_.norm_weight, "norm_weight", s_.value_dim);
    norm_.activation = gate_activation<GateActivation>(args_.output_gate_activation, "output_gate_activation");
    norm_.eps = static_cast<float>(non_negative(args_.norm_eps, "norm_eps"));
    params.norm = &norm_;
  }

  void set_convolution() {
    ConvolutionParams& params = call_.steps.convolution;
    params.num_channels = args_.mixed_qkv.size(1);
    set_filter(params, args_.conv_weight, args_.conv_bias);
    params.silu = is_silu(args_.activation);
    check_pool(args_.conv_states, "cache.conv_states", params);
    if (args_.conv_states.size(0) != args_.state.size(0)) {
      raise_value(cat({"cache.conv_states: expected the ", std::to_string(args_.state.size(0)),
                       " slots of cache.state, got ", describe(args_.conv_states)}));
    }
    params.num_columns = args_.conv_states.size(2);
    params.source = params.destination = states_of(args_.conv_states);
    params.update = ConvolutionUpdate::kRollback;
    params.stream_out = args_.mixed_qkv.numel() * (args_.mixed_qkv.dl.dtype.bits / 8) >= kFewestStreamedBytes;
  }

  void check_rows() {
    const std::int64_t pool_size = args_.state.size(0);
    const bool has_records = !args_.records.k.is_none();
    rows_ = check_layout(args_.layout, s_.tokens, has_records);
    const auto count = static_cast<std::int64_t>(rows_.size());
    table_ = slot_table(args_.slots, "slots", pool_size, optional_integer(args_.null_slot, "null_slot"));
    if (table_.rows != count) {
      raise_value(cat({"slots: expected ", shape_text({count, "S"}), ", got ", describe(args_.slots)}));
    }
    const std::int64_t recorded =
        has_records ? set_records(args_.records, args_.mixed_qkv, pool_size, s_, replay_.replay) : 0;
    accepted_ =
        accepted_tokens(args_.num_accepted_tokens, "num_accepted_tokens", count, std::max(table_.columns, recorded));
    has_state_ = booleans(args_.has_initial_state, "has_initial_state", count);
    const ConvolutionParams& convolution = call_.steps.convolution;
    const std::int64_t most_convolved = convolution.num_columns - convolution.width + 2;
    for (std::int64_t n = 0; n < count; ++n) {
      const Row row = rows_[static_cast<std::size_t>(n)];
      const bool is_replay = row.kind == kReplay;
      if (slot_of(n) >= 0 && row.kind != kPrefill) {
        check_step(row, n, std::min(is_replay ? recorded : table_.columns, most_convolved));
      }
      replay_.counts.push_back(
          is_replay && row.length() > 0 ? replayed_records(args_.records.live, slot_of(n), accepted(n)) : 0);
    }
  }

  void check_step(const Row& row, std::int64_t n, std::int64_t most) const {
    if (row.length() > most) {
      raise_value(cat({"layout: expected at most ", std::to_string(most), " tokens in row ", std::to_string(n),
                       ", got ", std::to_string(row.length())}));
    }
    if (accepted(n) > most) {
      raise_value(cat({"num_accepted_tokens: expected at most ", std::to_string(most), " in row ", std::to_string(n),
                       ", got ", std::to_string(accepted(n))}));
    }
  }

  [[nodiscard]] std::int64_t slot_of(std::int64_t n, std::int64_t column = 0) const {
    return table_.slots[static_cast<std::size_t>(n * table_.columns + column)];
  }
  [[nodiscard]] std::int64_t accepted(std::int64_t n) const { return accepted_[static_cast<std::size_t>(n)]; }

  // After all checks.
  void set_operands() {
    RecurrenceParams& steps = call_.steps.params;
    for (TensorView* input : {&args_.mixed_qkv, &args_.a, &args_.b, &args_.z}) keep_from(args_.out, *input);
    const TensorView& x = args_.mixed_qkv;
    call_.steps.convolution.x = {x.data(), dtype_, 0, x.stride(0), x.stride(1)};
    make_unit_stride(args_.a);
    make_unit_stride(args_.b);
    steps.gate = values_operand(args_.a, "a", {s_.tokens, s_.value_heads});
    steps.beta = values_operand(args_.b, "b", {s_.tokens, s_.value_heads});
    norm_.gate = heads_operand(args_.z);
    steps.num_sequences = table_.rows;
    steps.tokens_per_sequence = s_.tokens;
    call_.num_tokens = s_.tokens;
    call_.prefills = call_.replays = call_.steps;
    call_.prefills.convolution.num_columns = call_.steps.convolution.width - 1;
    call_.prefills.convolution.update = ConvolutionUpdate::kShift;
    for (std::int64_t n = 0; n < table_.rows; ++n) append_row(n);
    offsets_.push_back(rows_.empty() ? 0 : rows_.data()[rows_.size() - 1].end);
    for (AttentionRows* rows : {&call_.prefills, &call_.steps, &call_.replays}) {
      rows->params.token_offsets = offsets_.data();
      rows->params.source_slots = sources_.data();
      rows->params.destination_slots = first_slots_.data();
    }
    steps.destination_slots = table_.slots.data();
    steps.destination_columns = table_.columns;
    if (!args_.records.k.is_none()) replay_.attach(call_.replays.params, s_.tokens);
  }

  void append_row(std::int64_t n) {
    const Row row = rows_[static_cast<std::size_t>(n)];
    const bool is_step = row.kind == kStep;
    const std::int64_t slot = slot_of(n), resumed = is_step && slot >= 0 ? slot_of(n, accepted(n) - 1) : slot;
    const bool is_fresh = row.kind == kPrefill && !has_state_[static_cast<std::size_t>(n)];
    offsets_.push_back(row.begin);
    first_slots_.push_back(slot);
    sources_.push_back(is_fresh ? -1 : resumed);
    if (row.length() == 0) return;
    if (resumed < 0) {
      padding_.push_back(n);
    } else {
      rows_of(row.kind).live.push_back(n);
    }
    if (slot >= 0) append_convolution(row, slot, is_fresh ? -1 : slot, accepted(n));
  }

  AttentionRows& rows_of(std::int64_t kind) {
    return kind == kPrefill ? call_.prefills : kind == kStep ? call_.steps : call_.replays;
  }

  void append_convolution(const Row& row, std::int64_t slot, std::int64_t source, std::int64_t accepted) {
    ConvolutionRow convolved;
    convolved.begin = row.begin;
    convolved.end = row.end;
    convolved.source = source;
    convolved.destination = slot;
    if (row.kind != kPrefill) convolved.first_column = accepted - 1;
    // Steps of both forms are one call of the convolution.
    (row.kind == kPrefill ? call_.prefills : call_.steps).convolved.push_back(convolved);
  }

  void zero_uncovered() const {
    const RecurrenceParams& params = call_.steps.params;
    for (const std::int64_t n : padding_) {
      const Row row = rows_[static_cast<std::size_t>(n)];
      zero_tokens(params, s_.tokens, row.begin, row.end);
    }
    std::int64_t end = 0;
    for (const Row& row : rows_) {
      zero_tokens(params, s_.tokens, end, row.begin);
      end = row.end;
    }
    zero_tokens(params, s_.tokens, end, s_.tokens);
  }

  // A step leaves records of its tokens; what a slot's last owner recorded is none of a prompt's.
  void leave_records() const {
    if (args_.records.k.is_none()) return;
    for (const std::int64_t n : call_.prefills.live) live_records(args_.records.live, slot_of(n)) = 0;
    for (const std::int64_t n : call_.replays.live) {
      live_records(args_.records.live, slot_of(n)) =
          static_cast<std::int32_t>(rows_[static_cast<std::size_t>(n)].length());
    }
  }

  const AttentionArguments& args_;
  Sizes s_{};
  DType dtype_ = DType::kFloat32;
  AttentionCall call_;
  GatedNorm norm_;
  SmallVector<Row> rows_;
  SlotTable table_{};
  Indices accepted_;
  SmallVector<bool> has_state_;
  ReplayPlan replay_;
  Indices offsets_, sources_, first_slots_, padding_;
};

}  // namespace

void gdn_attention(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& z, TensorView& conv_weight,
                   TensorView& conv_bias, TensorView& A_log, TensorView& dt_bias, TensorView& norm_weight,
                   handle norm_eps, handle num_key_heads, handle head_k_dim, handle activation,
                   handle output_gate_activation, TensorView& conv_states, TensorView& state, TensorView& records_k,
                   TensorView& records_u, TensorView& records_decay, TensorView& records_live, handle state_v_first,
                   handle null_slot, TensorView& layout, handle /*query_start_loc*/, TensorView& slots,
                   TensorView& num_accepted_tokens, TensorView& has_initial_state, TensorView& out, bool dry_run) {
  const AttentionArguments args{mixed_qkv,
                                a,
                                b,
                                z,
                                conv_weight,
                                conv_bias,
                                A_log,
                                dt_bias,
                                norm_weight,
                                conv_states,
                                state,
                                {records_k, records_u, records_decay, records_live},
                                layout,
                                slots,
                                num_accepted_tokens,
                                has_initial_state,
                                out,
                                norm_eps,
                                num_key_heads,
                                head_k_dim,
                                activation,
                                output_gate_activation,
                                state_v_first,
                                null_slot};
  AttentionPlan plan(args);
  if (!dry_run && mixed_qkv.size(0) > 0) plan.run();
}

}  // namespace gdn::cpu
