// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores of the three dtypes, and of indices.
#pragma once

#include "functions.h"
#include "params.h"

namespace gdn::cuda {

struct Float32 {
  using Storage = float;
  static GDN_DEVICE float widen(float value) { return value; }
  static GDN_DEVICE float narrow(float value) { return value; }
};
struct BFloat16 {
  using Storage = unsigned short;
  static GDN_DEVICE float widen(unsigned short bits) { return widen_bfloat16(bits); }
  static GDN_DEVICE unsigned short narrow(float value) {
    return static_cast<unsigned short>(narrow_bfloat16(value, 0.0f));
  }
  static GDN_DEVICE unsigned narrow_pair(float low, float high) { return narrow_bfloat16(low, high); }
};
struct Float16 {
  using Storage = unsigned short;
  static GDN_DEVICE float widen(unsigned short bits) { return widen_float16(bits); }
  static GDN_DEVICE unsigned short narrow(float value) {
    return static_cast<unsigned short>(narrow_float16(value, 0.0f));
  }
  static GDN_DEVICE unsigned narrow_pair(float low, float high) { return narrow_float16(low, high); }
};

// Calls body with the type of a dtype. Once around a loop, so that the loads in it do not wait for each other.
template <class Body>
GDN_DEVICE void with_dtype(DType dtype, Body body) {
  if (dtype == DType::kBFloat16) {
    body(BFloat16{});
  } else if (dtype == DType::kFloat16) {
    body(Float16{});
  } else {
    body(Float32{});
  }
}

template <class Type>
GDN_DEVICE float load_as(const void* data, Index index) {
  return Type::widen(static_cast<const typename Type::Storage*>(data)[index]);
}
template <class Type>
GDN_DEVICE void store_as(void* data, Index index, float value) {
  static_cast<typename Type::Storage*>(data)[index] = Type::narrow(value);
}

// Single values, where waiting for one costs nothing.
GDN_DEVICE float load_value(const void* data, DType dtype, Index index) {
  if (dtype == DType::kFloat32) return load_as<Float32>(data, index);
  const unsigned short bits = static_cast<const unsigned short*>(data)[index];
  return dtype == DType::kBFloat16 ? widen_bfloat16(bits) : widen_float16(bits);
}

GDN_DEVICE void store_value(void* data, DType dtype, Index index, float value) {
  if (dtype == DType::kFloat32) {
    store_as<Float32>(data, index, value);
  } else {
    static_cast<unsigned short*>(data)[index] =
        dtype == DType::kBFloat16 ? BFloat16::narrow(value) : Float16::narrow(value);
  }
}

GDN_DEVICE Index load_index(const Indices& indices, Index row, Index column = 0) {
  const Index i = row * indices.row_stride + column * indices.column_stride;
  return indices.is_wide ? static_cast<const Index*>(indices.data)[i] : static_cast<const int*>(indices.data)[i];
}

}  // namespace gdn::cuda
