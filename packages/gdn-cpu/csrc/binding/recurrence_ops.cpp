// SPDX-License-Identifier: Apache-2.0
//
// The operations that are the recurrence: decode, token by token, and whole sequences.
#include <bit>
#include <cmath>
#include <cstring>

#include "dispatch/levels.h"
#include "ops.h"
#include "runtime/parallel.h"

namespace gdn::cpu {
namespace {

struct Sizes {
  std::int64_t batch, tokens, key_heads, key_dim, value_heads, value_dim;
};

Sizes check_qkv(const TensorView& q, const TensorView& k, const TensorView& v, Dim batch) {
  check_floating(q, "q", {batch, "T", "H", "K"});
  Sizes s{q.size(0), q.size(1), q.size(2), q.size(3), 0, 0};
  check_floating(k, "k", {s.batch, s.tokens, s.key_heads, s.key_dim});
  check_floating(v, "v", {s.batch, s.tokens, "HV", "V"});
  s.value_heads = v.size(2);
  s.value_dim = v.size(3);
  check_same_dtype(k, "k", q, "q");
  check_same_dtype(v, "v", q, "q");
  if (s.key_heads < 1 || s.value_heads % s.key_heads != 0) {
    raise_value(cat({"v: expected a multiple of the ", std::to_string(s.key_heads), " key heads as value heads, got ",
                     std::to_string(s.value_heads)}));
  }
  if (s.key_dim < 1 || s.value_dim < 1 || s.key_dim > kMaxHeadDim || s.value_dim > kMaxHeadDim) {
    decline("K and V: from 1 to " + std::to_string(kMaxHeadDim));
  }
  return s;
}

void set_sizes(RecurrenceParams& params, const Sizes& s) {
  params.num_key_heads = s.key_heads;
  params.num_value_heads = s.value_heads;
  params.key_dim = s.key_dim;
  params.value_dim = s.value_dim;
}

void set_scale(RecurrenceParams& params, handle scale) {
  const double fallback = params.key_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(params.key_dim)) : 1.0;
  params.scale = static_cast<float>(optional_number(scale, "scale").value_or(fallback));
}

// A state tensor [first, HV, K, V] or, V-first, [first, HV, V, K].
DType check_state(const TensorView& view, Name name, Dim first, const Sizes& s, bool state_v_first) {
  const std::int64_t rows = state_v_first ? s.value_dim : s.key_dim;
  const std::int64_t columns = state_v_first ? s.key_dim : s.value_dim;
  return check_floating(view, name, {first, s.value_heads, rows, columns});
}

// The rows of a call: where each one's tokens and states are. The vectors outlive the kernel.
struct RowPlan {
  Indices offsets;            // [N + 1], or empty: one batch entry (or one token) a row
  Indices sources;            // [N], negative: starts from zero
  Indices destinations;       // [N], negative: not stored
  SmallVector<bool> padding;  // [N]: computes nothing
};

std::int64_t row_begin(const RowPlan& plan, const RecurrenceParams& params, std::int64_t row) {
  return plan.offsets.empty() ? row * params.tokens_per_sequence : plan.offsets[static_cast<std::size_t>(row)];
}

// --- zeroing what no row computes ---

std::size_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Tokens [begin, end) of a packed batch; tokens of different batch entries are numbered on.
void zero_tokens(const RecurrenceParams& params, std::int64_t tokens_per_batch, std::int64_t begin, std::int64_t end) {
  const MutableOperand& out = params.out;
  const std::size_t item = dtype_bytes(out.dtype);
  for (std::int64_t token = begin; token < end; ++token) {
    const std::int64_t offset =
        token / tokens_per_batch * out.batch_stride + token % tokens_per_batch * out.token_stride;
    for (std::int64_t head = 0; head < params.num_value_heads; ++head) {
      char* row = static_cast<char*>(out.data) + (offset + head * out.head_stride) * static_cast<std::int64_t>(item);
      std::memset(row, 0, item * static_cast<std::size_t>(params.value_dim));
    }
  }
}

void zero_uncovered(const RecurrenceParams& params, const RowPlan& plan, std::int64_t tokens_per_batch) {
  const std::int64_t rows = params.num_sequences;
  if (!plan.offsets.empty()) {
    zero_tokens(params, tokens_per_batch, 0, plan.offsets.front());
    zero_tokens(params, tokens_per_batch, plan.offsets.back(), tokens_per_batch);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    if (!plan.padding[static_cast<std::size_t>(row)]) continue;
    zero_tokens(params, tokens_per_batch, row_begin(plan, params, row), row_begin(plan, params, row + 1));
  }
}

void execute(RecurrenceParams& params, RowPlan& plan, std::int64_t tokens_per_batch) {
  Indices live;
  for (std::int64_t row = 0; row < params.num_sequences; ++row) {
    if (!plan.padding[static_cast<std::size_t>(row)]) live.push_back(row);
  }
  params.token_offsets = plan.offsets.empty() ? nullptr : plan.offsets.data();
  params.source_slots = plan.sources.data();
  params.destination_slots = plan.destinations.data();
  const KernelTable& kernels = *active_level().kernels;
  const int threads = num_threads();
  nb::gil_scoped_release unlocked;
  zero_uncovered(params, plan, tokens_per_batch);
  run_recurrence(kernels, params, live, threads);
}

}  // namespace

// --- decode ---

void fused_sigmoid_gating_delta_rule_update(TensorView& A_log, TensorView& dt_bias, TensorView& q, TensorView& k,
                                            TensorView& v, TensorView& a, TensorView& b,
                                            TensorView& initial_state_source, TensorView& initial_state_indices,
                                            TensorView& cu_seqlens, handle use_qk_l2norm_in_kernel,
                                            handle softplus_beta, handle softplus_threshold, handle scale,
                                            handle state_v_first, handle null_slot, TensorView& out, bool dry_run) {
  const Sizes s = check_qkv(q, k, v, 1);
  RecurrenceParams params;
  set_sizes(params, s);
  set_scale(params, scale);
  params.A_log = head_vector(A_log, "A_log", s.value_heads);
  params.dt_bias = head_vector(dt_bias, "dt_bias", s.value_heads);
  params.gate = values_operand(a, "a", {s.tokens, s.value_heads});
  params.beta = values_operand(b, "b", {s.tokens, s.value_heads});
  params.gate_kind = Gate::kRaw;
  params.beta_kind = Beta::kLogit;
  params.softplus_beta = static_cast<float>(positive(softplus_beta, "softplus_beta"));
  params.softplus_threshold = static_cast<float>(number(softplus_threshold, "softplus_threshold"));
  params.normalize_qk = flag(use_qk_l2norm_in_kernel, "use_qk_l2norm_in_kernel");
  params.state_v_first = flag(state_v_first, "state_v_first");
  params.state_dtype = check_state(initial_state_source, "initial_state_source", "P", s, params.state_v_first);
  check_packed_slots(initial_state_source, "initial_state_source");
  params.out = output_operand(out, "out", {1, s.tokens, s.value_heads, s.value_dim});

  RowPlan plan;
  if (!cu_seqlens.is_none()) plan.offsets = row_offsets(cu_seqlens, "cu_seqlens", s.tokens);
  params.num_sequences = cu_seqlens.is_none() ? s.tokens : static_cast<std::int64_t>(plan.offsets.size()) - 1;
  plan.sources = slot_indices(initial_state_indices, "initial_state_indices", params.num_sequences,
                              initial_state_source.size(0), optional_integer(null_slot, "null_slot"));
  if (dry_run || s.tokens == 0) return;

  params.q = heads_operand(q);
  params.k = heads_operand(k);
  params.v = heads_operand(v);
  if (plan.offsets.empty()) {
    // One token a row: token n of batch 0 is token 0 of batch n.
    params.tokens_per_sequence = 1;
    for (Operand* operand : {&params.q, &params.k, &params.v, &params.gate, &params.beta}) {
      operand->batch_stride = operand->token_stride;
    }
    params.out.batch_stride = params.out.token_stride;
  }
  params.source = params.destination = initial_state_source.data();
  params.source_slot_stride = params.destination_slot_stride = initial_state_source.stride(0);
  plan.destinations = plan.sources;
  for (const std::int64_t slot : plan.sources) plan.padding.push_back(slot < 0);
  execute(params, plan, plan.offsets.empty() ? 1 : s.tokens);
}

// --- sequences ---

namespace {

struct SequenceArguments {
  TensorView &q, &k, &v, &g, &beta, &initial_state, &state, &cu_seqlens, &state_indices, &has_initial_state, &out,
      &final_state;
  handle scale, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, null_slot;
};

// One value, whatever its dtype; for checks, not for kernels.
float read_value(const Operand& x, std::int64_t index) {
  if (x.dtype == DType::kFloat32) return static_cast<const float*>(x.data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(x.data)[index];
  if (x.dtype == DType::kBFloat16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return fraction != 0 ? NAN : (bits >> 15 != 0 ? -INFINITY : INFINITY);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

// Under GDN_DEBUG=1: a linear decay passed where its logarithm is wanted.
void check_log_decay(const RecurrenceParams& params, const Sizes& s) {
  if (!debug_checks()) return;
  const Operand& g = params.gate;
  for (std::int64_t batch = 0; batch < s.batch; ++batch) {
    for (std::int64_t token = 0; token < s.tokens; ++token) {
      for (std::int64_t head = 0; head < s.value_heads; ++head) {
        const float value = read_value(g, batch * g.batch_stride + token * g.token_stride + head * g.head_stride);
        if (value > 0) raise_value("g: expected log decays <= 0, got " + std::to_string(value));
      }
    }
  }
}

// Everything that the token-by-token and the chunked signature share. Returns the sizes; fills params and plan.
Sizes check_sequences(SequenceArguments& args, RecurrenceParams& params, RowPlan& plan) {
  const Sizes s = check_qkv(args.q, args.k, args.v, "B");
  set_sizes(params, s);
  set_scale(params, args.scale);
  params.normalize_qk = flag(args.use_qk_l2norm_in_kernel, "use_qk_l2norm_in_kernel");
  params.double_beta = flag(args.allow_neg_eigval, "allow_neg_eigval");
  params.state_v_first = flag(args.state_v_first, "state_v_first");
  if (!args.cu_seqlens.is_none()) {
    if (s.batch != 1) raise_value(cat({"q: expected a batch of 1 with cu_seqlens, got ", describe(args.q)}));
    plan.offsets = row_offsets(args.cu_seqlens, "cu_seqlens", s.tokens);
  }
  const std::int64_t rows = args.cu_seqlens.is_none() ? s.batch : static_cast<std::int64_t>(plan.offsets.size()) - 1;
  params.num_sequences = rows;
  params.tokens_per_sequence = s.tokens;
  const SmallVector<bool> has_state = booleans(args.has_initial_state, "has_initial_state", rows);

  plan.padding = SmallVector<bool>(static_cast<std::size_t>(rows), false);
  plan.sources = Indices(static_cast<std::size_t>(rows), -1);
  plan.destinations = Indices(static_cast<std::size_t>(rows), -1);
  if (!args.state_indices.is_none()) {
    if (args.state.is_none()) raise_value("initial_state: expected a pool with state_indices, got None");
    params.state_dtype = check_state(args.state, "initial_state", "P", s, params.state_v_first);
    check_packed_slots(args.state, "initial_state");
    const Indices slots = slot_indices(args.state_indices, "state_indices", rows, args.state.size(0),
                                       optional_integer(args.null_slot, "null_slot"));
    params.source = params.destination = args.state.data();
    params.source_slot_stride = params.destination_slot_stride = args.state.stride(0);
    for (std::size_t row = 0; row < slots.size(); ++row) {
      plan.padding[row] = slots[row] < 0;
      plan.destinations[row] = slots[row];
      plan.sources[row] = has_state[row] ? slots[row] : -1;
    }
  } else {
    if (!args.initial_state.is_none()) {
      params.state_dtype = check_state(args.initial_state, "initial_state", rows, s, params.state_v_first);
      for (std::size_t row = 0; row < plan.sources.size(); ++row) {
        // A sequence without tokens ends in its initial state, also a fresh one.
        const auto index = static_cast<std::int64_t>(row);
        const bool is_empty = row_begin(plan, params, index) == row_begin(plan, params, index + 1);
        if (has_state[row] || is_empty) plan.sources[row] = index;
      }
    }
    if (!args.final_state.is_none()) {
      const DType dtype = check_state(args.final_state, "final_state", rows, s, params.state_v_first);
      check_packed_slots(args.final_state, "final_state");
      if (!args.initial_state.is_none() && dtype != params.state_dtype) {
        raise_type(cat({"final_state: expected the dtype of initial_state, got ", describe(args.final_state)}));
      }
      params.state_dtype = dtype;
      params.destination = args.final_state.data();
      params.destination_slot_stride = args.final_state.stride(0);
      for (std::size_t row = 0; row < plan.destinations.size(); ++row) {
        plan.destinations[row] = static_cast<std::int64_t>(row);
      }
    }
  }
  params.out = output_operand(args.out, "out", {s.batch, s.tokens, s.value_heads, s.value_dim});
  return s;
}

// An initial state that is only read may have any strides.
void borrow_initial_state(TensorView& view, RecurrenceParams& params) {
  if (view.is_none()) return;
  std::int64_t expected = 1;
  bool packed = true;
  for (int dim = view.ndim() - 1; dim > 0; --dim) {
    packed = packed && (view.size(dim) == 1 || view.stride(dim) == expected);
    expected *= view.size(dim);
  }
  if (!packed) {
    nb::object copy = view.object.attr("contiguous")();
    borrow(copy, view);
    view.owner = std::move(copy);
  }
  params.source = view.data();
  params.source_slot_stride = view.stride(0);
}

void run_sequences(SequenceArguments& args, RecurrenceParams& params, RowPlan& plan, const Sizes& s) {
  params.q = heads_operand(args.q);
  params.k = heads_operand(args.k);
  params.v = heads_operand(args.v);
  borrow_initial_state(args.initial_state, params);
  // A sequence without tokens leaves a pool alone, also where it is fresh.
  if (!args.state_indices.is_none()) {
    for (std::size_t row = 0; row < plan.sources.size(); ++row) {
      const std::int64_t begin = row_begin(plan, params, static_cast<std::int64_t>(row));
      const std::int64_t end = row_begin(plan, params, static_cast<std::int64_t>(row) + 1);
      if (begin == end) plan.padding[row] = true;
    }
  }
  execute(params, plan, s.tokens);
}

}  // namespace

void fused_recurrent_gated_delta_rule(TensorView& q, TensorView& k, TensorView& v, TensorView& g, TensorView& beta,
                                      handle scale, TensorView& initial_state, TensorView& state,
                                      handle use_qk_l2norm_in_kernel, handle use_gate_in_kernel, TensorView& A_log,
                                      TensorView& dt_bias, handle use_beta_sigmoid_in_kernel, handle allow_neg_eigval,
                                      handle state_v_first, TensorView& cu_seqlens, TensorView& state_indices,
                                      TensorView& has_initial_state, handle null_slot, TensorView& out,
                                      TensorView& final_state, bool dry_run) {
  SequenceArguments args{q,
                         k,
                         v,
                         g,
                         beta,
                         initial_state,
                         state,
                         cu_seqlens,
                         state_indices,
                         has_initial_state,
                         out,
                         final_state,
                         scale,
                         use_qk_l2norm_in_kernel,
                         allow_neg_eigval,
                         state_v_first,
                         null_slot};
  RecurrenceParams params;
  RowPlan plan;
  const Sizes s = check_sequences(args, params, plan);
  const Shape per_head{s.batch, s.tokens, s.value_heads};
  if (!g.is_none()) {
    params.gate = values_operand(g, "g", per_head);
    params.gate_kind = Gate::kLogDecay;
  }
  if (flag(use_gate_in_kernel, "use_gate_in_kernel")) {
    if (g.is_none()) raise_value("g: expected the raw gate input a with use_gate_in_kernel, got None");
    const std::string heads = std::to_string(s.value_heads);
    if (A_log.is_none()) raise_value("A_log: expected [" + heads + "] with use_gate_in_kernel, got None");
    if (dt_bias.is_none()) raise_value("dt_bias: expected [" + heads + "] with use_gate_in_kernel, got None");
    params.A_log = head_vector(A_log, "A_log", s.value_heads);
    params.dt_bias = head_vector(dt_bias, "dt_bias", s.value_heads);
    params.gate_kind = Gate::kRaw;
  } else if (!g.is_none()) {
    check_log_decay(params, s);
  }
  const bool logits = flag(use_beta_sigmoid_in_kernel, "use_beta_sigmoid_in_kernel");
  if (!beta.is_none()) {
    params.beta = values_operand(beta, "beta", per_head);
    params.beta_kind = logits ? Beta::kLogit : Beta::kValue;
  } else if (logits) {
    raise_value("beta: expected the raw input b with use_beta_sigmoid_in_kernel, got None");
  }
  if (dry_run) return;
  run_sequences(args, params, plan, s);
}

void chunk_gated_delta_rule(TensorView& q, TensorView& k, TensorView& v, TensorView& g, TensorView& beta, handle scale,
                            TensorView& initial_state, TensorView& state, handle use_qk_l2norm_in_kernel,
                            handle use_beta_sigmoid_in_kernel, handle allow_neg_eigval, handle state_v_first,
                            TensorView& cu_seqlens, TensorView& state_indices, TensorView& has_initial_state,
                            handle null_slot, TensorView& out, TensorView& final_state, TensorView& chunk_states,
                            bool dry_run) {
  SequenceArguments args{q,
                         k,
                         v,
                         g,
                         beta,
                         initial_state,
                         state,
                         cu_seqlens,
                         state_indices,
                         has_initial_state,
                         out,
                         final_state,
                         scale,
                         use_qk_l2norm_in_kernel,
                         allow_neg_eigval,
                         state_v_first,
                         null_slot};
  RecurrenceParams params;
  RowPlan plan;
  const Sizes s = check_sequences(args, params, plan);
  const Shape per_head{s.batch, s.tokens, s.value_heads};
  params.gate = values_operand(g, "g", per_head);
  params.gate_kind = Gate::kLogDecay;
  check_log_decay(params, s);
  params.beta = values_operand(beta, "beta", per_head);
  params.beta_kind = flag(use_beta_sigmoid_in_kernel, "use_beta_sigmoid_in_kernel") ? Beta::kLogit : Beta::kValue;

  Indices chunk_offsets;
  if (!chunk_states.is_none()) {
    constexpr std::int64_t kChunk = 64;
    chunk_offsets.push_back(0);
    for (std::int64_t row = 0; row < params.num_sequences; ++row) {
      const std::int64_t length = row_begin(plan, params, row + 1) - row_begin(plan, params, row);
      chunk_offsets.push_back(chunk_offsets.back() + (length + kChunk - 1) / kChunk);
    }
    check_state(chunk_states, "chunk_states", chunk_offsets.back(), s, params.state_v_first);
    if (!is_dtype(chunk_states, dlpack::kFloat, 32))
      raise_type("chunk_states: expected float32, got " + describe(chunk_states));
    check_packed_slots(chunk_states, "chunk_states");
    params.chunk_states = static_cast<float*>(chunk_states.data());
    params.chunk_offsets = chunk_offsets.data();
  }
  if (dry_run) return;
  if (!chunk_states.is_none())
    std::memset(chunk_states.data(), 0, sizeof(float) * static_cast<std::size_t>(chunk_states.numel()));
  run_sequences(args, params, plan, s);
}

}  // namespace gdn::cpu
