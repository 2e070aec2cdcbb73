// SPDX-License-Identifier: Apache-2.0
//
// One token on a tile of a [V, K] state: a row is a value column, a lane is a key. Groups of rows in one pass: both dot
// products of every row, then the updates while the group is in the nearest cache. The sum over lanes has one tree for
// all rows, so a row's values do not depend on the rows beside it. Memory is read row by row, for the processor's own
// prefetcher to follow.
#pragma once

#include "rank_one_update.h"
#include "token.h"
#include "token_block.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Elements of the rows that are read, then updated, before the next ones: they stay in the nearest cache. Fewer where
// they may come from memory, which then has reads and writes nearer to each other.
constexpr std::int64_t group_elements(bool is_resident) { return is_resident ? 4096 : 2048; }

// Rows side by side, so that none waits for its own sums.
template <class RowPointer>
GDN_INLINE void multiply_rows(const RowPointer* rows, const float* k, const float* q, std::int64_t key_dim, float* km,
                              float* qm) {
  Vec sum[2 * kSumRows];
#pragma GCC unroll 16
  for (int r = 0; r < 2 * kSumRows; ++r) sum[r] = zero();
  std::int64_t i = 0;
  for (; i + kLanes <= key_dim; i += kLanes) {
    const Vec k_part = load(k + i), q_part = load(q + i);
#pragma GCC unroll 8
    for (int r = 0; r < kSumRows; ++r) {
      const Vec x = in_register(load_columns(rows[r], i));
      sum[r] = fma(x, k_part, sum[r]);
      sum[kSumRows + r] = fma(x, q_part, sum[kSumRows + r]);
    }
  }
  if (i < key_dim) {
    const Vec k_part = load(k + i), q_part = load(q + i);
#pragma GCC unroll 8
    for (int r = 0; r < kSumRows; ++r) {
      const Vec x = load_columns(rows[r], i, key_dim - i);
      sum[r] = fma(x, k_part, sum[r]);
      sum[kSumRows + r] = fma(x, q_part, sum[kSumRows + r]);
    }
  }
  store_sums(sum, km, qm);
}

// The same of rows of kStripVectors vectors, one after the other: unrolled, the next row's sums fill the wait for
// one's.
template <bool kIsFromMemory, class RowPointer>
GDN_INLINE void multiply_rows_in_order(const RowPointer* rows, const float* k, const float* q, float* km, float* qm,
                                       NextState& next) {
  Vec sum[2 * kSumRows];
#pragma GCC unroll 8
  for (int r = 0; r < kSumRows; ++r) {
    Vec k_sum = zero(), q_sum = zero();
    ask_while_reading<kIsFromMemory>(rows[r], kStripVectors * kLanes, next);
#pragma GCC unroll 8
    for (int j = 0; j < kStripVectors; ++j) {
      const Vec x = in_register(load_columns(rows[r], j * kLanes));
      k_sum = fma(x, load(k + j * kLanes), k_sum);
      q_sum = fma(x, load(q + j * kLanes), q_sum);
    }
    sum[r] = k_sum;
    sum[kSumRows + r] = q_sum;
  }
  store_sums(sum, km, qm);
}

// km and qm of rows [0, count) of the tile.
template <class Source>
void multiply(Source tile, const Token& token, std::int64_t count, float* km, float* qm) {
  NextState ahead = *token.next;
  for (std::int64_t row = 0; row < count; row += kSumRows) {
    decltype(row_of(tile, 0)) rows[kSumRows];
    // A short last block repeats its last row, so that there is one code path and one order.
    for (int r = 0; r < kSumRows; ++r) rows[r] = row_of(tile, min_of(row + r, count - 1));
    if (kRegisters >= 32 && token.key_dim == kStripVectors * kLanes) {
      if (token.is_resident) {
        multiply_rows_in_order<false>(rows, token.k, token.q, km + row, qm + row, ahead);
      } else {
        multiply_rows_in_order<true>(rows, token.k, token.q, km + row, qm + row, ahead);
      }
    } else {
      if (!token.is_resident) touch_rows(tile, row, min_of(row + kSumRows, count), token.key_dim);
      multiply_rows(rows, token.k, token.q, token.key_dim, km + row, qm + row);
    }
  }
  *token.next = ahead;
}

// How many times as much of the next state as there are elements the update of an only token asks for, in bytes: all of
// an fp32 one, since a group's loads and stores stay in the nearest cache. Where records or tokens follow each other,
// that would come at once.
template <class Source>
constexpr int kAsk = 1;
template <>
constexpr int kAsk<Tile<const float>> = sizeof(float);

struct VFirst {};

template <class Source, class Destination>
void step(VFirst, const Token& token, const Token* after, Source source, Destination destination, Sums& sums) {
  alignas(kScratchAlignment) float u[kMaxHeadDim];
  float *km = sums.km, *qm = sums.qm;
  const std::int64_t rows = token.v_end - token.v_begin;
  const bool is_only = !token.is_resident && after == nullptr && token.record == nullptr;
  const std::int64_t group = group_elements(token.is_resident) / padded_row(token.key_dim);
  for (std::int64_t row = 0; row < rows; row += group) {
    const std::int64_t count = min_of(group, rows - row);
    const auto from = rows_from(source, row);
    if constexpr (kIsAbsent<Source>) {
      fill_zero(km, count);
      fill_zero(qm, count);
    } else {
      multiply(from, token, count, km, qm);
    }
    finish_columns(token, row, count, km, qm, u);
    if constexpr (!kIsAbsent<Destination>) {
      const auto to = rows_from(destination, row);
      if (is_only) {
        update<kAsk<Source>>(from, to, u, token.decay, count, token.key_dim, token.k, *token.next);
      } else {
        update<1>(from, to, u, token.decay, count, token.key_dim, token.k, *token.next);
      }
    }
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
