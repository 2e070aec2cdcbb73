// SPDX-License-Identifier: Apache-2.0
//
// What the levels of four lanes share; included after their Vec. Partial accesses go through a small buffer.
#pragma once

namespace gdn::cpu::GDN_ISA {
namespace {

template <class T>
GDN_INLINE Vec load_n(const T* p, std::int64_t n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(T));
  return load(buffer);
}

template <class T>
GDN_INLINE void store_n(T* p, Vec x, std::int64_t n) {
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(T));
}

GDN_INLINE void store_coarse(BFloat16* p, Vec x, std::int64_t n) {
  BFloat16 buffer[kLanes];
  store_coarse(n >= kLanes ? p : buffer, x);
  if (n < kLanes) std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(BFloat16));
}
GDN_INLINE void store_coarse_pair(BFloat16* p, Vec a, Vec b) {
  store_coarse(p, a);
  store_coarse(p + kLanes, b);
}

// a . b in double precision, n a multiple of 16.
GDN_INLINE double dot_double(const float* a, const float* b, std::int64_t n) {
  double sum[4] = {};
  for (std::int64_t i = 0; i < n; i += 4) {
    for (std::int64_t j = 0; j < 4; ++j) sum[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The sums over lanes of kSumRows vectors to `first`, of the kSumRows after them to `second`.
constexpr int kSumRows = static_cast<int>(kLanes);
GDN_INLINE void store_sums(const Vec* x, float* first, float* second) {
  store(first, sum_lanes(x));
  store(second, sum_lanes(x + kSumRows));
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA

#include "coarse.h"
