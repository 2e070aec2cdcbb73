// SPDX-License-Identifier: Apache-2.0
//
// What the value heads of a key head share: q and k of a chunk as operands, their norms, k k^T and q k^T.
#pragma once

#include "../token_block.h"
#include "workspace.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// A row of fp32, zeros beyond `dim`.
template <class T>
GDN_INLINE void copy_row(const T* x, std::int64_t dim, std::int64_t padded, float* row) {
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(row + i, load(x + i));
  if (i < dim) {
    store(row + i, load_n(x + i, dim - i));
    i += kLanes;
  }
  for (; i < padded; i += kLanes) store(row + i, zero());
}
// A row of bf16 as it is; engines that multiply in bf16 take no other activations.
GDN_INLINE void copy_row(const BFloat16* x, std::int64_t dim, std::int64_t padded, BFloat16* row) {
  constexpr std::int64_t kWords = 32;
  std::int64_t i = 0;
  for (; i + kWords <= dim; i += kWords) std::memcpy(row + i, x + i, kWords * sizeof(BFloat16));
  if (i == padded) return;
  std::memset(row + i, 0, static_cast<std::size_t>(padded - i) * sizeof(BFloat16));
  std::memcpy(row + i, x + i, static_cast<std::size_t>(dim - i) * sizeof(BFloat16));
}

template <class Element>
GDN_INLINE void clear_rows(Element* x, std::int64_t count) {
  std::memset(static_cast<void*>(x), 0, static_cast<std::size_t>(count) * sizeof(Element));
}

// Tokens [first, first + count) of a head, rows of zeros up to a whole block.
template <class Element>
void load_rows(const Operand& x, const TokenRow& row, std::int64_t first, std::int64_t count, std::int64_t head,
               std::int64_t dim, std::int64_t padded, Element* rows) {
  const auto copy = [&](const auto* data) {
    for (std::int64_t i = 0; i < count; ++i) {
      copy_row(data + element_index(x, row.batch, row.first + first + i, head), dim, padded, rows + i * padded);
    }
  };
  if constexpr (kIsFloat<Element>) {
    with_dtype(x.dtype, x.data, copy);
  } else {
    copy(static_cast<const BFloat16*>(x.data));
  }
  clear_rows(rows + count * padded, (round_up(count, kRowBlock) - count) * padded);
}

template <class Engine>
void inverse_norms(const typename Engine::Element* rows, std::int64_t count, std::int64_t padded, float* factors) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const typename Engine::Element* row = rows + i * padded;
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (std::int64_t r = 0; r < kLanes; ++r) sums[r] = zero();
    for (std::int64_t c = 0; c < padded; c += kLanes * Engine::kStep) {
#pragma GCC unroll 16
      for (std::int64_t r = 0; r < kLanes; ++r) sums[r] = Engine::add_squares(row + r * padded + c, sums[r]);
    }
    store(factors + i, div(set1(1.0f), square_root(add(sum_lanes(sums), set1(kNormEpsilon)))));
  }
}

// The steps of kLanes tokens from `from` on, [tokens, padded], to a panel of a right operand.
template <class Engine>
GDN_INLINE void pack_tokens(const typename Engine::Element* from, std::int64_t padded, typename Engine::Element* to) {
  constexpr std::int64_t kStep = Engine::kStep;
  constexpr std::size_t size = sizeof(*from) * static_cast<std::size_t>(kStep);
  const std::int64_t steps = padded / kStep;
  if constexpr (size == sizeof(float)) {
    // A step of a token is one lane: blocks of kLanes steps are transposed. As vectors of floats, whatever they hold: a
    // memcpy goes by way of the stack, a part at a time.
    const auto* lanes = reinterpret_cast<const float*>(from);
    auto* columns = reinterpret_cast<float*>(to);
    for (std::int64_t step = 0; step < steps; step += kLanes) {
      Vec x[kLanes];
#pragma GCC unroll 16
      for (std::int64_t r = 0; r < kLanes; ++r) x[r] = load(lanes + r * steps + step);
      transpose(x);
#pragma GCC unroll 16
      for (std::int64_t r = 0; r < kLanes; ++r) store(columns + (step + r) * kPanelColumns, x[r]);
    }
  } else {
    for (std::int64_t step = 0; step < steps; ++step) {
      for (std::int64_t r = 0; r < kLanes; ++r) {
        std::memcpy(to + (step * kPanelColumns + r) * kStep, from + r * padded + step * kStep, size);
      }
    }
  }
}

// Tokens [first, end) of a span of the right operand [rows, tokens] of k. Each span replaces the one before it.
template <class Engine>
void pack_columns(const typename Engine::Element* k, std::int64_t first, std::int64_t end, std::int64_t padded,
                  typename Engine::Element* columns) {
  for (std::int64_t token = first; token < end; token += kLanes) {
    const std::int64_t column = token % Engine::kSpan;
    typename Engine::Element* panel = columns + column / kPanelColumns * kPanelColumns * padded;
    pack_tokens<Engine>(k + token * padded, padded, panel + column % kPanelColumns * Engine::kStep);
  }
}

// Rows [first, first + kRows) of left right, the columns of their span up to the vector of their diagonal.
template <class Engine, std::int64_t kRows>
void multiply_lower(const typename Engine::Element* left, const typename Engine::Element* columns, std::int64_t first,
                    std::int64_t padded, float* product) {
  const std::int64_t span = span_begin<Engine>(first), vectors = (first - span + kRows + kLanes - 1) / kLanes;
  for (std::int64_t v = 0; v < vectors; v += kTileVectors) {
    const Right<Engine> right{columns + v * kLanes * padded, kPanelColumns * Engine::kStep};
    with_vectors(min_of(kTileVectors, vectors - v), [&](auto n) {
      constexpr int kVectors = decltype(n)::value;
      constexpr int kOfTile = kTileRows<kVectors>;
      for (std::int64_t row = first; row < first + kRows; row += kOfTile) {
        Vec sums[kOfTile][kVectors];
        clear(sums);
        accumulate<Engine>(sums, Left<Engine>{left + row * padded, padded, Engine::kStep}, right,
                           padded / Engine::kStep);
#pragma GCC unroll 16
        for (int r = 0; r < kOfTile; ++r) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) store(product + (row + r) * kTokens + span + (v + j) * kLanes, sums[r][j]);
        }
      }
    });
  }
}

// Rows of k k^T and q k^T of a block, up to its diagonal. What is above the diagonal is not defined.
template <class Engine>
void multiply_keys(const KeyOperands<Engine>& key, std::int64_t block, std::int64_t padded) {
  if constexpr (Engine::kSums == Sums::kOfBlocks) {
    const typename Engine::Element* const left[] = {key.k + block * padded, key.q + block * padded};
    const SumBlock sums[] = {{key.kk + block * kTokens, kTokens}, {key.qk + block * kTokens, kTokens}};
    Engine::template multiply_blocks<2>(left, padded, key.k_columns, kPanelColumns * 2, padded / 2,
                                        block / kRowBlock + 1, sums);
  } else {
    constexpr std::int64_t kRows = kTileRows<1>;  // of every tile a multiple
    for (std::int64_t row = block; row < block + kRowBlock; row += kRows) {
      multiply_lower<Engine, kRows>(key.k, key.k_columns, row, padded, key.kk);
      multiply_lower<Engine, kRows>(key.q, key.k_columns, row, padded, key.qk);
    }
  }
}

// The same by a library, for which blocks are small: two calls each leave out a quarter.
template <class Engine>
void multiply_keys_at_once(const KeyOperands<Engine>& key, std::int64_t rows, std::int64_t padded) {
  for (std::int64_t first = 0; first < rows; first += kTokens / 2) {
    const std::int64_t end = min_of(first + kTokens / 2, rows);
    const auto multiply = [&](const typename Engine::Element* left, float* product) {
      Engine::multiply(*key.blas, Blas::kAsIs, left + first * padded, padded, Blas::kTransposed, key.k, padded,
                       end - first, end, padded, false, product + first * kTokens, kTokens);
    };
    multiply(key.k, key.kk);
    multiply(key.q, key.qk);
  }
}

// Inverse norms of rows [first, end), or 1.
template <class Engine>
void load_factors(bool normalize, const typename Engine::Element* rows, std::int64_t first, std::int64_t end,
                  std::int64_t padded, float* factors) {
  if (normalize) return inverse_norms<Engine>(rows + first * padded, end - first, padded, factors + first);
  for (std::int64_t i = first; i < end; i += kLanes) store(factors + i, set1(1.0f));
}

// Block by block, each of which stays in the first-level cache until its products are there, while the rows of the next
// ones are on their way from memory.
template <class Engine>
void load_key_operands(const RecurrenceParams& p, const TokenRow& row, std::int64_t key_head, std::int64_t first,
                       std::int64_t count, const KeyOperands<Engine>& key) {
  const std::int64_t padded = padded_keys<Engine>(p.key_dim);
  const std::int64_t rows = round_up(count, kRowBlock);
  for (std::int64_t block = 0; block < rows; block += kRowBlock) {
    const std::int64_t end = block + kRowBlock, tokens = min_of(kRowBlock, count - block);
    load_rows(p.q, row, first + block, tokens, key_head, p.key_dim, padded, key.q + block * padded);
    load_rows(p.k, row, first + block, tokens, key_head, p.key_dim, padded, key.k + block * padded);
    load_factors<Engine>(p.normalize_qk, key.q, block, end, padded, key.q_factor);
    load_factors<Engine>(p.normalize_qk, key.k, block, end, padded, key.k_factor);
    if constexpr (Engine::kSums != Sums::kOfChunks) {
      pack_columns<Engine>(key.k, block, end, padded, key.k_columns);
      multiply_keys(key, block, padded);
    }
  }
  if constexpr (Engine::kSums == Sums::kOfChunks) {
    multiply_keys_at_once(key, rows, padded);
  } else if constexpr (Engine::kStep > 1) {
    Engine::pack_steps(key.k, rows, padded, key.k_steps);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
