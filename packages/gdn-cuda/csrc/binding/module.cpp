// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "binding/ops.h"
#include "driver/device_code.h"
#include "driver/driver.h"
#include "driver/launch.h"
#include "launch/launch.h"

namespace nb = nanobind;
using gdn::cuda::DeviceCode;
using gdn::cuda::DeviceInfo;
using gdn::cuda::DriverInfo;

namespace {

std::tuple<std::string, int, int> device_compiler() {
  const gdn::cuda::DeviceCompiler compiler = gdn::cuda::device_compiler();
  return {compiler.name, compiler.major, compiler.minor};
}

std::string code_for(int major, int minor) {
  const DeviceCode* code = gdn::cuda::code_for(major, minor);
  if (code == nullptr) return "";
  return (code->is_ptx ? "PTX " : "") + code->architecture;
}

}  // namespace

NB_MODULE(_C, m) {
  using namespace nb::literals;
  m.doc() = "The CUDA driver and its devices, and the operations that run on them.";
  m.def("version", [] { return std::string(GDN_VERSION); });

  nb::class_<DeviceInfo>(m, "Device")
      .def_ro("name", &DeviceInfo::name)
      .def_ro("capability_major", &DeviceInfo::capability_major)
      .def_ro("capability_minor", &DeviceInfo::capability_minor);
  nb::class_<DriverInfo>(m, "DriverInfo")
      .def_ro("problem", &DriverInfo::problem)
      .def_ro("version", &DriverInfo::version)
      .def_ro("devices", &DriverInfo::devices);
  nb::class_<DeviceCode>(m, "DeviceCode")
      .def_ro("architecture", &DeviceCode::architecture)
      .def_ro("is_ptx", &DeviceCode::is_ptx)
      .def_prop_ro("data", [](const DeviceCode& code) { return nb::bytes(code.data, code.size); });
  m.def("query_driver", &gdn::cuda::query_driver, nb::call_guard<nb::gil_scoped_release>(),
        "Ask the CUDA driver for its version and devices.");
  m.def("launch_problem", &gdn::cuda::launch_problem, nb::call_guard<nb::gil_scoped_release>(),
        "Why nothing can run on this machine, or ''.");
  m.def("device_code", &gdn::cuda::device_code, "The device code in this module.");
  m.def("device_compiler", &device_compiler, "What compiled it: the name, or '', and CUDA's major and minor version.");
  m.def("code_for", &code_for, "major"_a, "minor"_a,
        "The architecture whose code a device of this compute capability runs, with 'PTX ' in front of it where its "
        "driver compiles that; '' where there is none.");
  m.def("kernel_names", &gdn::cuda::decode_kernel_names);
  m.def("prepare_device", &gdn::cuda::prepare_device, "ordinal"_a);
  gdn::cuda::bind_ops(m);
}
