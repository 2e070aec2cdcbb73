// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16 with fp32 sums by BFMMLA: four elements a step. The instruction multiplies two rows by two columns,
// so sums are kept as such squares while they grow.
#pragma once

#include <arm_neon.h>

#include "tile.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct ArmBf16Engine {
  using Element = BFloat16;
  static constexpr std::int64_t kStep = 4;
  static constexpr Sums kSums = Sums::kInRegisters;
  static constexpr std::int64_t kSpan = kChunkTokens;
  static constexpr bool kMultipliesSquares = true;
  struct Session {};

  GDN_INLINE bfloat16x8_t load(const BFloat16* p) {
    return vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const std::uint16_t*>(p)));
  }
  GDN_INLINE bfloat16x8_t load_rows(const BFloat16* first, const BFloat16* second) {
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(first)),
                                               vld1_u16(reinterpret_cast<const std::uint16_t*>(second))));
  }
  GDN_INLINE Vec add_squares(const BFloat16* p, Vec sum) {
    const bfloat16x8_t low = load(p), high = load(p + 8);
    return {vbfdotq_f32(vbfdotq_f32(sum.v, low, low), high, high)};
  }

  GDN_INLINE float32x4_t first_halves(float32x4_t a, float32x4_t b) {
    return vcombine_f32(vget_low_f32(a), vget_low_f32(b));
  }
  GDN_INLINE float32x4_t second_halves(float32x4_t a, float32x4_t b) {
    return vcombine_f32(vget_high_f32(a), vget_high_f32(b));
  }

  template <int kRows, int kVectors>
  GDN_INLINE void accumulate(Vec (&sums)[kRows][kVectors], Left<ArmBf16Engine> left, Right<ArmBf16Engine> right,
                             std::int64_t steps) {
    float32x4_t squares[kRows / 2][2 * kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows / 2; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        squares[r][2 * j] = first_halves(sums[2 * r][j].v, sums[2 * r + 1][j].v);
        squares[r][2 * j + 1] = second_halves(sums[2 * r][j].v, sums[2 * r + 1][j].v);
      }
    }
    for (std::int64_t s = 0; s < steps; ++s) {
      bfloat16x8_t columns[2 * kVectors];
#pragma GCC unroll 8
      for (int j = 0; j < 2 * kVectors; ++j) columns[j] = load(right.data + s * right.step_stride + j * 2 * kStep);
#pragma GCC unroll 8
      for (int r = 0; r < kRows / 2; ++r) {
        const BFloat16* row = left.data + 2 * r * left.row_stride + s * left.step_stride;
        const bfloat16x8_t rows = load_rows(row, row + left.row_stride);
#pragma GCC unroll 8
        for (int j = 0; j < 2 * kVectors; ++j) squares[r][j] = vbfmmlaq_f32(squares[r][j], rows, columns[j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows / 2; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sums[2 * r][j].v = first_halves(squares[r][2 * j], squares[r][2 * j + 1]);
        sums[2 * r + 1][j].v = second_halves(squares[r][2 * j], squares[r][2 * j + 1]);
      }
    }
  }

  GDN_INLINE void store_row(BFloat16* p, Vec x) {
    vst1_u16(reinterpret_cast<std::uint16_t*>(p), vreinterpret_u16_bf16(vcvt_bf16_f32(x.v)));
  }
  GDN_INLINE void store_rows(BFloat16* packed, std::int64_t step_stride, std::int64_t row, const Vec* x) {
    Vec columns[4] = {x[0], x[1], x[2], x[3]};
    transpose(columns);
    BFloat16* step = packed + row / kStep * step_stride;
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) store_row(step + c * kStep, columns[c]);
  }

  // Element (token, key) of the left operand k^T [kChunkTokens / 4, padded keys, 4].
  GDN_INLINE std::int64_t step_index(std::int64_t token, std::int64_t key, std::int64_t padded) {
    return (token / kStep * padded + key) * kStep + token % kStep;
  }
  GDN_INLINE void pack_steps(const BFloat16* rows, std::int64_t count, std::int64_t padded, BFloat16* steps) {
    for (std::int64_t token = 0; token < count; token += kStep) {
      for (std::int64_t key = 0; key < padded; key += 8) {
        const auto* row = reinterpret_cast<const std::uint16_t*>(rows + token * padded + key);
        const uint16x8x4_t tokens = {
            {vld1q_u16(row), vld1q_u16(row + padded), vld1q_u16(row + 2 * padded), vld1q_u16(row + 3 * padded)}};
        vst4q_u16(reinterpret_cast<std::uint16_t*>(steps + step_index(token, key, padded)), tokens);
      }
    }
  }
};

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
