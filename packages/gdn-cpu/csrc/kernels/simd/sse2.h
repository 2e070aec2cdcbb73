// SPDX-License-Identifier: Apache-2.0
//
// Vec on SSE2, the baseline of x86-64: 4 lanes, 16 registers, no FMA (fma rounds twice), fp16 in scalar code.
#pragma once

#include <emmintrin.h>

#include "half.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Vec {
  __m128 v;
};
struct Mask {
  __m128 m;
};

constexpr std::int64_t kLanes = 4;
constexpr int kRegisters = 16;

GDN_INLINE Vec zero() { return {_mm_setzero_ps()}; }
GDN_INLINE Vec set1(float x) { return {_mm_set1_ps(x)}; }
GDN_INLINE float first_lane(Vec x) { return _mm_cvtss_f32(x.v); }

GDN_INLINE Vec load(const float* p) { return {_mm_loadu_ps(p)}; }
GDN_INLINE void store(float* p, Vec x) { _mm_storeu_ps(p, x.v); }
GDN_INLINE void stream(float* p, Vec x) { _mm_stream_ps(p, x.v); }
// 64 bytes, both aligned to them.
GDN_INLINE void stream_line(void* to, const void* from) {
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
  }
}

GDN_INLINE Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits))};
}
// To nearest even; a NaN gets its quiet bit, so that dropping the low half cannot make it an infinity.
GDN_INLINE void store(BFloat16* p, Vec x) {
  const __m128i bits = _mm_castps_si128(x.v);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i rounded = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
  const __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
  const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(x.v, x.v));
  const __m128i chosen = _mm_or_si128(_mm_and_si128(is_nan, quiet), _mm_andnot_si128(is_nan, rounded));
  // The arithmetic shift keeps the signed pack from saturating.
  const __m128i high = _mm_srai_epi32(chosen, 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(high, high));
}

// To nearest, ties away from zero; a NaN must have no bits in its low half.
GDN_INLINE void store_coarse(BFloat16* p, Vec x) {
  const __m128i rounded = _mm_add_epi32(_mm_castps_si128(x.v), _mm_set1_epi32(0x8000));
  const __m128i high = _mm_srai_epi32(rounded, 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(high, high));
}

// Out of line: the conversions are long, and used in many places.
__attribute__((noinline)) Vec load(const Float16* p) {
  return {_mm_setr_ps(to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3]))};
}
__attribute__((noinline)) void store(Float16* p, Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (std::int64_t i = 0; i < kLanes; ++i) p[i] = from_float<Float16>(lanes[i]);
}

GDN_INLINE Vec add(Vec a, Vec b) { return {_mm_add_ps(a.v, b.v)}; }
GDN_INLINE Vec sub(Vec a, Vec b) { return {_mm_sub_ps(a.v, b.v)}; }
GDN_INLINE Vec mul(Vec a, Vec b) { return {_mm_mul_ps(a.v, b.v)}; }
GDN_INLINE Vec div(Vec a, Vec b) { return {_mm_div_ps(a.v, b.v)}; }
GDN_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm_add_ps(_mm_mul_ps(a.v, b.v), c.v)}; }
// The second operand where either is NaN.
GDN_INLINE Vec min(Vec a, Vec b) { return {_mm_min_ps(a.v, b.v)}; }
GDN_INLINE Vec max(Vec a, Vec b) { return {_mm_max_ps(a.v, b.v)}; }
GDN_INLINE Vec abs(Vec a) { return {_mm_andnot_ps(_mm_set1_ps(-0.0f), a.v)}; }
GDN_INLINE Vec neg(Vec a) { return {_mm_xor_ps(_mm_set1_ps(-0.0f), a.v)}; }
// For |a| < 2^31, which is all that exp asks for.
GDN_INLINE Vec round(Vec a) { return {_mm_cvtepi32_ps(_mm_cvtps_epi32(a.v))}; }

GDN_INLINE __m128 power_of_two(__m128i n) {
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(n, _mm_set1_epi32(127)), 23));
}

// x * 2^n for integral |n| <= 252, in two factors that are normal numbers.
GDN_INLINE Vec scale_by_power_of_two(Vec x, Vec n) {
  const __m128i exponent = _mm_cvtps_epi32(n.v);
  const __m128i half = _mm_srai_epi32(exponent, 1);
  const __m128 scaled = _mm_mul_ps(x.v, power_of_two(half));
  return {_mm_mul_ps(scaled, power_of_two(_mm_sub_epi32(exponent, half)))};
}

// x * 2^n for the n that the last bits of `exponent` are.
GDN_INLINE Vec add_exponent(Vec x, Vec exponent) {
  const __m128i shifted = _mm_slli_epi32(_mm_castps_si128(exponent.v), 23);
  return {_mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(x.v), shifted))};
}

GDN_INLINE Mask less(Vec a, Vec b) { return {_mm_cmplt_ps(a.v, b.v)}; }
GDN_INLINE Mask either(Mask a, Mask b) { return {_mm_or_ps(a.m, b.m)}; }
GDN_INLINE Vec select(Mask m, Vec if_true, Vec if_false) {
  return {_mm_or_ps(_mm_and_ps(m.m, if_true.v), _mm_andnot_ps(m.m, if_false.v))};
}
GDN_INLINE unsigned lane_bits(Mask m) { return static_cast<unsigned>(_mm_movemask_ps(m.m)); }

GDN_INLINE Vec square_root(Vec a) { return {_mm_sqrt_ps(a.v)}; }
GDN_INLINE float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

GDN_INLINE float reduce_add(Vec x) {
  const __m128 pair = _mm_add_ps(x.v, _mm_movehl_ps(x.v, x.v));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

// Lane j is the sum of all lanes of x[j], each by the same tree.
GDN_INLINE Vec sum_lanes(const Vec* x) {
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(x[0].v, x[1].v), _mm_unpackhi_ps(x[0].v, x[1].v));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(x[2].v, x[3].v), _mm_unpackhi_ps(x[2].v, x[3].v));
  return {_mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab))};
}

// Lane i of vector j is p[i * kCount + j].
template <int kCount>
  requires(kCount == 2)
GDN_INLINE void load_interleaved(const BFloat16* p, Vec (&x)[kCount]) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  x[0] = {_mm_castsi128_ps(_mm_slli_epi32(words, 16))};
  x[1] = {_mm_castsi128_ps(_mm_and_si128(words, _mm_set1_epi32(-0x10000)))};
}
template <int kCount>
  requires(kCount == 4)
GDN_INLINE void load_interleaved(const BFloat16* p, Vec (&x)[kCount]) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  const __m128i even = _mm_unpacklo_epi16(first, last), odd = _mm_unpackhi_epi16(first, last);  // of the lanes
  const __m128i low = _mm_unpacklo_epi16(even, odd), high = _mm_unpackhi_epi16(even, odd);
  x[0] = {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), low))};
  x[1] = {_mm_castsi128_ps(_mm_unpackhi_epi16(_mm_setzero_si128(), low))};
  x[2] = {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), high))};
  x[3] = {_mm_castsi128_ps(_mm_unpackhi_epi16(_mm_setzero_si128(), high))};
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA

#include "four_lanes.h"
