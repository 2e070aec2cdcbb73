// SPDX-License-Identifier: Apache-2.0
//
// Vec on Advanced SIMD, the baseline of armv8-a: 4 lanes, 32 registers.
#pragma once

#include <arm_neon.h>

#include "half.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct Vec {
  float32x4_t v;
};
struct Mask {
  uint32x4_t m;
};

constexpr std::int64_t kLanes = 4;
constexpr int kRegisters = 32;

GDN_INLINE Vec zero() { return {vdupq_n_f32(0.0f)}; }
GDN_INLINE Vec set1(float x) { return {vdupq_n_f32(x)}; }
GDN_INLINE float first_lane(Vec x) { return vgetq_lane_f32(x.v, 0); }

GDN_INLINE Vec load(const float* p) { return {vld1q_f32(p)}; }
GDN_INLINE void store(float* p, Vec x) { vst1q_f32(p, x.v); }
GDN_INLINE void stream(float* p, Vec x) { store(p, x); }

GDN_INLINE Vec load(const BFloat16* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)), 16))};
}
// To nearest even; a NaN gets its quiet bit, so that dropping the low half cannot make it an infinity.
GDN_INLINE void store(BFloat16* p, Vec x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x.v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  const uint32x4_t is_number = vceqq_f32(x.v, x.v);
  vst1_u16(reinterpret_cast<std::uint16_t*>(p), vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16));
}

// To nearest, ties away from zero; a NaN must have no bits in its low half.
GDN_INLINE void store_coarse(BFloat16* p, Vec x) {
  vst1_u16(reinterpret_cast<std::uint16_t*>(p), vaddhn_u32(vreinterpretq_u32_f32(x.v), vdupq_n_u32(0x8000)));
}

GDN_INLINE Vec load(const Float16* p) {
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const std::uint16_t*>(p));
  return {vcvt_f32_f16(vreinterpret_f16_u16(bits))};
}
GDN_INLINE void store(Float16* p, Vec x) {
  vst1_u16(reinterpret_cast<std::uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(x.v)));
}

GDN_INLINE Vec add(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
GDN_INLINE Vec sub(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
GDN_INLINE Vec mul(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
GDN_INLINE Vec div(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
GDN_INLINE Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
// NaN where either is NaN.
GDN_INLINE Vec min(Vec a, Vec b) { return {vminq_f32(a.v, b.v)}; }
GDN_INLINE Vec max(Vec a, Vec b) { return {vmaxq_f32(a.v, b.v)}; }
GDN_INLINE Vec abs(Vec a) { return {vabsq_f32(a.v)}; }
GDN_INLINE Vec neg(Vec a) { return {vnegq_f32(a.v)}; }
GDN_INLINE Vec round(Vec a) { return {vrndnq_f32(a.v)}; }

GDN_INLINE float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

// x * 2^n for integral |n| <= 252, in two factors that are normal numbers.
GDN_INLINE Vec scale_by_power_of_two(Vec x, Vec n) {
  const int32x4_t exponent = vcvtnq_s32_f32(n.v);
  const int32x4_t half = vshrq_n_s32(exponent, 1);
  return {vmulq_f32(vmulq_f32(x.v, power_of_two(half)), power_of_two(vsubq_s32(exponent, half)))};
}

// x * 2^n for the n that the last bits of `exponent` are.
GDN_INLINE Vec add_exponent(Vec x, Vec exponent) {
  const uint32x4_t shifted = vshlq_n_u32(vreinterpretq_u32_f32(exponent.v), 23);
  return {vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x.v), shifted))};
}

GDN_INLINE Mask less(Vec a, Vec b) { return {vcltq_f32(a.v, b.v)}; }
GDN_INLINE Mask either(Mask a, Mask b) { return {vorrq_u32(a.m, b.m)}; }
GDN_INLINE Vec select(Mask m, Vec if_true, Vec if_false) { return {vbslq_f32(m.m, if_true.v, if_false.v)}; }
GDN_INLINE unsigned lane_bits(Mask m) {
  const std::uint32_t bit_of_lane[] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m.m, vld1q_u32(bit_of_lane)));
}

GDN_INLINE Vec square_root(Vec a) { return {vsqrtq_f32(a.v)}; }
GDN_INLINE float square_root(float x) { return vgetq_lane_f32(vsqrtq_f32(vdupq_n_f32(x)), 0); }

GDN_INLINE float reduce_add(Vec x) {
  const float32x2_t pair = vadd_f32(vget_low_f32(x.v), vget_high_f32(x.v));
  return vget_lane_f32(vpadd_f32(pair, pair), 0);
}

// Lane j is the sum of all lanes of x[j], each by the same tree.
GDN_INLINE Vec sum_lanes(const Vec* x) { return {vpaddq_f32(vpaddq_f32(x[0].v, x[1].v), vpaddq_f32(x[2].v, x[3].v))}; }

// Lane i of vector j is p[i * kCount + j].
template <int kCount>
  requires(kCount >= 2 && kCount <= 4)
GDN_INLINE void load_interleaved(const BFloat16* p, Vec (&x)[kCount]) {
  const auto* words = reinterpret_cast<const std::uint16_t*>(p);
  const auto widen = [&](const auto& columns) {
    for (int j = 0; j < kCount; ++j) x[j] = {vreinterpretq_f32_u32(vshll_n_u16(columns.val[j], 16))};
  };
  if constexpr (kCount == 2) widen(vld2_u16(words));
  if constexpr (kCount == 3) widen(vld3_u16(words));
  if constexpr (kCount == 4) widen(vld4_u16(words));
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA

#include "four_lanes.h"
