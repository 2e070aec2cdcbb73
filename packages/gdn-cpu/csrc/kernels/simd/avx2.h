// SPDX-License-Identifier: Apache-2.0
//
// Vec on AVX2, FMA and F16C: 8 lanes, 16 registers. Partial fp32 accesses use maskload and maskstore, partial
// half-precision ones a small buffer.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Vec {
  __m256 v;
};
struct Mask {
  __m256 m;
};

constexpr std::int64_t kLanes = 8;
constexpr int kRegisters = 16;

GDN_INLINE __m256i first_lanes(std::int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

GDN_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
GDN_INLINE Vec set1(float x) { return {_mm256_set1_ps(x)}; }
GDN_INLINE float first_lane(Vec x) { return _mm256_cvtss_f32(x.v); }

GDN_INLINE Vec widen(__m128i bits, BFloat16) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
GDN_INLINE Vec widen(__m128i bits, Float16) { return {_mm256_cvtph_ps(bits)}; }

// In the low half of each lane: to nearest even, all ones for a NaN.
GDN_INLINE __m256i bfloat16_bits(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_or_si256(rounded, is_nan), 16);
}
GDN_INLINE __m128i narrow(Vec x, BFloat16) {
  const __m256i bits = bfloat16_bits(x);
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}
GDN_INLINE __m128i narrow(Vec x, Float16) { return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }

GDN_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
GDN_INLINE Vec load_n(const float* p, std::int64_t n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
GDN_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
GDN_INLINE void stream(float* p, Vec x) { _mm256_stream_ps(p, x.v); }
// 64 bytes, both aligned to them.
GDN_INLINE void stream_line(void* to, const void* from) {
  for (int i = 0; i < 2; ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
  }
}
GDN_INLINE void store_n(float* p, Vec x, std::int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), x.v); }

template <class Half>
GDN_INLINE Vec load(const Half* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), Half{});
}
template <class Half>
GDN_INLINE Vec load_n(const Half* p, std::int64_t n) {
  Half buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(Half));
  return load(buffer);
}
template <class Half>
GDN_INLINE void store(Half* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x, Half{}));
}
template <class Half>
GDN_INLINE void store_n(Half* p, Vec x, std::int64_t n) {
  Half buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(Half));
}

GDN_INLINE __m256i narrow_pair(Vec a, Vec b) {
  const __m256i packed = _mm256_packus_epi32(bfloat16_bits(a), bfloat16_bits(b));  // per 128-bit half
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
GDN_INLINE void store_pair(BFloat16* p, Vec a, Vec b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_pair(a, b));
}
GDN_INLINE void stream_pair(BFloat16* p, Vec a, Vec b) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_pair(a, b));
}
GDN_INLINE void stream_pair(Float16* p, Vec a, Vec b) {
  const __m256i low = _mm256_castsi128_si256(narrow(a, Float16{}));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_inserti128_si256(low, narrow(b, Float16{}), 1));
}
GDN_INLINE void stream_pair(float* p, Vec a, Vec b) {
  stream(p, a);
  stream(p + kLanes, b);
}

// Of 2 kLanes in a row, those at even places and those at odd ones: cheaper to load and to store than halves.
GDN_INLINE void widen_split(__m256i words, Vec& even, Vec& odd) {
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-0x10000)))};
}
GDN_INLINE void load_split(const BFloat16* p, Vec& even, Vec& odd) {
  widen_split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), even, odd);
}
// Of 2 kLanes channels with four words side by side, word j of those at even places and of those at odd ones.
GDN_INLINE void load_interleaved_split(const BFloat16* p, Vec (&even)[4], Vec (&odd)[4]) {
  __m256i words[4];  // two channels, and the two that are eight later
  for (int i = 0; i < 4; ++i) {
    const auto* first = reinterpret_cast<const __m128i*>(p + i * 8);
    words[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)), _mm_loadu_si128(first + 4), 1);
  }
  const auto widen_words = [](__m256i a, __m256i b, Vec(&x)[4]) {
    const __m256 low = _mm256_castsi256_ps(a), high = _mm256_castsi256_ps(b);
    widen_split(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), x[0], x[1]);
    widen_split(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), x[2], x[3]);
  };
  widen_words(_mm256_unpacklo_epi64(words[0], words[1]), _mm256_unpacklo_epi64(words[2], words[3]), even);
  widen_words(_mm256_unpackhi_epi64(words[0], words[1]), _mm256_unpackhi_epi64(words[2], words[3]), odd);
}
GDN_INLINE __m256i narrow_split(Vec even, Vec odd) {
  return _mm256_or_si256(bfloat16_bits(even), _mm256_slli_epi32(bfloat16_bits(odd), 16));
}
GDN_INLINE void store_split(BFloat16* p, Vec even, Vec odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_split(even, odd));
}
GDN_INLINE void stream_split(BFloat16* p, Vec even, Vec odd) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_split(even, odd));
}
// 2 kLanes in a row as they lie in memory, of which bfloat16 is split when it is widened.
template <class T>
struct TwoVectors {
  __m256i part[sizeof(T) / 2];
};
template <class T>
GDN_INLINE TwoVectors<T> load_two(const T* p) {
  TwoVectors<T> x;
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    x.part[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i * kLanes));
    __asm__("" : "+x"(x.part[i]));  // left alone, the compiler loads it again for each use
  }
  return x;
}
template <class T>
GDN_INLINE void store_two(T* p, const TwoVectors<T>& x) {
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i * kLanes), x.part[i]);
  }
}
GDN_INLINE void widen_two(const TwoVectors<BFloat16>& x, Vec (&y)[2]) { widen_split(x.part[0], y[0], y[1]); }
GDN_INLINE void widen_two(const TwoVectors<Float16>& x, Vec (&y)[2]) {
  y[0] = widen(_mm256_castsi256_si128(x.part[0]), Float16{});
  y[1] = widen(_mm256_extracti128_si256(x.part[0], 1), Float16{});
}
GDN_INLINE void widen_two(const TwoVectors<float>& x, Vec (&y)[2]) {
  for (int v = 0; v < 2; ++v) y[v] = {_mm256_castsi256_ps(x.part[v])};
}
// The same of two vectors, and back.
GDN_INLINE void split(Vec& a, Vec& b) {
  const __m256 low = _mm256_permute2f128_ps(a.v, b.v, 0x20), high = _mm256_permute2f128_ps(a.v, b.v, 0x31);
  a = {_mm256_shuffle_ps(low, high, 0x88)};
  b = {_mm256_shuffle_ps(low, high, 0xdd)};
}
GDN_INLINE void join(Vec& a, Vec& b) {
  const __m256 low = _mm256_unpacklo_ps(a.v, b.v), high = _mm256_unpackhi_ps(a.v, b.v);
  a = {_mm256_permute2f128_ps(low, high, 0x20)};
  b = {_mm256_permute2f128_ps(low, high, 0x31)};
}

// The nearest bfloat16, ties away from zero, of values whose NaN have no bits in their low halves, as those from
// bfloat16 and canonical_nan: for what is itself only near the right value.
GDN_INLINE __m256i round_coarsely(Vec x) {
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x8000)), 16);
}
GDN_INLINE void store_coarse(BFloat16* p, Vec x, std::int64_t n) {
  const __m256i bits = round_coarsely(x);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  BFloat16 buffer[kLanes];
  void* const to = n >= kLanes ? p : buffer;
  _mm_storeu_si128(static_cast<__m128i*>(to), halves);
  if (n < kLanes) std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(BFloat16));
}
GDN_INLINE void store_coarse_pair(BFloat16* p, Vec a, Vec b) {
  const __m256i packed = _mm256_packus_epi32(round_coarsely(a), round_coarsely(b));  // per 128-bit half
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Of even and odd ones.
GDN_INLINE __m256i narrow_coarse_split(Vec even, Vec odd) {
  const __m256i high = _mm256_add_epi32(_mm256_castps_si256(odd.v), _mm256_set1_epi32(0x8000));
  return _mm256_blend_epi16(round_coarsely(even), high, 0xaa);
}
GDN_INLINE void store_coarse_split(BFloat16* p, Vec even, Vec odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_coarse_split(even, odd));
}
GDN_INLINE void stream_coarse_split(BFloat16* p, Vec even, Vec odd) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_coarse_split(even, odd));
}

GDN_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
GDN_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
GDN_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
GDN_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
GDN_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is NaN.
GDN_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
GDN_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
GDN_INLINE Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
GDN_INLINE Vec neg(Vec a) { return {_mm256_xor_ps(_mm256_set1_ps(-0.0f), a.v)}; }
GDN_INLINE Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

GDN_INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// x * 2^n for integral |n| <= 252, in two factors that are normal numbers.
GDN_INLINE Vec scale_by_power_of_two(Vec x, Vec n) {
  const __m256i exponent = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256 scaled = _mm256_mul_ps(x.v, power_of_two(half));
  return {_mm256_mul_ps(scaled, power_of_two(_mm256_sub_epi32(exponent, half)))};
}

// x * 2^n for the n that the last bits of `exponent` are.
GDN_INLINE Vec add_exponent(Vec x, Vec exponent) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(exponent.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.v), shifted))};
}

GDN_INLINE Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
GDN_INLINE Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.m, b.m)}; }
GDN_INLINE Vec select(Mask m, Vec if_true, Vec if_false) { return {_mm256_blendv_ps(if_false.v, if_true.v, m.m)}; }
GDN_INLINE unsigned lane_bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m.m)); }

GDN_INLINE Vec square_root(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
GDN_INLINE float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

GDN_INLINE float reduce_add(Vec x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// a . b in double precision, n a multiple of 16.
GDN_INLINE double dot_double(const float* a, const float* b, std::int64_t n) {
  __m256d sum0 = _mm256_setzero_pd(), sum1 = _mm256_setzero_pd();
  for (std::int64_t i = 0; i < n; i += 8) {
    sum0 = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + i)), _mm256_cvtps_pd(_mm_loadu_ps(b + i)), sum0);
    sum1 = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + i + 4)), _mm256_cvtps_pd(_mm_loadu_ps(b + i + 4)), sum1);
  }
  const __m256d sum = _mm256_add_pd(sum0, sum1);
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd(sum, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

// Dwords of words in their low halves.
GDN_INLINE Vec widen_dwords(__m256i words, BFloat16) { return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))}; }
GDN_INLINE Vec widen_dwords(__m256i words, Float16) {
  return {_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)))};
}

// Lane i of vector j is p[i * kCount + j]: four lanes in each 128-bit block, from the first and the last eight of their
// words. Nothing beyond is read.
template <int kCount, class Half>
  requires(sizeof(Half) == 2 && kCount >= 2 && kCount <= 4)
GDN_INLINE void load_interleaved(const Half* p, Vec (&x)[kCount]) {
  constexpr int kLast = 4 * kCount - 8;
  alignas(32) static constexpr auto kBytes = [] {
    struct {
      std::int8_t of_first[kCount][32], of_last[kCount][32];
    } table{};
    for (int j = 0; j < kCount; ++j) {
      for (int i = 0; i < 32; ++i) {
        const int word = i % 16 / 4 * kCount + j;
        const bool is_empty = i % 4 >= 2, is_in_first = word < 8;
        table.of_first[j][i] = static_cast<std::int8_t>(is_empty || !is_in_first ? -1 : 2 * word + i % 2);
        table.of_last[j][i] = static_cast<std::int8_t>(is_empty || is_in_first ? -1 : 2 * (word - kLast) + i % 2);
      }
    }
    return table;
  }();
  const auto words_from = [&](const Half* from) {
    const auto* low = reinterpret_cast<const __m128i*>(from);
    const auto* high = reinterpret_cast<const __m128i*>(from + 4 * kCount);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
  };
  const auto shuffle = [](__m256i words, const std::int8_t* bytes) {
    return _mm256_shuffle_epi8(words, _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)));
  };
  const __m256i first = words_from(p), last = words_from(p + kLast);
  for (int j = 0; j < kCount; ++j) {
    const __m256i words = _mm256_or_si256(shuffle(first, kBytes.of_first[j]), shuffle(last, kBytes.of_last[j]));
    x[j] = widen_dwords(words, Half{});
  }
}

// Per 128-bit block: lane j is the sum over the block of the j-th of four vectors.
GDN_INLINE __m256 sum_blocks(const Vec* x) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(x[0].v, x[1].v), _mm256_unpackhi_ps(x[0].v, x[1].v));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(x[2].v, x[3].v), _mm256_unpackhi_ps(x[2].v, x[3].v));
  const __m256d ab_pairs = _mm256_castps_pd(ab);
  const __m256d cd_pairs = _mm256_castps_pd(cd);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_pairs, cd_pairs)),
                       _mm256_castpd_ps(_mm256_unpackhi_pd(ab_pairs, cd_pairs)));
}

// Lane j is the sum of all lanes of x[j], each by the same tree.
GDN_INLINE Vec sum_lanes(const Vec* x) {
  const __m256 low = sum_blocks(x);
  const __m256 high = sum_blocks(x + 4);
  return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31))};
}

// The sums over lanes of kSumRows vectors to `first`, of the kSumRows after them to `second`.
constexpr int kSumRows = static_cast<int>(kLanes / 2);
GDN_INLINE void store_sums(const Vec* x, float* first, float* second) {
  const __m256 sums = sum_lanes(x).v;
  _mm_storeu_ps(first, _mm256_castps256_ps128(sums));
  _mm_storeu_ps(second, _mm256_extractf128_ps(sums, 1));
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA

#include "coarse.h"
