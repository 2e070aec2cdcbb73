// SPDX-License-Identifier: Apache-2.0
//
// What AVX-512 has instructions for, on the other levels; included after their Vec.
#pragma once

namespace gdn::cpu::GDN_ISA {
namespace {

// 2^x within 2^-13.7 of it, for results that are stored with 8 bits.
GDN_INLINE Vec coarse_exp2(Vec x) {
  // Just past the thresholds of 0 and infinity. The order of the operands lets NaN through.
  x = max(set1(-127.0f), min(set1(129.0f), x));
  const Vec n = round(x);
  const Vec f = sub(x, n);
  Vec p = set1(0.05517166852951f);
  p = fma(p, f, set1(0.24261112511158f));
  p = fma(p, f, set1(0.69326096773147f));
  p = fma(p, f, set1(0.99992805719376f));
  return scale_by_power_of_two(p, n);
}

// The nearest bfloat16, ties to even, of values whose NaN came through canonical_nan or from bfloat16.
GDN_INLINE Vec canonical_nan(Vec x) { return x; }
GDN_INLINE void store_coarse(BFloat16* p, Vec x, std::int64_t n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_n(p, x, n);
  }
}
template <class T>
GDN_INLINE void store_coarse_pair(T* p, Vec a, Vec b) {
  if constexpr (requires { store_pair(p, a, b); }) {
    store_pair(p, a, b);
  } else {
    store(p, a);
    store(p + kLanes, b);
  }
}

GDN_INLINE Vec coarse_reciprocal(Vec x) { return div(set1(1.0f), x); }

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
