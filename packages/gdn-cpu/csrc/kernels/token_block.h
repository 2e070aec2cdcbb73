// SPDX-License-Identifier: Apache-2.0
//
// What the recurrence needs of a few consecutive tokens of one head, computed once for all column tiles: q and k in
// fp32, their norms and product, the decay and beta.
//
// The passes over the state use q and k as they came. Their inverse norms are factors of what the passes give: so the
// passes need not wait for two square roots and two divisions.
#pragma once

#include "gate.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Rows of q and k are padded with zeros to whole vectors of every level.
constexpr std::int64_t kRowMultiple = 16;
constexpr float kNormEpsilon = 1e-6f;

// The tokens of one (sequence, head): batch and first token of its row, and how many.
struct TokenRow {
  std::int64_t batch;
  std::int64_t first;
  std::int64_t count;
};

struct TokenBlock {
  std::int64_t count;
  std::int64_t row_stride;  // of q and k
  float* q;
  float* k;
  float q_factor[kMaxBlockTokens];  // 1 / |q|, or 1
  float k_factor[kMaxBlockTokens];
  float qk[kMaxBlockTokens];  // of the normalised q and k
  float decay[kMaxBlockTokens];
  float beta[kMaxBlockTokens];
};

// A decay that is 0 in fp32 resets the state, as g = -inf does, whatever the state holds: it counts as zero and is not
// read. The decay alone says so, and a record keeps no more than that.
GDN_INLINE bool is_reset(float decay) { return decay == 0.0f; }

GDN_INLINE std::int64_t padded_row(std::int64_t dim) { return round_up(dim, kRowMultiple); }

// As many tokens as the working memory holds q and k of.
GDN_INLINE std::int64_t block_tokens(std::int64_t key_dim) {
  return min_of(kMaxBlockTokens, 4 * kMaxHeadDim / padded_row(key_dim));
}

GDN_INLINE std::int64_t key_head_of(const RecurrenceParams& p, std::int64_t head) {
  return head / (p.num_value_heads / p.num_key_heads);
}

template <class AnyOperand>
GDN_INLINE std::int64_t element_index(const AnyOperand& x, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return batch * x.batch_stride + token * x.token_stride + head * x.head_stride;
}

GDN_INLINE Vec square_add(Vec x, Vec sum) { return fma(x, x, sum); }

// Four accumulators; the order depends on the padded length only.
GDN_INLINE float sum_of_squares(const float* x, std::int64_t padded) {
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= padded; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[j] = square_add(load(x + i + j * kLanes), sum[j]);
  }
  for (; i < padded; i += kLanes) sum[0] = square_add(load(x + i), sum[0]);
  return reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

// To fp32, zeros up to the padded length.
template <class T>
GDN_INLINE void convert_row(const T* x, std::int64_t dim, float* row) {
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(row + i, load(x + i));
  if (i < dim) {
    store(row + i, load_n(x + i, dim - i));
    i += kLanes;
  }
  for (; i < padded_row(dim); i += kLanes) store(row + i, zero());
}

GDN_INLINE float inverse_norm(const float* row, std::int64_t padded) {
  return 1.0f / square_root(sum_of_squares(row, padded) + kNormEpsilon);
}

GDN_INLINE Vec log_decay_of(const RecurrenceParams& p, std::int64_t head, Vec gate) {
  if (p.gate_kind != Gate::kRaw) return gate;
  const Vec A_log = set1(load_scalar(p.A_log.dtype, p.A_log.data, head * p.A_log.stride));
  const Vec dt_bias = set1(load_scalar(p.dt_bias.dtype, p.dt_bias.data, head * p.dt_bias.stride));
  return log_decay(gate, A_log, exp(A_log), dt_bias, SoftplusParams{p.softplus_beta, p.softplus_threshold});
}

GDN_INLINE Vec beta_of(const RecurrenceParams& p, Vec value) {
  const Vec beta = p.beta_kind == Beta::kLogit ? sigmoid(value) : value;
  return p.double_beta ? add(beta, beta) : beta;
}

// Element [.., t + i, head] in lane i, i < n. One token is broadcast: loading what was written piecewise would wait.
GDN_INLINE Vec gather_tokens(const Operand& x, const TokenRow& row, std::int64_t t, std::int64_t head, std::int64_t n) {
  const std::int64_t index = element_index(x, row.batch, row.first + t, head);
  if (n == 1) return set1(load_scalar(x.dtype, x.data, index));
  float lanes[kLanes];
  store(lanes, zero());
  for (std::int64_t i = 0; i < n; ++i) lanes[i] = load_scalar(x.dtype, x.data, index + i * x.token_stride);
  return load(lanes);
}

// Gates of tokens [t, t + n) of the row, n <= kLanes, into block from `first` on.
GDN_INLINE void load_gates(const RecurrenceParams& p, const TokenRow& row, std::int64_t head, std::int64_t t,
                           std::int64_t n, std::int64_t first, TokenBlock& block) {
  const Vec g = p.gate_kind == Gate::kNone ? zero() : log_decay_of(p, head, gather_tokens(p.gate, row, t, head, n));
  const Vec beta = p.beta_kind == Beta::kOne ? set1(1.0f) : gather_tokens(p.beta, row, t, head, n);
  store(block.decay + first, exp(g));
  store(block.beta + first, beta_of(p, beta));
}

template <class AnyOperand>
GDN_INLINE void prefetch_row(const AnyOperand& x, const TokenRow& row, std::int64_t t, std::int64_t head,
                             std::int64_t dim) {
  const std::int64_t size = element_size(x.dtype);
  prefetch(x.data, element_index(x, row.batch, row.first + t, head) * size, dim * size);
}

// Tokens [t, t_end) of the row: a head's rows lie a token's heads apart, which the processor's own prefetcher does not
// follow.
[[maybe_unused]] void prefetch_tokens(const RecurrenceParams& p, const TokenRow& row, std::int64_t head, std::int64_t t,
                                      std::int64_t t_end) {
  const std::int64_t key_head = key_head_of(p, head);
  for (; t < t_end; ++t) {
    prefetch_row(p.q, row, t, key_head, p.key_dim);
    prefetch_row(p.k, row, t, key_head, p.key_dim);
    prefetch_row(p.v, row, t, head, p.value_dim);
    prefetch_row(p.out, row, t, head, p.value_dim);
  }
}

// Tokens [token, token + block.count) of the row.
[[maybe_unused]] void load_token_block(const RecurrenceParams& p, const TokenRow& row, std::int64_t head,
                                       std::int64_t token, TokenBlock& block) {
  const std::int64_t key_head = key_head_of(p, head);
  for (std::int64_t i = 0; i < block.count; ++i) {
    float* q = block.q + i * block.row_stride;
    float* k = block.k + i * block.row_stride;
    const std::int64_t q_index = element_index(p.q, row.batch, row.first + token + i, key_head);
    const std::int64_t k_index = element_index(p.k, row.batch, row.first + token + i, key_head);
    with_dtype(p.q.dtype, p.q.data, [&](auto data) { convert_row(data + q_index, p.key_dim, q); });
    with_dtype(p.k.dtype, p.k.data, [&](auto data) { convert_row(data + k_index, p.key_dim, k); });
    block.q_factor[i] = p.normalize_qk ? inverse_norm(q, block.row_stride) : 1.0f;
    block.k_factor[i] = p.normalize_qk ? inverse_norm(k, block.row_stride) : 1.0f;
    // In double precision: all columns of a fresh state's first output are multiples of it, and q may be nearly
    // orthogonal to k.
    const float qk = static_cast<float>(dot_double(q, k, block.row_stride));
    block.qk[i] = qk * block.q_factor[i] * block.k_factor[i];
  }
  for (std::int64_t i = 0; i < block.count; i += kLanes) {
    load_gates(p, row, head, token + i, min_of(kLanes, block.count - i), i, block);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
