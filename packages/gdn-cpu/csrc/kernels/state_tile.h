// SPDX-License-Identifier: Apache-2.0
//
// Where the recurrence reads and writes the state: rows of a typed matrix in memory, or nothing.
#pragma once

#include "simd/simd.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Rows of `stride` elements. Reading Absent gives zeros, nothing is written to it: a fresh or reset state, a state
// that nobody keeps.
template <class T>
struct Tile {
  T* data;
  std::int64_t stride;
};

struct Absent {};

template <class T>
constexpr bool kIsAbsent = false;
template <>
constexpr bool kIsAbsent<Absent> = true;

template <class T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;

// Two vectors of bfloat16 are rounded and packed together for less than one and one; others go one by one.
template <class T>
constexpr bool kStoresPairs = false;
template <>
constexpr bool kStoresPairs<BFloat16* const> = kLanes > 4;

GDN_INLINE Absent row_of(Absent, std::int64_t) { return {}; }
GDN_INLINE Vec load_columns(Absent, std::int64_t) { return zero(); }
GDN_INLINE Vec load_columns(Absent, std::int64_t, std::int64_t) { return zero(); }

GDN_INLINE Absent rows_from(Absent, std::int64_t) { return {}; }

template <class T>
GDN_INLINE Tile<T> rows_from(Tile<T> tile, std::int64_t row) {
  return {tile.data + row * tile.stride, tile.stride};
}

template <class T>
GDN_INLINE T* row_of(Tile<T> tile, std::int64_t row) {
  return tile.data + row * tile.stride;
}
template <class T>
GDN_INLINE Vec load_columns(const T* row, std::int64_t column) {
  return load(row + column);
}
template <class T>
GDN_INLINE Vec load_columns(const T* row, std::int64_t column, std::int64_t n) {
  return load_n(row + column, n);
}
template <class T>
GDN_INLINE void store_columns(T* row, std::int64_t column, Vec x) {
  store(row + column, x);
}
template <class T>
GDN_INLINE void store_columns(T* row, std::int64_t column, Vec x, std::int64_t n) {
  store_n(row + column, x, n);
}

// How far ahead of its use a state that is not read in order is asked for: past the latency of memory at the kernels'
// speed.
constexpr std::int64_t kPrefetchBytes = 16384;

// `count` elements that lie kPrefetchBytes beyond the given column.
template <class T>
GDN_INLINE void prefetch_columns(const T* row, std::int64_t column, std::int64_t count) {
  constexpr std::int64_t size = sizeof(T);
  prefetch(row, column * size + kPrefetchBytes, count * size);
}

template <class Source, class T>
GDN_INLINE void copy_tile(Source source, Tile<T> destination, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto from = row_of(source, i);
    const auto to = row_of(destination, i);
    std::int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) store_columns(to, c, load_columns(from, c));
    if (c < columns) store_columns(to, c, load_columns(from, c, columns - c), columns - c);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
