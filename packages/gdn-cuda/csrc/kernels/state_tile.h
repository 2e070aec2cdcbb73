// SPDX-License-Identifier: Apache-2.0
//
// The part of a head's state [V, K] that a thread keeps in registers. kRowLanes neighbouring threads, a group, share
// kRows consecutive rows; of a row each has kElements, in vectors of 16 bytes that lie kRowLanes apart, so that a group
// loads 128 bytes at a time.
#pragma once

#include "values.h"

namespace gdn::cuda {

template <int kKeyDim, class State>
struct StateTile {
  using Storage = typename State::Storage;
  static constexpr int kRows = rows_per_thread(kKeyDim);
  static constexpr int kElements = kKeyDim / kRowLanes;
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(Storage));
  static constexpr int kVectors = kElements / kPerVector;
  static constexpr int kQuads = kElements / 4;

  static constexpr bool kIsNarrow = kPerVector == 8;

  Vector16 raw[kRows][kIsNarrow ? kVectors : 1];  // as loaded, until it is wanted in fp32
  float value[kRows][kElements];

  // In shared memory a row of q or k is stored so that a group reads its next four elements each without bank
  // conflicts: element -> place, and quad -> place of a thread's elements [4 quad, 4 quad + 4).
  static GDN_DEVICE int place(int element) {
    if constexpr (!kIsNarrow) {
      return element;
    } else {
      const int in_chunk = element % (kRowLanes * 8), chunk = element - in_chunk;
      return chunk + in_chunk % 8 / 4 * (kRowLanes * 4) + in_chunk / 8 * 4 + in_chunk % 4;
    }
  }
  static GDN_DEVICE int quad_place(int quad, int lane) { return (quad * kRowLanes + lane) * 4; }

  // `rows` points to the first row of the group.
  GDN_DEVICE void load(const Storage* rows, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const Vector16 words = load16(rows + r * kKeyDim + (i * kRowLanes + lane) * kPerVector);
        if constexpr (kIsNarrow) {
          raw[r][i] = words;
        } else {
          widen_vector(words, value[r] + i * kPerVector);
        }
      }
    }
  }

  GDN_DEVICE void widen() {
    if constexpr (kIsNarrow) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) widen_vector(raw[r][i], value[r] + i * kPerVector);
      }
    }
  }

  GDN_DEVICE void store(Storage* rows, int lane) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        store16(rows + r * kKeyDim + (i * kRowLanes + lane) * kPerVector, narrow_vector(value[r] + i * kPerVector));
      }
    }
  }

  // Stores, and goes on with what a load would bring back.
  GDN_DEVICE void store_and_round(Storage* rows, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const Vector16 words = narrow_vector(value[r] + i * kPerVector);
        store16(rows + r * kKeyDim + (i * kRowLanes + lane) * kPerVector, words);
        widen_vector(words, value[r] + i * kPerVector);
      }
    }
  }

  GDN_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) value[r][i] = 0.0f;
    }
  }

  // M = decay M + k u^T, where u has one value a row.
  GDN_DEVICE void update(float decay, const float* k, int lane, const float (&u)[kRows]) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const Float4 key = *reinterpret_cast<const Float4*>(k + quad_place(quad, lane));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float* row = value[r] + 4 * quad;
        row[0] = multiply_add(key.x, u[r], decay * row[0]);
        row[1] = multiply_add(key.y, u[r], decay * row[1]);
        row[2] = multiply_add(key.z, u[r], decay * row[2]);
        row[3] = multiply_add(key.w, u[r], decay * row[3]);
      }
    }
  }

 private:
  static GDN_DEVICE void widen_vector(Vector16 words, float* to) {
    widen_word(words.x, to, 0);
    widen_word(words.y, to, 1);
    widen_word(words.z, to, 2);
    widen_word(words.w, to, 3);
  }
  static GDN_DEVICE Vector16 narrow_vector(const float* from) {
    return {narrow_word(from, 0), narrow_word(from, 1), narrow_word(from, 2), narrow_word(from, 3)};
  }
  // A word holds one fp32 value or two of half precision.
  static GDN_DEVICE void widen_word(unsigned word, float* to, int i) {
    if constexpr (!kIsNarrow) {
      to[i] = from_bits(word);
    } else {
      to[2 * i] = State::widen(static_cast<unsigned short>(word & 0xffffu));
      to[2 * i + 1] = State::widen(static_cast<unsigned short>(word >> 16));
    }
  }
  static GDN_DEVICE unsigned narrow_word(const float* from, int i) {
    if constexpr (!kIsNarrow) {
      return bits_of(from[i]);
    } else {
      return State::narrow_pair(from[2 * i], from[2 * i + 1]);
    }
  }
};

// Adds each of the values, which are a power of two up to 8, up over a group. A thread gets one of the sums: at each
// step half of its values go on, and the other half to the thread that keeps it, until there is one. The order of
// additions is the same for every value.
template <int kMask, int kCount>
GDN_DEVICE float group_sums(const float (&values)[kCount], int lane) {
  constexpr int kLeft = kCount > 1 ? kCount / 2 : 1;
  float sums[kLeft];
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const bool is_upper = kCount > 1 && (lane & kMask) != 0;
    const float lower = values[i], upper = values[kCount - kLeft + i];
    sums[i] = (is_upper ? upper : lower) + shuffle_xor(is_upper ? lower : upper, kMask);
  }
  if constexpr (kMask == 1) {
    return sums[0];
  } else {
    return group_sums<kMask / 2>(sums, lane);
  }
}

// The sum over a warp, for every thread of it.
GDN_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

}  // namespace gdn::cuda
