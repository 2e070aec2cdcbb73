// SPDX-License-Identifier: Apache-2.0
//
// Transposes kLanes vectors in place: lane j of vector i becomes lane i of vector j. The lanes may hold any bits.
#pragma once

#include "simd.h"

namespace gdn::cpu::GDN_ISA {
namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

// Within each 128-bit block: a 4 by 4 transpose of four vectors.
GDN_INLINE void transpose_blocks(__m512* x) {
  const __m512 ab_low = _mm512_unpacklo_ps(x[0], x[1]), ab_high = _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 cd_low = _mm512_unpacklo_ps(x[2], x[3]), cd_high = _mm512_unpackhi_ps(x[2], x[3]);
  x[0] = _mm512_shuffle_ps(ab_low, cd_low, 0x44);
  x[1] = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
  x[2] = _mm512_shuffle_ps(ab_high, cd_high, 0x44);
  x[3] = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
}

GDN_INLINE void transpose(Vec* vectors) {
  __m512 x[16];
  for (int i = 0; i < 16; ++i) x[i] = vectors[i].v;
  for (int i = 0; i < 16; i += 4) transpose_blocks(x + i);
  // x[4 a + c] holds column c of blocks (a, 0..3): now a transpose of the 4 by 4 blocks.
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(x[c], x[4 + c], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(x[c], x[4 + c], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0xee);
    vectors[c].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    vectors[4 + c].v = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    vectors[8 + c].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    vectors[12 + c].v = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

GDN_INLINE void transpose_blocks(__m256* x) {
  const __m256 ab_low = _mm256_unpacklo_ps(x[0], x[1]), ab_high = _mm256_unpackhi_ps(x[0], x[1]);
  const __m256 cd_low = _mm256_unpacklo_ps(x[2], x[3]), cd_high = _mm256_unpackhi_ps(x[2], x[3]);
  x[0] = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
  x[1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
  x[2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
  x[3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
}

GDN_INLINE void transpose(Vec* vectors) {
  __m256 x[8];
  for (int i = 0; i < 8; ++i) x[i] = vectors[i].v;
  transpose_blocks(x);
  transpose_blocks(x + 4);
  for (int c = 0; c < 4; ++c) {
    vectors[c].v = _mm256_permute2f128_ps(x[c], x[4 + c], 0x20);
    vectors[4 + c].v = _mm256_permute2f128_ps(x[c], x[4 + c], 0x31);
  }
}

#elif defined(__SSE2__)

GDN_INLINE void transpose(Vec* x) {
  const __m128 ab_low = _mm_unpacklo_ps(x[0].v, x[1].v), ab_high = _mm_unpackhi_ps(x[0].v, x[1].v);
  const __m128 cd_low = _mm_unpacklo_ps(x[2].v, x[3].v), cd_high = _mm_unpackhi_ps(x[2].v, x[3].v);
  x[0].v = _mm_movelh_ps(ab_low, cd_low);
  x[1].v = _mm_movehl_ps(cd_low, ab_low);
  x[2].v = _mm_movelh_ps(ab_high, cd_high);
  x[3].v = _mm_movehl_ps(cd_high, ab_high);
}

#elif defined(__aarch64__)

GDN_INLINE void transpose(Vec* x) {
  const float32x4x2_t ab = vtrnq_f32(x[0].v, x[1].v), cd = vtrnq_f32(x[2].v, x[3].v);
  x[0].v = vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
  x[1].v = vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
  x[2].v = vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
  x[3].v = vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
}

#else

GDN_INLINE void transpose(Vec* x) {
  for (std::int64_t i = 0; i < kLanes; ++i) {
    for (std::int64_t j = 0; j < i; ++j) {
      const float lane = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = lane;
    }
  }
}

#endif

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
