// SPDX-License-Identifier: Apache-2.0
//
// What AVX-512 has instructions for, on the other levels; included after their Vec.
#pragma once

namespace gdn::cpu::GDN_ISA {
namespace {

// silu(x) from t = c x for results that are stored as bfloat16: within 2^-12.6 of it, where it is above 1e-36. With
// c = log2(e) / 2, x / (1 + exp(-x)) = t / (c + (sqrt(c) 2^-t)^2), and t is finite wherever x is.
constexpr float kCoarseSiluScale = 0x1.715476p-1f;
// Step by step for all of them: one after the other, they would wait for their own results. In two halves, between
// which other work may come: `power` is for the second one.
template <int kCount>
GDN_INLINE void begin_coarse_silu(const Vec (&t)[kCount], Vec (&power)[kCount]) {
  const Vec shift = set1(12582912.0f);  // 1.5 * 2^23: of a sum with it, the last bits are an integer
  Vec exponent[kCount], f[kCount], p[kCount];
  for (int i = 0; i < kCount; ++i) {
    // Beyond, the square is 0 or infinity. The order of the operands lets NaN through.
    const Vec limited = max(set1(-126.0f), min(set1(126.0f), t[i]));
    exponent[i] = sub(shift, limited);
    f[i] = add(sub(exponent[i], shift), limited);
  }
  for (int i = 0; i < kCount; ++i) p[i] = fma(set1(-0.0468585005f), f[i], set1(0.206054916f));
  for (int i = 0; i < kCount; ++i) p[i] = fma(p[i], f[i], set1(-0.588801649f));
  for (int i = 0; i < kCount; ++i) p[i] = fma(p[i], f[i], set1(0.849260692f));
  for (int i = 0; i < kCount; ++i) power[i] = add_exponent(p[i], exponent[i]);
}
template <int kCount>
GDN_INLINE void finish_coarse_silu(Vec (&t)[kCount], const Vec (&power)[kCount]) {
  for (int i = 0; i < kCount; ++i) t[i] = div(t[i], fma(power[i], power[i], set1(kCoarseSiluScale)));
}
template <int kCount>
GDN_INLINE void coarse_silu(Vec (&t)[kCount]) {
  Vec power[kCount];
  begin_coarse_silu(t, power);
  finish_coarse_silu(t, power);
}

// A NaN becomes the default one, others stay.
GDN_INLINE Vec canonical_nan(Vec x) {
  const Mask is_number = either(less(x, set1(1.0f)), less(zero(), x));
  return select(is_number, x, set1(__builtin_nanf("")));
}

// Lane i of vector j is p[i * kCount + j].
template <int kCount, class T>
GDN_INLINE void load_interleaved(const T* p, Vec (&x)[kCount]) {
  for (int j = 0; j < kCount; ++j) {
    float lanes[kLanes];
    for (std::int64_t i = 0; i < kLanes; ++i) lanes[i] = to_float(p[i * kCount + j]);
    x[j] = load(lanes);
  }
}

// Lane i is p[i * stride], for i < n, zeros beyond.
template <class T>
GDN_INLINE Vec load_strided(const T* p, std::int64_t stride, std::int64_t n) {
  float lanes[kLanes] = {};
  for (std::int64_t i = 0; i < (n < kLanes ? n : kLanes); ++i) lanes[i] = to_float(p[i * stride]);
  return load(lanes);
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
