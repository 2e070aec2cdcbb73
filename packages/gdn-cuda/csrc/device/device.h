// SPDX-License-Identifier: Apache-2.0
//
// The only names of CUDA that kernels may use. This is what they mean on a GPU; the emulator of tools/cuda_emulator has
// a file of the same name, with the same functions for a CPU. Rules that keep both true to each other:
//  - all shared memory is one block, given by shared_memory();
//  - a collective (barrier, warp_barrier, shuffle...) is called by every thread of the block or warp at one source
//  line;
//  - only barrier and warp_barrier order memory between threads, never a shuffle, nor the width of a warp;
//  - blocks do not wait for each other; between blocks, only device_fence with atomic_increment orders memory;
//  - products fuse where the code says multiply_add, and nowhere else (-fmad=false).
// Needs no CUDA header, so that the run-time compiler (NVRTC) can take it too. SM80 and newer.
#pragma once

#define GDN_DEVICE __device__ __forceinline__
#define GDN_KERNEL(threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)
#define GDN_GRID_CONSTANT __grid_constant__

namespace gdn::device {

inline constexpr int kWarp = 32;

// Sixteen bytes, the widest load and store.
struct alignas(16) Vector16 {
  unsigned x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

GDN_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
GDN_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
GDN_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
GDN_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }

// The block's shared memory: its size is an argument of the launch.
GDN_DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

GDN_DEVICE void barrier() { __syncthreads(); }
GDN_DEVICE void warp_barrier() { __syncwarp(); }
GDN_DEVICE float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
GDN_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

GDN_DEVICE void device_fence() { __threadfence(); }
// Returns the value before; `last` becomes 0 again.
GDN_DEVICE unsigned atomic_increment(unsigned* counter, unsigned last) { return atomicInc(counter, last); }

// Past the first-level cache: states are read once, and values from other blocks must not be stale.
GDN_DEVICE Vector16 load16(const void* address) {
  Vector16 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}
GDN_DEVICE void store16(void* address, Vector16 value) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
GDN_DEVICE float load_uncached(const float* address) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

// Sixteen bytes to shared memory, there once the thread has awaited its copies.
GDN_DEVICE void copy16_async(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
GDN_DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

GDN_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
GDN_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
GDN_DEVICE unsigned bits_of(float value) { return __float_as_uint(value); }
GDN_DEVICE float from_bits(unsigned bits) { return __uint_as_float(bits); }

GDN_DEVICE float widen_bfloat16(unsigned short bits) { return from_bits(static_cast<unsigned>(bits) << 16); }
GDN_DEVICE float widen_float16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
// Round to nearest even; the first value goes to the lower half.
GDN_DEVICE unsigned narrow_bfloat16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
GDN_DEVICE unsigned narrow_float16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace gdn::device
