// SPDX-License-Identifier: Apache-2.0
//
// Replaying records of tokens, M = decay M + k u^T for one after the other, in one pass over the state. Every element
// sees the operations that the tokens themselves applied, in their order: the state comes out the same bit for bit.
#pragma once

#include "recurrence_k_first.h"
#include "recurrence_v_first.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// The records of one slot and head, oldest first. As in the update by a token, k is not normalised and u is scaled by
// what would normalise it. Rows are kMaxHeadDim apart, padded with zeros to whole vectors.
struct RecordBlock {
  std::int64_t count = 0;
  bool is_reset = false;  // the first decay is 0: the state before is not read
  const float* k = nullptr;
  const float* u = nullptr;  // columns from v_begin of the item on
  float decay[kMaxRecords];
};

void load_record_keys(const RecurrenceParams& p, std::int64_t slot, std::int64_t key_head, std::int64_t count,
                      RecurrenceScratch& scratch) {
  const MutableOperand& recorded = p.replay->k;
  for (std::int64_t i = 0; i < count; ++i) {
    float* k = scratch.record_k + i * kMaxHeadDim;
    const std::int64_t index = element_index(recorded, slot, i, key_head);
    scratch.record_k_factor[i] = load_row(recorded, index, p, k);
  }
}

// Records of columns [v_begin, v_end). Those before a reset are left out.
RecordBlock load_records(const RecurrenceParams& p, std::int64_t sequence, std::int64_t head, std::int64_t v_begin,
                         std::int64_t v_end, RecurrenceScratch& scratch) {
  const Replay& replay = *p.replay;
  const std::int64_t slot = p.source_slots[sequence];
  const std::int64_t key_head = key_head_of(p, head);
  const std::int64_t count = replay.counts[sequence];
  if (!has_keys(scratch, sequence, key_head)) load_record_keys(p, slot, key_head, count, scratch);
  const auto* decays = static_cast<const float*>(replay.decay.data);
  const auto* all_u = static_cast<const float*>(replay.u.data);
  RecordBlock records;
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float decay = decays[element_index(replay.decay, slot, i, head)];
    if (is_reset(decay)) {
      first = i;
      records.is_reset = true;
    }
    records.decay[i - first] = decay;
  }
  records.count = count - first;
  records.k = scratch.record_k + first * kMaxHeadDim;
  records.u = scratch.record_u + first * kMaxHeadDim;
  for (std::int64_t i = first; i < count; ++i) {
    float* u = scratch.record_u + i * kMaxHeadDim;
    const Vec k_factor = set1(scratch.record_k_factor[i]);
    const float* recorded = all_u + element_index(replay.u, slot, i, head) + v_begin;
    for (std::int64_t c = 0; c < v_end - v_begin; c += kLanes) {
      store(u + c, mul(k_factor, load_up_to(recorded + c, v_end - v_begin - c)));
    }
  }
  return records;
}

void prefetch_records(const RecurrenceParams& p, std::int64_t sequence, std::int64_t head) {
  const Replay& replay = *p.replay;
  const std::int64_t slot = p.source_slots[sequence];
  for (std::int64_t i = 0; i < replay.counts[sequence]; ++i) {
    const std::int64_t k_index = element_index(replay.k, slot, i, key_head_of(p, head));
    prefetch(replay.k.data, k_index * element_size(replay.k.dtype), p.key_dim * element_size(replay.k.dtype));
    prefetch(replay.u.data, element_index(replay.u, slot, i, head) * element_size(DType::kFloat32),
             p.value_dim * element_size(DType::kFloat32));
  }
}

// One record on vectors of one row, in registers.
template <int kVectors>
GDN_INLINE void replay_row(Vec (&x)[kVectors], float decay, float row_factor, const float* factors) {
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) x[j] = fma(set1(row_factor), load(factors + j * kLanes), mul(set1(decay), x[j]));
}

// row_factors and column_factors of record i start at i * kMaxHeadDim.
template <int kVectors, class Source, class Destination>
GDN_INLINE void replay_strip(const RecordBlock& records, Source source, Destination destination,
                             const float* row_factors, const float* column_factors, std::int64_t rows,
                             std::int64_t column, std::int64_t n, NextState& next) {
  NextState ahead = next;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto from = row_of(source, r);
    ask_for(ahead, bytes_ahead(kVectors * kLanes));
    Vec x[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t c = column + j * kLanes;
      x[j] = kVectors > 1 || n >= kLanes ? load_columns(from, c) : load_columns(from, c, n);
    }
    for (std::int64_t i = 0; i < records.count; ++i) {
      replay_row<kVectors>(x, records.decay[i], row_factors[i * kMaxHeadDim + r],
                           column_factors + i * kMaxHeadDim + column);
    }
    const auto to = row_of(destination, r);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t c = column + j * kLanes;
      if (kVectors > 1 || n >= kLanes) {
        store_columns(to, c, x[j]);
      } else {
        store_columns(to, c, x[j], n);
      }
    }
  }
  next = ahead;
}

// Of a [K, V] tile that one strip covers, with the sums of the token that reads the state next. Several records take
// the arithmetic longer than the memory: it asks for all of the next state, so that the tokens have the caches to
// themselves. One record does not, and leaves most of it to the tokens.
template <class Source>
void replay_and_accumulate(const RecordBlock& records, Source source, Tile<float> destination, std::int64_t column,
                           const Token& after, Sums& sums) {
  constexpr std::int64_t kRow = kStripVectors * kLanes;
  const std::int64_t asked = records.count == 1 ? bytes_ahead(kRow) : kRow * static_cast<std::int64_t>(sizeof(float));
  NextState ahead = *after.next;
  Vec k_sum[kStripVectors], q_sum[kStripVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kStripVectors; ++j) k_sum[j] = q_sum[j] = zero();
  for (std::int64_t r = 0; r < after.key_dim; ++r) {
    const auto from = row_of(source, r);
    ask_for(ahead, asked);
    Vec x[kStripVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kStripVectors; ++j) x[j] = load_columns(from, j * kLanes);
    for (std::int64_t i = 0; i < records.count; ++i) {
      replay_row<kStripVectors>(x, records.decay[i], records.k[i * kMaxHeadDim + r],
                                records.u + i * kMaxHeadDim + column);
    }
    float* to = row_of(destination, r);
    const Vec k_row = set1(after.k[r]), q_row = set1(after.q[r]);
#pragma GCC unroll 8
    for (int j = 0; j < kStripVectors; ++j) {
      store(to + j * kLanes, x[j]);
      k_sum[j] = fma(x[j], k_row, k_sum[j]);
      q_sum[j] = fma(x[j], q_row, q_sum[j]);
    }
  }
  put_sums(k_sum, q_sum, sums);
  *after.next = ahead;
}

template <class Source, class Destination>
void replay_tile(const RecordBlock& records, Source source, Destination destination, const float* row_factors,
                 const float* column_factors, std::int64_t rows, std::int64_t width, NextState& next) {
  std::int64_t c = 0;
  for (; c + kStripVectors * kLanes <= width; c += kStripVectors * kLanes) {
    replay_strip<kStripVectors>(records, source, destination, row_factors, column_factors, rows, c, width - c, next);
  }
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
    replay_strip<2>(records, source, destination, row_factors, column_factors, rows, c, width - c, next);
  }
  for (; c < width; c += kLanes) {
    replay_strip<1>(records, source, destination, row_factors, column_factors, rows, c, width - c, next);
  }
}

// `width` columns of the state, those of u from `column` on.
template <class Source, class Destination>
void replay_records(KFirst, const RecordBlock& records, Source source, Destination destination, std::int64_t column,
                    std::int64_t width, std::int64_t key_dim, NextState& next) {
  replay_tile(records, source, destination, records.k, records.u + column, key_dim, width, next);
}
template <class Source, class Destination>
void replay_records(VFirst, const RecordBlock& records, Source source, Destination destination, std::int64_t column,
                    std::int64_t width, std::int64_t key_dim, NextState& next) {
  replay_tile(records, source, destination, records.u + column, records.k, width, key_dim, next);
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
