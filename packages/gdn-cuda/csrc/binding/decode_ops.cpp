// SPDX-License-Identifier: Apache-2.0
//
// Decode steps, from q, k and v or straight from the convolution's output, with several slots a row or with records.
#include <cmath>
#include <string>
#include <utility>

#include "binding/arguments.h"
#include "binding/ops.h"
#include "launch/launch.h"

namespace gdn::cuda {
namespace {

constexpr std::int64_t kMaxBlocksY = 65535;

struct Sizes {
  std::int64_t tokens = 0;
  std::int64_t key_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_heads = 0;
  std::int64_t value_dim = 0;
};

// A call as far as it is checked, and what it keeps alive.
struct Checked {
  Arguments arguments;
  DecodeCall call;
  Sizes s;
};

void check_heads(const Sizes& s, Name name) {
  if (s.key_heads < 1 || s.value_heads % s.key_heads != 0) {
    raise_value(cat({name, ": expected a multiple of the ", std::to_string(s.key_heads),
                     " key heads as value heads, got ", std::to_string(s.value_heads)}));
  }
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
  p.scale = static_cast<float>(scale.is_none() ? fallback : number(scale, "scale"));
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

void set_null_slot(DecodeParams& p, handle null_slot) {
  p.has_null_slot = !null_slot.is_none();
  if (p.has_null_slot) p.null_slot = integer(null_slot, "null_slot");
}

// One token and one slot a row.
void set_single_tokens(Checked& checked, const TensorView& slots, const TensorView& cu_seqlens, handle null_slot) {
  DecodeParams& p = checked.call.params;
  p.num_rows = checked.s.tokens;
  p.num_columns = 1;
  if (!cu_seqlens.is_none()) {
    checked.arguments.indices(cu_seqlens, "cu_seqlens", {"N+1"});
    if (cu_seqlens.size(0) < 1) {
      raise_value(cat({"cu_seqlens: expected at least one offset, got ", describe(cu_seqlens)}));
    }
    p.num_rows = cu_seqlens.size(0) - 1;
  }
  p.slots = checked.arguments.indices(slots, "initial_state_indices", {p.num_rows});
  set_null_slot(p, null_slot);
  // How long the rows are only the device knows, and the kernel stores a state after every token.
  if (!cu_seqlens.is_none()) decline("cu_seqlens: rows of one token each (None)");
}

void set_rows(Checked& checked, std::int64_t rows, std::int64_t columns, const TensorView& num_accepted_tokens,
              const TensorView& cu_seqlens) {
  DecodeParams& p = checked.call.params;
  p.num_rows = rows;
  p.num_columns = static_cast<int>(columns);
  p.cu_seqlens = checked.arguments.indices(cu_seqlens, "cu_seqlens", {rows + 1});
  if (!num_accepted_tokens.is_none()) {
    p.num_accepted_tokens = checked.arguments.indices(num_accepted_tokens, "num_accepted_tokens", {rows});
  }
}

void set_several_slots(Checked& checked, const TensorView& table, Name name, const TensorView& num_accepted_tokens,
                       const TensorView& cu_seqlens, handle null_slot) {
  DecodeParams& p = checked.call.params;
  p.slots = checked.arguments.indices(table, name, {"N", "S"});
  const std::int64_t columns = table.size(1);
  if (columns < 1 || columns > kMaxColumns) {
    raise_value(cat({name, ": expected 1 to ", std::to_string(kMaxColumns), " columns, got ", describe(table)}));
  }
  set_null_slot(p, null_slot);
  set_rows(checked, table.size(0), columns, num_accepted_tokens, cu_seqlens);
}

struct RecordTensors {
  TensorView &k, &u, &decay, &live;
};

// `activations` has the dtype of k.
void set_replay(Checked& checked, const TensorView& slots, const RecordTensors& records, const TensorView& activations,
                const TensorView& num_accepted_tokens, const TensorView& cu_seqlens, handle null_slot) {
  constexpr dlpack::DataType kFp32{dlpack::kFloat, 32, 1};
  constexpr dlpack::DataType kInt32{dlpack::kInt, 32, 1};
  DecodeParams& p = checked.call.params;
  Arguments& arguments = checked.arguments;
  const Sizes& s = checked.s;
  const std::int64_t num_slots = p.num_slots;
  arguments.exact(records.k, "records.k", activations.dl.dtype, {num_slots, "S", s.key_heads, s.key_dim});
  const std::int64_t columns = records.k.size(1);
  arguments.exact(records.u, "records.u", kFp32, {num_slots, columns, s.value_heads, s.value_dim});
  arguments.exact(records.decay, "records.decay", kFp32, {num_slots, columns, s.value_heads});
  arguments.exact(records.live, "records.live", kInt32, {num_slots});
  for (const auto& [view, name] : {std::pair{&records.k, "records.k"},
                                   {&records.u, "records.u"},
                                   {&records.decay, "records.decay"},
                                   {&records.live, "records.live"}}) {
    check_separate_elements(*view, name);
  }
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
  checked.call.replays = true;
  p.slots = arguments.indices(slots, "slot_indices", {"N"});
  set_null_slot(p, null_slot);
  set_rows(checked, slots.size(0), columns, num_accepted_tokens, cu_seqlens);
}

void launch(Checked& checked) {
  if (checked.s.tokens == 0 || checked.s.value_heads == 0) return;
  launch_decode(checked.call);
}

// --- from q, k and v ---

struct DecodeArguments {
  TensorView &A_log, &dt_bias, &q, &k, &v, &a, &b, &state;
  Name state_name;
  handle use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, scale, state_v_first;
  TensorView& out;
};

Checked check_decode(const DecodeArguments& args) {
  Checked checked;
  Arguments& arguments = checked.arguments;
  DecodeParams& p = checked.call.params;
  arguments.floating(args.q, "q", {1, "T", "H", "K"});
  Sizes& s = checked.s;
  s = {args.q.size(1), args.q.size(2), args.q.size(3), 0, 0};
  arguments.floating(args.k, "k", {1, s.tokens, s.key_heads, s.key_dim});
  arguments.floating(args.v, "v", {1, s.tokens, "HV", "V"});
  s.value_heads = args.v.size(2);
  s.value_dim = args.v.size(3);
  check_same_dtype(args.k, "k", args.q, "q");
  check_same_dtype(args.v, "v", args.q, "q");
  check_heads(s, "v");
  check_not_empty(args.q, "q");
  check_not_empty(args.v, "v");
  set_sizes(checked);
  set_scale(p, s.key_dim, args.scale);
  set_gates(checked, args.A_log, args.dt_bias, args.a, args.b);
  p.softplus_beta = static_cast<float>(positive(args.softplus_beta, "softplus_beta"));
  p.softplus_threshold = static_cast<float>(number(args.softplus_threshold, "softplus_threshold"));
  p.normalize_qk = flag(args.use_qk_l2norm_in_kernel, "use_qk_l2norm_in_kernel");
  set_pool(checked, args.state, args.state_name, flag(args.state_v_first, "state_v_first"));
  const DType out_dtype = arguments.floating(args.out, "out", {1, s.tokens, s.value_heads, s.value_dim});
  check_unit_stride(args.out, "out");
  check_separate_elements(args.out, "out");
  p.out = {args.out.data(), out_dtype, args.out.stride(1), args.out.stride(2)};
  return checked;
}

void run_decode(Checked& checked, const DecodeArguments& args, bool dry_run) {
  decline_unsupported(checked, flag(args.state_v_first, "state_v_first"));
  if (dry_run) return;
  DecodeParams& p = checked.call.params;
  p.q = heads_operand(args.q);
  p.k = heads_operand(args.k);
  p.v = heads_operand(args.v);
  launch(checked);
}

// --- from the convolution's output ---

// What both forms of the fused step take, but the rows and their slots.
struct FusedArguments {
  TensorView &mixed_qkv, &a, &b, &A_log, &dt_bias, &state, &output_gate, &norm_weight;
  handle scale, norm_eps, output_gate_activation, num_key_heads, head_k_dim, state_v_first;
  TensorView& out;
};

// Channels q | k | v of mixed_qkv [T, C]; HV and V are those of output_gate [T, HV, V].
Sizes check_channels(Arguments& arguments, const FusedArguments& args) {
  arguments.floating(args.mixed_qkv, "mixed_qkv", {"T", "C"});
  const std::int64_t tokens = args.mixed_qkv.size(0), channels = args.mixed_qkv.size(1);
  arguments.floating(args.output_gate, "output_gate", {tokens, "HV", "V"});
  const std::int64_t value_heads = args.output_gate.size(1), value_dim = args.output_gate.size(2);
  const std::int64_t key_dim = integer(args.head_k_dim, "head_k_dim");
  if (key_dim < 1) raise_value("head_k_dim: expected at least 1, got " + std::to_string(key_dim));
  const std::int64_t key_channels = channels > value_heads * value_dim ? channels - value_heads * value_dim : 0;
  const std::int64_t key_heads =
      args.num_key_heads.is_none() ? key_channels / (2 * key_dim) : integer(args.num_key_heads, "num_key_heads");
  // More heads or wider ones than there are channels: the product need not fit 64 bits.
  const bool too_many = key_heads < 0 || key_heads > channels || key_dim > channels;
  if (too_many || channels != 2 * key_heads * key_dim + value_heads * value_dim) {
    raise_value(cat({"mixed_qkv: expected [", std::to_string(tokens), ", 2 * ", std::to_string(key_heads), " * ",
                     std::to_string(key_dim), " + ", std::to_string(value_heads), " * ", std::to_string(value_dim),
                     "], got ", describe(args.mixed_qkv)}));
  }
  const Sizes s{tokens, key_heads, key_dim, value_heads, value_dim};
  check_heads(s, "output_gate");
  check_not_empty(args.output_gate, "output_gate");
  return s;
}

Checked check_fused(const FusedArguments& args) {
  Checked checked;
  checked.s = check_channels(checked.arguments, args);
  DecodeParams& p = checked.call.params;
  const Sizes& s = checked.s;
  set_sizes(checked);
  set_scale(p, s.key_dim, args.scale);
  set_gates(checked, args.A_log, args.dt_bias, args.a, args.b);
  p.softplus_beta = 1.0f;
  p.softplus_threshold = 20.0f;
  p.normalize_qk = true;
  p.norm_weight = checked.arguments.vector(args.norm_weight, "norm_weight", s.value_dim);
  p.gate_activation = gate_activation(args.output_gate_activation, "output_gate_activation");
  p.norm_eps = static_cast<float>(non_negative(args.norm_eps, "norm_eps"));
  set_pool(checked, args.state, "state", flag(args.state_v_first, "state_v_first"));
  p.out = checked.arguments.output(args.out, "out", s.tokens, s.value_heads, s.value_dim);
  return checked;
}

void run_fused(Checked& checked, const FusedArguments& args, bool dry_run) {
  decline_unsupported(checked, flag(args.state_v_first, "state_v_first"));
  if (dry_run) return;
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
  launch(checked);
}

}  // namespace

void fused_sigmoid_gating_delta_rule_update(TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k,
                                            TensorView& v, TensorView& a, TensorView& b,
                                            TensorView& initial_state_source, TensorView& initial_state_indices,
                                            TensorView& cu_seqlens, handle use_qk_l2norm_in_kernel,
                                            handle softplus_beta, handle softplus_threshold, handle scale,
                                            handle state_v_first, handle null_slot, TensorView& out, bool dry_run) {
  const DecodeArguments args{A_log,
                             dt_bias,
                             q,
                             k,
                             v,
                             a,
                             b,
                             initial_state_source,
                             "initial_state_source",
                             use_qk_l2norm_in_kernel,
                             softplus_beta,
                             softplus_threshold,
                             scale,
                             state_v_first,
                             out};
  Checked checked = check_decode(args);
  set_single_tokens(checked, initial_state_indices, cu_seqlens, null_slot);
  run_decode(checked, args, dry_run);
}

void fused_sigmoid_gating_delta_rule_update_spec(TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k,
                                                 TensorView& v, TensorView& a, TensorView& b,
                                                 TensorView& initial_state_source, TensorView& spec_state_indices,
                                                 TensorView& num_accepted_tokens, TensorView& cu_seqlens,
                                                 handle use_qk_l2norm_in_kernel, handle softplus_beta,
                                                 handle softplus_threshold, handle scale, handle state_v_first,
                                                 handle null_slot, TensorView& out, bool dry_run) {
  const DecodeArguments args{A_log,
                             dt_bias,
                             q,
                             k,
                             v,
                             a,
                             b,
                             initial_state_source,
                             "initial_state_source",
                             use_qk_l2norm_in_kernel,
                             softplus_beta,
                             softplus_threshold,
                             scale,
                             state_v_first,
                             out};
  Checked checked = check_decode(args);
  set_several_slots(checked, spec_state_indices, "spec_state_indices", num_accepted_tokens, cu_seqlens, null_slot);
  run_decode(checked, args, dry_run);
}

void fused_sigmoid_gating_delta_rule_update_replay(
    TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k, TensorView& v, TensorView& a, TensorView& b,
    TensorView& state, TensorView& slot_indices, TensorView& records_k, TensorView& records_u,
    TensorView& records_decay, TensorView& records_live, TensorView& num_accepted_tokens, TensorView& cu_seqlens,
    handle use_qk_l2norm_in_kernel, handle softplus_beta, handle softplus_threshold, handle scale, handle state_v_first,
    handle null_slot, TensorView& out, bool dry_run) {
  const DecodeArguments args{
      A_log, dt_bias,       q,  k, v, a, b, state, "state", use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold,
      scale, state_v_first, out};
  Checked checked = check_decode(args);
  set_replay(checked, slot_indices, {records_k, records_u, records_decay, records_live}, q, num_accepted_tokens,
             cu_seqlens, null_slot);
  run_decode(checked, args, dry_run);
}

void fused_gdn_decode_post_conv_mtp(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log,
                                    TensorView& dt_bias, TensorView& state_indices, TensorView& cu_seqlens,
                                    TensorView& num_accepted_tokens, TensorView& state, TensorView& output_gate,
                                    TensorView& norm_weight, handle scale, handle norm_eps,
                                    handle output_gate_activation, handle num_key_heads, handle head_k_dim,
                                    handle state_v_first, handle null_slot, TensorView& out, bool dry_run) {
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
  Checked checked = check_fused(args);
  set_several_slots(checked, state_indices, "state_indices", num_accepted_tokens, cu_seqlens, null_slot);
  run_fused(checked, args, dry_run);
}

void fused_gdn_decode_post_conv_mtp_replay(TensorView& mixed_qkv, TensorView& a, TensorView& b, TensorView& A_log,
                                           TensorView& dt_bias, TensorView& slot_indices, TensorView& records_k,
                                           TensorView& records_u, TensorView& records_decay, TensorView& records_live,
                                           TensorView& cu_seqlens, TensorView& num_accepted_tokens, TensorView& state,
                                           TensorView& output_gate, TensorView& norm_weight, handle scale,
                                           handle norm_eps, handle output_gate_activation, handle num_key_heads,
                                           handle head_k_dim, handle state_v_first, handle null_slot, TensorView& out,
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
  Checked checked = check_fused(args);
  set_replay(checked, slot_indices, {records_k, records_u, records_decay, records_live}, mixed_qkv, num_accepted_tokens,
             cu_seqlens, null_slot);
  run_fused(checked, args, dry_run);
}

void bind_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def("fused_sigmoid_gating_delta_rule_update", &fused_sigmoid_gating_delta_rule_update, "A_log"_a.none(),
        "dt_bias"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "a"_a.none(), "b"_a.none(),
        "initial_state_source"_a.none(), "initial_state_indices"_a.none(), "cu_seqlens"_a.none(),
        "use_qk_l2norm_in_kernel"_a.none(), "softplus_beta"_a.none(), "softplus_threshold"_a.none(), "scale"_a.none(),
        "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(), "dry_run"_a = false);
  m.def("fused_sigmoid_gating_delta_rule_update_spec", &fused_sigmoid_gating_delta_rule_update_spec, "A_log"_a.none(),
        "dt_bias"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "a"_a.none(), "b"_a.none(),
        "initial_state_source"_a.none(), "spec_state_indices"_a.none(), "num_accepted_tokens"_a.none(),
        "cu_seqlens"_a.none(), "use_qk_l2norm_in_kernel"_a.none(), "softplus_beta"_a.none(),
        "softplus_threshold"_a.none(), "scale"_a.none(), "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(),
        "dry_run"_a = false);
  m.def("fused_sigmoid_gating_delta_rule_update_replay", &fused_sigmoid_gating_delta_rule_update_replay,
        "A_log"_a.none(), "dt_bias"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "a"_a.none(), "b"_a.none(),
        "state"_a.none(), "slot_indices"_a.none(), "records_k"_a.none(), "records_u"_a.none(), "records_decay"_a.none(),
        "records_live"_a.none(), "num_accepted_tokens"_a.none(), "cu_seqlens"_a.none(),
        "use_qk_l2norm_in_kernel"_a.none(), "softplus_beta"_a.none(), "softplus_threshold"_a.none(), "scale"_a.none(),
        "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(), "dry_run"_a = false);
  m.def("fused_gdn_decode_post_conv_mtp", &fused_gdn_decode_post_conv_mtp, "mixed_qkv"_a.none(), "a"_a.none(),
        "b"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(), "state_indices"_a.none(), "cu_seqlens"_a.none(),
        "num_accepted_tokens"_a.none(), "state"_a.none(), "output_gate"_a.none(), "norm_weight"_a.none(),
        "scale"_a.none(), "norm_eps"_a.none(), "output_gate_activation"_a.none(), "num_key_heads"_a.none(),
        "head_k_dim"_a.none(), "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(), "dry_run"_a = false);
  m.def("fused_gdn_decode_post_conv_mtp_replay", &fused_gdn_decode_post_conv_mtp_replay, "mixed_qkv"_a.none(),
        "a"_a.none(), "b"_a.none(), "A_log"_a.none(), "dt_bias"_a.none(), "slot_indices"_a.none(), "records_k"_a.none(),
        "records_u"_a.none(), "records_decay"_a.none(), "records_live"_a.none(), "cu_seqlens"_a.none(),
        "num_accepted_tokens"_a.none(), "state"_a.none(), "output_gate"_a.none(), "norm_weight"_a.none(),
        "scale"_a.none(), "norm_eps"_a.none(), "output_gate_activation"_a.none(), "num_key_heads"_a.none(),
        "head_k_dim"_a.none(), "state_v_first"_a.none(), "null_slot"_a.none(), "out"_a.none(), "dry_run"_a = false);
}

}  // namespace gdn::cuda
