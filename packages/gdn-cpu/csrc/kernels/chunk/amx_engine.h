// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16 on AMX tiles. Operands are those of AVX512-BF16, but k^T, whose rows are keys. Blocks of 16 rows are
// multiplied at a time, into memory, where the rows of a chunk read them.
#pragma once

#include "../simd/transpose.h"
#include "amx_tiles.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct AmxEngine : Avx512Bf16Engine {
  static constexpr Sums kSums = Sums::kOfBlocks;
  static constexpr std::int64_t kSpan = kChunkTokens;
  using Session = TileSession;

  template <int kLefts>
  GDN_INLINE void multiply_blocks(const BFloat16* const* left, std::int64_t left_stride, const BFloat16* right,
                                  std::int64_t right_stride, std::int64_t steps, std::int64_t column_blocks,
                                  const SumBlock* sums) {
    multiply_tile_rows<kLefts>(left, left_stride, right, right_stride, steps, column_blocks, sums);
  }

  // Element (token, key) of k^T [padded keys, kChunkTokens].
  GDN_INLINE std::int64_t step_index(std::int64_t token, std::int64_t key, std::int64_t) {
    return key * kChunkTokens + token;
  }
  GDN_INLINE void pack_steps(const BFloat16* rows, std::int64_t count, std::int64_t padded, BFloat16* steps) {
    for (std::int64_t token = 0; token < count; token += 32) {
      for (std::int64_t key = 0; key < padded; key += 16) {
        Vec pairs[16];
        for (std::int64_t i = 0; i < 16; ++i) {
          const BFloat16* first = rows + (token + 2 * i) * padded + key;
          const bool exists = token + 2 * i < count;
          const __m512i words = exists ? join_rows(first, first + padded) : _mm512_setzero_si512();
          pairs[i].v = _mm512_castsi512_ps(words);
        }
        transpose(pairs);
        for (std::int64_t i = 0; i < 16; ++i) _mm512_storeu_ps(steps + (key + i) * kChunkTokens + token, pairs[i].v);
      }
    }
  }
};

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
