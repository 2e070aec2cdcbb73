// SPDX-License-Identifier: Apache-2.0
//
// What the recurrence needs of a few consecutive tokens of one head, computed once for all column tiles: q and k in
// fp32, their norms and product, the decay and beta.
//
// The passes over the state use q and k as they came. Their inverse norms are factors of what the passes give: so the
// passes need not wait for two square roots and two divisions. Of very large or small rows that are normalised, a power
// of two is left to the factors as well: only what is normalised below the normal numbers can change by that.
#pragma once

#include "gate.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Rows of q and k are padded with zeros to whole vectors of every level.
constexpr std::int64_t kRowMultiple = 16;
constexpr float kNormEpsilon = 1e-6f;
// Sums of squares of rows that are used as they came: products with a state, and u times a factor, are then about as
// far from the ends of fp32 as those of what is normalised.
constexpr float kSmallestSquares = 0x1p-24f, kLargestSquares = 0x1p24f;

// The tokens of one (sequence, head): batch and first token of its row, and how many.
struct TokenRow {
  std::int64_t batch;
  std::int64_t first;
  std::int64_t count;
};

// All of it lies in the scratch.
struct TokenBlock {
  std::int64_t count;
  std::int64_t row_stride;  // of q and k
  const float* q;
  const float* k;
  const float* q_factor;  // 1 / |q| of q as it stands here, or 1
  const float* k_factor;
  const float* qk;  // of q and k with their factors
  const float* decay;
  const float* beta;
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

// 2^n of a normal number.
GDN_INLINE float exact_power(int n) { return float_of(static_cast<std::uint32_t>(n + 127) << 23); }

// n of the largest |x|, 2^n <= |x|; 0 where one is not finite, and far below any where all are zero.
[[maybe_unused]] int largest_exponent(const float* row, std::int64_t n) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t exponent = (bits_of(row[i]) >> 23) & 0xffu;
    largest = exponent > largest ? exponent : largest;
  }
  return largest == 0xffu ? 0 : static_cast<int>(largest) - 127;
}

// Divides the row by the power of two of its largest element, and returns the inverse norm of the quotient. The epsilon
// keeps the norm of a small row from needing all of it.
[[maybe_unused]] float scaled_inverse_norm(float* row, std::int64_t padded) {
  const int exponent = static_cast<int>(min_of(126, max_of(-40, largest_exponent(row, padded))));
  const float down = exact_power(-exponent);
  for (std::int64_t i = 0; i < padded; i += kLanes) store(row + i, mul(load(row + i), set1(down)));
  return 1.0f / square_root(sum_of_squares(row, padded) + kNormEpsilon * down * down);
}

GDN_INLINE float inverse_norm(float* row, std::int64_t padded) {
  const float sum = sum_of_squares(row, padded);
  const bool is_ordinary = kSmallestSquares <= sum && sum <= kLargestSquares;
  return __builtin_expect(is_ordinary, 1) ? 1.0f / square_root(sum + kNormEpsilon) : scaled_inverse_norm(row, padded);
}

GDN_INLINE Vec raw_log_decay(const RecurrenceParams& p, Vec a, Vec A_log, Vec dt_bias) {
  return log_decay(a, A_log, exp(A_log), dt_bias, SoftplusParams{p.softplus_beta, p.softplus_threshold});
}

// Of tokens of one head.
GDN_INLINE Vec log_decay_of(const RecurrenceParams& p, std::int64_t head, Vec gate) {
  if (p.gate_kind != Gate::kRaw) return gate;
  const Vec A_log = set1(load_scalar(p.A_log.dtype, p.A_log.data, head * p.A_log.stride));
  const Vec dt_bias = set1(load_scalar(p.dt_bias.dtype, p.dt_bias.data, head * p.dt_bias.stride));
  return raw_log_decay(p, gate, A_log, dt_bias);
}

// Of n heads of one token.
GDN_INLINE Vec log_decay_of(const RecurrenceParams& p, std::int64_t head, std::int64_t n, Vec gate) {
  if (p.gate_kind != Gate::kRaw) return gate;
  return raw_log_decay(p, gate, load_strided(p.A_log, head, n), load_strided(p.dt_bias, head, n));
}

GDN_INLINE Vec beta_of(const RecurrenceParams& p, Vec value) {
  const Vec beta = p.beta_kind == Beta::kLogit ? sigmoid(value) : value;
  return p.double_beta ? add(beta, beta) : beta;
}

// Lane i is element index + i * stride, i < n. One is broadcast: loading what was written piecewise would wait.
GDN_INLINE Vec gather(const Operand& x, std::int64_t index, std::int64_t stride, std::int64_t n) {
  if (n == 1) return set1(load_scalar(x.dtype, x.data, index));
  if (stride == 1) return load_as(x.dtype, x.data, index, n);
  float lanes[kLanes];
  store(lanes, zero());
  for (std::int64_t i = 0; i < n; ++i) lanes[i] = load_scalar(x.dtype, x.data, index + i * stride);
  return load(lanes);
}

// Element [.., t + i, head] in lane i, i < n.
GDN_INLINE Vec gather_tokens(const Operand& x, const TokenRow& row, std::int64_t t, std::int64_t head, std::int64_t n) {
  return gather(x, element_index(x, row.batch, row.first + t, head), x.token_stride, n);
}

// Element [.., 0, head + i] in lane i, i < n.
GDN_INLINE Vec gather_heads(const Operand& x, const TokenRow& row, std::int64_t head, std::int64_t n) {
  return gather(x, element_index(x, row.batch, row.first, head), x.head_stride, n);
}

// Gates of tokens [t, t + count) of the row, to the front of the scratch's.
GDN_INLINE void load_token_gates(const RecurrenceParams& p, const TokenRow& row, std::int64_t head, std::int64_t t,
                                 std::int64_t count, RecurrenceScratch& scratch) {
  scratch.gate_sequence = -1;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = min_of(kLanes, count - i);
    const Vec g =
        p.gate_kind == Gate::kNone ? zero() : log_decay_of(p, head, gather_tokens(p.gate, row, t + i, head, n));
    const Vec beta = p.beta_kind == Beta::kOne ? set1(1.0f) : gather_tokens(p.beta, row, t + i, head, n);
    store(scratch.decay + i, exp(g));
    store(scratch.beta + i, beta_of(p, beta));
  }
}

// Gates of the row's only token for `head` and those after it, a vector of them: for less than as many vectors.
GDN_INLINE void load_head_gates(const RecurrenceParams& p, const TokenRow& row, std::int64_t sequence,
                                std::int64_t head, RecurrenceScratch& scratch) {
  const std::int64_t n = min_of(kLanes, p.num_value_heads - head);
  const Vec g = p.gate_kind == Gate::kNone ? zero() : log_decay_of(p, head, n, gather_heads(p.gate, row, head, n));
  const Vec beta = p.beta_kind == Beta::kOne ? set1(1.0f) : gather_heads(p.beta, row, head, n);
  store(scratch.decay, exp(g));
  store(scratch.beta, beta_of(p, beta));
  scratch.gate_sequence = sequence;
  scratch.gate_head_begin = head;
  scratch.gate_head_end = head + n;
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
  }
}

// What the same tokens need after their passes over the state.
[[maybe_unused]] void prefetch_outputs(const RecurrenceParams& p, const TokenRow& row, std::int64_t head,
                                       std::int64_t t, std::int64_t t_end) {
  for (; t < t_end; ++t) {
    prefetch_row(p.out, row, t, head, p.value_dim);
    if (p.norm != nullptr) prefetch_row(p.norm->gate, row, t, head, p.value_dim);
  }
}

// Row `index` of q or k in fp32, padded; returns what it has to be multiplied with.
template <class AnyOperand>
GDN_INLINE float load_row(const AnyOperand& x, std::int64_t index, const RecurrenceParams& p, float* row) {
  with_dtype(x.dtype, x.data, [&](auto data) { convert_row(data + index, p.key_dim, row); });
  return p.normalize_qk ? inverse_norm(row, padded_row(p.key_dim)) : 1.0f;
}

// q and k of tokens [token, token + count) of the row.
[[maybe_unused]] void load_keys(const RecurrenceParams& p, const TokenRow& row, std::int64_t key_head,
                                std::int64_t token, std::int64_t count, RecurrenceScratch& scratch) {
  const std::int64_t padded = padded_row(p.key_dim);
  float* q = scratch.qk;
  float* k = scratch.qk + block_tokens(p.key_dim) * padded;
  for (std::int64_t i = 0; i < count; ++i, q += padded, k += padded) {
    const std::int64_t q_index = element_index(p.q, row.batch, row.first + token + i, key_head);
    const std::int64_t k_index = element_index(p.k, row.batch, row.first + token + i, key_head);
    const float q_factor = load_row(p.q, q_index, p, q);
    const float k_factor = load_row(p.k, k_index, p, k);
    // In double precision: all columns of a fresh state's first output are multiples of it, q may be nearly orthogonal
    // to k, and the product of what is not normalised may leave the range of fp32.
    const double qk = dot_double(q, k, padded) * static_cast<double>(q_factor) * static_cast<double>(k_factor);
    scratch.q_factor[i] = q_factor;
    scratch.k_factor[i] = k_factor;
    scratch.qk_product[i] = static_cast<float>(qk);
  }
}

// Whether the item before has left q and k of all tokens of the row, and its records.
GDN_INLINE bool has_keys(const RecurrenceScratch& scratch, std::int64_t sequence, std::int64_t key_head) {
  return scratch.key_sequence == sequence && scratch.key_head == key_head;
}

// Tokens [token, token + count) of the row.
[[maybe_unused]] TokenBlock load_token_block(const RecurrenceParams& p, const TokenRow& row, std::int64_t sequence,
                                             std::int64_t head, std::int64_t token, std::int64_t count,
                                             RecurrenceScratch& scratch) {
  const std::int64_t key_head = key_head_of(p, head);
  const std::int64_t padded = padded_row(p.key_dim);
  if (!has_keys(scratch, sequence, key_head)) {
    load_keys(p, row, key_head, token, count, scratch);
    scratch.key_sequence = count == row.count ? sequence : -1;
    scratch.key_head = key_head;
  }
  std::int64_t first_gate = 0;
  if (row.count > 1) {
    load_token_gates(p, row, head, token, count, scratch);
  } else {
    const bool has_gates = scratch.gate_sequence == sequence && scratch.gate_head_begin <= head;
    if (!has_gates || head >= scratch.gate_head_end) load_head_gates(p, row, sequence, head, scratch);
    first_gate = head - scratch.gate_head_begin;
  }
  return {.count = count,
          .row_stride = padded,
          .q = scratch.qk,
          .k = scratch.qk + block_tokens(p.key_dim) * padded,
          .q_factor = scratch.q_factor,
          .k_factor = scratch.k_factor,
          .qk = scratch.qk_product,
          .decay = scratch.decay + first_gate,
          .beta = scratch.beta + first_gate};
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
