// SPDX-License-Identifier: Apache-2.0
//
// Checks of arguments. Each failure raises the Python exception that a user expects and names the argument, what was
// expected and what came: "beta: expected float32 [2, 16], got bfloat16 [2, 8]".
#pragma once

#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tensor_view.h"

namespace gdn {

// Out of the way of calls that are right, whose code the caches have to fetch anew after other work: what is
// [[gnu::cold]], and every block that leads to it, lies in a section of its own.
[[noreturn, gnu::cold]] inline void raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw nb::python_error();
}
[[noreturn, gnu::cold]] inline void raise_value(const std::string& message) { raise(PyExc_ValueError, message); }
[[noreturn, gnu::cold]] inline void raise_type(const std::string& message) { raise(PyExc_TypeError, message); }
[[noreturn, gnu::cold]] inline void raise_index(const std::string& message) { raise(PyExc_IndexError, message); }
// The call may be right, but this backend does not run it: the dispatcher takes another.
[[noreturn, gnu::cold]] inline void decline(const std::string& message) { raise(PyExc_NotImplementedError, message); }

using Name = std::string_view;

[[gnu::cold]] inline std::string cat(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (std::string_view part : parts) text += part;
  return text;
}

[[gnu::cold]] inline std::string dtype_name(dlpack::DataType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case dlpack::kInt:
      return "int" + bits;
    case dlpack::kUInt:
      return "uint" + bits;
    case dlpack::kFloat:
      return "float" + bits;
    case dlpack::kBFloat:
      return "bfloat" + bits;
    case dlpack::kComplex:
      return "complex" + bits;
    case dlpack::kBool:
      return "bool";
    default:
      break;
  }
  const std::size_t narrow = dtype.code - std::size_t{dlpack::kFirstNarrowFloat};
  return narrow < std::size(dlpack::kNarrowFloats) ? dlpack::kNarrowFloats[narrow] : "an unknown dtype";
}

[[gnu::cold]] inline std::string list_text(const std::int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

[[gnu::cold]] inline std::string describe(const TensorView& view) {
  switch (view.status) {
    case TensorView::Status::kOk:
      return dtype_name(view.dl.dtype) + " " + list_text(view.dl.shape, view.dl.ndim);
    case TensorView::Status::kNone:
      return "None";
    default:
      return nb::type_name(view.object.type()).c_str();
  }
}

// One expected dimension: a fixed size, or any size under the letter that the documentation gives it.
struct Dim {
  std::int64_t size;
  const char* letter;
  Dim(std::int64_t fixed) : size(fixed), letter(nullptr) {}  // NOLINT: reads as a shape
  Dim(const char* any) : size(-1), letter(any) {}            // NOLINT
  [[nodiscard]] bool matches(std::int64_t actual) const { return letter != nullptr || actual == size; }
  [[nodiscard]] std::string text() const { return letter != nullptr ? letter : std::to_string(size); }
};
using Shape = std::initializer_list<Dim>;

[[gnu::cold]] inline std::string shape_text(Shape shape) {
  std::string text = "[";
  for (const Dim& dim : shape) text += (text.size() > 1 ? ", " : "") + dim.text();
  return text + "]";
}

// The tensor must be dense, with values of its own.
inline void check_dense(const TensorView& view, Name name) {
  switch (view.status) {
    case TensorView::Status::kOk:
      break;
    case TensorView::Status::kNone:
    case TensorView::Status::kNotATensor:
      raise_type(cat({name, ": expected a torch.Tensor, got ", describe(view)}));
    case TensorView::Status::kSubclass:
      decline(cat({name, ": a tensor subclass, ", describe(view)}));
    case TensorView::Status::kUnreadable:
      decline(cat({name, ": not a dense tensor with its values in memory"}));
  }
}

// The tensor must be one whose memory can be read here.
inline void check_readable(const TensorView& view, Name name) {
  check_dense(view, name);
  if (view.dl.device.device_type != dlpack::kCpu) decline(cat({name, ": is not on the CPU"}));
}

inline void check_shape(const TensorView& view, Name name, Shape shape) {
  bool matches = view.ndim() == static_cast<int>(shape.size());
  int dim = 0;
  for (const Dim& expected : shape) {
    matches = matches && expected.matches(view.dl.shape[dim]);
    ++dim;
    if (!matches) break;
  }
  if (!matches) raise_value(cat({name, ": expected ", shape_text(shape), ", got ", describe(view)}));
}

inline bool is_dtype(const TensorView& view, dlpack::TypeCode code, int bits) {
  return view.dl.dtype.code == code && view.dl.dtype.bits == bits;
}

}  // namespace gdn
