// SPDX-License-Identifier: Apache-2.0
//
// TensorView: a torch.Tensor argument of a bound function, seen through DLPack without linking libtorch.
//
// Fast path: the exchange table of torch.Tensor, 40 ns a tensor. Where torch is too old to have it (before 2.10), the
// slow path asks for `__dlpack__` through nb::ndarray, some 2 us a tensor. The table checks nothing, so the caster
// does: an exact torch.Tensor or Parameter (a subclass, a fake or a functorch tensor would have no data of its own),
// dense, not lazily conjugated or negated. Whatever fails is kept as a status and raised by name when the argument is
// used.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "dlpack_abi.h"

namespace gdn {

namespace nb = nanobind;

struct TensorView {
  enum class Status : std::uint8_t {
    kOk,
    kNone,        // the argument was None
    kNotATensor,  // not a torch.Tensor at all
    kSubclass,    // a subclass: torch's dispatcher has to see it
    kUnreadable,  // sparse, conjugated, negated, or otherwise without plain strided data
  };

  Status status = Status::kNone;
  dlpack::Tensor dl{};
  nb::handle object;                               // the argument, borrowed for the call
  nb::object owner;                                // a copy made to get unit strides, if any
  std::optional<nb::ndarray<nb::ro>> slow_borrow;  // keeps the slow path's export alive

  [[nodiscard]] bool is_none() const { return status == Status::kNone; }
  [[nodiscard]] int ndim() const { return dl.ndim; }
  [[nodiscard]] std::int64_t size(int dim) const { return dl.shape[dim < 0 ? dim + dl.ndim : dim]; }
  [[nodiscard]] std::int64_t stride(int dim) const { return dl.strides[dim < 0 ? dim + dl.ndim : dim]; }
  [[nodiscard]] void* data() const { return static_cast<char*>(dl.data) + dl.byte_offset; }
  [[nodiscard]] std::int64_t numel() const {
    std::int64_t count = 1;
    for (int dim = 0; dim < dl.ndim; ++dim) count *= dl.shape[dim];
    return count;
  }
};

// What the caster needs of torch, looked up once. References are kept for the life of the process.
class TorchTypes {
 public:
  static TorchTypes& get() {
    static TorchTypes* types = new TorchTypes();  // never destroyed: Python may be gone by then
    return *types;
  }

  [[nodiscard]] bool is_plain(nb::handle object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    return type == tensor_.ptr() || type == parameter_.ptr();
  }
  [[nodiscard]] bool is_tensor(nb::handle object) const {
    return PyObject_IsInstance(object.ptr(), tensor_.ptr()) == 1;
  }
  [[nodiscard]] const dlpack::ExchangeApi* exchange_api() const { return use_exchange_api_ ? api_ : nullptr; }
  void use_exchange_api(bool enabled) { use_exchange_api_ = enabled; }

  // Whether the values are stored as they read, not lazily negated (`x.conj().imag` is). Lazily conjugated tensors are
  // complex, which no argument may be.
  [[nodiscard]] bool is_materialized(nb::handle object) const {
    PyObject* negated =
        is_neg_ != nullptr ? is_neg_(object.ptr(), nullptr) : PyObject_CallMethod(object.ptr(), "is_neg", nullptr);
    if (negated == nullptr) PyErr_Clear();
    const bool materialized = negated == Py_False;
    Py_XDECREF(negated);
    return materialized;
  }

 private:
  TorchTypes() {
    nb::object torch = nb::module_::import_("torch");
    tensor_ = torch.attr("Tensor");
    parameter_ = torch.attr("nn").attr("Parameter");
    is_neg_ = find_method(torch.attr("_C").attr("TensorBase"), "is_neg");
    if (nb::hasattr(tensor_, "__dlpack_c_exchange_api__")) {
      api_ = find_api(tensor_.attr("__dlpack_c_exchange_api__"));
    }
  }

  static const dlpack::ExchangeApi* find_api(const nb::object& capsule) {
    auto* header = static_cast<dlpack::ExchangeApiHeader*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    if (header == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
    while (header != nullptr && header->version.major != dlpack::kMajorVersion) header = header->prev_api;
    auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
    return api != nullptr && api->tensor_from_py_object_no_sync != nullptr ? api : nullptr;
  }

  // The C function behind a method without arguments: half the cost of a call through the interpreter, which matters
  // for a check of every tensor of every call.
  static PyCFunction find_method(const nb::object& type, const char* name) {
    const auto* method =
        static_cast<const PyMethodDef*>(PyType_GetSlot(reinterpret_cast<PyTypeObject*>(type.ptr()), Py_tp_methods));
    for (; method != nullptr && method->ml_name != nullptr; ++method) {
      if (std::strcmp(method->ml_name, name) == 0 && method->ml_flags == METH_NOARGS) return method->ml_meth;
    }
    PyErr_Clear();
    return nullptr;
  }

  nb::object tensor_, parameter_;
  PyCFunction is_neg_ = nullptr;
  const dlpack::ExchangeApi* api_ = nullptr;
  bool use_exchange_api_ = true;
};

namespace detail {

inline TensorView::Status borrow_fast(const dlpack::ExchangeApi& api, nb::handle object, TensorView& view) {
  if (api.tensor_from_py_object_no_sync(object.ptr(), &view.dl) != 0) {
    PyErr_Clear();
    return TensorView::Status::kUnreadable;
  }
  return TensorView::Status::kOk;
}

inline TensorView::Status borrow_slow(nb::handle object, TensorView& view) {
  try {
    nb::object plain = object.attr("detach")();  // __dlpack__ refuses what requires a gradient
    nb::ndarray<nb::ro> array;
    if (!nb::try_cast(plain, array)) return TensorView::Status::kUnreadable;
    view.dl.data = const_cast<void*>(array.data());
    view.dl.device = {array.device_type(), array.device_id()};
    view.dl.ndim = static_cast<std::int32_t>(array.ndim());
    view.dl.dtype = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
    view.dl.shape = const_cast<std::int64_t*>(array.shape_ptr());
    view.dl.strides = const_cast<std::int64_t*>(array.stride_ptr());
    view.dl.byte_offset = 0;
    view.slow_borrow = std::move(array);
    return TensorView::Status::kOk;
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("gdn: __dlpack__ of a tensor");
    return TensorView::Status::kUnreadable;
  }
}

}  // namespace detail

// Fill `view` from a Python argument. Never raises: what is wrong is in the status.
inline void borrow(nb::handle object, TensorView& view) {
  view.object = object;
  if (object.is_none()) {
    view.status = TensorView::Status::kNone;
    return;
  }
  const TorchTypes& torch = TorchTypes::get();
  if (!torch.is_plain(object)) {
    view.status = torch.is_tensor(object) ? TensorView::Status::kSubclass : TensorView::Status::kNotATensor;
    return;
  }
  const dlpack::ExchangeApi* api = torch.exchange_api();
  view.status = api != nullptr ? detail::borrow_fast(*api, object, view) : detail::borrow_slow(object, view);
  if (view.status != TensorView::Status::kOk) return;
  const bool null_data = view.dl.data == nullptr && view.numel() > 0;  // fake or functorch data
  // Negated views are imaginary parts of complex tensors, and no complex type has bfloat16 parts. Asking costs 50 ns a
  // tensor, a tenth of a call.
  const bool may_be_negated = view.dl.dtype.code == dlpack::kFloat;
  if (null_data || (may_be_negated && !torch.is_materialized(object))) view.status = TensorView::Status::kUnreadable;
}

}  // namespace gdn

namespace nanobind::detail {

template <>
struct type_caster<gdn::TensorView> {
  NB_TYPE_CASTER(gdn::TensorView, const_name("torch.Tensor"))

  bool from_python(handle source, std::uint8_t /*flags*/, cleanup_list* /*cleanup*/) noexcept {
    try {
      gdn::borrow(source, value);
      return true;
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }
};

}  // namespace nanobind::detail
