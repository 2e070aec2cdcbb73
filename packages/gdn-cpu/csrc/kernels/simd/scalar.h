// SPDX-License-Identifier: Apache-2.0
//
// Vec in plain C++, for architectures without a wrapper of their own: 4 lanes that the compiler may vectorise.
#pragma once

#include "half.h"

namespace gdn::cpu::GDN_ISA {
namespace {

constexpr std::int64_t kLanes = 4;
constexpr int kRegisters = 16;

struct Vec {
  float v[kLanes];
};
struct Mask {
  bool m[kLanes];
};

// Applies an expression of lane i to every lane.
#define GDN_LANEWISE(result, expression)                \
  result out;                                           \
  for (std::int64_t i = 0; i < kLanes; ++i) expression; \
  return out

GDN_INLINE Vec set1(float x) { GDN_LANEWISE(Vec, out.v[i] = x); }
GDN_INLINE Vec zero() { return set1(0.0f); }
GDN_INLINE float first_lane(Vec x) { return x.v[0]; }

template <class T>
GDN_INLINE Vec load(const T* p) {
  GDN_LANEWISE(Vec, out.v[i] = to_float(p[i]));
}
template <class T>
GDN_INLINE void store(T* p, Vec x) {
  for (std::int64_t i = 0; i < kLanes; ++i) p[i] = from_float<T>(x.v[i]);
}

// To nearest, ties away from zero; a NaN must have no bits in its low half.
GDN_INLINE void store_coarse(BFloat16* p, Vec x) {
  for (std::int64_t i = 0; i < kLanes; ++i) p[i].bits = static_cast<std::uint16_t>((bits_of(x.v[i]) + 0x8000u) >> 16);
}

GDN_INLINE void stream(float* p, Vec x) { store(p, x); }

GDN_INLINE Vec add(Vec a, Vec b) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] + b.v[i]); }
GDN_INLINE Vec sub(Vec a, Vec b) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] - b.v[i]); }
GDN_INLINE Vec mul(Vec a, Vec b) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] * b.v[i]); }
GDN_INLINE Vec div(Vec a, Vec b) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] / b.v[i]); }
GDN_INLINE Vec fma(Vec a, Vec b, Vec c) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] * b.v[i] + c.v[i]); }
// The second operand where either is NaN.
GDN_INLINE Vec min(Vec a, Vec b) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
GDN_INLINE Vec max(Vec a, Vec b) { GDN_LANEWISE(Vec, out.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
GDN_INLINE Vec abs(Vec a) { GDN_LANEWISE(Vec, out.v[i] = __builtin_fabsf(a.v[i])); }
GDN_INLINE Vec neg(Vec a) { GDN_LANEWISE(Vec, out.v[i] = -a.v[i]); }
// For |a| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
GDN_INLINE Vec round(Vec a) { GDN_LANEWISE(Vec, out.v[i] = (a.v[i] + 12582912.0f) - 12582912.0f); }

GDN_INLINE float power_of_two(int n) { return float_of(static_cast<std::uint32_t>(n + 127) << 23); }

// x * 2^n for integral |n| <= 252, in two factors that are normal numbers. A NaN in n (then x is NaN too) counts as 0:
// converting it would be undefined.
GDN_INLINE float scale_by_power_of_two(float x, float n) {
  const int exponent = n == n ? static_cast<int>(n) : 0;
  const int half = exponent / 2;
  return x * power_of_two(half) * power_of_two(exponent - half);
}
GDN_INLINE Vec scale_by_power_of_two(Vec x, Vec n) {
  GDN_LANEWISE(Vec, out.v[i] = scale_by_power_of_two(x.v[i], n.v[i]));
}

// x * 2^n for the n that the last bits of `exponent` are.
GDN_INLINE Vec add_exponent(Vec x, Vec exponent) {
  GDN_LANEWISE(Vec, out.v[i] = float_of(bits_of(x.v[i]) + (bits_of(exponent.v[i]) << 23)));
}

GDN_INLINE Mask less(Vec a, Vec b) { GDN_LANEWISE(Mask, out.m[i] = a.v[i] < b.v[i]); }
GDN_INLINE Mask either(Mask a, Mask b) { GDN_LANEWISE(Mask, out.m[i] = a.m[i] || b.m[i]); }
GDN_INLINE Vec select(Mask m, Vec if_true, Vec if_false) {
  GDN_LANEWISE(Vec, out.v[i] = m.m[i] ? if_true.v[i] : if_false.v[i]);
}
GDN_INLINE unsigned lane_bits(Mask m) {
  unsigned bits = 0;
  for (std::int64_t i = 0; i < kLanes; ++i) bits |= (m.m[i] ? 1u : 0u) << i;
  return bits;
}

GDN_INLINE Vec square_root(Vec a) { GDN_LANEWISE(Vec, out.v[i] = __builtin_sqrtf(a.v[i])); }
GDN_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

GDN_INLINE float reduce_add(Vec x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }

// Lane j is the sum of all lanes of x[j].
GDN_INLINE Vec sum_lanes(const Vec* x) { GDN_LANEWISE(Vec, out.v[i] = reduce_add(x[i])); }

#undef GDN_LANEWISE

}  // namespace
}  // namespace gdn::cpu::GDN_ISA

#include "four_lanes.h"
