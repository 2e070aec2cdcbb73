// SPDX-License-Identifier: Apache-2.0
//
// Gating and the gated norm: independent rows.
#include <cstring>

#include "dispatch/levels.h"
#include "ops.h"
#include "runtime/parallel.h"

namespace gdn::cpu {
namespace {

// The shape of `view` must be that of `model`.
void check_shape_of(const TensorView& view, Name name, const TensorView& model) {
  const bool same =
      view.ndim() == model.ndim() &&
      std::memcmp(view.dl.shape, model.dl.shape, sizeof(std::int64_t) * static_cast<std::size_t>(view.ndim())) == 0;
  if (!same) {
    raise_value(cat({name, ": expected ", list_text(model.dl.shape, model.ndim()), ", got ", describe(view)}));
  }
}

DType check_like(const TensorView& view, Name name, const TensorView& model) {
  check_readable(view, name);
  const std::optional<DType> dtype = floating_dtype<DType>(view);
  if (!dtype) raise_floating(view, name, list_text(model.dl.shape, model.ndim()));
  check_shape_of(view, name, model);
  return *dtype;
}

bool is_contiguous(const TensorView& view) {
  if (view.numel() == 0) return true;
  std::int64_t expected = 1;
  for (int dim = view.ndim() - 1; dim >= 0; --dim) {
    if (view.size(dim) != 1 && view.stride(dim) != expected) return false;
    expected *= view.size(dim);
  }
  return true;
}

std::int64_t row_count(const TensorView& view) {
  std::int64_t rows = 1;
  for (int dim = 0; dim < view.ndim() - 1; ++dim) rows *= view.size(dim);
  return rows;
}

// Rows of [..., HV] under one stride: as they are, or through a copy that the view then owns.
Operand rows_operand(TensorView& view, Name name, DType dtype) {
  const bool two_dimensional = view.ndim() == 2 && (view.size(1) <= 1 || view.stride(1) == 1);
  if (!two_dimensional && !is_contiguous(view)) {
    nb::object copy = view.object.attr("contiguous")();
    borrow(copy, view);
    check_readable(view, name);
    view.owner = std::move(copy);
  }
  const std::int64_t row_stride = two_dimensional ? view.stride(0) : view.size(-1);
  return {view.data(), dtype, 0, row_stride, 1};
}

float* packed_fp32(const TensorView& view, Name name, const TensorView& model) {
  check_readable(view, name);
  if (!is_dtype(view, dlpack::kFloat, 32) || !is_contiguous(view)) {
    raise_type(cat(
        {name, ": expected contiguous float32 ", list_text(model.dl.shape, model.ndim()), ", got ", describe(view)}));
  }
  check_shape_of(view, name, model);
  return static_cast<float*>(view.data());
}

}  // namespace

void fused_gdn_gating(TensorView& A_log, TensorView& a, TensorView& b, TensorView& dt_bias, handle softplus_beta,
                      handle softplus_threshold, TensorView& g, TensorView& beta, bool dry_run) {
  check_floating(A_log, "A_log", {"HV"});
  GatingParams params;
  params.num_heads = A_log.size(0);
  params.A_log = head_vector(A_log, "A_log", params.num_heads);
  params.dt_bias = head_vector(dt_bias, "dt_bias", params.num_heads);
  check_readable(a, "a");
  if (a.ndim() < 1 || a.size(-1) != params.num_heads) {
    raise_value(cat({"a: expected [..., ", std::to_string(params.num_heads), "], got ", describe(a)}));
  }
  const DType a_dtype = check_like(a, "a", a);
  const DType b_dtype = check_like(b, "b", a);
  params.softplus_beta = static_cast<float>(positive(softplus_beta, "softplus_beta"));
  params.softplus_threshold = static_cast<float>(number(softplus_threshold, "softplus_threshold"));
  params.g = packed_fp32(g, "g", a);
  params.beta = packed_fp32(beta, "beta", a);
  if (dry_run || a.numel() == 0) return;
  params.a = rows_operand(a, "a", a_dtype);
  params.b = rows_operand(b, "b", b_dtype);
  const std::int64_t rows = row_count(a);
  const int threads = num_threads();
  const KernelTable& kernels = *active_level().kernels;
  nb::gil_scoped_release unlocked;
  run_gating(kernels, params, rows, threads);
}

namespace {

// The leading dimensions of x, gate and out, merged where all three allow it.
class MergedRows {
 public:
  explicit MergedRows(const TensorView& x, const TensorView& gate, const TensorView& out) {
    const TensorView* views[kOperands] = {&x, &gate, &out};
    for (int dim = 0; dim < x.ndim() - 1; ++dim) {
      if (x.size(dim) != 1) append(views, dim);
    }
  }

  [[nodiscard]] bool fits() const { return count_ <= Rows::kMaxDims; }

  // Right-aligned: the last of the four is the fastest.
  void write(RmsNormGatedParams& params) const {
    Rows* rows[kOperands] = {&params.x_rows, &params.gate_rows, &params.out_rows};
    for (int i = 0; i < count_; ++i) {
      const int slot = Rows::kMaxDims - count_ + i;
      params.sizes[slot] = sizes_[i];
      for (int operand = 0; operand < kOperands; ++operand) rows[operand]->strides[slot] = strides_[i][operand];
    }
  }

 private:
  static constexpr int kOperands = 3;
  static constexpr int kMostDims = 64;  // torch's own limit

  void append(const TensorView* const views[], int dim) {
    const std::int64_t size = views[0]->size(dim);
    bool mergeable = count_ > 0;
    for (int operand = 0; mergeable && operand < kOperands; ++operand) {
      mergeable = strides_[count_ - 1][operand] == views[operand]->stride(dim) * size;
    }
    if (!mergeable) sizes_[count_++] = 1;
    sizes_[count_ - 1] *= size;
    for (int operand = 0; operand < kOperands; ++operand) strides_[count_ - 1][operand] = views[operand]->stride(dim);
  }

  int count_ = 0;
  std::int64_t sizes_[kMostDims] = {};
  std::int64_t strides_[kMostDims][kOperands] = {};
};

}  // namespace

void rms_norm_gated(TensorView& x, TensorView& gate, TensorView& weight, handle eps, handle activation, TensorView& out,
                    bool dry_run) {
  check_readable(x, "x");
  if (x.ndim() < 1) raise_value(cat({"x: expected [..., V], got ", describe(x)}));
  RmsNormGatedParams params;
  params.x_rows.dtype = check_like(x, "x", x);
  params.gate_rows.dtype = check_like(gate, "gate", x);
  params.dim = x.size(-1);
  params.weight = head_vector(weight, "weight", params.dim);
  params.activation = gate_activation<GateActivation>(activation, "activation");
  params.eps = static_cast<float>(non_negative(eps, "eps"));
  params.out_rows.dtype = check_like(out, "out", x);
  check_unit_stride(out, "out");
  check_separate_elements(out, "out");
  if (!dry_run) {
    for (TensorView* input : {&x, &gate}) {
      if (!same_elements(out, *input)) keep_from(out, *input);
      make_unit_stride(*input);
    }
  }
  const MergedRows rows(x, gate, out);
  if (!rows.fits()) decline("x: more than four leading dimensions that cannot be merged");
  if (dry_run || x.numel() == 0) return;
  rows.write(params);
  params.x = x.data();
  params.gate = gate.data();
  params.out = out.data();
  const std::int64_t num_rows = row_count(x);
  const int threads = num_threads();
  const KernelTable& kernels = *active_level().kernels;
  nb::gil_scoped_release unlocked;
  run_rms_norm_gated(kernels, params, num_rows, threads);
}

}  // namespace gdn::cpu
