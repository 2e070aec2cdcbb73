// SPDX-License-Identifier: Apache-2.0
//
// One token on a tile of a [K, V] state: a lane is a value column, so no sum crosses lanes. Two passes over the rows,
//   km = k M, qm = q M;    u = beta (v - decay km), o = scale (decay qm + (q k) u);    M = decay M + k u^T,
// the second from the cache. Each column's sums run over the rows in order, whatever the tile.
#pragma once

#include "rank_one_update.h"
#include "token.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// kIsFromMemory: so are whole rows, which are read in order.
template <int kVectors, bool kIsFromMemory, class Source>
GDN_INLINE void accumulate_strip(Source tile, const float* k, const float* q, std::int64_t row, std::int64_t row_end,
                                 std::int64_t column, float* km, float* qm, NextState& next) {
  NextState ahead = next;
  Vec k_sum[kVectors], q_sum[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) {
    k_sum[j] = row == 0 ? zero() : load(km + column + j * kLanes);
    q_sum[j] = row == 0 ? zero() : load(qm + column + j * kLanes);
  }
  for (; row < row_end; ++row) {
    const auto m = row_of(tile, row);
    ask_while_reading<kIsFromMemory>(m, kVectors * kLanes, ahead);
    const Vec k_row = set1(k[row]), q_row = set1(q[row]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const Vec x = in_register(load_columns(m, column + j * kLanes));
      k_sum[j] = fma(x, k_row, k_sum[j]);
      q_sum[j] = fma(x, q_row, q_sum[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) {
    store(km + column + j * kLanes, k_sum[j]);
    store(qm + column + j * kLanes, q_sum[j]);
  }
  next = ahead;
}

template <class Source>
GDN_INLINE void accumulate_tail(Source tile, const float* k, const float* q, std::int64_t row, std::int64_t row_end,
                                std::int64_t column, std::int64_t n, float* km, float* qm) {
  Vec k_sum = row == 0 ? zero() : load(km + column);
  Vec q_sum = row == 0 ? zero() : load(qm + column);
  for (; row < row_end; ++row) {
    const Vec x = load_columns(row_of(tile, row), column, n);
    k_sum = fma(x, set1(k[row]), k_sum);
    q_sum = fma(x, set1(q[row]), q_sum);
  }
  store(km + column, k_sum);
  store(qm + column, q_sum);
}

// km and qm over rows [row, row_end), on top of what the rows before gave.
template <class Source>
GDN_INLINE void accumulate_band(Source tile, const float* k, const float* q, std::int64_t row, std::int64_t row_end,
                                std::int64_t width, float* km, float* qm, NextState& next) {
  std::int64_t c = 0;
  for (; c + kStripVectors * kLanes <= width; c += kStripVectors * kLanes) {
    accumulate_strip<kStripVectors, false>(tile, k, q, row, row_end, c, km, qm, next);
  }
  if constexpr (kStripVectors > 4) {
    if (c + 4 * kLanes <= width) {
      accumulate_strip<4, false>(tile, k, q, row, row_end, c, km, qm, next);
      c += 4 * kLanes;
    }
  }
  if (c + 2 * kLanes <= width) {
    accumulate_strip<2, false>(tile, k, q, row, row_end, c, km, qm, next);
    c += 2 * kLanes;
  }
  if (c + kLanes <= width) {
    accumulate_strip<1, false>(tile, k, q, row, row_end, c, km, qm, next);
    c += kLanes;
  }
  if (c < width) accumulate_tail(tile, k, q, row, row_end, c, width - c, km, qm);
}

template <class Source>
void accumulate(Source tile, const Token& token, std::int64_t width, float* km, float* qm) {
  const std::int64_t rows = token.key_dim;
  if (width == kStripVectors * kLanes && token.is_resident) {
    return accumulate_strip<kStripVectors, false>(tile, token.k, token.q, 0, rows, 0, km, qm, *token.next);
  }
  if (width == kStripVectors * kLanes) {
    return accumulate_strip<kStripVectors, true>(tile, token.k, token.q, 0, rows, 0, km, qm, *token.next);
  }
  const std::int64_t band = width < kStripVectors * kLanes ? rows : kBandRows;
  for (std::int64_t row = 0; row < rows; row += band) {
    const std::int64_t row_end = min_of(row + band, rows);
    if (!token.is_resident && band < rows) touch_rows(tile, row, row_end, width);
    accumulate_band(tile, token.k, token.q, row, row_end, width, km, qm, *token.next);
  }
}

struct KFirst {};

template <class Source, class Destination>
void step(KFirst, const Token& token, Source source, Destination destination) {
  alignas(kScratchAlignment) float km[kMaxHeadDim], qm[kMaxHeadDim], u[kMaxHeadDim];
  const std::int64_t width = token.v_end - token.v_begin;
  if constexpr (kIsAbsent<Source>) {
    fill_zero(km, width);
    fill_zero(qm, width);
  } else {
    accumulate(source, token, width, km, qm);
  }
  finish_columns(token, 0, width, km, qm, u);
  if constexpr (!kIsAbsent<Destination>) {
    update(source, destination, token.k, token.decay, token.key_dim, width, u, *token.next);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
