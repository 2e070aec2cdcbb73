// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace gdn::cpu {

// --- scalars ---

bool flag(handle value, Name name) {
  if (value.ptr() == Py_True) return true;
  if (value.ptr() == Py_False) return false;
  const int truth = PyObject_IsTrue(value.ptr());
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

std::optional<double> optional_number(handle value, Name name) {
  if (value.is_none()) return std::nullopt;
  return number(value, name);
}

std::optional<std::int64_t> optional_integer(handle value, Name name) {
  if (value.is_none()) return std::nullopt;
  PyObject* index = PyNumber_Index(value.ptr());
  const long long result = index != nullptr ? PyLong_AsLongLong(index) : -1;
  Py_XDECREF(index);
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_type(cat({name, ": expected an int or None, got ", nb::type_name(value.type()).c_str()}));
  }
  return result;
}

bool debug_checks() {
  const char* value = std::getenv("GDN_DEBUG");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

int num_threads() {
  static const nb::object* get = new nb::object(nb::module_::import_("torch").attr("get_num_threads"));
  PyObject* result = PyObject_CallFunctionObjArgs(get->ptr(), nullptr);
  if (result == nullptr) throw nb::python_error();
  const long count = PyLong_AsLong(result);
  Py_DECREF(result);
  return static_cast<int>(count);
}

// --- tensors ---

std::optional<DType> floating_dtype(const TensorView& view) {
  if (is_dtype(view, dlpack::kFloat, 32)) return DType::kFloat32;
  if (is_dtype(view, dlpack::kBFloat, 16)) return DType::kBFloat16;
  if (is_dtype(view, dlpack::kFloat, 16)) return DType::kFloat16;
  return std::nullopt;
}

void raise_floating(const TensorView& view, Name name, const std::string& expected_shape) {
  if (is_dtype(view, dlpack::kFloat, 64)) decline(cat({name, ": float64 runs on the reference"}));
  raise_type(cat({name, ": expected float32 or bfloat16 or float16 ", expected_shape, ", got ", describe(view)}));
}

DType check_floating(const TensorView& view, Name name, Shape shape) {
  check_readable(view, name);
  const std::optional<DType> dtype = floating_dtype(view);
  if (!dtype) raise_floating(view, name, shape_text(shape));
  check_shape(view, name, shape);
  return *dtype;
}

void check_same_dtype(const TensorView& view, Name name, const TensorView& other, Name other_name) {
  if (view.dl.dtype.code != other.dl.dtype.code || view.dl.dtype.bits != other.dl.dtype.bits) {
    raise_type(cat({name, ": expected the dtype of ", other_name, ", ", describe(other), ", got ", describe(view)}));
  }
}

namespace {

bool has_unit_stride(const TensorView& view) { return view.numel() == 0 || view.size(-1) <= 1 || view.stride(-1) == 1; }

}  // namespace

void make_unit_stride(TensorView& view) {
  if (has_unit_stride(view)) return;
  nb::object copy = view.object.attr("contiguous")();
  borrow(copy, view);
  view.owner = std::move(copy);
}

void check_unit_stride(const TensorView& view, Name name) {
  if (!has_unit_stride(view)) {
    raise_value(cat({name, ": expected a unit stride in the last dimension, got strides ",
                     list_text(view.dl.strides, view.ndim())}));
  }
}

HeadVector head_vector(const TensorView& view, Name name, std::int64_t size) {
  const DType dtype = check_floating(view, name, {size});
  return {view.data(), dtype, view.stride(0)};
}

Operand heads_operand(TensorView& view) {
  make_unit_stride(view);
  return {view.data(), *floating_dtype(view), view.stride(0), view.stride(1), view.stride(2)};
}

Operand values_operand(const TensorView& view, Name name, Shape shape) {
  const DType dtype = check_floating(view, name, shape);
  const std::int64_t batch_stride = view.ndim() == 3 ? view.stride(0) : 0;
  return {view.data(), dtype, batch_stride, view.stride(-2), view.stride(-1)};
}

MutableOperand output_operand(const TensorView& view, Name name, Shape shape) {
  const DType dtype = check_floating(view, name, shape);
  check_unit_stride(view, name);
  return {view.data(), dtype, view.stride(0), view.stride(1), view.stride(2)};
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

// --- indices ---

Indices integers(const TensorView& view, Name name, Dim size) {
  check_readable(view, name);
  const bool wide = is_dtype(view, dlpack::kInt, 64);
  if (!wide && !is_dtype(view, dlpack::kInt, 32)) {
    raise_type(cat({name, ": expected int32 or int64 ", shape_text({size}), ", got ", describe(view)}));
  }
  check_shape(view, name, {size});
  const std::int64_t count = view.size(0);
  const std::int64_t stride = view.stride(0);
  Indices values(static_cast<std::size_t>(count), 0);
  for (std::int64_t i = 0; i < count; ++i) {
    values[static_cast<std::size_t>(i)] = wide ? static_cast<const std::int64_t*>(view.data())[i * stride]
                                               : static_cast<const std::int32_t*>(view.data())[i * stride];
  }
  return values;
}

namespace {

std::string short_list(const Indices& values) {
  constexpr std::size_t kShown = 16;
  const std::string text = list_text(values.data(), static_cast<int>(std::min(values.size(), kShown)));
  return values.size() <= kShown ? text : text.substr(0, text.size() - 1) + ", ...]";
}

}  // namespace

Indices row_offsets(const TensorView& view, Name name, std::int64_t total) {
  Indices ends = integers(view, name, "N+1");
  if (ends.empty()) raise_value(cat({name, ": expected at least one offset, got ", describe(view)}));
  const bool ordered = ends.front() >= 0 && ends.back() <= total && std::is_sorted(ends.begin(), ends.end());
  if (!ordered) {
    raise_value(
        cat({name, ": expected non-decreasing offsets in [0, ", std::to_string(total), "], got ", short_list(ends)}));
  }
  return ends;
}

Indices slot_indices(const TensorView& view, Name name, std::int64_t rows, std::int64_t pool_size,
                     std::optional<std::int64_t> null_slot) {
  Indices slots = integers(view, name, rows);
  for (std::int64_t& slot : slots) {
    if (slot < 0 || (null_slot && slot == *null_slot)) {
      slot = -1;
    } else if (slot >= pool_size) {
      raise_index(cat({name, ": expected slots below ", std::to_string(pool_size), ", got ", std::to_string(slot)}));
    }
  }
  if (debug_checks()) {
    Indices sorted = slots;
    std::sort(sorted.begin(), sorted.end());
    const auto live = std::lower_bound(sorted.begin(), sorted.end(), 0);
    if (std::adjacent_find(live, sorted.end()) != sorted.end()) {
      raise_value(cat({name, ": expected distinct slots, got ", short_list(slots)}));
    }
  }
  return slots;
}

SmallVector<bool> booleans(const TensorView& view, Name name, std::int64_t rows) {
  SmallVector<bool> values(static_cast<std::size_t>(rows), true);
  if (view.is_none()) return values;
  check_readable(view, name);
  if (view.dl.dtype.code != dlpack::kBool) {
    raise_type(cat({name, ": expected bool ", shape_text({rows}), ", got ", describe(view)}));
  }
  check_shape(view, name, {rows});
  const auto* data = static_cast<const std::uint8_t*>(view.data());
  for (std::int64_t i = 0; i < rows; ++i) values[static_cast<std::size_t>(i)] = data[i * view.stride(0)] != 0;
  return values;
}

}  // namespace gdn::cpu
