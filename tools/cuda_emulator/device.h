// SPDX-License-Identifier: Apache-2.0
//
// The names that kernels may use, for the emulator; packages/gdn-cuda/csrc/device/device.h says what they mean.
#pragma once

#include <cmath>
#include <cstring>

#include "emulator.h"

#define GDN_DEVICE inline
#define GDN_KERNEL(threads, blocks_per_sm) extern "C" void
#define GDN_GRID_CONSTANT

namespace gdn::device {

inline constexpr int kWarp = 32;

struct alignas(16) Vector16 {
  unsigned x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

// Where a collective is called from: the arguments that its callers leave out.
#define GDN_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline int thread_index() { return emulator::thread_index(); }
inline int num_threads() { return emulator::block_threads(); }
inline int block_x() { return emulator::block_x(); }
inline int block_y() { return emulator::block_y(); }
inline char* shared_memory() { return emulator::shared_memory(); }

inline void barrier(GDN_PLACE) { emulator::barrier({file, line}); }
inline void warp_barrier(GDN_PLACE) { emulator::warp_barrier({file, line}); }
inline float shuffle(float value, int lane, GDN_PLACE) { return emulator::shuffle(value, lane & 31, {file, line}); }
inline float shuffle_xor(float value, int mask, GDN_PLACE) {
  return emulator::shuffle(value, (emulator::thread_index() & 31) ^ mask, {file, line});
}
inline void device_fence(GDN_PLACE) { emulator::device_fence({file, line}); }
inline unsigned atomic_increment(unsigned* counter, unsigned last) { return emulator::atomic_increment(counter, last); }

inline Vector16 load16(const void* address) { return *static_cast<const Vector16*>(address); }
inline void store16(void* address, Vector16 value) { *static_cast<Vector16*>(address) = value; }
inline float load_uncached(const float* address, GDN_PLACE) {
  emulator::note_uncached_load({file, line});
  return *address;
}
inline void copy16_async(void* shared, const void* global, GDN_PLACE) {
  emulator::copy16_async(shared, global, {file, line});
}
inline void await_copies() { emulator::await_copies(); }

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float square_root(float x) { return std::sqrt(x); }
inline unsigned bits_of(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float from_bits(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen_bfloat16(unsigned short bits) { return from_bits(static_cast<unsigned>(bits) << 16); }
inline float widen_float16(unsigned short half) {
  const unsigned sign = static_cast<unsigned>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Moved to the place of fp32's fraction, the number is 2^-112 of itself, also below the normal range.
  return from_bits(sign | bits_of(from_bits(magnitude << 13) * 0x1p112f));
}

inline unsigned bfloat16_bits(float value) {
  const unsigned bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline unsigned float16_bits(float value) {
  const unsigned bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // Below the normal range: adding a half rounds to multiples of 2^-24, the last place of a half.
    return sign | (bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
}
inline unsigned narrow_bfloat16(float low, float high) { return bfloat16_bits(high) << 16 | bfloat16_bits(low); }
inline unsigned narrow_float16(float low, float high) { return float16_bits(high) << 16 | float16_bits(low); }

#undef GDN_PLACE

}  // namespace gdn::device
