// SPDX-License-Identifier: Apache-2.0
//
// One tile of a product in registers: rows of a left operand by vectors of columns of a right one.
//
// An engine says what an element is, and how many consecutive ones along the inner dimension (a step) one instruction
// multiplies. The right operand is packed: for each step, the step's elements of column 0, of column 1, and so on. The
// left one is read a step at a time, broadcast, from wherever it lies.
//
// Every element of a product is one chain of multiply-adds over the steps in order: it does not depend on the tile it
// is computed in.
#pragma once

#include "../simd/transpose.h"

namespace gdn::cpu::GDN_ISA {
namespace {

template <class Engine>
struct Left {
  const typename Engine::Element* data;
  std::int64_t row_stride;
  std::int64_t step_stride;
};

template <class Engine>
GDN_INLINE Left<Engine> rows_from(Left<Engine> left, std::int64_t row) {
  return {left.data + row * left.row_stride, left.row_stride, left.step_stride};
}

template <class Engine>
struct Right {
  const typename Engine::Element* data;
  std::int64_t step_stride;
};

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// Vectors of columns of a whole tile, and the columns of the panels that right operands are packed in.
// Of 16 registers, SSE2 needs one for each product before it is added.
constexpr int kTileVectors = kRegisters >= 32 ? 4 : kLanes == 8 ? 3 : 2;
constexpr std::int64_t kPanelColumns = kTileVectors * kLanes;

// Rows of a tile: as many accumulators as hide the latency of a multiply-add, and leave registers for the operands.
template <int kVectors>
constexpr int kTileRows = kRegisters >= 32 ? (kVectors == 1   ? 16
                                              : kVectors == 2 ? 8
                                                              : 4)
                                           : (kVectors == 1 ? 8 : 4);
constexpr std::int64_t kRowBlock = 16;  // of every kTileRows a multiple

// Where the sums of an engine's products are: in registers, a tile at a time; or in memory, of blocks of kRowBlock rows
// or of all rows of a chunk.
enum class Sums { kInRegisters, kOfBlocks, kOfChunks };

// Where an engine that multiplies blocks of kRowBlock rows leaves the sums: rows `stride` floats apart.
struct SumBlock {
  float* data;
  std::int64_t stride;
};

// Calls body with the number of vectors as a constant.
template <class Body>
GDN_INLINE void with_vectors(std::int64_t vectors, Body body) {
  if constexpr (kTileVectors > 3) {
    if (vectors == 4) return body(Count<4>{});
  }
  if constexpr (kTileVectors > 2) {
    if (vectors == 3) return body(Count<3>{});
  }
  if (vectors == 2) return body(Count<2>{});
  body(Count<1>{});
}

template <int kRows, int kVectors>
GDN_INLINE void clear(Vec (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[r][j] = zero();
  }
}

// sums += left right over `steps` steps, a step's rows broadcast one by one.
template <class Engine, int kRows, int kVectors>
GDN_INLINE void accumulate_broadcast(Vec (&sums)[kRows][kVectors], Left<Engine> left, Right<Engine> right,
                                     std::int64_t steps) {
  for (std::int64_t s = 0; s < steps; ++s) {
    typename Engine::Packed columns[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      columns[j] = Engine::load(right.data + s * right.step_stride + j * kLanes * Engine::kStep);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename Engine::Packed row = Engine::broadcast(left.data + r * left.row_stride + s * left.step_stride);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[r][j] = Engine::multiply_add(row, columns[j], sums[r][j]);
    }
  }
}

template <class Engine, int kRows, int kVectors>
GDN_INLINE void accumulate(Vec (&sums)[kRows][kVectors], Left<Engine> left, Right<Engine> right, std::int64_t steps) {
  if constexpr (Engine::kMultipliesSquares) {
    Engine::accumulate(sums, left, right, steps);
  } else {
    accumulate_broadcast(sums, left, right, steps);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
