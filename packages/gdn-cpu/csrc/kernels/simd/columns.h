// SPDX-License-Identifier: Apache-2.0
//
// Columns that lie side by side, [channel][column], to columns apart, [column][channel], and back. Bits are kept.
#pragma once

#include <type_traits>

#include "simd.h"

namespace gdn::cpu::GDN_ISA {
namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

// Words of half precision, 32 channels at a time, of 2 to kMostColumns columns: a vector is put together from others in
// pairs, by one permutation each under a mask. Of few columns the number is a constant, and all vectors are registers.
constexpr std::int64_t kWords = 32;
constexpr std::int64_t kMostColumns = 20;
constexpr std::int64_t kFewColumns = 8;

GDN_INLINE __m512i word_numbers() {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(1)), 16));
}
GDN_INLINE __m512i words_of(std::int64_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }

// from: [32][count], to: [count] rows of 32 that are to_stride apart.
template <class Count>
GDN_INLINE void split_words(std::uint16_t* to, std::int64_t to_stride, const std::uint16_t* from, Count count) {
  __m512i part[kMostColumns + 1];
  for (std::int64_t i = 0; i < count; ++i) part[i] = _mm512_loadu_si512(from + i * kWords);
  part[count] = _mm512_setzero_si512();
  __m512i word = _mm512_mullo_epi16(word_numbers(), words_of(count));
  for (std::int64_t column = 0; column < count; ++column) {
    const __m512i pair = _mm512_srli_epi16(word, 6);
    __m512i all = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < count; i += 2) {
      const __mmask32 here = _mm512_cmpeq_epi16_mask(pair, words_of(i / 2));
      all = _mm512_mask_mov_epi16(all, here, _mm512_permutex2var_epi16(part[i], word, part[i + 1]));
    }
    _mm512_storeu_si512(to + column * to_stride, all);
    word = _mm512_add_epi16(word, words_of(1));
  }
}

// The other way.
template <class Count>
GDN_INLINE void join_words(std::uint16_t* to, const std::uint16_t* from, std::int64_t from_stride, Count count) {
  __m512i part[kMostColumns + 1];
  for (std::int64_t i = 0; i < count; ++i) part[i] = _mm512_loadu_si512(from + i * from_stride);
  part[count] = _mm512_setzero_si512();
  // Rounded up, so that the high half of a product is the quotient, for as few words as there are.
  const __m512i inverse = words_of(65536 / count + 1);
  __m512i word = word_numbers();
  for (std::int64_t i = 0; i < count; ++i) {
    const __m512i channel = _mm512_mulhi_epu16(word, inverse);
    const __m512i column = _mm512_sub_epi16(word, _mm512_mullo_epi16(channel, words_of(count)));
    const __m512i pair = _mm512_srli_epi16(column, 1);
    const __m512i source = _mm512_add_epi16(channel, _mm512_slli_epi16(_mm512_and_si512(column, words_of(1)), 5));
    __m512i all = _mm512_setzero_si512();
    for (std::int64_t j = 0; j < count; j += 2) {
      const __mmask32 here = _mm512_cmpeq_epi16_mask(pair, words_of(j / 2));
      all = _mm512_mask_mov_epi16(all, here, _mm512_permutex2var_epi16(part[j], source, part[j + 1]));
    }
    _mm512_storeu_si512(to + i * kWords, all);
    word = _mm512_add_epi16(word, words_of(kWords));
  }
}

// Calls body with count, as a constant where it is one of few.
template <std::int64_t kCount = 2, class Body>
GDN_INLINE void with_count(std::int64_t count, Body body) {
  if constexpr (kCount > kFewColumns) {
    body(count);
  } else if (count == kCount) {
    body(std::integral_constant<std::int64_t, kCount>{});
  } else {
    with_count<kCount + 1>(count, body);
  }
}

#endif

// n channels.
template <class T>
void split_columns(T* to, std::int64_t to_stride, const T* from, std::int64_t count, std::int64_t n) {
  std::int64_t c = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    if (count > 1 && count <= kMostColumns) {
      with_count(count, [&](auto columns) {
        for (; c + kWords <= n; c += kWords) {
          split_words(reinterpret_cast<std::uint16_t*>(to + c), to_stride,
                      reinterpret_cast<const std::uint16_t*>(from + c * count), columns);
        }
      });
    }
  }
#endif
  for (; c < n; ++c) {
    for (std::int64_t i = 0; i < count; ++i) to[i * to_stride + c] = from[c * count + i];
  }
}

template <class T>
void join_columns(T* to, const T* from, std::int64_t from_stride, std::int64_t count, std::int64_t n) {
  std::int64_t c = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    if (count > 1 && count <= kMostColumns) {
      with_count(count, [&](auto columns) {
        for (; c + kWords <= n; c += kWords) {
          join_words(reinterpret_cast<std::uint16_t*>(to + c * count), reinterpret_cast<const std::uint16_t*>(from + c),
                     from_stride, columns);
        }
      });
    }
  }
#endif
  for (; c < n; ++c) {
    for (std::int64_t i = 0; i < count; ++i) to[c * count + i] = from[i * from_stride + c];
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
