// SPDX-License-Identifier: Apache-2.0
//
// One token on a tile of a [K, V] state: a lane is a value column, so no sum crosses lanes. Two passes over the rows,
//   km = k M, qm = q M;    u = beta (v - decay km), o = scale (decay qm + (q k) u);    M = decay M + k u^T,
// the second from the cache. Where one strip covers the tile, the second pass of a token is the first of the next one:
// the multipliers, with four operations a vector, hide all of its loads and stores. Each column's sums run over the
// rows in order, whatever the tile.
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
  constexpr bool kSplits = kVectors % 2 == 0 && kIsSplit<decltype(row_of(tile, 0))>;
  if constexpr (kSplits) split_columns(k_sum), split_columns(q_sum);
  for (; row < row_end; ++row) {
    const auto m = row_of(tile, row);
    ask_while_reading<kIsFromMemory>(m, kVectors * kLanes, ahead);
    const Vec k_row = set1(k[row]), q_row = set1(q[row]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j += kSplits ? 2 : 1) {
      if constexpr (kSplits) {
        Vec even, odd;
        load_split(m + column + j * kLanes, even, odd);
        k_sum[j] = fma(even, k_row, k_sum[j]);
        q_sum[j] = fma(even, q_row, q_sum[j]);
        k_sum[j + 1] = fma(odd, k_row, k_sum[j + 1]);
        q_sum[j + 1] = fma(odd, q_row, q_sum[j + 1]);
      } else {
        const Vec x = in_register(load_columns(m, column + j * kLanes));
        k_sum[j] = fma(x, k_row, k_sum[j]);
        q_sum[j] = fma(x, q_row, q_sum[j]);
      }
    }
  }
  if constexpr (kSplits) join_columns(k_sum), join_columns(q_sum);
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

GDN_INLINE void put_sums(const Vec (&k_sum)[kStripVectors], const Vec (&q_sum)[kStripVectors], Sums& sums) {
#pragma GCC unroll 8
  for (int j = 0; j < kStripVectors; ++j) {
    store(sums.km + j * kLanes, k_sum[j]);
    store(sums.qm + j * kLanes, q_sum[j]);
  }
  sums.are_ready = true;
}

// A tile that one strip covers: its update, and while a new row is in registers, the sums of the token after it. They
// see the operations of `accumulate` in their order.
template <class Source, class Destination>
void update_and_accumulate(Source source, Destination destination, const Token& token, const Token& after,
                           const float* u, Sums& sums) {
  constexpr int kVectors = kStripVectors;
  NextState ahead = *token.next;  // a copy, which stores to the state cannot alias
  const Vec decay = set1(token.decay);
  Vec k_sum[kVectors], q_sum[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) k_sum[j] = q_sum[j] = zero();
  for (std::int64_t r = 0; r < token.key_dim; ++r) {
    const auto from = row_of(source, r);
    auto to = row_of(destination, r);
    const Vec row_factor = set1(token.k[r]);
    const Vec k_row = set1(after.k[r]), q_row = set1(after.q[r]);
    ask_for(ahead, bytes_ahead(kVectors * kLanes));
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j += 2) {
      const std::int64_t c = j * kLanes;
      const Vec first = fma(row_factor, load(u + c), mul(decay, load_columns(from, c)));
      const Vec second = fma(row_factor, load(u + c + kLanes), mul(decay, load_columns(from, c + kLanes)));
      store_two_columns(to, c, first, second);
      k_sum[j] = fma(first, k_row, k_sum[j]);
      q_sum[j] = fma(first, q_row, q_sum[j]);
      k_sum[j + 1] = fma(second, k_row, k_sum[j + 1]);
      q_sum[j + 1] = fma(second, q_row, q_sum[j + 1]);
    }
  }
  put_sums(k_sum, q_sum, sums);
  *token.next = ahead;
}

struct KFirst {};

template <class Layout>
constexpr bool kIsKFirst = false;
template <>
constexpr bool kIsKFirst<KFirst> = true;

// after: the token that reads what this one leaves in the destination; null: none does.
template <class Source, class Destination>
void step(KFirst, const Token& token, const Token* after, Source source, Destination destination, Sums& sums) {
  alignas(kScratchAlignment) float u[kMaxHeadDim];
  const std::int64_t width = token.v_end - token.v_begin;
  if (!sums.are_ready) {
    if constexpr (kIsAbsent<Source>) {
      fill_zero(sums.km, width);
      fill_zero(sums.qm, width);
    } else {
      accumulate(source, token, width, sums.km, sums.qm);
    }
  }
  finish_columns(token, 0, width, sums.km, sums.qm, u);
  sums.are_ready = false;
  if constexpr (!kIsAbsent<Destination>) {
    if (after != nullptr && width == kStripVectors * kLanes) {
      return update_and_accumulate(source, destination, token, *after, u, sums);
    }
    update<1>(source, destination, token.k, token.decay, token.key_dim, width, u, *token.next);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
