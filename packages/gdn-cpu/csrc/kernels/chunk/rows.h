// SPDX-License-Identifier: Apache-2.0
//
// The rows of a chunk, for one panel of columns, block by block from the first on:
//   u_i = beta_i (v_i - exp(G_i) k_i M) + sum_{j < i} mixing_ij u_j,   o_i = scale (exp(G_i) q_i M + sum_{j <= i}
//   attention_ij u_j)
// with the state M from before the span, in which the sums over j stay too. That of u is a forward substitution in
// fp32: tiles of earlier rows as a product, the rows of the tile itself in registers.
#pragma once

#include "decays.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Rows of the next chunk, that its memory may be asked for while this one is computed: a head's rows lie a token's
// heads apart, which the processor's own prefetcher does not follow.
struct NextRows {
  struct Operand {
    const void* data;  // of row 0
    std::int64_t stride, bytes;
  };
  Operand operands[4];  // of q, k, v and o; of no bytes where another task asks
  std::int64_t count;
};

// States in memory that are moved next: that of the next head, and where this head's goes. Each row asks for a part. Of
// a step: what another thread has prepared for the next one, of the key head and of the head.
struct StatesAhead {
  NextState loaded, stored;
  std::int64_t row_bytes;
};

// One panel of columns of one head and a segment of a chunk.
template <class Engine>
struct PanelTask {
  using Element = typename Engine::Element;
  const RecurrenceParams& params;
  const KeyOperands<Engine>& key;
  const ChunkOperands<Engine>& chunk;
  const Segment& segment;
  const NextRows& next;
  StatesAhead& states;
  std::int64_t keys;        // padded
  std::int64_t chunk_rows;  // whole blocks
  std::int64_t v_index;     // of the panel's first column in the chunk's first token
  std::int64_t out_index;   // the same
  std::int64_t columns;     // of v
  const Element* state;     // panel of the rounded state; null: zero
  bool leaves_outputs;      // to a call of their own: nothing of q is multiplied
  float* u;                 // panels of the chunk's operands
  Element* u_packed;
  Element* u_decayed;

  bool holds(std::int64_t row) const { return row >= segment.begin && row < segment.end; }
  bool holds(std::int64_t row, std::int64_t rows) const { return row >= segment.begin && row + rows <= segment.end; }
};

constexpr std::int64_t panel_stride(std::int64_t vectors) { return vectors * kLanes; }

template <int kRows, int kVectors>
GDN_INLINE void load_sums(const float* sums, std::int64_t row, Vec (&x)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[r][j] = load(sums + ((row + r) * kVectors + j) * kLanes);
  }
}

// k M of all rows of the chunk, or q M, where the engine multiplies chunks: sums[0] or sums[1].
template <class Engine, int kVectors>
GDN_INLINE void multiply_state_chunk(const PanelTask<Engine>& task, const typename Engine::Element* rows) {
  if constexpr (Engine::kSums == Sums::kOfChunks) {
    if (task.state == nullptr) return;
    constexpr std::int64_t width = kVectors * kLanes;
    float* sums = task.chunk.sums + (rows == task.key.q ? kTokens * width : 0);
    Engine::multiply(*task.key.blas, Blas::kAsIs, rows, task.keys, Blas::kAsIs, task.state, width, task.chunk_rows,
                     width, task.keys, false, sums, width);
  }
}

// The same of a block of rows, where the engine multiplies blocks: of k and q at once, or of one of them.
template <class Engine, int kVectors>
GDN_INLINE void multiply_state_block(const PanelTask<Engine>& task, std::int64_t block, bool of_k, bool of_q) {
  if constexpr (Engine::kSums == Sums::kOfBlocks) {
    if (task.state == nullptr) return;
    constexpr std::int64_t width = kVectors * kLanes;
    const typename Engine::Element* const left[] = {task.key.k + block * task.keys, task.key.q + block * task.keys};
    const SumBlock sums[] = {{task.chunk.sums, width}, {task.chunk.sums + kRowBlock * width, width}};
    const std::int64_t right_stride = width * 2, steps = task.keys / 2;
    if (of_k && of_q) {
      Engine::template multiply_blocks<2>(left, task.keys, task.state, right_stride, steps, kVectors, sums);
    } else {
      const int i = of_k ? 0 : 1;
      Engine::template multiply_blocks<1>(left + i, task.keys, task.state, right_stride, steps, kVectors, sums + i);
    }
  }
}

// attention u of a block of rows, over its sums[0]. Products of tiles are of 32 tokens: those after the block count as
// zero, and the next block writes its own there.
template <class Engine, int kVectors>
GDN_INLINE void multiply_attention_block(const PanelTask<Engine>& task, std::int64_t block) {
  constexpr std::int64_t width = kVectors * kLanes;
  if constexpr (Engine::kSums == Sums::kOfChunks) {
    Engine::multiply(*task.key.blas, Blas::kAsIs, task.chunk.attention + block * kTokens, kTokens, Blas::kAsIs,
                     task.u_packed, width, kRowBlock, width, block + kRowBlock, false, task.chunk.sums + block * width,
                     width);
  }
  if constexpr (Engine::kSums == Sums::kOfBlocks) {
    const std::int64_t tokens = round_up(block + kRowBlock, 2 * kRowBlock);
    clear_rows(task.u_packed + (block + kRowBlock) * width, (tokens - block - kRowBlock) * width);
    const typename Engine::Element* const left[] = {task.chunk.attention + block * kTokens};
    const SumBlock sums[] = {{task.chunk.sums, width}};
    Engine::template multiply_blocks<1>(left, kTokens, task.u_packed, width * 2, tokens / 2, kVectors, sums);
  }
}

template <class Engine, int kRows, int kVectors>
GDN_INLINE void multiply_state(const PanelTask<Engine>& task, const typename Engine::Element* rows, std::int64_t row,
                               Vec (&x)[kRows][kVectors]) {
  clear(x);
  if (task.state == nullptr) return;
  if constexpr (Engine::kSums != Sums::kInRegisters) {
    constexpr std::int64_t sum_rows = kRowsOfSums<Engine>;
    load_sums(task.chunk.sums + (rows == task.key.q ? sum_rows * kVectors * kLanes : 0), row % sum_rows, x);
  } else {
    accumulate<Engine>(x, Left<Engine>{rows + row * task.keys, task.keys, Engine::kStep},
                       Right<Engine>{task.state, kVectors * kLanes * Engine::kStep}, task.keys / Engine::kStep);
  }
}

template <int kRows, int kVectors>
GDN_INLINE void zero_outside(const Segment& segment, std::int64_t row, Vec (&x)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (row + r >= segment.begin && row + r < segment.end) continue;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[r][j] = zero();
  }
}

// Whether the panel's part of a row of x is whole vectors of bf16. To look at dtype and length of each vector took 2 %
// of all time.
template <int kVectors, class Engine, class AnyOperand>
GDN_INLINE bool is_plain(const PanelTask<Engine>& task, const AnyOperand& x) {
  return x.dtype == DType::kBFloat16 && task.columns >= kVectors * kLanes;
}

// beta (v - exp(G) k M) of a tile of rows. kIsPlain: v is plain, all rows are in the segment, and there is a state.
template <bool kIsPlain, class Engine, int kRows, int kVectors>
GDN_INLINE void start_rows_of(const PanelTask<Engine>& task, std::int64_t row, Vec (&x)[kRows][kVectors]) {
  const Operand& v = task.params.v;
  const bool is_whole = kIsPlain || task.holds(row, kRows);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (!is_whole && !task.holds(row + r)) continue;
    const Vec beta = set1(task.chunk.beta[row + r]);
    const Vec factor = set1(-task.chunk.state_factor[row + r] * task.key.k_factor[row + r]);
    const std::int64_t index = task.v_index + (row + r) * v.token_stride;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t c = j * kLanes;
      const Vec value = kIsPlain ? load(static_cast<const BFloat16*>(v.data) + index + c)
                                 : load_as(v.dtype, v.data, index + c, task.columns - c);
      x[r][j] = mul(beta, kIsPlain || task.state != nullptr ? fma(factor, x[r][j], value) : value);
    }
  }
  if (!is_whole) zero_outside(task.segment, row, x);
}

template <class Engine, int kRows, int kVectors>
GDN_INLINE void start_rows(const PanelTask<Engine>& task, std::int64_t row, Vec (&x)[kRows][kVectors]) {
  if (task.state != nullptr && task.holds(row, kRows) && is_plain<kVectors>(task, task.params.v)) {
    return start_rows_of<true>(task, row, x);
  }
  start_rows_of<false>(task, row, x);
}

// The rows of the tile from those before it in the tile.
template <int kRows, int kVectors>
GDN_INLINE void substitute(const float* mixing, Vec (&x)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int s = 0; s + 1 < kRows; ++s) {
#pragma GCC unroll 16
    for (int r = s + 1; r < kRows; ++r) {
      const Vec factor = in_register(set1(mixing[r * kTokens + s]));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) x[r][j] = fma(factor, x[s][j], x[r][j]);
    }
  }
}

// Stores a tile of u in its three forms; adds to `check` a NaN where a value is not finite, or not
// once it is rounded.
template <class Engine, int kRows, int kVectors>
GDN_INLINE void store_delta(const PanelTask<Engine>& task, std::int64_t row, Vec (&x)[kRows][kVectors], Vec& check) {
  constexpr std::int64_t width = kVectors * kLanes;
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r += 4) {
      Vec rows[4], decayed[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        rows[i] = x[r + i][j];
        decayed[i] = mul(rows[i], set1(task.chunk.end_factor[row + r + i]));
        const Vec twice = add(rows[i], rows[i]);
        check = add(check, sub(twice, twice));
        store(task.u + (row + r + i) * width + j * kLanes, rows[i]);
      }
      const std::int64_t column = j * kLanes * Engine::kStep;
      if constexpr (!kIsFloat<typename Engine::Element>) {
        Engine::store_rows(task.u_packed + column, width * Engine::kStep, row + r, rows);
      }
      Engine::store_rows(task.u_decayed + column, width * Engine::kStep, row + r, decayed);
    }
  }
}

// The decayed form of a segment's u again, of a panel from `first` on; where u is fp32.
template <int kVectors, class Engine>
void decay_rows(const Segment& segment, const ChunkOperands<Engine>& chunk, std::int64_t first) {
  constexpr std::int64_t width = kVectors * kLanes;
  for (std::int64_t row = segment.begin; row < segment.end; ++row) {
    const Vec factor = set1(chunk.end_factor[row]);
    for (std::int64_t i = first + row * width; i < first + (row + 1) * width; i += kLanes) {
      store(chunk.u_decayed + i, mul(load(chunk.u + i), factor));
    }
  }
}

// Asks for rows [row, row + kRows) of the next chunk.
template <int kRows>
GDN_INLINE void prefetch_rows(const NextRows& next, std::int64_t row) {
  for (std::int64_t i = row; i < min_of(row + kRows, next.count); ++i) {
    for (const NextRows::Operand& x : next.operands) {
      if (x.bytes > 0) prefetch(x.data, i * x.stride, x.bytes);
    }
  }
}

template <class Engine, int kRows, int kVectors>
GDN_INLINE void delta_tile(const PanelTask<Engine>& task, std::int64_t row, Vec& check) {
  Vec x[kRows][kVectors];
  prefetch_rows<kRows>(task.next, row);
  ask_for(task.states.loaded, kRows * task.states.row_bytes);
  ask_for(task.states.stored, kRows * task.states.row_bytes);
  multiply_state(task, task.key.k, row, x);
  start_rows(task, row, x);
  const float* mixing = task.chunk.mixing + row * kTokens;
  const std::int64_t span = span_begin<Engine>(row);
  accumulate<Fp32Engine>(x, Left<Fp32Engine>{mixing + span, kTokens, 1},
                         Right<Fp32Engine>{task.u + span * kVectors * kLanes, kVectors * kLanes}, row - span);
  substitute(mixing + row, x);
  if (!task.holds(row, kRows)) zero_outside(task.segment, row, x);
  store_delta(task, row, x, check);
}

template <class T>
GDN_INLINE void store_adjacent(T* to, Vec a, Vec b) {
  if constexpr (requires { store_pair(to, a, b); }) {
    store_pair(to, a, b);
  } else {
    store(to, a);
    store(to + kLanes, b);
  }
}

// A tile of plain outputs, whose rows are all in the segment.
template <class Engine, int kRows, int kVectors>
GDN_INLINE void store_plain_rows(const PanelTask<Engine>& task, std::int64_t row, Vec (&x)[kRows][kVectors]) {
  const MutableOperand& out = task.params.out;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    BFloat16* to = static_cast<BFloat16*>(out.data) + task.out_index + (row + r) * out.token_stride;
#pragma GCC unroll 4
    for (int j = 0; j + 1 < kVectors; j += 2) store_adjacent(to + j * kLanes, x[r][j], x[r][j + 1]);
    if constexpr (kVectors % 2 == 1) store(to + (kVectors - 1) * kLanes, x[r][kVectors - 1]);
  }
}

// Rows [begin, end) of the tile are stored.
template <class Engine, int kRows, int kVectors>
GDN_INLINE void output_tile(const PanelTask<Engine>& task, std::int64_t row, std::int64_t begin, std::int64_t end) {
  Vec x[kRows][kVectors];
  multiply_state(task, task.key.q, row, x);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = set1(task.chunk.state_factor[row + r] * task.key.q_factor[row + r]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[r][j] = mul(factor, x[r][j]);
  }
  if constexpr (Engine::kSums != Sums::kInRegisters) {
    Vec attended[kRows][kVectors];
    load_sums(task.chunk.sums, row % kRowsOfSums<Engine>, attended);
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kVectors; ++j) x[r][j] = add(x[r][j], attended[r][j]);
    }
  } else {
    const std::int64_t span = span_begin<Engine>(row);
    accumulate<Engine>(x, Left<Engine>{task.chunk.attention + row * kTokens + span, kTokens, Engine::kStep},
                       Right<Engine>{task.u_packed + span * kVectors * kLanes, kVectors * kLanes * Engine::kStep},
                       (row + kRows - span) / Engine::kStep);
  }
  const MutableOperand& out = task.params.out;
  const Vec scale = set1(task.params.scale);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    // Adding 0 leaves one kind of zero: how many masked products follow must not show.
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[r][j] = add(mul(scale, x[r][j]), zero());
  }
  if (begin <= row && row + kRows <= end && is_plain<kVectors>(task, out)) return store_plain_rows(task, row, x);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (row + r < begin || row + r >= end) continue;
    const std::int64_t index = task.out_index + (row + r) * out.token_stride;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      store_as(out.dtype, out.data, index + j * kLanes, x[r][j], task.columns - j * kLanes);
    }
  }
}

// The outputs of a block whose u are not all finite: a masked 0 * NaN is a NaN. From the last row to the first, each
// with the later rows of u cleared; later blocks find them as they were.
template <class Engine, int kVectors>
void output_block_with_nan(const PanelTask<Engine>& task, std::int64_t block) {
  constexpr int kRows = kTileRows<kVectors>;
  constexpr std::int64_t width = kVectors * kLanes;
  typename Engine::Element* u = task.u_packed + block * width;
  const std::size_t size = sizeof(*u) * static_cast<std::size_t>(kRowBlock * width);
  std::memcpy(task.chunk.u_block, u, size);
  const std::int64_t first = task.segment.begin > block ? task.segment.begin : block;
  for (std::int64_t row = min_of(block + kRowBlock, task.segment.end) - 1; row >= first; --row) {
    multiply_attention_block<Engine, kVectors>(task, block);
    output_tile<Engine, kRows, kVectors>(task, row / kRows * kRows, row, row + 1);
    for (std::int64_t c = 0; c < width; ++c) {
      u[(row - block) / Engine::kStep * width * Engine::kStep + c * Engine::kStep + row % Engine::kStep] = {};
    }
  }
  std::memcpy(u, task.chunk.u_block, size);
}

GDN_INLINE bool is_finite(Vec check) { return lane_bits(less(abs(check), set1(1.0f))) == (1u << kLanes) - 1u; }

// The outputs of a block whose u is there.
template <class Engine, int kVectors>
GDN_INLINE void output_block(const PanelTask<Engine>& task, std::int64_t block, std::int64_t end, bool has_nan) {
  constexpr int kRows = kTileRows<kVectors>;
  if (has_nan) return output_block_with_nan<Engine, kVectors>(task, block);
  multiply_attention_block<Engine, kVectors>(task, block);
  for (std::int64_t row = block; row < end; row += kRows) {
    output_tile<Engine, kRows, kVectors>(task, row, task.segment.begin, task.segment.end);
  }
}

// A product of a block reads all its rows of u.
template <class Engine>
GDN_INLINE std::int64_t end_of_block(const Segment& segment, std::int64_t block) {
  const bool needs_all = Engine::kSums != Sums::kInRegisters;
  return needs_all ? block + kRowBlock : min_of(block + kRowBlock, segment.end);
}

// u, and outputs unless these are left to run_outputs. Returns a bit for each block whose u is not all finite.
template <class Engine, int kVectors>
unsigned run_rows(const PanelTask<Engine>& task) {
  constexpr int kRows = kTileRows<kVectors>;
  const Segment& segment = task.segment;
  unsigned not_finite = 0;
  multiply_state_chunk<Engine, kVectors>(task, task.key.k);
  if (!task.leaves_outputs) multiply_state_chunk<Engine, kVectors>(task, task.key.q);
  for (std::int64_t block = segment.begin / kRowBlock * kRowBlock; block < segment.end; block += kRowBlock) {
    Vec check = zero();
    const std::int64_t end = end_of_block<Engine>(segment, block);
    multiply_state_block<Engine, kVectors>(task, block, true, !task.leaves_outputs);
    for (std::int64_t row = block; row < end; row += kRows) delta_tile<Engine, kRows, kVectors>(task, row, check);
    const bool has_nan = !is_finite(check);
    if (has_nan) not_finite |= 1u << (block / kRowBlock);
    if (!task.leaves_outputs) output_block<Engine, kVectors>(task, block, end, has_nan);
  }
  return not_finite;
}

// The outputs that run_rows has left, `not_finite` being what it returned. Last block first: products of tiles want the
// rows of u after a block cleared.
template <class Engine, int kVectors>
void run_outputs(const PanelTask<Engine>& task, unsigned not_finite) {
  const Segment& segment = task.segment;
  multiply_state_chunk<Engine, kVectors>(task, task.key.q);
  for (std::int64_t block = (segment.end - 1) / kRowBlock * kRowBlock; block >= segment.begin; block -= kRowBlock) {
    multiply_state_block<Engine, kVectors>(task, block, false, true);
    const bool has_nan = (not_finite >> (block / kRowBlock) & 1u) != 0;
    output_block<Engine, kVectors>(task, block, end_of_block<Engine>(segment, block), has_nan);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
