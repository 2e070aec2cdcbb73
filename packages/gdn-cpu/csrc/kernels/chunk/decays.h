// SPDX-License-Identifier: Apache-2.0
//
// The gates of a chunk and what they make of k k^T and q k^T. Every decay is the exp of a difference of prefix sums
// that is <= 0. The sums are kept in two fp32 parts, so that a difference of large ones loses nothing.
#pragma once

#include "key_operands.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Tokens [begin, end) of a chunk, from one reset (g = -inf) to the next: nothing passes a reset.
struct Segment {
  std::int64_t begin, end;
  bool is_reset;  // its first token resets the state
};

// Any g below this decays everything to 0; sums of it stay far inside the range.
constexpr float kLeastLogDecay = -1e4f;

template <class Engine>
void load_chunk_gates(const RecurrenceParams& p, const TokenRow& row, std::int64_t head, std::int64_t first,
                      std::int64_t count, const ChunkOperands<Engine>& chunk) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t n = min_of(kLanes, count - i);
    const bool has_gate = p.gate_kind != Gate::kNone;
    store(chunk.log_decay + i,
          has_gate ? log_decay_of(p, head, gather_tokens(p.gate, row, first + i, head, n)) : zero());
    const bool has_beta = p.beta_kind != Beta::kOne;
    store(chunk.beta + i, beta_of(p, has_beta ? gather_tokens(p.beta, row, first + i, head, n) : set1(1.0f)));
  }
}

// The segment that begins at `begin`.
template <class Engine>
Segment next_segment(const ChunkOperands<Engine>& chunk, std::int64_t begin, std::int64_t count) {
  const auto is_reset = [&](std::int64_t i) { return chunk.log_decay[i] == -__builtin_inff(); };
  const std::int64_t last_end = span_end<Engine>(begin, count);
  std::int64_t end = begin + 1;
  while (end < last_end && !is_reset(end)) ++end;
  return {begin, end, is_reset(begin)};
}

// Rows that share a block with the segment's.
GDN_INLINE void clear_outside(const Segment& segment, std::int64_t row_size, float* rows) {
  const std::int64_t first = segment.begin / kRowBlock * kRowBlock;
  clear_rows(rows + first * row_size, (segment.begin - first) * row_size);
  clear_rows(rows + segment.end * row_size, (round_up(segment.end, kRowBlock) - segment.end) * row_size);
}

// G over the segment and the decays from its start and to its end. Returns the decay of the whole segment.
template <class Engine>
float sum_gates(const Segment& segment, const KeyOperands<Engine>& key, const ChunkOperands<Engine>& chunk) {
  double sum = 0.0;
  for (std::int64_t i = segment.begin; i < segment.end; ++i) {
    const float g = chunk.log_decay[i];
    if (i > segment.begin || !segment.is_reset) sum += static_cast<double>(g < kLeastLogDecay ? kLeastLogDecay : g);
    chunk.sum_high[i] = static_cast<float>(sum);
    chunk.sum_low[i] = static_cast<float>(sum - static_cast<double>(chunk.sum_high[i]));
  }
  const std::int64_t last = segment.end - 1;
  const Vec high = set1(chunk.sum_high[last]), low = set1(chunk.sum_low[last]);
  for (std::int64_t i = segment.begin / kLanes * kLanes; i < segment.end; i += kLanes) {
    const Vec difference = add(sub(high, load(chunk.sum_high + i)), sub(low, load(chunk.sum_low + i)));
    store(chunk.end_factor + i, mul(exp(difference), load(key.k_factor + i)));
    store(chunk.state_factor + i, exp(load(chunk.sum_high + i)));
  }
  clear_outside(segment, 1, chunk.end_factor);
  return chunk.state_factor[last];
}

// Lanes [begin, end) of the vector of tokens from `first` on.
GDN_INLINE Vec keep_tokens(Vec x, Vec token, float before_begin, float end) {
  const Vec kept = select(less(token, set1(end)), x, zero());
  return select(less(set1(before_begin), token), kept, zero());
}

// exp(G_i - G_j) of tokens j in a block before the one of i, as a product of two factors that are at most 1:
// exp(G_i - G_last) exp(G_last - G_j), with the last token of the block of j. `to_last` has the factor 1 / |k_j| too.
struct BlockDecays {
  static constexpr std::int64_t kBlocks = kTokens / kRowBlock;
  alignas(kScratchAlignment) float to_last[kTokens];
  alignas(kScratchAlignment) float from_last[kBlocks][kTokens];
};

template <class Engine>
void decay_blocks(const Segment& segment, const KeyOperands<Engine>& key, const ChunkOperands<Engine>& chunk,
                  BlockDecays& decays) {
  const std::int64_t last_block = (segment.end - 1) / kRowBlock;
  for (std::int64_t block = segment.begin / kRowBlock; block < last_block; ++block) {
    const std::int64_t last = (block + 1) * kRowBlock - 1;
    const Vec high = set1(chunk.sum_high[last]), low = set1(chunk.sum_low[last]);
    for (std::int64_t j = block * kRowBlock; j <= last; j += kLanes) {
      const Vec difference = add(sub(high, load(chunk.sum_high + j)), sub(low, load(chunk.sum_low + j)));
      store(decays.to_last + j, mul(exp(difference), load(key.k_factor + j)));
    }
    for (std::int64_t i = last + 1; i < segment.end; i += kLanes) {
      const Vec difference = add(sub(load(chunk.sum_high + i), high), sub(load(chunk.sum_low + i), low));
      store(decays.from_last[block] + i, exp(difference));
    }
  }
}

// One row of mixing and attention, in the making.
template <class Engine>
struct MixedRow {
  const KeyOperands<Engine>& key;
  const ChunkOperands<Engine>& chunk;
  std::int64_t row;  // index of its first element
  Vec beta, q_factor;

  // From the decays of tokens from j on; `keep` zeroes what is masked, whatever is there.
  template <class Keep>
  inline __attribute__((always_inline)) void store_tokens(std::int64_t j, Vec decay, Keep keep) const {
    store(chunk.mixing + row + j, keep(mul(beta, mul(decay, load(key.kk + row + j)))));
    Engine::store_row(chunk.attention + row + j, keep(mul(q_factor, mul(decay, load(key.qk + row + j)))));
  }
};

// mixing and attention of the rows of a segment, up to the diagonal block.
template <class Engine>
void mix_tokens(const Segment& segment, const KeyOperands<Engine>& key, const ChunkOperands<Engine>& chunk) {
  BlockDecays decays;
  decay_blocks(segment, key, chunk, decays);
  float lane_numbers[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) lane_numbers[i] = static_cast<float>(i);
  const Vec lanes = load(lane_numbers);
  const auto begin = static_cast<float>(segment.begin) - 0.5f;
  clear_outside(segment, kTokens, chunk.mixing);
  for (std::int64_t i = segment.begin; i < segment.end; ++i) {
    const MixedRow<Engine> mixed{key, chunk, i * kTokens, set1(-chunk.beta[i] * key.k_factor[i]),
                                 set1(key.q_factor[i])};
    const std::int64_t diagonal = i / kRowBlock * kRowBlock;
    for (std::int64_t j = span_begin<Engine>(segment.begin); j < diagonal; j += kLanes) {
      const std::int64_t block = j / kRowBlock;
      if (block * kRowBlock + kRowBlock <= segment.begin) {
        mixed.store_tokens(j, zero(), [](Vec) { return zero(); });
        continue;
      }
      const Vec decay = mul(set1(decays.from_last[block][i]), load(decays.to_last + j));
      if (segment.begin <= j) {
        mixed.store_tokens(j, decay, [](Vec x) { return x; });
      } else {
        const Vec token = add(lanes, set1(static_cast<float>(j)));
        mixed.store_tokens(j, decay, [&](Vec x) { return select(less(set1(begin), token), x, zero()); });
      }
    }
    const Vec high = set1(chunk.sum_high[i]), low = set1(chunk.sum_low[i]);
    const auto end = static_cast<float>(i) + 0.5f;
    for (std::int64_t j = diagonal; j < diagonal + kRowBlock; j += kLanes) {
      const Vec token = add(lanes, set1(static_cast<float>(j)));
      const Vec difference = add(sub(high, load(chunk.sum_high + j)), sub(low, load(chunk.sum_low + j)));
      const Vec decay = mul(exp(keep_tokens(difference, token, begin, end)), load(key.k_factor + j));
      mixed.store_tokens(j, decay, [&](Vec x) { return keep_tokens(x, token, begin, end); });
    }
    const std::int64_t block_end = diagonal + kRowBlock;
    if constexpr (Engine::kSums == Sums::kOfBlocks)
      clear_rows(chunk.attention + i * kTokens + block_end, block_end % (2 * kRowBlock));
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
