// SPDX-License-Identifier: Apache-2.0
//
// y = x * rsqrt(mean(x * x) + eps) * weight * act(gate), per row of `dim` values, in fp32 until the store.
//
// x, gate, y: rows of unit stride at any offsets, each with its own dtype; y may be x or gate itself, since a row is
// read for its mean before any of it is written, and then element by element. weight: [dim], any dtype and stride.
// One call computes a range of rows; a lane is a column. The order of the sum depends on `dim` only.
// Bound by arithmetic, one exp and one division a value: 83 ns a row of 128 bf16 values on one core of Zen 4 at x86_v4,
// 140 at x86_v3.
#include "gated_norm.h"
#include "kernels.h"

namespace gdn::cpu::GDN_ISA {
namespace {

struct RowIndex {
  std::int64_t of_dim[Rows::kMaxDims];
};

GDN_INLINE RowIndex row_index(const std::int64_t (&sizes)[Rows::kMaxDims], std::int64_t row) {
  RowIndex index{};
  for (int d = Rows::kMaxDims - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    index.of_dim[d] = row % sizes[d];
    row /= sizes[d];
  }
  return index;
}

GDN_INLINE std::int64_t row_offset(const Rows& rows, const RowIndex& index) {
  std::int64_t offset = 0;
  for (int d = 0; d < Rows::kMaxDims; ++d) offset += index.of_dim[d] * rows.strides[d];
  return offset;
}

template <GateActivation kActivation>
void normalize_rows(const RmsNormGatedParams& p, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const RowIndex index = row_index(p.sizes, row);
    normalize_row<kActivation>({.dim = p.dim,
                                .x = p.x,
                                .x_dtype = p.x_rows.dtype,
                                .x_index = row_offset(p.x_rows, index),
                                .gate = p.gate,
                                .gate_dtype = p.gate_rows.dtype,
                                .gate_index = row_offset(p.gate_rows, index),
                                .out = p.out,
                                .out_dtype = p.out_rows.dtype,
                                .out_index = row_offset(p.out_rows, index),
                                .weight = p.weight,
                                .eps = p.eps});
  }
}

}  // namespace

void rms_norm_gated(const RmsNormGatedParams& params, std::int64_t row_begin, std::int64_t row_end) {
  with_activation(params.activation,
                  [&](auto activation) { normalize_rows<decltype(activation)::kValue>(params, row_begin, row_end); });
}

}  // namespace gdn::cpu::GDN_ISA
