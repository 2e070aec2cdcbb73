// SPDX-License-Identifier: Apache-2.0
#include "binding/arguments.h"

#include <algorithm>
#include <vector>

#include "launch/launch.h"

namespace gdn::cuda {

// --- scalars ---

bool flag(handle value, Name name) {
  if (value.ptr() == Py_True) return true;
  if (value.ptr() == Py_False) return false;
  // What has a length only, as a str or a list, is true or false too, but not a flag.
  const int truth = PyObject_HasAttrString(value.ptr(), "__bool__") == 1 ? PyObject_IsTrue(value.ptr()) : -1;
  if (truth < 0) {
    PyErr_Clear();
    raise_type(cat({name, ": expected a bool, got ", nb::type_name(value.type()).c_str()}));
  }
  return truth == 1;
}

double number(handle value, Name name) {
  const double result = PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_type(cat({name, ": expected a number, got ", nb::type_name(value.type()).c_str()}));
  }
  return result;
}

double positive(handle value, Name name) {
  const double result = number(value, name);
  if (!(result > 0)) raise_value(cat({name, ": expected a positive number, got ", std::to_string(result)}));
  return result;
}

double non_negative(handle value, Name name) {
  const double result = number(value, name);
  if (!(result >= 0)) raise_value(cat({name, ": expected a number >= 0, got ", std::to_string(result)}));
  return result;
}

std::int64_t integer(handle value, Name name) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    raise_type(cat({name, ": expected an int, got ", nb::type_name(value.type()).c_str()}));
  }
  const long long result = PyLong_AsLongLong(index.ptr());
  if (result == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_value(cat({name, ": expected an int of 64 bits, got ", nb::repr(index).c_str()}));
  }
  return result;
}

Activation gate_activation(handle value, Name name) {
  if (PyUnicode_Check(value.ptr())) {
    const char* utf8 = PyUnicode_AsUTF8AndSize(value.ptr(), nullptr);
    if (utf8 == nullptr) throw nb::python_error();
    const std::string_view text = utf8;
    if (text == "silu" || text == "swish") return Activation::kSilu;
    if (text == "sigmoid") return Activation::kSigmoid;
  }
  raise_value(cat({name, ": expected one of 'silu', 'swish', 'sigmoid', got ", nb::repr(value).c_str()}));
}

// --- tensors ---

void Device::check(const TensorView& view, Name name) {
  check_dense(view, name);
  const dlpack::Device device = view.dl.device;
  if (first_name_.empty()) {
    if (device.device_type != launch_device_type()) decline(cat({name, ": is not on a CUDA device"}));
    first_ = device;
    first_name_ = name;
  } else if (device.device_type != first_.device_type || device.device_id != first_.device_id) {
    const nb::object expected = nb::str("cuda:") + nb::str(std::to_string(first_.device_id).c_str());
    raise_value(cat({name, ": expected device ", nb::str(expected).c_str(), " (of ", first_name_, "), got ",
                     nb::str(nb::object(view.object.attr("device"))).c_str()}));
  }
}

namespace {

std::optional<DType> floating_dtype(const TensorView& view) {
  if (is_dtype(view, dlpack::kFloat, 32)) return DType::kFloat32;
  if (is_dtype(view, dlpack::kBFloat, 16)) return DType::kBFloat16;
  if (is_dtype(view, dlpack::kFloat, 16)) return DType::kFloat16;
  return std::nullopt;
}

bool has_unit_stride(const TensorView& view) { return view.numel() == 0 || view.size(-1) <= 1 || view.stride(-1) == 1; }

}  // namespace

DType Arguments::floating(const TensorView& view, Name name, Shape shape) {
  device_.check(view, name);
  const std::optional<DType> dtype = floating_dtype(view);
  if (!dtype) {
    if (is_dtype(view, dlpack::kFloat, 64)) decline(cat({name, ": float64 runs on the reference"}));
    raise_type(cat({name, ": expected float32 or bfloat16 or float16 ", shape_text(shape), ", got ", describe(view)}));
  }
  check_shape(view, name, shape);
  return *dtype;
}

void Arguments::exact(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape) {
  device_.check(view, name);
  if (view.dl.dtype.code != dtype.code || view.dl.dtype.bits != dtype.bits) {
    raise_type(cat({name, ": expected ", dtype_name(dtype), " ", shape_text(shape), ", got ", describe(view)}));
  }
  check_shape(view, name, shape);
}

Vector Arguments::vector(const TensorView& view, Name name, std::int64_t size) {
  const DType dtype = floating(view, name, {size});
  return {view.data(), dtype, view.stride(0)};
}

Operand Arguments::values(const TensorView& view, Name name, std::int64_t tokens, std::int64_t heads) {
  const DType dtype = floating(view, name, {tokens, heads});
  return {view.data(), dtype, view.stride(0), view.stride(1)};
}

MutableOperand Arguments::output(const TensorView& view, Name name, std::int64_t tokens, std::int64_t heads,
                                 std::int64_t dim) {
  const DType dtype = floating(view, name, {tokens, heads, dim});
  check_unit_stride(view, name);
  check_separate_elements(view, name);
  return {view.data(), dtype, view.stride(0), view.stride(1)};
}

Indices Arguments::indices(const TensorView& view, Name name, Shape shape) {
  device_.check(view, name);
  const bool is_wide = is_dtype(view, dlpack::kInt, 64);
  if (!is_wide && !is_dtype(view, dlpack::kInt, 32)) {
    raise_type(cat({name, ": expected int32 or int64 ", shape_text(shape), ", got ", describe(view)}));
  }
  check_shape(view, name, shape);
  return {view.data(), is_wide, view.stride(0), view.ndim() > 1 ? view.stride(1) : 0};
}

DType dtype_of(const TensorView& view) { return floating_dtype(view).value(); }

void check_same_dtype(const TensorView& view, Name name, const TensorView& other, Name other_name) {
  if (view.dl.dtype.code != other.dl.dtype.code || view.dl.dtype.bits != other.dl.dtype.bits) {
    raise_type(cat({name, ": expected the dtype of ", other_name, ", ", describe(other), ", got ", describe(view)}));
  }
}

void check_not_empty(const TensorView& view, Name name) {
  if (view.size(-1) < 1) {
    raise_value(cat({name, ": expected a last dimension of at least 1, got ", describe(view)}));
  }
}

void check_unit_stride(const TensorView& view, Name name) {
  if (!has_unit_stride(view)) {
    raise_value(cat({name, ": expected a unit stride in the last dimension, got strides ",
                     list_text(view.dl.strides, view.ndim())}));
  }
}

void check_separate_elements(const TensorView& view, Name name) {
  if (view.numel() == 0) return;
  std::vector<int> dims;  // by stride
  for (int dim = 0; dim < view.ndim(); ++dim) {
    if (view.size(dim) > 1) dims.push_back(dim);
  }
  std::sort(dims.begin(), dims.end(), [&](int a, int b) { return view.stride(a) < view.stride(b); });
  std::int64_t span = 1;
  for (const int dim : dims) {
    if (view.stride(dim) < span) {
      raise_value(cat(
          {name, ": expected elements that do not overlap, got strides ", list_text(view.dl.strides, view.ndim())}));
    }
    span += view.stride(dim) * (view.size(dim) - 1);
  }
}

void check_packed_slots(const TensorView& view, Name name) {
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

Operand heads_operand(TensorView& view) {
  if (!has_unit_stride(view)) {
    nb::object copy = view.object.attr("contiguous")();
    borrow(copy, view);
    view.owner = std::move(copy);
  }
  return {view.data(), dtype_of(view), view.ndim() > 2 ? view.stride(-3) : 0, view.stride(-2)};
}

}  // namespace gdn::cuda
