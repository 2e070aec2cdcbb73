// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace gdn::cpu {

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

std::optional<double> optional_number(handle value, Name name) {
  if (value.is_none()) return std::nullopt;
  return number(value, name);
}

namespace {

std::int64_t as_integer(handle value, Name name, Name expected) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    raise_type(cat({name, ": expected ", expected, ", got ", nb::type_name(value.type()).c_str()}));
  }
  const long long result = PyLong_AsLongLong(index.ptr());
  if (result == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_value(cat({name, ": expected an int of 64 bits, got ", nb::repr(index).c_str()}));
  }
  return result;
}

}  // namespace

std::int64_t integer(handle value, Name name) { return as_integer(value, name, "an int"); }

std::optional<std::int64_t> optional_integer(handle value, Name name) {
  if (value.is_none()) return std::nullopt;
  return as_integer(value, name, "an int or None");
}

GateActivation gate_activation(handle value, Name name) {
  if (PyUnicode_Check(value.ptr())) {
    const char* utf8 = PyUnicode_AsUTF8AndSize(value.ptr(), nullptr);
    if (utf8 == nullptr) throw nb::python_error();
    const std::string_view text = utf8;
    if (text == "silu" || text == "swish") return GateActivation::kSilu;
    if (text == "sigmoid") return GateActivation::kSigmoid;
  }
  raise_value(cat({name, ": expected one of 'silu', 'swish', 'sigmoid', got ", nb::repr(value).c_str()}));
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

void check_exact(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape) {
  check_readable(view, name);
  if (view.dl.dtype.code != dtype.code || view.dl.dtype.bits != dtype.bits) {
    raise_type(cat({name, ": expected ", dtype_name(dtype), " ", shape_text(shape), ", got ", describe(view)}));
  }
  check_shape(view, name, shape);
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

void check_not_empty(const TensorView& view, Name name) {
  if (view.size(-1) < 1) {
    raise_value(cat({name, ": expected a last dimension of at least 1, got ", describe(view)}));
  }
}

void check_separate_elements(const TensorView& view, Name name) {
  if (view.numel() == 0) return;
  SmallVector<int> dims;  // by stride
  for (int dim = view.ndim() - 1; dim >= 0; --dim) {
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

HeadVector head_vector(const TensorView& view, Name name, std::int64_t size) {
  const DType dtype = check_floating(view, name, {size});
  return {view.data(), dtype, view.stride(0)};
}

namespace {

// Of a tensor that has a batch dimension when it has `ndim` dimensions.
std::int64_t batch_stride(const TensorView& view, int ndim) { return view.ndim() == ndim ? view.stride(0) : 0; }

}  // namespace

Operand heads_operand(TensorView& view) {
  make_unit_stride(view);
  return {view.data(), *floating_dtype(view), batch_stride(view, 4), view.stride(-3), view.stride(-2)};
}

Operand values_operand(const TensorView& view, Name name, Shape shape) {
  const DType dtype = check_floating(view, name, shape);
  return {view.data(), dtype, batch_stride(view, 3), view.stride(-2), view.stride(-1)};
}

MutableOperand output_operand(const TensorView& view, Name name, Shape shape) {
  const DType dtype = check_floating(view, name, shape);
  check_unit_stride(view, name);
  check_separate_elements(view, name);
  return {view.data(), dtype, batch_stride(view, 4), view.stride(-3), view.stride(-2)};
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

namespace {

void check_integers(const TensorView& view, Name name, Shape shape) {
  check_readable(view, name);
  if (!is_dtype(view, dlpack::kInt, 64) && !is_dtype(view, dlpack::kInt, 32)) {
    raise_type(cat({name, ": expected int32 or int64 ", shape_text(shape), ", got ", describe(view)}));
  }
  check_shape(view, name, shape);
}

void append_integers(const TensorView& view, std::int64_t offset, std::int64_t count, std::int64_t stride,
                     Indices& values) {
  const bool wide = is_dtype(view, dlpack::kInt, 64);
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(wide ? static_cast<const std::int64_t*>(view.data())[offset + i * stride]
                          : static_cast<const std::int32_t*>(view.data())[offset + i * stride]);
  }
}

}  // namespace

Indices integers(const TensorView& view, Name name, Dim size) {
  check_integers(view, name, {size});
  Indices values;
  append_integers(view, 0, view.size(0), view.stride(0), values);
  return values;
}

namespace {

std::string short_list(const Indices& values) {
  constexpr std::size_t kShown = 16;
  const std::string text = list_text(values.data(), static_cast<int>(std::min(values.size(), kShown)));
  return values.size() <= kShown ? text : text.substr(0, text.size() - 1) + ", ...]";
}

}  // namespace

Indices row_offsets(const TensorView& view, Name name, std::int64_t total, Dim size) {
  Indices ends = integers(view, name, size);
  if (ends.empty()) raise_value(cat({name, ": expected at least one offset, got ", describe(view)}));
  const bool ordered = ends.front() >= 0 && ends.back() <= total && std::is_sorted(ends.begin(), ends.end());
  if (!ordered) {
    raise_value(
        cat({name, ": expected non-decreasing offsets in [0, ", std::to_string(total), "], got ", short_list(ends)}));
  }
  return ends;
}

Indices named_rows(const TensorView& view, std::int64_t rows) {
  if (view.is_none()) return {};
  const Indices named = integers(view, "row_indices", "M");
  const bool in_range =
      std::all_of(named.begin(), named.end(), [&](std::int64_t row) { return row >= 0 && row < rows; });
  if (!in_range) {
    raise_index(cat({"row_indices: expected rows in [0, ", std::to_string(rows), "), got ", short_list(named)}));
  }
  return named;
}

Indices accepted_tokens(const TensorView& view, Name name, std::int64_t rows, std::int64_t columns,
                        const Indices* named) {
  if (view.is_none()) return Indices(static_cast<std::size_t>(rows), 1);
  Indices counts = integers(view, name, rows);
  if (named != nullptr) {
    Indices others(static_cast<std::size_t>(rows), 1);
    for (const std::int64_t row : *named) others[static_cast<std::size_t>(row)] = counts[static_cast<std::size_t>(row)];
    counts = others;
  }
  const bool in_range =
      std::all_of(counts.begin(), counts.end(), [&](std::int64_t count) { return count >= 0 && count <= columns; });
  if (!in_range) {
    raise_value(cat({name, ": expected values in [0, ", std::to_string(columns), "], got ", short_list(counts)}));
  }
  for (std::int64_t& count : counts) count = std::max<std::int64_t>(count, 1);
  return counts;
}

namespace {

// Padding becomes -1.
void check_slots(Indices& slots, Name name, std::int64_t pool_size, std::optional<std::int64_t> null_slot) {
  for (std::int64_t& slot : slots) {
    if (slot < 0 || (null_slot && slot == *null_slot)) {
      slot = -1;
    } else if (slot >= pool_size) {
      raise_index(cat({name, ": expected slots below ", std::to_string(pool_size), ", got ", std::to_string(slot)}));
    }
  }
}

// No two of the rows of `columns` slots may share one; the columns of a row may.
void check_distinct(const Indices& slots, Name name, std::int64_t columns) {
  struct Use {
    std::int64_t slot, row;
  };
  std::vector<Use> uses;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= 0) uses.push_back({slots[i], static_cast<std::int64_t>(i) / columns});
  }
  std::stable_sort(uses.begin(), uses.end(), [](const Use& left, const Use& right) { return left.slot < right.slot; });
  const auto shared = std::adjacent_find(uses.begin(), uses.end(), [](const Use& left, const Use& right) {
    return left.slot == right.slot && left.row != right.row;
  });
  if (shared != uses.end()) {
    raise_value(cat({name, ": expected distinct slots, got ", std::to_string(shared->slot), " in rows ",
                     std::to_string(shared->row), " and ", std::to_string((shared + 1)->row)}));
  }
}

}  // namespace

Indices slot_indices(const TensorView& view, Name name, Dim rows, std::int64_t pool_size,
                     std::optional<std::int64_t> null_slot) {
  Indices slots = integers(view, name, rows);
  check_slots(slots, name, pool_size, null_slot);
  if (debug_checks()) check_distinct(slots, name, 1);
  return slots;
}

SlotTable slot_table(const TensorView& view, Name name, std::int64_t pool_size, std::optional<std::int64_t> null_slot) {
  check_integers(view, name, {"N", "S"});
  SlotTable table{view.size(0), view.size(1), {}};
  for (std::int64_t row = 0; row < table.rows; ++row) {
    append_integers(view, row * view.stride(0), table.columns, view.stride(1), table.slots);
  }
  check_slots(table.slots, name, pool_size, null_slot);
  if (debug_checks()) check_distinct(table.slots, name, table.columns);
  constexpr std::int64_t kMostColumns = 16;
  if (table.columns < 1 || table.columns > kMostColumns) {
    raise_value(cat({name, ": expected 1 to ", std::to_string(kMostColumns), " columns, got ", describe(view)}));
  }
  return table;
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
