// SPDX-License-Identifier: Apache-2.0
//
// Products by OpenBLAS, of fp32 or of bf16 with fp32 sums: operands lie as rows, all rows of a chunk are multiplied at
// a time, and sums go to memory. The library promises nothing about the order of a sum, so the shapes of its calls
// follow from the chunk's length and from K and V alone, never from who runs the chunk with whom.
#pragma once

#include "workspace.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Columns are divided between panels, and where other code cuts them too.
constexpr std::int64_t kWholePanels = kPanelColumns % 16 == 0 ? kPanelColumns : 16 / kLanes * kPanelColumns;
static_assert(kWholePanels % 16 == 0 && kWholePanels % kPanelColumns == 0);

template <class T>
struct BlasEngine {
  using Element = T;
  static constexpr std::int64_t kStep = 1;
  static constexpr Sums kSums = Sums::kOfChunks;
  static constexpr std::int64_t kSpan = kChunkTokens;
  static constexpr bool kMultipliesSquares = false;
  struct Session {};

  // c [m, n] = op(a) b + (keeps ? c : 0), rows of n floats.
  static void multiply(const Blas& blas, int op_a, const T* a, std::int64_t stride_a, int op_b, const T* b,
                       std::int64_t stride_b, std::int64_t m, std::int64_t n, std::int64_t k, bool keeps, float* c,
                       std::int64_t stride_c) {
    const auto number = [](std::int64_t x) { return static_cast<int>(x); };
    const float beta = keeps ? 1.0f : 0.0f;
    if constexpr (kIsFloat<T>) {
      blas.sgemm(Blas::kRowMajor, op_a, op_b, number(m), number(n), number(k), 1.0f, a, number(stride_a), b,
                 number(stride_b), beta, c, number(stride_c));
    } else {
      blas.sbgemm(Blas::kRowMajor, op_a, op_b, number(m), number(n), number(k), 1.0f,
                  reinterpret_cast<const std::uint16_t*>(a), number(stride_a),
                  reinterpret_cast<const std::uint16_t*>(b), number(stride_b), beta, c, number(stride_c));
    }
  }

  GDN_INLINE Vec add_squares(const T* p, Vec sum) {
    const Vec x = load(p);
    return fma(x, x, sum);
  }
  GDN_INLINE void store_rows(T* packed, std::int64_t step_stride, std::int64_t row, const Vec* x) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) store(packed + (row + r) * step_stride, x[r]);
  }
  // Element (token, key) of the left operand k^T: the rows of k themselves.
  GDN_INLINE std::int64_t step_index(std::int64_t token, std::int64_t key, std::int64_t padded) {
    return token * padded + key;
  }
  GDN_INLINE void store_row(T* p, Vec x) { store(p, x); }
};

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
