// SPDX-License-Identifier: Apache-2.0
//
// Decode steps, from q, k and v or straight from the convolution's output, with one slot a row, several, or records.
#include "decode_ops.h"

#include <cmath>
#include <string>

#include "binding/arguments.h"
#include "binding/ops.h"
#include "launch/launch.h"

namespace gdn::cuda {
namespace {

constexpr std::int64_t kMaxBlocksY = 65535;

// A call as far as it is checked.
struct Checked {
  Arguments arguments;
  DecodeCall call;
  Sizes s;
  bool has_rows = true;  // false where row_indices names none
};

// The check of a tensor that belongs to a call.
auto floating_of(Checked& checked) {
  return [&](const TensorView& view, Name name, Shape shape) { return checked.arguments.floating(view, name, shape); };
}

// After all other checks: what the kernel is not made for.
void decline_unsupported(const Checked& checked, bool state_v_first) {
  const Sizes& s = checked.s;
  if (!has_decode_kernel(s.key_dim, s.value_dim)) {
    decline("K and V: 64, 128 or 256, got " + std::to_string(s.key_dim) + " and " + std::to_string(s.value_dim));
  }
  if (!state_v_first) decline("state_v_first: the kernel takes states of [HV, V, K] only");
  if (s.value_heads > kMaxBlocksY) decline("HV: up to 65535");
  const DecodeParams& p = checked.call.params;
  const std::int64_t item = checked.call.state_dtype == DType::kFloat32 ? 4 : 2;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(p.state) % 16 == 0 && p.slot_stride * item % 16 == 0;
  if (!is_aligned) decline("state: slots that do not start at a multiple of 16 bytes");
  if (const std::string problem = decode_problem(checked.call.device); !problem.empty()) decline(problem);
}

void set_scale(DecodeParams& p, std::int64_t key_dim, handle scale) {
  const double fallback = 1.0 / std::sqrt(static_cast<double>(key_dim));
  p.scale = static_cast<float>(optional_number(scale, "scale").value_or(fallback));
}

void set_gates(Checked& checked, const TensorView& A_log, const TensorView& dt_bias, const TensorView& a,
               const TensorView& b) {
  DecodeParams& p = checked.call.params;
  const Sizes& s = checked.s;
  p.A_log = checked.arguments.vector(A_log, "A_log", s.value_heads);
  p.dt_bias = checked.arguments.vector(dt_bias, "dt_bias", s.value_heads);
  p.a = checked.arguments.values(a, "a", s.tokens, s.value_heads);
  p.b = checked.arguments.values(b, "b", s.tokens, s.value_heads);
}

void set_pool(Checked& checked, const TensorView& pool, Name name, bool state_v_first) {
  DecodeParams& p = checked.call.params;
  const Sizes& s = checked.s;
  const std::int64_t rows = state_v_first ? s.value_dim : s.key_dim;
  const std::int64_t columns = state_v_first ? s.key_dim : s.value_dim;
  checked.call.state_dtype = checked.arguments.floating(pool, name, {"P", s.value_heads, rows, columns});
  check_packed_slots(pool, name);
  p.state = pool.data();
  p.slot_stride = pool.stride(0);
  p.num_slots = pool.size(0);
}

void set_sizes(Checked& checked) {
  DecodeParams& p = checked.call.params;
  const Sizes& s = checked.s;
  p.num_tokens = s.tokens;
  p.num_key_heads = static_cast<int>(s.key_heads);
  p.num_value_heads = static_cast<int>(s.value_heads);
  p.value_dim = static_cast<int>(s.value_dim);
  checked.call.key_dim = static_cast<int>(s.key_dim);
  checked.call.device = checked.arguments.device();
}

// --- rows ---

void set_null_slot(DecodeParams& p, handle null_slot) {
  const std::optional<std::int64_t> slot = optional_integer(null_slot, "null_slot");
  p.has_null_slot = slot.has_value();
  p.null_slot = slot.value_or(0);
}

// One slot a row, and one token, or as many as cu_seqlens says.
void set_single_slots(Checked& checked, const RowArguments& rows) {
  DecodeParams& p = checked.call.params;
  p.num_rows = checked.s.tokens;
  p.num_columns = 1;
  if (!rows.cu_seqlens.is_none()) {
    p.cu_seqlens = checked.arguments.indices(rows.cu_seqlens, "cu_seqlens", {"N+1"});
    if (rows.cu_seqlens.size(0) < 1) {
      raise_value(cat({"cu_seqlens: expected at least one offset, got ", describe(rows.cu_seqlens)}));
    }
    p.num_rows = rows.cu_seqlens.size(0) - 1;
    p.num_columns = kColumnsOfLongRows;
    checked.call.form = Form::kRows;
  }
  p.num_table_rows = p.num_rows;
  p.slots = checked.arguments.indices(rows.slots, rows.slots_name, {p.num_rows});
  set_null_slot(p, rows.null_slot);
}

void set_rows(Checked& checked, std::int64_t count, std::int64_t columns, const RowArguments& rows) {
  DecodeParams& p = checked.call.params;
  set_null_slot(p, rows.null_slot);
  p.num_rows = p.num_table_rows = count;
  p.num_columns = static_cast<int>(columns);
  p.cu_seqlens = checked.arguments.indices(rows.cu_seqlens, "cu_seqlens", {count + 1});
  if (!rows.num_accepted_tokens.is_none()) {
    p.num_accepted_tokens = checked.arguments.indices(rows.num_accepted_tokens, "num_accepted_tokens", {count});
  }
  if (!rows.row_indices.is_none()) {
    p.row_indices = checked.arguments.indices(rows.row_indices, "row_indices", {"M"});
    p.num_rows = rows.row_indices.size(0);
    checked.has_rows = p.num_rows > 0;
  }
}

void set_several_slots(Checked& checked, const RowArguments& rows) {
  const TensorView& table = rows.slots;
  checked.call.params.slots = checked.arguments.indices(table, rows.slots_name, {"N", "S"});
  const std::int64_t columns = table.size(1);
  if (columns < 1 || columns > kMaxColumns) {
    raise_value(
        cat({rows.slots_name, ": expected 1 to ", std::to_string(kMaxColumns), " columns, got ", describe(table)}));
  }
  set_rows(checked, table.size(0), columns, rows);
}

// `activations` has the dtype of k.
void set_replay(Checked& checked, const RowArguments& rows, const RecordTensors& records,
                const TensorView& activations) {
  DecodeParams& p = checked.call.params;
  const auto check_exact = [&](const TensorView& view, Name name, dlpack::DataType dtype, Shape shape) {
    checked.arguments.exact(view, name, dtype, shape);
  };
  const std::int64_t columns = check_records(records, activations, p.num_slots, checked.s, check_exact);
  check_unit_stride(records.k, "records.k");
  check_unit_stride(records.u, "records.u");
  if (columns < 1 || columns > kMaxColumns) decline("records: 1 to " + std::to_string(kMaxColumns) + " a slot");
  p.records = {records.k.data(),
               records.k.stride(0),
               records.k.stride(1),
               records.k.stride(2),
               static_cast<float*>(records.u.data()),
               records.u.stride(0),
               records.u.stride(1),
               records.u.stride(2),
               static_cast<float*>(records.decay.data()),
               records.decay.stride(0),
               records.decay.stride(1),
               records.decay.stride(2),
               static_cast<int*>(records.live.data()),
               records.live.stride(0)};
  checked.call.form = Form::kReplay;
  p.slots = checked.arguments.indices(rows.slots, rows.slots_name, {"N"});
  set_rows(checked, rows.slots.size(0), columns, rows);
}

// --- from q, k and v ---

Checked check(const DecodeArguments& args) {
  Checked checked;
  DecodeParams& p = checked.call.params;
  checked.s = check_qkv(args.q, args.k, args.v, 1, floating_of(checked));
  const Sizes& s = checked.s;
  set_sizes(checked);
  set_scale(p, s.key_dim, args.scale);
  set_gates(checked, args.A_log, args.dt_bias, args.a, args.b);
  p.softplus_beta = static_cast<float>(positive(args.softplus_beta, "softplus_beta"));
  p.softplus_threshold = static_cast<float>(number(args.softplus_threshold, "softplus_threshold"));
  p.normalize_qk = flag(args.use_qk_l2norm_in_kernel, "use_qk_l2norm_in_kernel");
  set_pool(checked, args.pool, args.pool_name, flag(args.state_v_first, "state_v_first"));
  const DType out_dtype = checked.arguments.floating(args.out, "out", {1, s.tokens, s.value_heads, s.value_dim});
  check_unit_stride(args.out, "out");
  check_separate_elements(args.out, "out");
  p.out = {args.out.data(), out_dtype, args.out.stride(1), args.out.stride(2)};
  return checked;
}

const TensorView& activations(const DecodeArguments& args) { return args.q; }

void set_operands(Checked& checked, const DecodeArguments& args) {
  DecodeParams& p = checked.call.params;
  p.q = heads_operand(args.q);
  p.k = heads_operand(args.k);
  p.v = heads_operand(args.v);
}

// --- from the convolution's output ---

Checked check(const FusedArguments& args) {
  Checked checked;
  checked.s = check_channels(args, floating_of(checked));
  DecodeParams& p = checked.call.params;
  const Sizes& s = checked.s;
  set_sizes(checked);
  set_scale(p, s.key_dim, args.scale);
  set_gates(checked, args.A_log, args.dt_bias, args.a, args.b);
  p.softplus_beta = 1.0f;
  p.softplus_threshold = 20.0f;
  p.normalize_qk = true;
  p.norm_weight = checked.arguments.vector(args.norm_weight, "norm_weight", s.value_dim);
  p.gate_activation = gate_activation<Activation>(args.output_gate_activation, "output_gate_activation");
  p.norm_eps = static_cast<float>(non_negative(args.norm_eps, "norm_eps"));
  set_pool(checked, args.pool, "state", flag(args.state_v_first, "state_v_first"));
  p.out = checked.arguments.output(args.out, "out", s.tokens, s.value_heads, s.value_dim);
  return checked;
}

const TensorView& activations(const FusedArguments& args) { return args.mixed_qkv; }

void set_operands(Checked& checked, const FusedArguments& args) {
  DecodeParams& p = checked.call.params;
  const Sizes& s = checked.s;
  const Operand channels = heads_operand(args.mixed_qkv);
  const auto part = [&](std::int64_t channel, std::int64_t head_dim) {
    const std::int64_t bytes = channel * (channels.dtype == DType::kFloat32 ? 4 : 2);
    return Operand{static_cast<const char*>(channels.data) + bytes, channels.dtype, channels.head_stride, head_dim};
  };
  p.q = part(0, s.key_dim);
  p.k = part(s.key_heads * s.key_dim, s.key_dim);
  p.v = part(2 * s.key_heads * s.key_dim, s.value_dim);
  p.gate = heads_operand(args.output_gate);
}

// --- calls ---

template <class Args>
void finish(Checked& checked, const Args& args, bool dry_run) {
  decline_unsupported(checked, flag(args.state_v_first, "state_v_first"));
  if (dry_run || checked.s.tokens == 0 || checked.s.value_heads == 0 || !checked.has_rows) return;
  set_operands(checked, args);
  launch_decode(checked.call);
}

template <class Args>
void run_slots(const Args& args, const RowArguments& rows, bool dry_run) {
  Checked checked = check(args);
  set_several_slots(checked, rows);
  finish(checked, args, dry_run);
}

template <class Args>
void run_records(const Args& args, const RowArguments& rows, const RecordTensors& records, bool dry_run) {
  Checked checked = check(args);
  set_replay(checked, rows, records, activations(args));
  finish(checked, args, dry_run);
}

struct Decode {
  static void run_single(const DecodeArguments& args, const RowArguments& rows, bool dry_run) {
    Checked checked = check(args);
    set_single_slots(checked, rows);
    finish(checked, args, dry_run);
  }
  static void run_several_slots(const DecodeArguments& args, const RowArguments& rows, bool dry_run) {
    run_slots(args, rows, dry_run);
  }
  static void run_several_slots(const FusedArguments& args, const RowArguments& rows, bool dry_run) {
    run_slots(args, rows, dry_run);
  }
  static void run_replay(const DecodeArguments& args, const RowArguments& rows, const RecordTensors& records,
                         bool dry_run) {
    run_records(args, rows, records, dry_run);
  }
  static void run_replay(const FusedArguments& args, const RowArguments& rows, const RecordTensors& records,
                         bool dry_run) {
    run_records(args, rows, records, dry_run);
  }
};

}  // namespace

void bind_ops(nb::module_& m) { bind_decode_ops<Decode>(m); }

}  // namespace gdn::cuda
