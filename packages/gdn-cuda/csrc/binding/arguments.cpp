// SPDX-License-Identifier: Apache-2.0
#include "binding/arguments.h"

#include "launch/launch.h"

namespace gdn::cuda {

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

DType Arguments::floating(const TensorView& view, Name name, Shape shape) {
  device_.check(view, name);
  const std::optional<DType> dtype = floating_dtype<DType>(view);
  if (!dtype) raise_floating(view, name, shape_text(shape));
  check_shape(view, name, shape);
  return *dtype;
}

void Arguments::exact(const TensorView& view, Name name, dlpack::DataType dtype, Shape shape) {
  device_.check(view, name);
  check_dtype(view, name, dtype, shape);
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
  const bool is_wide = check_integer_dtype(view, name, shape);
  check_shape(view, name, shape);
  return {view.data(), is_wide, view.stride(0), view.ndim() > 1 ? view.stride(1) : 0};
}

Operand heads_operand(TensorView& view) {
  make_unit_stride(view);
  return {view.data(), *floating_dtype<DType>(view), view.ndim() > 2 ? view.stride(-3) : 0, view.stride(-2)};
}

}  // namespace gdn::cuda
