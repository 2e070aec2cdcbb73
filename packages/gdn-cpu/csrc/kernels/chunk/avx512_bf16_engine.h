// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16 with fp32 sums, on AVX512-BF16: two elements a step. The instruction treats subnormal operands as
// zero, and rounds each sum once an element.
#pragma once

#include "tile.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Avx512Bf16Engine {
  using Element = BFloat16;
  struct Packed {
    __m512bh v;
  };
  static constexpr std::int64_t kStep = 2;
  static constexpr Sums kSums = Sums::kInRegisters;
  static constexpr std::int64_t kSpan = kChunkTokens;
  static constexpr bool kMultipliesSquares = false;
  struct Session {};

  GDN_INLINE __m512bh as_pairs(__m512i x) {
    __m512bh pairs;
    std::memcpy(&pairs, &x, sizeof pairs);
    return pairs;
  }
  GDN_INLINE __m512i as_bits(__m512bh x) {
    __m512i bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }

  GDN_INLINE Packed load(const BFloat16* p) {
    __m512i x = _mm512_loadu_si512(p);
    __asm__("" : "+v"(x));
    return {as_pairs(x)};
  }
  GDN_INLINE Packed broadcast(const BFloat16* p) {
    int pair;
    std::memcpy(&pair, p, sizeof pair);
    __m512i x = _mm512_set1_epi32(pair);
    __asm__("" : "+v"(x));
    return {as_pairs(x)};
  }
  GDN_INLINE Vec multiply_add(Packed a, Packed b, Vec sum) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }

  GDN_INLINE Vec add_squares(const BFloat16* p, Vec sum) {
    const Packed x = load(p);
    return multiply_add(x, x, sum);
  }

  GDN_INLINE __m512i interleave(Vec first, Vec second) {
    const __m512i word = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(word, as_bits(_mm512_cvtne2ps_pbh(second.v, first.v)));
  }
  GDN_INLINE void store_rows(BFloat16* packed, std::int64_t step_stride, std::int64_t row, const Vec* x) {
    BFloat16* step = packed + row / 2 * step_stride;
    _mm512_storeu_si512(step, interleave(x[0], x[1]));
    _mm512_storeu_si512(step + step_stride, interleave(x[2], x[3]));
  }
  // Words of two rows side by side.
  GDN_INLINE __m512i join_rows(const BFloat16* first, const BFloat16* second) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  // Element (token, key) of the left operand k^T [kChunkTokens / 2, padded keys, 2].
  GDN_INLINE std::int64_t step_index(std::int64_t token, std::int64_t key, std::int64_t padded) {
    return (token / 2 * padded + key) * 2 + token % 2;
  }
  GDN_INLINE void pack_steps(const BFloat16* rows, std::int64_t count, std::int64_t padded, BFloat16* steps) {
    for (std::int64_t token = 0; token < count; token += 2) {
      const BFloat16* first = rows + token * padded;
      for (std::int64_t key = 0; key < padded; key += 16) {
        _mm512_storeu_si512(steps + step_index(token, key, padded), join_rows(first + key, first + padded + key));
      }
    }
  }
  GDN_INLINE void store_row(BFloat16* p, Vec x) {
    __m256bh half = _mm512_cvtneps_pbh(x.v);
    std::memcpy(p, &half, sizeof half);
  }
};

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
