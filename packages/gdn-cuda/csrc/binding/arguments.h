// SPDX-License-Identifier: Apache-2.0
//
// From Python arguments to what the kernel takes. Every function checks, and raises by the argument's name. What lies
// in device memory is not looked at: that would mean to wait for the device.
#pragma once

#include <cstdint>

#include "check.h"
#include "kernels/params.h"
#include "layout.h"

namespace gdn::cuda {

using nb::handle;

// All tensors of a call, which have to be on one device.
class Device {
 public:
  void check(const TensorView& view, Name name);
  [[nodiscard]] int index() const { return first_.device_id; }

 private:
  dlpack::Device first_{};
  Name first_name_;
};

class Arguments {
 public:
  // An activation dtype and `shape`; float64 is declined.
  DType floating(const TensorView& view, Name name, Shape shape);
  void exact(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape);

  Vector vector(const TensorView& view, Name name, std::int64_t size);
  // [T, HV], any strides.
  Operand values(const TensorView& view, Name name, std::int64_t tokens, std::int64_t heads);
  // [T, heads, dim], unit last stride, no overlaps.
  MutableOperand output(const TensorView& view, Name name, std::int64_t tokens, std::int64_t heads, std::int64_t dim);
  Indices indices(const TensorView& view, Name name, Shape shape);

  [[nodiscard]] int device() const { return device_.index(); }

 private:
  Device device_;
};

// [.., heads, dim], the last dimension given a unit stride by a copy that `view` then owns, if it has none.
Operand heads_operand(TensorView& view);

}  // namespace gdn::cuda
