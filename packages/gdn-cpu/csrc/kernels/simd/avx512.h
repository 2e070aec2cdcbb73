// SPDX-License-Identifier: Apache-2.0
//
// Vec on AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers. Partial accesses use masks, which suppress faults.
#pragma once

// GCC 12 warns of the undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "half.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Vec {
  __m512 v;
};
struct Mask {
  __mmask16 m;
};

constexpr std::int64_t kLanes = 16;
constexpr int kRegisters = 32;

GDN_INLINE __mmask16 first_lanes(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

GDN_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
GDN_INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
GDN_INLINE float first_lane(Vec x) { return _mm512_cvtss_f32(x.v); }

// One permutation puts the words into the high halves and zeros into the low ones.
GDN_INLINE Vec widen(__m256i bits, BFloat16) {
  const __m512i word_of =
      _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
  return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, word_of, _mm512_castsi256_si512(bits)))};
}
GDN_INLINE Vec widen(__m256i bits, Float16) { return {_mm512_cvtph_ps(bits)}; }

// To nearest even; a NaN becomes the default one. AVX512-BF16 does it in one instruction, where a NaN stays one and
// what is below 2^-126 becomes 0.
GDN_INLINE __m512i round_to_bfloat16(Vec x) {
  const __m512i number = _mm512_castps_si512(_mm512_fixupimm_ps(x.v, x.v, _mm512_set1_epi32(0x33), 0));
  const __mmask16 odd = _mm512_test_epi32_mask(number, _mm512_set1_epi32(0x10000));
  const __m512i rounded = _mm512_add_epi32(number, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(rounded, odd, number, _mm512_set1_epi32(0x8000));
}
// The high halves of the lanes of two vectors.
GDN_INLINE __m512i high_halves(__m512i a, __m512i b) {
  const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  // Words 2 i + 1 and 2 i + 3 of the concatenation, for dword i of the result.
  const __m512i word_pairs =
      _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x20002)), _mm512_set1_epi32(0x30001));
  return _mm512_permutex2var_epi16(a, word_pairs, b);
}
GDN_INLINE __m256i narrow(Vec x, BFloat16) {
#if defined(__AVX512BF16__)
  const __m256bh words = _mm512_cvtneps_pbh(x.v);
  __m256i bits;
  std::memcpy(&bits, &words, sizeof bits);
  return bits;
#else
  const __m512i rounded = round_to_bfloat16(x);
  return _mm512_castsi512_si256(high_halves(rounded, rounded));
#endif
}
GDN_INLINE __m256i narrow(Vec x, Float16) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }

GDN_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
GDN_INLINE Vec load_n(const float* p, std::int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
GDN_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
GDN_INLINE void stream(float* p, Vec x) { _mm512_stream_ps(p, x.v); }
// 64 bytes, both aligned to them.
GDN_INLINE void stream_line(void* to, const void* from) {
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
}
GDN_INLINE void store_n(float* p, Vec x, std::int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }

template <class Half>
GDN_INLINE Vec load(const Half* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), Half{});
}
// Both vectors from one load.
GDN_INLINE void load_pair(const BFloat16* p, Vec (&x)[2]) {
  const __m512i words = _mm512_loadu_si512(p);
  const __m512i first = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(16 << 16));
  x[0] = {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, first, words))};
  x[1] = {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, second, words))};
}
template <class Half>
GDN_INLINE Vec load_n(const Half* p, std::int64_t n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), Half{});
}
template <class Half>
GDN_INLINE void store(Half* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, Half{}));
}
template <class Half>
GDN_INLINE void store_n(Half* p, Vec x, std::int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x, Half{}));
}

// Words i * stride of 64 words, for every dword i.
GDN_INLINE __m512i strided_words(__m512i low, __m512i high, std::int64_t stride) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i word = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(stride)));
  return _mm512_permutex2var_epi16(low, word, high);
}
GDN_INLINE Vec widen_dwords(__m512i bits, BFloat16) { return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))}; }
GDN_INLINE Vec widen_dwords(__m512i bits, Float16) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits))}; }

// Words `word` of two vectors, one a dword.
GDN_INLINE Vec widen_words(__m512i low, __m512i word, __m512i high, BFloat16) {
  const __m512i high_halves_of = _mm512_slli_epi32(word, 16);
  return {_mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(0xaaaaaaaau, low, high_halves_of, high))};
}
GDN_INLINE Vec widen_words(__m512i low, __m512i word, __m512i high, Float16) {
  return widen_dwords(_mm512_permutex2var_epi16(low, word, high), Float16{});
}

// Lane i of vector j is p[i * kCount + j].
template <int kCount>
GDN_INLINE void load_interleaved(const float* p, Vec (&x)[kCount]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_mullo_epi32(lane, _mm512_set1_epi32(kCount));
  for (int j = 0; j < kCount; ++j) x[j] = {_mm512_i32gather_ps(index, p + j, 4)};
}
template <int kCount, class Half>
  requires(kCount <= 4)
GDN_INLINE void load_interleaved(const Half* p, Vec (&x)[kCount]) {
  constexpr std::uint64_t kWords = kCount == 4 ? ~std::uint64_t{0} : (std::uint64_t{1} << (kCount * kLanes % 64)) - 1;
  const __m512i low = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(kWords), p);
  const __m512i high = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(kWords >> 32), p + 32);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i first = _mm512_mullo_epi32(lane, _mm512_set1_epi32(kCount));
  for (int j = 0; j < kCount; ++j) {
    const __m512i word = _mm512_add_epi32(first, _mm512_set1_epi32(j));
    x[j] = widen_words(low, word, high, Half{});
  }
}
template <int kCount, class Half>
  requires(kCount > 4)
GDN_INLINE void load_interleaved(const Half* p, Vec (&x)[kCount]) {
  for (int j = 0; j < kCount; ++j) {
    float lanes[kLanes];
    for (std::int64_t i = 0; i < kLanes; ++i) lanes[i] = to_float(p[i * kCount + j]);
    x[j] = load(lanes);
  }
}

// Lane i is p[i * stride], for i < n, zeros beyond. Nothing between the last of them and the next is read.
template <class Half>
GDN_INLINE Vec load_strided(const Half* p, std::int64_t stride, std::int64_t n) {
  const std::int64_t lanes = n < kLanes ? n : kLanes;
  if (stride > 4) {
    float each[kLanes] = {};
    for (std::int64_t i = 0; i < lanes; ++i) each[i] = to_float(p[i * stride]);
    return load(each);
  }
  const std::uint64_t words = (std::uint64_t{2} << ((lanes - 1) * stride)) - 1;
  const __m512i low = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(words), p);
  const __m512i high = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(words >> 32), p + 32);
  return widen_dwords(strided_words(low, high, stride), Half{});
}

// Of kLanes channels with kCount words side by side, each word becomes the one after it, and a channel's last one that
// of x. Nothing beyond them is read.
template <int kCount, class Half>
  requires(sizeof(Half) == 2 && kCount <= 4)
GDN_INLINE void shift_interleaved_vector(Half* state, const Half* x) {
  constexpr int kWords = 32;  // of a vector
  alignas(64) static constexpr auto kChannelOf = [] {
    struct {
      std::uint16_t of[4 * 16];
    } table{};
    for (int i = 0; i < 4 * 16; ++i) table.of[i] = static_cast<std::uint16_t>(i / kCount % 16);
    return table;
  }();
  constexpr std::uint64_t kLast = [] {
    std::uint64_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= std::uint64_t{1} << (i * kCount + kCount - 1);
    return bits;
  }();
  constexpr std::uint64_t kAll = kCount == 4 ? ~std::uint64_t{0} : (std::uint64_t{1} << (kCount * 16 % 64)) - 1;
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  for (int begin = 0; begin < kCount * 16; begin += kWords) {
    const __m512i channel = _mm512_load_si512(kChannelOf.of + begin);
    const __m512i shifted =
        _mm512_maskz_loadu_epi16(static_cast<__mmask32>((kAll & ~kLast) >> begin), state + begin + 1);
    const __m512i merged =
        _mm512_mask_permutexvar_epi16(shifted, static_cast<__mmask32>(kLast >> begin), channel, words);
    // Not by a mask, which takes far longer: all kCount * kLanes words are a number of half vectors.
    if (kCount * 16 - begin >= kWords) {
      _mm512_storeu_si512(state + begin, merged);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(state + begin), _mm512_castsi512_si256(merged));
    }
  }
}
GDN_INLINE Vec load_strided(const float* p, std::int64_t stride, std::int64_t n) {
  const std::int64_t lanes = n < kLanes ? n : kLanes;
  if (stride > 1 << 24) {
    float each[kLanes] = {};
    for (std::int64_t i = 0; i < lanes; ++i) each[i] = p[i * stride];
    return load(each);
  }
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(stride)));
  return {_mm512_mask_i32gather_ps(_mm512_setzero_ps(), first_lanes(lanes), index, p, 4)};
}

// Both, a in the lower half.
GDN_INLINE __m512i narrow_pair(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  const __m512bh words = _mm512_cvtne2ps_pbh(b.v, a.v);
  __m512i bits;
  std::memcpy(&bits, &words, sizeof bits);
  return bits;
#else
  return high_halves(round_to_bfloat16(a), round_to_bfloat16(b));
#endif
}
GDN_INLINE void store_pair(BFloat16* p, Vec a, Vec b) { _mm512_storeu_si512(p, narrow_pair(a, b)); }

// Of 2 kLanes in a row, those at even places and those at odd ones: cheaper to load and to store than halves.
GDN_INLINE void widen_split(__m512i words, Vec& even, Vec& odd) {
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-0x10000)))};
}
GDN_INLINE void load_split(const BFloat16* p, Vec& even, Vec& odd) { widen_split(_mm512_loadu_si512(p), even, odd); }
// Of 2 kLanes channels with four words side by side, word j of those at even places and of those at odd ones.
GDN_INLINE void load_interleaved_split(const BFloat16* p, Vec (&even)[4], Vec (&odd)[4]) {
  // Two words of each channel of two vectors, first those at even places.
  const __m512i index = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 2, 6, 10, 14, 18, 22, 26, 30);
  for (int j = 0; j < 4; j += 2) {
    const __m512i dword = _mm512_add_epi32(index, _mm512_set1_epi32(j / 2));
    __m512i half[2];
    for (int i = 0; i < 2; ++i) {
      half[i] = _mm512_permutex2var_epi32(_mm512_loadu_si512(p + i * 64), dword, _mm512_loadu_si512(p + i * 64 + 32));
    }
    widen_split(_mm512_inserti64x4(half[0], _mm512_castsi512_si256(half[1]), 1), even[j], even[j + 1]);
    widen_split(_mm512_shuffle_i64x2(half[0], half[1], 0xee), odd[j], odd[j + 1]);
  }
}
GDN_INLINE __m512i narrow_split(Vec even, Vec odd) {
#if defined(__AVX512BF16__)
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i word =
      _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x100000));
  return _mm512_permutexvar_epi16(word, narrow_pair(even, odd));
#else
  const __m512i low = _mm512_srli_epi32(round_to_bfloat16(even), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, round_to_bfloat16(odd));
#endif
}
GDN_INLINE void store_split(BFloat16* p, Vec even, Vec odd) { _mm512_storeu_si512(p, narrow_split(even, odd)); }
GDN_INLINE void stream_split(BFloat16* p, Vec even, Vec odd) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_split(even, odd));
}
// 2 kLanes in a row as they lie in memory, of which bfloat16 is split when it is widened.
template <class T>
struct TwoVectors {
  __m512i part[sizeof(T) / 2];
};
template <class T>
GDN_INLINE TwoVectors<T> load_two(const T* p) {
  TwoVectors<T> x;
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    x.part[i] = _mm512_loadu_si512(p + i * kLanes);
    __asm__("" : "+v"(x.part[i]));  // left alone, the compiler loads it again for each use
  }
  return x;
}
template <class T>
GDN_INLINE void store_two(T* p, const TwoVectors<T>& x) {
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) _mm512_storeu_si512(p + i * kLanes, x.part[i]);
}
GDN_INLINE void widen_two(const TwoVectors<BFloat16>& x, Vec (&y)[2]) { widen_split(x.part[0], y[0], y[1]); }
GDN_INLINE void widen_two(const TwoVectors<Float16>& x, Vec (&y)[2]) {
  y[0] = widen(_mm512_castsi512_si256(x.part[0]), Float16{});
  y[1] = widen(_mm512_extracti64x4_epi64(x.part[0], 1), Float16{});
}
GDN_INLINE void widen_two(const TwoVectors<float>& x, Vec (&y)[2]) {
  for (int v = 0; v < 2; ++v) y[v] = {_mm512_castsi512_ps(x.part[v])};
}
// The same of two vectors, and back.
GDN_INLINE void split(Vec& a, Vec& b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 first = a.v;
  a = {_mm512_permutex2var_ps(first, even, b.v)};
  b = {_mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b.v)};
}
GDN_INLINE void join(Vec& a, Vec& b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512 even = a.v;
  a = {_mm512_permutex2var_ps(even, low, b.v)};
  b = {_mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b.v)};
}

// A NaN becomes the default one, others stay.
GDN_INLINE Vec canonical_nan(Vec x) { return {_mm512_fixupimm_ps(x.v, x.v, _mm512_set1_epi32(0x33), 0)}; }
// The nearest bfloat16, ties away from zero, of values whose NaN have no bits in their low halves, as those from
// bfloat16 and canonical_nan: for what is itself only near the right value.
GDN_INLINE __m512i round_coarsely(Vec x) {
  return _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x8000));
}
GDN_INLINE void store_coarse(BFloat16* p, Vec x, std::int64_t n) {
  const __m512i bits = round_coarsely(x);
  const __m256i halves = _mm512_castsi512_si256(high_halves(bits, bits));
  if (n >= kLanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  } else {
    _mm256_mask_storeu_epi16(p, first_lanes(n), halves);
  }
}
GDN_INLINE void store_coarse_pair(BFloat16* p, Vec a, Vec b) {
  _mm512_storeu_si512(p, high_halves(round_coarsely(a), round_coarsely(b)));
}
GDN_INLINE void stream_pair(BFloat16* p, Vec a, Vec b) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_pair(a, b));
}
GDN_INLINE void stream_pair(Float16* p, Vec a, Vec b) {
  const __m512i low = _mm512_castsi256_si512(narrow(a, Float16{}));
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_inserti64x4(low, narrow(b, Float16{}), 1));
}
GDN_INLINE void stream_pair(float* p, Vec a, Vec b) {
  stream(p, a);
  stream(p + kLanes, b);
}
// Of even and odd ones.
GDN_INLINE __m512i narrow_coarse_split(Vec even, Vec odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(round_coarsely(even), 16), round_coarsely(odd));
}
GDN_INLINE void store_coarse_split(BFloat16* p, Vec even, Vec odd) {
  _mm512_storeu_si512(p, narrow_coarse_split(even, odd));
}
GDN_INLINE void stream_coarse_split(BFloat16* p, Vec even, Vec odd) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_coarse_split(even, odd));
}

GDN_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
GDN_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
GDN_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
GDN_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
GDN_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is NaN.
GDN_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
GDN_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
GDN_INLINE Vec abs(Vec a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
GDN_INLINE Vec neg(Vec a) { return {_mm512_xor_ps(_mm512_set1_ps(-0.0f), a.v)}; }
GDN_INLINE Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x * 2^n for integral n, rounded once.
GDN_INLINE Vec scale_by_power_of_two(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

// silu(x) from t = c x for results that are stored as bfloat16: within 2^-12.6 of it, where it is above 1e-36. With
// c = -log2(e) / 2, x / (1 + exp(-x)) = t / (c + c 4^t), and t is finite wherever x is.
constexpr float kCoarseSiluScale = -0x1.715476p-1f;
// Step by step for all of them: one after the other, they would wait for their own results. In two halves, between
// which other work may come: `power` is for the second one.
template <int kCount>
GDN_INLINE void begin_coarse_silu(const Vec (&t)[kCount], Vec (&power)[kCount]) {
  __m512 f[kCount], p[kCount];
  // t less the halves in it; 0 for infinite t.
  for (int i = 0; i < kCount; ++i) f[i] = _mm512_reduce_ps(t[i].v, 0x10 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  for (int i = 0; i < kCount; ++i) {
    p[i] = _mm512_fmadd_ps(_mm512_set1_ps(-0.450262355f), f[i], _mm512_set1_ps(-0.65229192f));
  }
  for (int i = 0; i < kCount; ++i) p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(-1.00387553f));
  for (int i = 0; i < kCount; ++i) power[i] = {_mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(-0.721293551f))};
}
template <int kCount>
GDN_INLINE void finish_coarse_silu(Vec (&t)[kCount], const Vec (&power)[kCount]) {
  __m512 p[kCount];
  // c 4^t: the exponent is rounded down by the instruction itself.
  for (int i = 0; i < kCount; ++i) p[i] = _mm512_scalef_ps(power[i].v, _mm512_add_ps(t[i].v, t[i].v));
  for (int i = 0; i < kCount; ++i) p[i] = _mm512_rcp14_ps(_mm512_add_ps(p[i], _mm512_set1_ps(kCoarseSiluScale)));
  for (int i = 0; i < kCount; ++i) t[i] = {_mm512_mul_ps(t[i].v, p[i])};
}
template <int kCount>
GDN_INLINE void coarse_silu(Vec (&t)[kCount]) {
  Vec power[kCount];
  begin_coarse_silu(t, power);
  finish_coarse_silu(t, power);
}

GDN_INLINE Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
GDN_INLINE Mask either(Mask a, Mask b) { return {static_cast<__mmask16>(a.m | b.m)}; }
GDN_INLINE Vec select(Mask m, Vec if_true, Vec if_false) { return {_mm512_mask_blend_ps(m.m, if_false.v, if_true.v)}; }
GDN_INLINE unsigned lane_bits(Mask m) { return m.m; }

GDN_INLINE Vec square_root(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
GDN_INLINE float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

GDN_INLINE float reduce_add(Vec x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// a . b in double precision, n a multiple of 16.
GDN_INLINE double dot_double(const float* a, const float* b, std::int64_t n) {
  __m512d sum0 = _mm512_setzero_pd(), sum1 = _mm512_setzero_pd();
  for (std::int64_t i = 0; i < n; i += 16) {
    sum0 = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_loadu_ps(a + i)), _mm512_cvtps_pd(_mm256_loadu_ps(b + i)), sum0);
    sum1 =
        _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_loadu_ps(a + i + 8)), _mm512_cvtps_pd(_mm256_loadu_ps(b + i + 8)), sum1);
  }
  const __m512d sum = _mm512_add_pd(sum0, sum1);
  const __m256d half = _mm256_add_pd(_mm512_castpd512_pd256(sum), _mm512_extractf64x4_pd(sum, 1));
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

// Per 128-bit block: lane j is the sum over the block of the j-th of four vectors.
GDN_INLINE __m512 sum_blocks(const Vec* x) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0].v, x[1].v), _mm512_unpackhi_ps(x[0].v, x[1].v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2].v, x[3].v), _mm512_unpackhi_ps(x[2].v, x[3].v));
  const __m512d ab_pairs = _mm512_castps_pd(ab);
  const __m512d cd_pairs = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_pairs, cd_pairs)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(ab_pairs, cd_pairs)));
}

// [A, B, C, D] and [E, F, G, H] of 128-bit blocks to [A + C, B + D, E + G, F + H].
GDN_INLINE __m512 sum_halves(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
}

// Lane j is the sum of all lanes of x[j], each by the same tree.
GDN_INLINE Vec sum_lanes(const Vec* x) {
  const __m512 low = sum_halves(sum_blocks(x), sum_blocks(x + 4));
  const __m512 high = sum_halves(sum_blocks(x + 8), sum_blocks(x + 12));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd))};
}

// The sums over lanes of kSumRows vectors to `first`, of the kSumRows after them to `second`.
constexpr int kSumRows = static_cast<int>(kLanes / 2);
GDN_INLINE void store_sums(const Vec* x, float* first, float* second) {
  const __m512 sums = sum_lanes(x).v;
  _mm256_storeu_ps(first, _mm512_castps512_ps256(sums));
  _mm256_storeu_ps(second, _mm512_extractf32x8_ps(sums, 1));
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
