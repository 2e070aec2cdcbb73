// SPDX-License-Identifier: Apache-2.0
//
// Dtypes and strides of tensors that are known to be dense.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "check.h"

namespace gdn {

// The activation dtype of a tensor, if it has one, as each backend numbers them.
template <class DType>
std::optional<DType> floating_dtype(const TensorView& view) {
  if (is_dtype(view, dlpack::kFloat, 32)) return DType::kFloat32;
  if (is_dtype(view, dlpack::kBFloat, 16)) return DType::kBFloat16;
  if (is_dtype(view, dlpack::kFloat, 16)) return DType::kFloat16;
  return std::nullopt;
}

[[noreturn, gnu::cold]] inline void raise_floating(const TensorView& view, Name name,
                                                   const std::string& expected_shape) {
  if (is_dtype(view, dlpack::kFloat, 64)) decline(cat({name, ": float64 runs on the reference"}));
  raise_type(cat({name, ": expected float32 or bfloat16 or float16 ", expected_shape, ", got ", describe(view)}));
}

inline bool has_dtype(const TensorView& view, dlpack::DataType dtype) {
  return view.dl.dtype.code == dtype.code && view.dl.dtype.bits == dtype.bits;
}

inline void check_dtype(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape) {
  if (!has_dtype(view, dtype)) {
    raise_type(cat({name, ": expected ", dtype_name(dtype), " ", shape_text(shape), ", got ", describe(view)}));
  }
}

inline void check_same_dtype(const TensorView& view, Name name, const TensorView& other, Name other_name) {
  if (!has_dtype(view, other.dl.dtype)) {
    raise_type(cat({name, ": expected the dtype of ", other_name, ", ", describe(other), ", got ", describe(view)}));
  }
}

// Returns whether they are int64, else int32.
inline bool check_integer_dtype(const TensorView& view, Name name, Shape shape) {
  const bool is_wide = is_dtype(view, dlpack::kInt, 64);
  if (!is_wide && !is_dtype(view, dlpack::kInt, 32)) {
    raise_type(cat({name, ": expected int32 or int64 ", shape_text(shape), ", got ", describe(view)}));
  }
  return is_wide;
}

// The last dimension must have elements.
inline void check_not_empty(const TensorView& view, Name name) {
  if (view.size(-1) < 1) {
    raise_value(cat({name, ": expected a last dimension of at least 1, got ", describe(view)}));
  }
}

inline bool has_unit_stride(const TensorView& view) {
  return view.numel() == 0 || view.size(-1) <= 1 || view.stride(-1) == 1;
}

inline void check_unit_stride(const TensorView& view, Name name) {
  if (!has_unit_stride(view)) {
    raise_value(cat({name, ": expected a unit stride in the last dimension, got strides ",
                     list_text(view.dl.strides, view.ndim())}));
  }
}

// The last dimension gets a unit stride: in place where it has one, else through a copy that `view` then owns.
inline void make_unit_stride(TensorView& view) {
  if (has_unit_stride(view)) return;
  nb::object copy = view.object.attr("contiguous")();
  borrow(copy, view);
  view.owner = std::move(copy);
}

// No two elements may share memory.
inline void check_separate_elements(const TensorView& view, Name name) {
  if (view.numel() == 0) return;
  std::array<int, 64> dims;  // by stride; torch has no tensors of more dimensions
  auto end = dims.begin();
  for (int dim = view.ndim() - 1; dim >= 0; --dim) {
    if (view.size(dim) > 1) *end++ = dim;
  }
  std::sort(dims.begin(), end, [&](int a, int b) { return view.stride(a) < view.stride(b); });
  std::int64_t span = 1;
  for (auto dim = dims.begin(); dim != end; ++dim) {
    if (view.stride(*dim) < span) {
      raise_value(cat(
          {name, ": expected elements that do not overlap, got strides ", list_text(view.dl.strides, view.ndim())}));
    }
    span += view.stride(*dim) * (view.size(*dim) - 1);
  }
}

// The inside of each slot must be packed; the stride between slots is free.
inline void check_packed_slots(const TensorView& view, Name name) {
  std::int64_t expected = 1;
  for (int dim = view.ndim() - 1; dim > 0; --dim) {
    if (view.size(dim) != 1 && view.stride(dim) != expected) {
      raise_value(cat({name, ": expected the inside of a slot to be packed, got strides ",
                       list_text(view.dl.strides, view.ndim()), " for ", describe(view)}));
    }
    expected *= view.size(dim);
  }
  if (view.size(0) > 1 && view.numel() > 0 && view.stride(0) < expected) {
    raise_value(
        cat({name, ": expected slots that do not overlap, got a slot stride of ", std::to_string(view.stride(0))}));
  }
}

}  // namespace gdn
