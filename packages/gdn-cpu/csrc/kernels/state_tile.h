// SPDX-License-Identifier: Apache-2.0
//
// Where the recurrence reads and writes the state: rows of a typed matrix in memory, or nothing.
#pragma once

#include <cstring>

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

// Rows that are written past the caches, which would otherwise read them first: whole vectors at multiples of their
// size. Half-precision ones go in pairs, or the usual way.
template <class T>
struct StreamedRow {
  T* data;
};
template <class T>
struct StreamedTile {
  T* data;
  std::int64_t stride;
};

// A state that is kept in two places: unrounded in the scratch, from where the next token reads it, and in a slot.
template <class Slot>
struct KeptRow {
  float* scratch;
  Slot slot;
};
template <class Slot>
struct KeptTile {
  Tile<float> scratch;
  Slot slot;
};

// Two vectors of bfloat16 are rounded and packed together for less than one and one; others go one by one.
template <class Row>
constexpr bool kStoresPairs = false;
template <>
constexpr bool kStoresPairs<BFloat16*> = kLanes > 4;
template <>
constexpr bool kStoresPairs<StreamedRow<BFloat16>> = kLanes > 4;
template <class Slot>
constexpr bool kStoresPairs<KeptRow<Slot>> = kStoresPairs<Slot>;

// They also come as the even columns and the odd ones for less than in order. For passes in which a value never leaves
// its column, and that read and write nothing else.
template <class Row>
constexpr bool kIsSplit = false;
template <>
constexpr bool kIsSplit<const BFloat16*> = kLanes > 4;
template <>
constexpr bool kIsSplit<BFloat16*> = kLanes > 4;
template <>
constexpr bool kIsSplit<StreamedRow<BFloat16>> = kLanes > 4;

template <int kVectors>
GDN_INLINE void split_columns(Vec (&x)[kVectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; j += 2) split(x[j], x[j + 1]);
}
template <int kVectors>
GDN_INLINE void join_columns(Vec (&x)[kVectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; j += 2) join(x[j], x[j + 1]);
}

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
template <class T>
GDN_INLINE void store_column_pair(T* row, std::int64_t column, Vec a, Vec b) {
  store_pair(row + column, a, b);
}

template <class T>
GDN_INLINE StreamedTile<T> rows_from(StreamedTile<T> tile, std::int64_t row) {
  return {tile.data + row * tile.stride, tile.stride};
}
template <class T>
GDN_INLINE StreamedRow<T> row_of(StreamedTile<T> tile, std::int64_t row) {
  return {tile.data + row * tile.stride};
}
GDN_INLINE void store_columns(StreamedRow<float> row, std::int64_t column, Vec x) { stream(row.data + column, x); }
template <class T>
GDN_INLINE void store_columns(StreamedRow<T> row, std::int64_t column, Vec x) {
  store(row.data + column, x);
}
template <class T>
GDN_INLINE void store_columns(StreamedRow<T> row, std::int64_t column, Vec x, std::int64_t n) {
  store_n(row.data + column, x, n);
}
template <class T>
GDN_INLINE void store_column_pair(StreamedRow<T> row, std::int64_t column, Vec a, Vec b) {
  stream_pair(row.data + column, a, b);
}

template <class T>
GDN_INLINE void store_split_columns(T* row, std::int64_t column, Vec even, Vec odd) {
  store_split(row + column, even, odd);
}
template <class T>
GDN_INLINE void store_split_columns(StreamedRow<T> row, std::int64_t column, Vec even, Vec odd) {
  stream_split(row.data + column, even, odd);
}

template <class Slot>
GDN_INLINE KeptTile<Slot> rows_from(KeptTile<Slot> tile, std::int64_t row) {
  return {rows_from(tile.scratch, row), rows_from(tile.slot, row)};
}
template <class Slot>
GDN_INLINE auto row_of(KeptTile<Slot> tile, std::int64_t row) {
  const auto slot = row_of(tile.slot, row);
  return KeptRow<decltype(row_of(tile.slot, row))>{row_of(tile.scratch, row), slot};
}
template <class Slot>
GDN_INLINE void store_columns(KeptRow<Slot> row, std::int64_t column, Vec x) {
  store(row.scratch + column, x);
  store_columns(row.slot, column, x);
}
template <class Slot>
GDN_INLINE void store_columns(KeptRow<Slot> row, std::int64_t column, Vec x, std::int64_t n) {
  store_n(row.scratch + column, x, n);
  store_columns(row.slot, column, x, n);
}
template <class Slot>
GDN_INLINE void store_column_pair(KeptRow<Slot> row, std::int64_t column, Vec a, Vec b) {
  store(row.scratch + column, a);
  store(row.scratch + column + kLanes, b);
  store_column_pair(row.slot, column, a, b);
}

template <class Row>
GDN_INLINE void store_two_columns(Row row, std::int64_t column, Vec a, Vec b) {
  if constexpr (kStoresPairs<Row>) {
    store_column_pair(row, column, a, b);
  } else {
    store_columns(row, column, a);
    store_columns(row, column + kLanes, b);
  }
}

// Of `bytes` that are read in order: asks for every fourth line a page ahead of them. The processor's own prefetcher
// stops where a page ends, and starts in the next when it sees that one read.
GDN_INLINE void ask_page_ahead(const void* p, std::int64_t bytes) {
  constexpr std::int64_t kPage = 4096;
  for (std::int64_t i = 0; i < bytes; i += 4 * kCacheLine) prefetch(p, kPage + i, kCacheLine);
}

// Reads a byte of every line of rows [row, row_end), in order, as that prefetcher wants it: before a pass that reads
// them in another.
template <class T>
GDN_INLINE void touch_rows(Tile<T> tile, std::int64_t row, std::int64_t row_end, std::int64_t columns) {
  const std::int64_t row_bytes = columns * static_cast<std::int64_t>(sizeof(T));
  for (; row < row_end; ++row) {
    const auto* bytes = reinterpret_cast<const volatile char*>(row_of(tile, row));
    for (std::int64_t i = 0; i < row_bytes; i += kCacheLine) static_cast<void>(bytes[i]);
    ask_page_ahead(row_of(tile, row), row_bytes);
  }
}

// What the thread reads next. An update asks for the first quarter of it (of an fp32 state), bit by bit, so that memory
// delivers while the arithmetic, from the caches, does without it. The rest is left to the processor's own prefetcher,
// which has the second cache's miss buffers: what is asked for waits in the few of the first.
struct NextState {
  const char* from = nullptr;
  const char* end = nullptr;
};

GDN_INLINE void ask_for(NextState& next, std::int64_t bytes) {
  if (next.from >= next.end) return;
  prefetch(next.from, 0, bytes);
  next.from += bytes;
}

// What a pass asks for at `count` elements, in whole lines.
constexpr std::int64_t bytes_ahead(std::int64_t count) { return (count + kCacheLine - 1) / kCacheLine * kCacheLine; }

// What the first pass over `count` elements of a row asks for. A half-precision state takes the arithmetic longer than
// the memory: there is time to ask for all of the next one.
template <bool kIsFromMemory>
GDN_INLINE void ask_while_reading(const float* row, std::int64_t count, NextState&) {
  if constexpr (kIsFromMemory) ask_page_ahead(row, count * static_cast<std::int64_t>(sizeof *row));
}
template <bool kIsFromMemory, class Half>
GDN_INLINE void ask_while_reading(const Half*, std::int64_t count, NextState& next) {
  ask_for(next, bytes_ahead(count));
}

// The same dtype on both sides: bit for bit.
template <class T>
GDN_INLINE void copy_tile(Tile<const T> source, Tile<T> destination, std::int64_t rows, std::int64_t columns) {
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * sizeof(T);
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(row_of(destination, i), row_of(source, i), row_bytes);
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
