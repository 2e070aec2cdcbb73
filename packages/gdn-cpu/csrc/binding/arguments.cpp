// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace gdn::cpu {

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

DType check_floating(const TensorView& view, Name name, Shape shape) {
  check_readable(view, name);
  const std::optional<DType> dtype = floating_dtype<DType>(view);
  if (!dtype) raise_floating(view, name, shape_text(shape));
  check_shape(view, name, shape);
  return *dtype;
}

void check_exact(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape) {
  check_readable(view, name);
  check_dtype(view, name, dtype, shape);
  check_shape(view, name, shape);
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
  return {view.data(), *floating_dtype<DType>(view), batch_stride(view, 4), view.stride(-3), view.stride(-2)};
}

namespace {

Operand values_of(const TensorView& view, DType dtype) {
  return {view.data(), dtype, batch_stride(view, 3), view.stride(-2), view.stride(-1)};
}

}  // namespace

Operand values_operand(const TensorView& view, Name name, Shape shape) {
  return values_of(view, check_floating(view, name, shape));
}

MutableOperand output_operand(const TensorView& view, Name name, Shape shape) {
  const DType dtype = check_floating(view, name, shape);
  check_unit_stride(view, name);
  check_separate_elements(view, name);
  return {view.data(), dtype, batch_stride(view, 4), view.stride(-3), view.stride(-2)};
}

namespace {

// [first, last] byte of a tensor that has elements.
struct Span {
  const char* first;
  const char* last;
};

Span span_of(const TensorView& view) {
  const std::int64_t size = view.dl.dtype.bits / 8;
  std::int64_t reach = 0;
  for (int dim = 0; dim < view.ndim(); ++dim) reach += (view.size(dim) - 1) * view.stride(dim);
  const char* first = static_cast<const char*>(view.data());
  return {first, first + (reach + 1) * size - 1};
}

}  // namespace

bool may_overlap(const TensorView& left, const TensorView& right) {
  if (left.numel() == 0 || right.numel() == 0) return false;
  const Span a = span_of(left), b = span_of(right);
  return a.first <= b.last && b.first <= a.last;
}

bool same_elements(const TensorView& left, const TensorView& right) {
  const bool alike = left.data() == right.data() && left.ndim() == right.ndim() &&
                     left.dl.dtype.code == right.dl.dtype.code && left.dl.dtype.bits == right.dl.dtype.bits;
  for (int dim = 0; alike && dim < left.ndim(); ++dim) {
    if (left.size(dim) != right.size(dim) || (left.size(dim) > 1 && left.stride(dim) != right.stride(dim)))
      return false;
  }
  return alike;
}

void copy_into_view(TensorView& view) {
  nb::object copy = view.object.attr("clone")();
  borrow(copy, view);
  view.owner = std::move(copy);
}

void keep_from(const TensorView& out, TensorView& input) {
  if (may_overlap(out, input)) copy_into_view(input);
}

void keep_from(const TensorView& out, TensorView& input, Operand& values) {
  if (values.data == nullptr || !may_overlap(out, input)) return;
  copy_into_view(input);
  values = values_of(input, values.dtype);
}

// --- indices ---

namespace {

void check_integers(const TensorView& view, Name name, Shape shape) {
  check_readable(view, name);
  check_integer_dtype(view, name, shape);
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
  if (slots.size() > 1 && debug_checks()) check_distinct(slots, name, 1);
  return slots;
}

SlotTable slot_table(const TensorView& view, Name name, std::int64_t pool_size, std::optional<std::int64_t> null_slot) {
  check_integers(view, name, {"N", "S"});
  SlotTable table{view.size(0), view.size(1), {}};
  for (std::int64_t row = 0; row < table.rows; ++row) {
    append_integers(view, row * view.stride(0), table.columns, view.stride(1), table.slots);
  }
  check_slots(table.slots, name, pool_size, null_slot);
  if (table.rows > 1 && debug_checks()) check_distinct(table.slots, name, table.columns);
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
