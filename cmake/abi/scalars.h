// SPDX-License-Identifier: Apache-2.0
//
// Arguments that are no tensors. Each function checks, and raises by the argument's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "check.h"

namespace gdn {

inline bool flag(nb::handle value, Name name) {
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

inline std::int64_t integer(nb::handle value, Name name, Name expected = "an int") {
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

inline double number(nb::handle value, Name name) {
  // torch takes a Python int as a number of 64 bits, where a float of that size would do.
  if (PyLong_Check(value.ptr())) return static_cast<double>(integer(value, name, "a number"));
  const double result = PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_type(cat({name, ": expected a number, got ", nb::type_name(value.type()).c_str()}));
  }
  return result;
}

inline double positive(nb::handle value, Name name) {
  const double result = number(value, name);
  if (!(result > 0)) raise_value(cat({name, ": expected a positive number, got ", std::to_string(result)}));
  return result;
}

inline double non_negative(nb::handle value, Name name) {
  const double result = number(value, name);
  if (!(result >= 0)) raise_value(cat({name, ": expected a number >= 0, got ", std::to_string(result)}));
  return result;
}

inline std::optional<double> optional_number(nb::handle value, Name name) {
  if (value.is_none()) return std::nullopt;
  return number(value, name);
}

inline std::optional<std::int64_t> optional_integer(nb::handle value, Name name) {
  if (value.is_none()) return std::nullopt;
  return integer(value, name, "an int or None");
}

// 'silu', 'swish', 'sigmoid' or 'none', as each backend numbers them.
template <class Activation>
Activation gate_activation(nb::handle value, Name name) {
  if (PyUnicode_Check(value.ptr())) {
    const char* utf8 = PyUnicode_AsUTF8AndSize(value.ptr(), nullptr);
    if (utf8 == nullptr) throw nb::python_error();
    const std::string_view text = utf8;
    if (text == "silu" || text == "swish") return Activation::kSilu;
    if (text == "sigmoid") return Activation::kSigmoid;
    if (text == "none") return Activation::kNone;
  }
  raise_value(cat({name, ": expected one of 'silu', 'swish', 'sigmoid', 'none', got ", nb::repr(value).c_str()}));
}

}  // namespace gdn
