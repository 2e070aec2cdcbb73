// SPDX-License-Identifier: Apache-2.0
//
// One row of the gated norm, y = x * rsqrt(mean(x * x) + eps) * weight * act(gate), in fp32 until the store. The norm's
// own kernel and the decode step that ends in it share this, and agree bit for bit. The order of the sum depends on
// `dim` only.
#pragma once

#include "vector_math.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// y may be x or gate itself: a row is read for its mean before any of it is written, and then element by element.
struct GatedNormRow {
  std::int64_t dim;
  const void* x;
  DType x_dtype;
  std::int64_t x_index;
  const void* gate;
  DType gate_dtype;
  std::int64_t gate_index;
  void* out;
  DType out_dtype;
  std::int64_t out_index;
  const HeadVector& weight;  // [dim]
  float eps;
};

float sum_of_squares(DType dtype, const void* x, std::int64_t index, std::int64_t dim) {
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    for (std::int64_t j = 0; j < 4; ++j) {
      const Vec value = load_as(dtype, x, index + i + j * kLanes, kLanes);
      sum[j] = fma(value, value, sum[j]);
    }
  }
  for (; i < dim; i += kLanes) {
    const Vec value = load_as(dtype, x, index + i, dim - i);
    sum[0] = fma(value, value, sum[0]);
  }
  return reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

template <GateActivation kActivation>
GDN_INLINE Vec activate(const GatedNormRow& row, std::int64_t i, std::int64_t n) {
  if constexpr (kActivation == GateActivation::kNone) {
    return set1(1.0f);
  } else {
    const Vec gate = load_as(row.gate_dtype, row.gate, row.gate_index + i, n);
    return kActivation == GateActivation::kSilu ? silu(gate) : sigmoid(gate);
  }
}

template <GateActivation kActivation>
GDN_INLINE void normalize_row(const GatedNormRow& row) {
  const float mean = sum_of_squares(row.x_dtype, row.x, row.x_index, row.dim) / static_cast<float>(row.dim);
  const Vec inverse_rms = set1(1.0f / square_root(mean + row.eps));
  for (std::int64_t i = 0; i < row.dim; i += kLanes) {
    const std::int64_t n = row.dim - i;
    const Vec x = load_as(row.x_dtype, row.x, row.x_index + i, n);
    const Vec normalized = mul(mul(x, inverse_rms), load_strided(row.weight, i, n));
    const Vec y = mul(normalized, activate<kActivation>(row, i, n));
    store_as(row.out_dtype, row.out, row.out_index + i, y, n);
  }
}

template <GateActivation kActivation>
struct Activation {
  static constexpr GateActivation kValue = kActivation;
};

// Calls body with an Activation<...>, for loops that are worth a copy each.
template <class Body>
GDN_INLINE void with_activation(GateActivation activation, Body body) {
  switch (activation) {
    case GateActivation::kSilu:
      return body(Activation<GateActivation::kSilu>{});
    case GateActivation::kSigmoid:
      return body(Activation<GateActivation::kSigmoid>{});
    case GateActivation::kNone:
      return body(Activation<GateActivation::kNone>{});
  }
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
