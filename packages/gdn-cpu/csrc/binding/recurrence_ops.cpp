// SPDX-License-Identifier: Apache-2.0
//
// The operations that are the recurrence: decode, token by token, and whole sequences.
#include <bit>
#include <cmath>
#include <cstring>

#include "ops.h"
#include "recurrence_call.h"

namespace gdn::cpu {

// --- decode ---

void Decode::run_single(const DecodeArguments& args, const RowArguments& rows, bool dry_run) {
  RecurrenceParams params;
  const Sizes s = check_decode(args, params);

  RowPlan plan;
  if (!rows.cu_seqlens.is_none()) plan.offsets = row_offsets(rows.cu_seqlens, "cu_seqlens", s.tokens);
  params.num_sequences = rows.cu_seqlens.is_none() ? s.tokens : static_cast<std::int64_t>(plan.offsets.size()) - 1;
  plan.sources = slot_indices(rows.slots, rows.slots_name, params.num_sequences, args.pool.size(0),
                              optional_integer(rows.null_slot, "null_slot"));
  if (dry_run || s.tokens == 0) return;

  set_qkv(params, args.q, args.k, args.v, args.out);
  keep_gates(params, args.a, args.b, args.out);
  if (plan.offsets.empty()) {
    // One token a row: token n of batch 0 is token 0 of batch n.
    params.tokens_per_sequence = 1;
    for (Operand* operand : {&params.q, &params.k, &params.v, &params.gate, &params.beta}) {
      operand->batch_stride = operand->token_stride;
    }
    params.out.batch_stride = params.out.token_stride;
  }
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
  const Sizes s = check_qkv(args.q, args.k, args.v, "B", check_floating);
  check_head_dims(s);
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
    set_pool(params, args.state, "initial_state", s, args.state_v_first);
    const Indices slots = slot_indices(args.state_indices, "state_indices", rows, args.state.size(0),
                                       optional_integer(args.null_slot, "null_slot"));
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

void run_sequences(SequenceArguments& args, RecurrenceParams& params, RowPlan& plan, const Sizes& s, Method method) {
  set_qkv(params, args.q, args.k, args.v, args.out);
  keep_gates(params, args.g, args.beta, args.out);
  borrow_initial_state(args.initial_state, params);
  // A sequence without tokens leaves a pool alone, also where it is fresh.
  if (!args.state_indices.is_none()) {
    for (std::size_t row = 0; row < plan.sources.size(); ++row) {
      const std::int64_t begin = row_begin(plan, params, static_cast<std::int64_t>(row));
      const std::int64_t end = row_begin(plan, params, static_cast<std::int64_t>(row) + 1);
      if (begin == end) plan.padding[row] = true;
    }
  }
  execute(params, plan, s.tokens, method);
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
  run_sequences(args, params, plan, s, Method::kTokenByToken);
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
  if (!chunk_states.is_none() && chunk_states.numel() > 0)
    std::memset(chunk_states.data(), 0, sizeof(float) * static_cast<std::size_t>(chunk_states.numel()));
  run_sequences(args, params, plan, s, Method::kChunked);
}

}  // namespace gdn::cpu
