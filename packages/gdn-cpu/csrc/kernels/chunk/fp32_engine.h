// SPDX-License-Identifier: Apache-2.0
//
// Products in fp32 on Vec: one element a step. Runs at every level, for activations of every dtype.
#pragma once

#include "tile.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Fp32Engine {
  using Element = float;
  using Packed = Vec;
  static constexpr std::int64_t kStep = 1;
  static constexpr Sums kSums = Sums::kInRegisters;
  // In fp32 products cost more than one more update: spans of 64 tokens take 1.08 to 1.12 times as long on AVX2 and
  // AVX-512, 1.05 to 1.11 times on SSE2. Spans of 16 would take another 2 to 3 % less, but
  // where another thread computes the outputs of a chunk, it updates the state once more for each span but the last.
  static constexpr std::int64_t kSpan = 32;
  static constexpr bool kMultipliesSquares = false;
  struct Session {};  // what a thread has to set up

  GDN_INLINE Packed load(const float* p) { return in_register(gdn::cpu::GDN_ISA::load(p)); }
  GDN_INLINE Packed broadcast(const float* p) { return in_register(set1(*p)); }
  GDN_INLINE Vec multiply_add(Packed a, Packed b, Vec sum) { return fma(a, b, sum); }
  // The squares of kLanes * kStep elements.
  GDN_INLINE Vec add_squares(const float* p, Vec sum) {
    const Vec x = load(p);
    return fma(x, x, sum);
  }

  // Rows `row` to `row` + 3 of a packed operand, whose columns the vectors are.
  GDN_INLINE void store_rows(float* packed, std::int64_t step_stride, std::int64_t row, const Vec* x) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) store(packed + (row + r) * step_stride, x[r]);
  }
  // Element (token, key) of the left operand k^T: the rows of k themselves.
  GDN_INLINE std::int64_t step_index(std::int64_t token, std::int64_t key, std::int64_t padded) {
    return token * padded + key;
  }
  // Consecutive elements of a left operand.
  GDN_INLINE void store_row(float* p, Vec x) { store(p, x); }
};

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
