// SPDX-License-Identifier: Apache-2.0
//
// One token of one head as the state passes see it, and the two lines of the rule that are the same in both layouts.
#pragma once

#include "state_tile.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Token {
  const float* q;  // [key_dim], padded with zeros, not normalised
  const float* k;
  float q_factor, k_factor;  // what they have to be multiplied with
  float qk;                  // of q and k with their factors
  float decay;
  float beta;
  float scale;
  bool is_resident;  // the state is in a cache, since the token before
  NextState* next;
  std::int64_t key_dim;
  std::int64_t v_begin, v_end;  // the columns of this tile
  DType v_dtype, out_dtype;
  const void* v;
  std::int64_t v_index;  // of column v_begin
  void* out;
  std::int64_t out_index;
  float* record;  // of u, from column v_begin on; null: not recorded
};

// k M and q M of a tile, in whole vectors.
struct Sums {
  alignas(kScratchAlignment) float km[kMaxHeadDim];
  alignas(kScratchAlignment) float qm[kMaxHeadDim];
  bool are_ready = false;  // for the next token, by whoever wrote the state that it reads
};

// u = beta (v - decay k M); km is the product with the k that is not normalised.
GDN_INLINE Vec token_delta(const Token& token, Vec v, Vec km) {
  return mul(set1(token.beta), fma(set1(-(token.decay * token.k_factor)), km, v));
}

// o = scale (decay q M + (q k) u), which is scale q (decay M + k u^T).
GDN_INLINE Vec token_output(const Token& token, Vec qm, Vec u) {
  return mul(set1(token.scale), fma(set1(token.qk), u, mul(set1(token.decay * token.q_factor), qm)));
}

// Whole vectors that hold n elements.
GDN_INLINE void fill_zero(float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(x + i, zero());
}

// For `width` columns: the output, and u in the form that the update multiplies with the k that is not normalised.
template <class V, class Out>
GDN_INLINE void finish_columns(const Token& token, const V* v, Out* out, std::int64_t width, const float* km,
                               const float* qm, float* u, float* record) {
  for (std::int64_t c = 0; c < width; c += kLanes) {
    const std::int64_t n = width - c;
    const Vec delta = token_delta(token, load_up_to(v + c, n), load(km + c));
    store_up_to(out + c, token_output(token, load(qm + c), delta), n);
    store(u + c, mul(set1(token.k_factor), delta));
    if (record != nullptr) store_up_to(record + c, delta, n);
  }
}

// Columns [column, column + width) of the tile; km, qm and u hold whole vectors.
void finish_columns(const Token& token, std::int64_t column, std::int64_t width, const float* km, const float* qm,
                    float* u) {
  float* record = token.record != nullptr ? token.record + column : nullptr;
  with_dtype(token.v_dtype, token.v, [&](auto v) {
    with_dtype(token.out_dtype, token.out, [&](auto out) {
      finish_columns(token, v + token.v_index + column, out + token.out_index + column, width, km, qm, u, record);
    });
  });
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
