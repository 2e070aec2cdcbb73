// SPDX-License-Identifier: Apache-2.0
//
// Strided lanes of any dtype, and the states of the convolution: reading a row's history, and leaving its last inputs.
#pragma once

#include "simd/simd.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// One value a channel: value i is data[offset + i * stride].
struct Lanes {
  const void* data;
  DType dtype;
  std::int64_t stride;
  std::int64_t offset;
};
struct MutableLanes {
  void* data;
  DType dtype;
  std::int64_t stride;
  std::int64_t offset;
};

GDN_INLINE Lanes lanes_from(const Lanes& x, std::int64_t index) {
  return {x.data, x.dtype, x.stride, x.offset + index * x.stride};
}

GDN_INLINE void store_scalar(DType dtype, void* data, std::int64_t index, float x) {
  if (dtype == DType::kBFloat16) {
    static_cast<BFloat16*>(data)[index] = from_float<BFloat16>(x);
  } else if (dtype == DType::kFloat16) {
    static_cast<Float16*>(data)[index] = from_float<Float16>(x);
  } else {
    static_cast<float*>(data)[index] = x;
  }
}

// The first n of them, at most kLanes.
GDN_INLINE Vec load_lanes(const Lanes& x, std::int64_t n) {
  if (x.stride == 1) return load_as(x.dtype, x.data, x.offset, n);
  if (x.dtype == DType::kBFloat16) return load_strided(static_cast<const BFloat16*>(x.data) + x.offset, x.stride, n);
  if (x.dtype == DType::kFloat16) return load_strided(static_cast<const Float16*>(x.data) + x.offset, x.stride, n);
  return load_strided(static_cast<const float*>(x.data) + x.offset, x.stride, n);
}

GDN_INLINE void store_lanes(const MutableLanes& to, Vec x, std::int64_t n) {
  if (to.stride == 1) return store_as(to.dtype, to.data, to.offset, x, n);
  float lanes[kLanes];
  store(lanes, x);
  for (std::int64_t i = 0; i < min_of(n, kLanes); ++i) {
    store_scalar(to.dtype, to.data, to.offset + i * to.stride, lanes[i]);
  }
}

// The same by store_coarse, to bfloat16.
GDN_INLINE void store_coarse_lanes(const MutableLanes& to, Vec x, std::int64_t n) {
  BFloat16* const data = static_cast<BFloat16*>(to.data) + to.offset;
  if (to.stride == 1) return store_coarse(data, x, n);
  BFloat16 lanes[kLanes];
  store_coarse(lanes, x, kLanes);
  for (std::int64_t i = 0; i < min_of(n, kLanes); ++i) data[i * to.stride] = lanes[i];
}

// To fp32, zeros up to a whole vector.
GDN_INLINE void widen_lanes(float* to, const Lanes& from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, canonical_nan(load_lanes(lanes_from(from, i), n - i)));
}

template <class T>
GDN_INLINE void copy_bits(T* to, std::int64_t to_stride, const T* from, std::int64_t from_stride, std::int64_t n) {
  if (to_stride == 1 && from_stride == 1) {
    std::memmove(to, from, static_cast<std::size_t>(n) * sizeof(T));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i * to_stride] = from[i * from_stride];
  }
}

// Channels of kCount columns side by side: each column becomes the one after it, and the last one x.
template <int kCount, class T>
GDN_INLINE void shift_interleaved(T* state, const T* x, std::int64_t n) {
  if constexpr (requires { shift_interleaved_vector<kCount>(state, x); }) {
    if (n == kLanes) return shift_interleaved_vector<kCount>(state, x);
  }
  std::memmove(state, state + 1, static_cast<std::size_t>(n * kCount - 1) * sizeof(T));
  for (std::int64_t i = 0; i < n; ++i) state[i * kCount + kCount - 1] = x[i];
}

// Rounds where the dtypes differ, else keeps the bits.
void copy_lanes(const MutableLanes& to, const Lanes& from, std::int64_t n) {
  if (to.dtype != from.dtype) {
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const MutableLanes part{to.data, to.dtype, to.stride, to.offset + i * to.stride};
      store_lanes(part, load_lanes(lanes_from(from, i), n - i), n - i);
    }
  } else if (element_size(to.dtype) == 2) {
    copy_bits(static_cast<std::uint16_t*>(to.data) + to.offset, to.stride,
              static_cast<const std::uint16_t*>(from.data) + from.offset, from.stride, n);
  } else {
    copy_bits(static_cast<float*>(to.data) + to.offset, to.stride, static_cast<const float*>(from.data) + from.offset,
              from.stride, n);
  }
}

void clear_lanes(const MutableLanes& to, std::int64_t n) {
  if (to.stride == 1) {
    const std::int64_t size = element_size(to.dtype);
    std::memset(static_cast<char*>(to.data) + to.offset * size, 0, static_cast<std::size_t>(n * size));
    return;
  }
  for (std::int64_t i = 0; i < n; i += kLanes) {
    store_lanes({to.data, to.dtype, to.stride, to.offset + i * to.stride}, zero(), n - i);
  }
}

GDN_INLINE std::int64_t state_offset(const ConvolutionStates& s, std::int64_t slot, std::int64_t channel,
                                     std::int64_t column) {
  return slot * s.slot_stride + channel * s.channel_stride + column * s.column_stride;
}

GDN_INLINE Lanes state_lanes(const ConvolutionStates& s, std::int64_t slot, std::int64_t channel, std::int64_t column) {
  return {s.data, s.dtype, s.channel_stride, state_offset(s, slot, channel, column)};
}
GDN_INLINE MutableLanes mutable_state_lanes(const ConvolutionStates& s, std::int64_t slot, std::int64_t channel,
                                            std::int64_t column) {
  return {s.data, s.dtype, s.channel_stride, state_offset(s, slot, channel, column)};
}

GDN_INLINE Lanes input_lanes(const ConvolutionParams& p, const ConvolutionRow& row, std::int64_t token,
                             std::int64_t channel) {
  return {p.x.data, p.x.dtype, p.x.head_stride,
          row.batch * p.x.batch_stride + token * p.x.token_stride + channel * p.x.head_stride};
}

// The W-1 inputs before a row, oldest first: history i at to + i * to_stride.
void load_history(const ConvolutionParams& p, const ConvolutionRow& row, std::int64_t channel, std::int64_t n,
                  float* to, std::int64_t to_stride) {
  const std::int64_t size = p.width - 1;
  for (std::int64_t i = 0; i < size; ++i, to += to_stride) {
    if ((row.input_history >> i & 1u) != 0) {
      widen_lanes(to, input_lanes(p, row, row.begin - size + i, channel), n);
    } else if (row.source >= 0) {
      const std::int64_t column = (row.first_column + i) % p.num_columns;
      widen_lanes(to, state_lanes(p.source, row.source, channel, column), n);
    } else {
      for (std::int64_t c = 0; c < n; c += kLanes) store(to + c, zero());
    }
  }
}

// Column `column` of `to` becomes number `index` of cat(columns of the source, x).
void store_joined(const ConvolutionParams& p, const ConvolutionRow& row, const MutableLanes& to, std::int64_t index,
                  std::int64_t channel, std::int64_t n) {
  if (index >= p.num_columns) {
    copy_lanes(to, input_lanes(p, row, row.begin + index - p.num_columns, channel), n);
  } else if (row.source >= 0) {
    copy_lanes(to, state_lanes(p.source, row.source, channel, index), n);
  } else {
    clear_lanes(to, n);
  }
}

// Whether the columns of one channel after the other lie side by side, in a state that is shifted in place.
GDN_INLINE bool is_packed_in_place(const ConvolutionParams& p, const ConvolutionRow& row) {
  return p.source.data == p.destination.data && row.source == row.destination && p.destination.column_stride == 1 &&
         p.destination.channel_stride == p.num_columns;
}

// The same as a shift of each channel: what enters a channel from the next is overwritten by x.
void shift_packed_state(const ConvolutionParams& p, const ConvolutionRow& row, std::int64_t num_tokens,
                        std::int64_t channel, std::int64_t n) {
  const std::int64_t size = element_size(p.destination.dtype);
  char* first =
      static_cast<char*>(p.destination.data) + state_offset(p.destination, row.destination, channel, 0) * size;
  const std::int64_t kept = n * p.num_columns - num_tokens;
  std::memmove(first, first + num_tokens * size, static_cast<std::size_t>(kept * size));
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const std::int64_t column = p.num_columns - num_tokens + t;
    copy_lanes(mutable_state_lanes(p.destination, row.destination, channel, column),
               input_lanes(p, row, row.begin + t, channel), n);
  }
}

// The columns that a row of num_tokens leaves. Ascending: where source and destination are the same memory, a column is
// read before it is written.
void update_state(const ConvolutionParams& p, const ConvolutionRow& row, std::int64_t num_tokens, std::int64_t channel,
                  std::int64_t n) {
  const auto to = [&](std::int64_t column) {
    return mutable_state_lanes(p.destination, row.destination, channel, column);
  };
  switch (p.update) {
    case ConvolutionUpdate::kShift:
      if (num_tokens < p.num_columns && is_packed_in_place(p, row)) {
        shift_packed_state(p, row, num_tokens, channel, n);
        break;
      }
      for (std::int64_t column = 0; column < p.num_columns; ++column) {
        store_joined(p, row, to(column), column + num_tokens, channel, n);
      }
      break;
    case ConvolutionUpdate::kRollback: {
      const std::int64_t kept = p.width - 2;
      for (std::int64_t i = 0; i < kept; ++i) store_joined(p, row, to(i), row.first_column + 1 + i, channel, n);
      for (std::int64_t t = 0; t < num_tokens; ++t) store_joined(p, row, to(kept + t), p.num_columns + t, channel, n);
      break;
    }
    case ConvolutionUpdate::kRing: {
      const std::int64_t first = num_tokens > p.num_columns ? num_tokens - p.num_columns : 0;
      for (std::int64_t t = first; t < num_tokens; ++t) {
        const std::int64_t column = (row.first_column + p.width - 1 + t) % p.num_columns;
        store_joined(p, row, to(column), p.num_columns + t, channel, n);
      }
      break;
    }
  }
}

// The last W-1 inputs of a row, apart from its state.
void store_final_state(const ConvolutionParams& p, const ConvolutionRow& row, std::int64_t num_tokens,
                       std::int64_t channel, std::int64_t n) {
  for (std::int64_t column = 0; column < p.width - 1; ++column) {
    const MutableLanes to = mutable_state_lanes(p.final_states, row.final_slot, channel, column);
    store_joined(p, row, to, column + num_tokens, channel, n);
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
