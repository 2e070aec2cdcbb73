// SPDX-License-Identifier: Apache-2.0
//
// From Python arguments to what kernels take. Every function checks, and raises by the argument's name.
#pragma once

#include <cstdint>
#include <optional>

#include "check.h"
#include "kernels/params.h"
#include "layout.h"
#include "runtime/small_vector.h"
#include "scalars.h"

namespace gdn::cpu {

using nb::handle;

// True under GDN_DEBUG=1.
bool debug_checks();

// torch.get_num_threads(): the setting of the calling thread, as torch's own operators use it.
int num_threads();

// --- tensors ---

// A readable tensor of an activation dtype and of `shape`; returns that dtype. float64 is declined.
DType check_floating(const TensorView& view, Name name, Shape shape);
// A readable tensor of exactly `dtype` and of `shape`.
void check_exact(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape);

// [HV] values of any stride.
HeadVector head_vector(const TensorView& view, Name name, std::int64_t size);

// [B, T, heads, dim] or [T, heads, dim] with a unit last stride; call after check_floating.
Operand heads_operand(TensorView& view);
// [B, T, heads]: one value a head, any strides.
Operand values_operand(const TensorView& view, Name name, Shape shape);
// An output [B, T, heads, dim] or [T, heads, dim].
MutableOperand output_operand(const TensorView& view, Name name, Shape shape);

// Whether the memory between their first and last elements meets.
bool may_overlap(const TensorView& left, const TensorView& right);
// The same elements in the same places.
bool same_elements(const TensorView& left, const TensorView& right);
// From here on the view is of a copy.
void copy_into_view(TensorView& view);
// Copies an input that `out` lies on: kernels read it after they have begun to write.
void keep_from(const TensorView& out, TensorView& input);
// The same of an input that is an operand of one value a head, or is not there.
void keep_from(const TensorView& out, TensorView& input, Operand& values);

// --- indices ---

// A one-dimensional int32 or int64 tensor, any stride; `size` < 0 takes any.
Indices integers(const TensorView& view, Name name, Dim size);
// Offsets of packed rows: at least one, non-decreasing, inside [0, total].
Indices row_offsets(const TensorView& view, Name name, std::int64_t total, Dim size = "N+1");
// Slots of a pool: padding (negative or null) becomes -1; IndexError at pool_size and beyond.
Indices slot_indices(const TensorView& view, Name name, Dim rows, std::int64_t pool_size,
                     std::optional<std::int64_t> null_slot);
// The table of a call that stores a state per token.
struct SlotTable {
  std::int64_t rows, columns;  // 1 to 16 columns
  Indices slots;               // [rows, columns], padding is -1
};
SlotTable slot_table(const TensorView& view, Name name, std::int64_t pool_size, std::optional<std::int64_t> null_slot);
// Which of a call's rows it is about; empty for None.
Indices named_rows(const TensorView& view, std::int64_t rows);
// Accepted tokens of each row, at least 1 and at most `columns`; all 1 for None, and in rows that are not `named`.
Indices accepted_tokens(const TensorView& view, Name name, std::int64_t rows, std::int64_t columns,
                        const Indices* named = nullptr);
// [rows] bool; all true for None.
SmallVector<bool> booleans(const TensorView& view, Name name, std::int64_t rows);

}  // namespace gdn::cpu
