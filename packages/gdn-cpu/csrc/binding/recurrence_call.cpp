// SPDX-License-Identifier: Apache-2.0
#include "recurrence_call.h"

#include <cmath>
#include <cstring>

#include "dispatch/levels.h"
#include "runtime/chunked.h"
#include "runtime/parallel.h"

namespace gdn::cpu {

void check_head_dims(const Sizes& s) {
  if (s.key_dim > kMaxHeadDim || s.value_dim > kMaxHeadDim) {
    decline("K and V: from 1 to " + std::to_string(kMaxHeadDim));
  }
}

void set_sizes(RecurrenceParams& params, const Sizes& s) {
  params.num_key_heads = s.key_heads;
  params.num_value_heads = s.value_heads;
  params.key_dim = s.key_dim;
  params.value_dim = s.value_dim;
}

void set_scale(RecurrenceParams& params, handle scale) {
  const double fallback = 1.0 / std::sqrt(static_cast<double>(params.key_dim));
  params.scale = static_cast<float>(optional_number(scale, "scale").value_or(fallback));
}

DType check_state(const TensorView& view, Name name, Dim first, const Sizes& s, bool state_v_first) {
  const std::int64_t rows = state_v_first ? s.value_dim : s.key_dim;
  const std::int64_t columns = state_v_first ? s.key_dim : s.value_dim;
  return check_floating(view, name, {first, s.value_heads, rows, columns});
}

void set_pool(RecurrenceParams& params, const TensorView& pool, Name name, const Sizes& s, handle state_v_first) {
  params.state_v_first = flag(state_v_first, "state_v_first");
  params.state_dtype = check_state(pool, name, "P", s, params.state_v_first);
  check_packed_slots(pool, name);
  params.source = params.destination = pool.data();
  params.source_slot_stride = params.destination_slot_stride = pool.stride(0);
}

void set_raw_gates(RecurrenceParams& params, const Sizes& s, const TensorView& A_log, const TensorView& dt_bias,
                   const TensorView& a, const TensorView& b) {
  params.A_log = head_vector(A_log, "A_log", s.value_heads);
  params.dt_bias = head_vector(dt_bias, "dt_bias", s.value_heads);
  params.gate = values_operand(a, "a", {s.tokens, s.value_heads});
  params.beta = values_operand(b, "b", {s.tokens, s.value_heads});
  params.gate_kind = Gate::kRaw;
  params.beta_kind = Beta::kLogit;
}

Sizes check_decode(const DecodeArguments& args, RecurrenceParams& params) {
  const Sizes s = check_qkv(args.q, args.k, args.v, 1, check_floating);
  check_head_dims(s);
  set_sizes(params, s);
  set_scale(params, args.scale);
  set_raw_gates(params, s, args.A_log, args.dt_bias, args.a, args.b);
  params.softplus_beta = static_cast<float>(positive(args.softplus_beta, "softplus_beta"));
  params.softplus_threshold = static_cast<float>(number(args.softplus_threshold, "softplus_threshold"));
  params.normalize_qk = flag(args.use_qk_l2norm_in_kernel, "use_qk_l2norm_in_kernel");
  set_pool(params, args.pool, args.pool_name, s, args.state_v_first);
  params.out = output_operand(args.out, "out", {1, s.tokens, s.value_heads, s.value_dim});
  return s;
}

void set_qkv(RecurrenceParams& params, TensorView& q, TensorView& k, TensorView& v, const TensorView& out) {
  for (TensorView* input : {&q, &k, &v}) keep_from(out, *input);
  params.q = heads_operand(q);
  params.k = heads_operand(k);
  params.v = heads_operand(v);
}

void keep_gates(RecurrenceParams& params, TensorView& gate, TensorView& beta, const TensorView& out) {
  keep_from(out, gate, params.gate);
  keep_from(out, beta, params.beta);
}

std::int64_t row_begin(const RowPlan& plan, const RecurrenceParams& params, std::int64_t row) {
  return plan.offsets.empty() ? row * params.tokens_per_sequence : plan.offsets[static_cast<std::size_t>(row)];
}

void RowPlan::name_rows(const TensorView& row_indices, std::int64_t rows) {
  names_rows = !row_indices.is_none();
  named = named_rows(row_indices, rows);
}

void check_row_lengths(const RowPlan& plan, Name name, std::int64_t rows, std::int64_t most) {
  plan.for_each_row(rows, [&](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    const std::int64_t length = plan.padding[i] ? 0 : plan.offsets[i + 1] - plan.offsets[i];
    if (length > most) {
      raise_value(cat(
          {name, ": expected rows of at most ", std::to_string(most), " tokens, got one of ", std::to_string(length)}));
    }
  });
}

// --- zeroing what no row computes ---

namespace {

std::size_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace

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

namespace {

void zero_uncovered(const RecurrenceParams& params, const RowPlan& plan, std::int64_t tokens_per_batch) {
  const std::int64_t rows = params.num_sequences;
  if (!plan.offsets.empty() && !plan.names_rows) {
    zero_tokens(params, tokens_per_batch, 0, plan.offsets.front());
    zero_tokens(params, tokens_per_batch, plan.offsets.back(), tokens_per_batch);
  }
  plan.for_each_row(rows, [&](std::int64_t row) {
    if (!plan.padding[static_cast<std::size_t>(row)]) return;
    zero_tokens(params, tokens_per_batch, row_begin(plan, params, row), row_begin(plan, params, row + 1));
  });
}

// Few elements do not average their rounding to bf16, and gain nothing from it.
constexpr std::int64_t kFewestForBFloat16 = 32;

}  // namespace

const ChunkKernel& chunk_kernel_of(const RecurrenceParams& params, DType dtype) {
  const bool has_size = params.key_dim >= kFewestForBFloat16 && params.value_dim >= kFewestForBFloat16;
  const ChunkKernel* kernel = chunk_kernel(has_size && dtype == DType::kBFloat16);
  if (kernel == nullptr) {
    raise_value("GDN_CPU_GEMM: level " + std::string(active_level().name) + " has no engine '" + forced_gemm() + "'");
  }
  return *kernel;
}

void execute(RecurrenceParams& params, RowPlan& plan, std::int64_t tokens_per_batch, Method method) {
  Indices live;
  plan.for_each_row(params.num_sequences, [&](std::int64_t row) {
    if (!plan.padding[static_cast<std::size_t>(row)]) live.push_back(row);
  });
  params.token_offsets = plan.offsets.empty() ? nullptr : plan.offsets.data();
  params.source_slots = plan.sources.data();
  params.destination_slots = plan.destinations.data();
  const KernelTable& kernels = *active_level().kernels;
  const ChunkKernel* chunk = method == Method::kChunked ? &chunk_kernel_of(params, params.q.dtype) : nullptr;
  const int threads = num_threads();
  nb::gil_scoped_release unlocked;
  zero_uncovered(params, plan, tokens_per_batch);
  if (chunk == nullptr) return run_recurrence(kernels, params, live, threads);
  run_chunked(kernels, *chunk, params, live, threads);
}

}  // namespace gdn::cpu
