// SPDX-License-Identifier: Apache-2.0
#include "runtime/attention.h"

#include <vector>

#include "runtime/chunked.h"
#include "runtime/parallel.h"
#include "runtime/thread_memory.h"

namespace gdn::cpu {
namespace {

constexpr std::int64_t kKeptBytes = std::int64_t{64} << 20;

std::int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// What lies between the parts of a call, [T, ...] each: of all tokens, so that they keep their numbers; the pages of
// tokens that do not need it are never touched.
struct Between {
  ThreadMemory convolved, outputs, g, beta;

  ~Between() = default;
  void give_back() {
    for (ThreadMemory* memory : {&convolved, &outputs, &g, &beta}) memory->keep_at_most(kKeptBytes);
  }
};

Between& kept_between() {
  thread_local Between between;
  return between;
}

// q, k and v as parts of [T, C].
void set_convolved(RecurrenceParams& params, const void* convolved, DType dtype) {
  const std::int64_t keys = params.num_key_heads * params.key_dim;
  const std::int64_t channels = 2 * keys + params.num_value_heads * params.value_dim;
  const auto part = [&](std::int64_t channel, std::int64_t head_dim) {
    return Operand{static_cast<const char*>(convolved) + channel * element_size(dtype), dtype, 0, channels, head_dim};
  };
  params.q = part(0, params.key_dim);
  params.k = part(keys, params.key_dim);
  params.v = part(2 * keys, params.value_dim);
}

class Attention {
 public:
  Attention(const KernelTable& table, const ChunkKernel* chunk, const AttentionCall& call, int threads)
      : table_(table), chunk_(chunk), call_(call), threads_(threads), between_(kept_between()) {}

  void run() {
    const Operand& x = call_.steps.convolution.x;
    const std::int64_t channels = call_.steps.convolution.num_channels;
    convolved_ = between_.convolved.at_least(call_.num_tokens * channels * element_size(x.dtype));
    for (const AttentionRows* rows : {&call_.prefills, &call_.steps, &call_.replays}) convolve(*rows);
    RecurrenceParams steps = call_.steps.params, replays = call_.replays.params;
    set_convolved(steps, convolved_, x.dtype);
    set_convolved(replays, convolved_, x.dtype);
    if (call_.prefills.live.empty()) {
      run_recurrence(table_, steps, call_.steps.live, threads_);
      run_recurrence(table_, replays, call_.replays.live, threads_);
    } else {
      run_beside_prefills(steps, replays);
    }
    between_.give_back();
  }

 private:
  void convolve(const AttentionRows& rows) {
    if (rows.convolved.empty()) return;
    ConvolutionParams params = rows.convolution;
    params.out = {convolved_, params.x.dtype, 0, params.num_channels, 1};
    run_causal_conv1d(table_, params, rows.convolved, threads_);
  }

  // Prompts too short for the chunked rule are steps of another kind.
  void run_beside_prefills(const RecurrenceParams& steps, const RecurrenceParams& replays) {
    RecurrenceParams prefills = call_.prefills.params;
    set_convolved(prefills, convolved_, call_.steps.convolution.x.dtype);
    set_gates(prefills);
    Indices shorts, longs;
    for (const std::int64_t row : call_.prefills.live) {
      const std::int64_t length = prefills.token_offsets[row + 1] - prefills.token_offsets[row];
      (length < chunk_->shortest ? shorts : longs).push_back(row);
    }
    RecurrenceWork of_steps(table_, steps, call_.steps.live, threads_);
    RecurrenceWork of_replays(table_, replays, call_.replays.live, threads_);
    RecurrenceWork of_shorts(table_, prefills, shorts, threads_);
    std::vector<RecurrenceWork*> others;
    for (RecurrenceWork* work : {&of_shorts, &of_steps, &of_replays}) {
      if (!work->is_empty()) others.push_back(work);
    }
    if (longs.empty()) {
      for (RecurrenceWork* work : others) work->run();
    } else {
      const RmsNormGatedParams norm = norm_of(prefills);
      const std::int64_t head = prefills.value_dim;
      prefills.out = {between_.outputs.at_least(0), DType::kFloat32, 0, prefills.num_value_heads * head, head};
      prefills.norm = nullptr;
      run_chunked(table_, *chunk_, prefills, longs, threads_, others);
      for (const std::int64_t row : longs) {
        normalize(norm, prefills.token_offsets[row], prefills.token_offsets[row + 1]);
      }
    }
    of_replays.finish();
  }

  // Of all tokens: a value of others is computed from theirs and read by nobody.
  void set_gates(RecurrenceParams& prefills) {
    const RecurrenceParams& raw = call_.steps.params;
    const std::int64_t heads = raw.num_value_heads;
    const std::int64_t bytes = call_.num_tokens * heads * element_size(DType::kFloat32);
    GatingParams params{.num_heads = heads,
                        .a = raw.gate,
                        .b = raw.beta,
                        .A_log = raw.A_log,
                        .dt_bias = raw.dt_bias,
                        .g = static_cast<float*>(between_.g.at_least(bytes)),
                        .beta = static_cast<float*>(between_.beta.at_least(bytes))};
    run_gating(table_, params, call_.num_tokens, threads_);
    prefills.gate = {params.g, DType::kFloat32, 0, heads, 1};
    prefills.beta = {params.beta, DType::kFloat32, 0, heads, 1};
    prefills.gate_kind = Gate::kLogDecay;
    prefills.beta_kind = Beta::kValue;
  }

  // From fp32 outputs [T, HV, V], which the chunked rule leaves, to those of the call.
  RmsNormGatedParams norm_of(const RecurrenceParams& prefills) {
    const GatedNorm& norm = *prefills.norm;
    const std::int64_t heads = prefills.num_value_heads, row = heads * prefills.value_dim;
    return {.dim = prefills.value_dim,
            .sizes = {1, 1, 1, heads},
            .x = between_.outputs.at_least(call_.num_tokens * row * element_size(DType::kFloat32)),
            .x_rows = {DType::kFloat32, {0, 0, row, prefills.value_dim}},
            .gate = norm.gate.data,
            .gate_rows = {norm.gate.dtype, {0, 0, norm.gate.token_stride, norm.gate.head_stride}},
            .out = prefills.out.data,
            .out_rows = {prefills.out.dtype, {0, 0, prefills.out.token_stride, prefills.out.head_stride}},
            .weight = norm.weight,
            .eps = norm.eps,
            .activation = norm.activation};
  }

  // Tokens [begin, end).
  void normalize(RmsNormGatedParams norm, std::int64_t begin, std::int64_t end) {
    const auto offset = [begin](const Rows& rows) { return begin * rows.strides[2] * element_size(rows.dtype); };
    norm.x = static_cast<const char*>(norm.x) + offset(norm.x_rows);
    norm.gate = static_cast<const char*>(norm.gate) + offset(norm.gate_rows);
    norm.out = static_cast<char*>(norm.out) + offset(norm.out_rows);
    norm.sizes[2] = end - begin;
    run_rms_norm_gated(table_, norm, norm.sizes[2] * norm.sizes[3], threads_);
  }

  const KernelTable& table_;
  const ChunkKernel* chunk_;
  const AttentionCall& call_;
  int threads_;
  Between& between_;
  void* convolved_ = nullptr;
};

}  // namespace

void run_attention(const KernelTable& table, const ChunkKernel* chunk, const AttentionCall& call, int num_threads) {
  Attention(table, chunk, call, num_threads).run();
}

}  // namespace gdn::cpu
