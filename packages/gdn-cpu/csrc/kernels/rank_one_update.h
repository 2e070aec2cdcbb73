// SPDX-License-Identifier: Apache-2.0
//
// The update of the state, M = decay M + a b^T: a = k, b = u in the [K, V] layout, a = u, b = k in the [V, K] one.
// Every element sees one multiplication and one fma, whatever the tile.
#pragma once

#include "state_tile.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Vectors of columns that a pass works on at a time: two accumulators each in the first pass.
constexpr int kStripVectors = kRegisters >= 32 ? 8 : 4;
// Tiles are walked in bands of rows, so that memory is read nearly in order where a tile is wider than one strip.
constexpr std::int64_t kBandRows = 16;

template <int kVectors, int kAsk, class Source, class Destination>
GDN_INLINE void update_strip(Source source, Destination destination, const float* row_factors, Vec decay,
                             std::int64_t row, std::int64_t row_end, std::int64_t column, const float* column_factors,
                             NextState& next) {
  Vec factors[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) factors[j] = load(column_factors + column + j * kLanes);
  constexpr bool kSplits =
      kVectors % 2 == 0 && kIsSplit<decltype(row_of(source, 0))> && kIsSplit<decltype(row_of(destination, 0))>;
  if constexpr (kSplits) split_columns(factors);
  NextState ahead = next;  // a copy, which stores to the state cannot alias
  for (std::int64_t r = row; r < row_end; ++r) {
    const auto from = row_of(source, r);
    auto to = row_of(destination, r);
    const Vec row_factor = set1(row_factors[r]);
    ask_for(ahead, kAsk * bytes_ahead(kVectors * kLanes));
    if constexpr (kSplits) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; j += 2) {
        const std::int64_t c = column + j * kLanes;
        Vec even, odd;
        load_split(from + c, even, odd);
        even = fma(row_factor, factors[j], mul(decay, even));
        odd = fma(row_factor, factors[j + 1], mul(decay, odd));
        store_split_columns(to, c, even, odd);
      }
    } else if constexpr (kVectors % 2 == 0 && kStoresPairs<decltype(to)>) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; j += 2) {
        const std::int64_t c = column + j * kLanes;
        const Vec first = fma(row_factor, factors[j], mul(decay, load_columns(from, c)));
        const Vec second = fma(row_factor, factors[j + 1], mul(decay, load_columns(from, c + kLanes)));
        store_column_pair(to, c, first, second);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const Vec decayed = mul(decay, load_columns(from, column + j * kLanes));
        store_columns(to, column + j * kLanes, fma(row_factor, factors[j], decayed));
      }
    }
  }
  next = ahead;
}

template <class Source, class Destination>
GDN_INLINE void update_tail(Source source, Destination destination, const float* row_factors, Vec decay,
                            std::int64_t row, std::int64_t row_end, std::int64_t column, std::int64_t n,
                            const float* column_factors) {
  const Vec factors = load(column_factors + column);
  for (; row < row_end; ++row) {
    const Vec decayed = mul(decay, load_columns(row_of(source, row), column, n));
    store_columns(row_of(destination, row), column, fma(set1(row_factors[row]), factors, decayed), n);
  }
}

template <int kAsk, class Source, class Destination>
GDN_INLINE void update_band(Source source, Destination destination, const float* row_factors, Vec decay,
                            std::int64_t row, std::int64_t row_end, std::int64_t width, const float* column_factors,
                            NextState& next) {
  std::int64_t c = 0;
  for (; c + kStripVectors * kLanes <= width; c += kStripVectors * kLanes) {
    update_strip<kStripVectors, kAsk>(source, destination, row_factors, decay, row, row_end, c, column_factors, next);
  }
  if constexpr (kStripVectors > 4) {
    if (c + 4 * kLanes <= width) {
      update_strip<4, kAsk>(source, destination, row_factors, decay, row, row_end, c, column_factors, next);
      c += 4 * kLanes;
    }
  }
  if (c + 2 * kLanes <= width) {
    update_strip<2, kAsk>(source, destination, row_factors, decay, row, row_end, c, column_factors, next);
    c += 2 * kLanes;
  }
  if (c + kLanes <= width) {
    update_strip<1, kAsk>(source, destination, row_factors, decay, row, row_end, c, column_factors, next);
    c += kLanes;
  }
  if (c < width) update_tail(source, destination, row_factors, decay, row, row_end, c, width - c, column_factors);
}

// M = decay M + row_factors column_factors^T over a tile of rows x width, the last band first. Asks for kAsk times as
// much of the next state as there are elements, in bytes.
template <int kAsk, class Source, class Destination>
void update(Source source, Destination destination, const float* row_factors, float decay, std::int64_t rows,
            std::int64_t width, const float* column_factors, NextState& next) {
  const std::int64_t band = width <= kStripVectors * kLanes ? rows : kBandRows;
  for (std::int64_t row = (rows - 1) / band * band; row >= 0; row -= band) {
    update_band<kAsk>(source, destination, row_factors, set1(decay), row, min_of(row + band, rows), width,
                      column_factors, next);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
