// SPDX-License-Identifier: Apache-2.0
//
// The storage types of the kernels and their scalar conversions, in integer arithmetic: the results do not depend on
// the compiler, on F16C or on the flush-to-zero mode.
#pragma once

#include <cstdint>
#include <cstring>

// Everything in the kernels is local to its translation unit: a function that one level emitted with its own
// instructions must never be the copy that the linker keeps for another level.
#define GDN_INLINE static inline __attribute__((always_inline))

namespace gdn::cpu::GDN_ISA {
namespace {

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

GDN_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

GDN_INLINE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

GDN_INLINE float to_float(float x) { return x; }

GDN_INLINE float to_float(BFloat16 x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }

GDN_INLINE float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  if (mantissa == 0) return float_of(sign);
  // A subnormal: shift the leading one to bit 10, each shift lowers the exponent.
  std::uint32_t float_exponent = 113;
  for (; (mantissa & 0x400u) == 0; mantissa <<= 1) --float_exponent;
  return float_of(sign | (float_exponent << 23) | ((mantissa & 0x3ffu) << 13));
}

template <class T>
inline __attribute__((always_inline)) T from_float(float x);

template <>
inline __attribute__((always_inline)) float from_float<float>(float x) {
  return x;
}

template <>
inline __attribute__((always_inline)) BFloat16 from_float<BFloat16>(float x) {
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline __attribute__((always_inline)) Float16 from_float<Float16>(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65536 and above, inf
  // Drop `shift` bits of the mantissa, to nearest, ties to even. Carries run into the exponent, up to infinity.
  const std::uint32_t exponent = magnitude >> 23;
  const bool is_normal = exponent >= 113;                         // 2^-14
  if (exponent < 102) return {static_cast<std::uint16_t>(sign)};  // below half the smallest subnormal
  const std::uint32_t shift = is_normal ? 13u : 126u - exponent;
  const std::uint32_t value = is_normal ? magnitude - (112u << 23) : ((magnitude & 0x7fffffu) | 0x800000u);
  const std::uint32_t rounded = value + ((1u << (shift - 1)) - 1u) + ((value >> shift) & 1u);
  return {static_cast<std::uint16_t>(sign | (rounded >> shift))};
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
