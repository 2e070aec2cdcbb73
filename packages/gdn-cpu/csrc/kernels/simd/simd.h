// SPDX-License-Identifier: Apache-2.0
//
// Vec of the level that is being compiled, and accesses whose dtype is known at run time only.
#pragma once

#include "../params.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
#elif defined(__SSE2__)
#include "sse2.h"
#elif defined(__aarch64__)
#include "neon.h"
#else
#include "scalar.h"
#endif

namespace gdn::cpu::GDN_ISA {
namespace {

GDN_INLINE std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

GDN_INLINE std::int64_t max_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

GDN_INLINE std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

GDN_INLINE std::int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// n lanes, zeros beyond; a full vector takes the access without a mask.
template <class T>
GDN_INLINE Vec load_up_to(const T* p, std::int64_t n) {
  return n >= kLanes ? load(p) : load_n(p, n);
}
template <class T>
GDN_INLINE void store_up_to(T* p, Vec x, std::int64_t n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_n(p, x, n);
  }
}

// The dtype is the same for a whole call: these branches are always predicted.
GDN_INLINE Vec load_as(DType dtype, const void* data, std::int64_t index, std::int64_t n) {
  if (dtype == DType::kBFloat16) return load_up_to(static_cast<const BFloat16*>(data) + index, n);
  if (dtype == DType::kFloat16) return load_up_to(static_cast<const Float16*>(data) + index, n);
  return load_up_to(static_cast<const float*>(data) + index, n);
}
GDN_INLINE void store_as(DType dtype, void* data, std::int64_t index, Vec x, std::int64_t n) {
  if (dtype == DType::kBFloat16) return store_up_to(static_cast<BFloat16*>(data) + index, x, n);
  if (dtype == DType::kFloat16) return store_up_to(static_cast<Float16*>(data) + index, x, n);
  store_up_to(static_cast<float*>(data) + index, x, n);
}
// Calls body with a pointer of the dtype, for loops that are worth a copy per dtype.
template <class Body>
GDN_INLINE void with_dtype(DType dtype, const void* data, Body body) {
  if (dtype == DType::kBFloat16) return body(static_cast<const BFloat16*>(data));
  if (dtype == DType::kFloat16) return body(static_cast<const Float16*>(data));
  body(static_cast<const float*>(data));
}
template <class Body>
GDN_INLINE void with_dtype(DType dtype, void* data, Body body) {
  if (dtype == DType::kBFloat16) return body(static_cast<BFloat16*>(data));
  if (dtype == DType::kFloat16) return body(static_cast<Float16*>(data));
  body(static_cast<float*>(data));
}

GDN_INLINE float load_scalar(DType dtype, const void* data, std::int64_t index) {
  if (dtype == DType::kBFloat16) return to_float(static_cast<const BFloat16*>(data)[index]);
  if (dtype == DType::kFloat16) return to_float(static_cast<const Float16*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

// Elements [index, index + n) of a vector of any stride.
GDN_INLINE Vec load_strided(const HeadVector& x, std::int64_t index, std::int64_t n) {
  if (x.stride == 1) return load_as(x.dtype, x.data, index, n);
  float lanes[kLanes] = {};
  for (std::int64_t i = 0; i < min_of(n, kLanes); ++i) lanes[i] = load_scalar(x.dtype, x.data, (index + i) * x.stride);
  return load(lanes);
}

// Has the compiler load x once: left alone, it folds the load into each of its uses.
GDN_INLINE Vec in_register(Vec x) {
#if defined(__x86_64__)
  __asm__("" : "+v"(x.v));
#endif
  return x;
}

// After streamed stores, which otherwise may be seen later than what follows them.
GDN_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

constexpr std::int64_t kCacheLine = 64;

// The lines of `bytes` bytes from p + offset, into the second-level cache: asking for the first level was slower. They
// may lie beyond the operand: a prefetch never faults.
GDN_INLINE void prefetch(const void* p, std::int64_t offset, std::int64_t bytes) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(p) + static_cast<std::uintptr_t>(offset);
  for (std::int64_t i = 0; i < bytes; i += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<std::uintptr_t>(i)), 0, 2);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
