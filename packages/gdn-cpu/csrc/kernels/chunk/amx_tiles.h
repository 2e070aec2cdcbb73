// SPDX-License-Identifier: Apache-2.0
//
// The AMX instructions, each with a memory clobber: the compiler's own intrinsics have none, and GCC 12 then drops
// stores that only a tile load reads.
#pragma once

#include "avx512_bf16_engine.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Tiles 0 to 3 are sums [16, 16] of fp32, 4 and 5 left operands [16, 32], 6 and 7 right ones [16 pairs, 16, 2] of bf16.
constexpr int kTileRowCount = 16;
constexpr int kTileRowBytes = 64;
constexpr std::int64_t kTilePairs = 16;  // steps of one product

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles are configured for the thread as long as it lives.
class TileSession {
 public:
  TileSession() {
    TileConfiguration configuration;
    for (int i = 0; i < 8; ++i) {
      configuration.row_bytes[i] = kTileRowBytes;
      configuration.rows[i] = kTileRowCount;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
  }
  ~TileSession() { __asm__ volatile("tilerelease" : : : "memory"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

template <int kTile>
GDN_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile) : "memory");
}
template <int kTile>
GDN_INLINE void tile_load(const void* p, std::int64_t row_bytes) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(p), "r"(row_bytes) : "memory");
}
template <int kTile>
GDN_INLINE void tile_store(void* p, std::int64_t row_bytes) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(p), "r"(row_bytes) : "memory");
}
// sum += left right
template <int kSum, int kLeft, int kRight>
GDN_INLINE void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
}

// left is [16, steps], rows apart by its stride; right is [steps, 16 columns]. `kLefts` row blocks, one per left
// operand, by `kRights` column blocks of 16: every loaded tile serves all sums it can.
template <int kLefts, int kRights>
GDN_INLINE void multiply_tiles(const BFloat16* const* left, std::int64_t left_stride, const BFloat16* right,
                               std::int64_t right_stride, std::int64_t steps, const SumBlock* sums) {
  static_assert(kLefts <= 2 && kRights <= 2);
  constexpr std::int64_t size = sizeof(BFloat16);
  tile_zero<0>();
  if constexpr (kRights > 1) tile_zero<1>();
  if constexpr (kLefts > 1) tile_zero<2>();
  if constexpr (kLefts > 1 && kRights > 1) tile_zero<3>();
  for (std::int64_t step = 0; step < steps; step += kTilePairs) {
    const BFloat16* columns = right + step * right_stride;
    tile_load<4>(left[0] + step * 2, left_stride * size);
    tile_load<6>(columns, right_stride * size);
    tile_multiply<0, 4, 6>();
    if constexpr (kRights > 1) {
      tile_load<7>(columns + kTileRowCount * 2, right_stride * size);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (kLefts > 1) {
      tile_load<5>(left[1] + step * 2, left_stride * size);
      tile_multiply<2, 5, 6>();
      if constexpr (kRights > 1) tile_multiply<3, 5, 7>();
    }
  }
  constexpr std::int64_t float_size = sizeof(float);
  tile_store<0>(sums[0].data, sums[0].stride * float_size);
  if constexpr (kRights > 1) tile_store<1>(sums[0].data + kTileRowCount, sums[0].stride * float_size);
  if constexpr (kLefts > 1) tile_store<2>(sums[1].data, sums[1].stride * float_size);
  if constexpr (kLefts > 1 && kRights > 1) {
    tile_store<3>(sums[1].data + kTileRowCount, sums[1].stride * float_size);
  }
}

// Two row blocks by `column_blocks` blocks of columns.
template <int kLefts>
GDN_INLINE void multiply_tile_rows(const BFloat16* const* left, std::int64_t left_stride, const BFloat16* right,
                                   std::int64_t right_stride, std::int64_t steps, std::int64_t column_blocks,
                                   const SumBlock* sums) {
  for (std::int64_t block = 0; block < column_blocks; block += 2) {
    const std::int64_t column = block * kTileRowCount;
    SumBlock there[kLefts];
    for (int i = 0; i < kLefts; ++i) there[i] = {sums[i].data + column, sums[i].stride};
    if (block + 1 < column_blocks) {
      multiply_tiles<kLefts, 2>(left, left_stride, right + column * 2, right_stride, steps, there);
    } else {
      multiply_tiles<kLefts, 1>(left, left_stride, right + column * 2, right_stride, steps, there);
    }
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
