// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "driver/driver.h"

namespace nb = nanobind;
using gdn::cuda::Device;
using gdn::cuda::DriverInfo;

NB_MODULE(_C, m) {
  m.doc() = "The CUDA driver and its devices, as seen by gdn-cuda.";
  m.def("version", [] { return std::string(GDN_VERSION); });

  nb::class_<Device>(m, "Device")
      .def_ro("name", &Device::name)
      .def_ro("capability_major", &Device::capability_major)
      .def_ro("capability_minor", &Device::capability_minor);
  nb::class_<DriverInfo>(m, "DriverInfo")
      .def_ro("problem", &DriverInfo::problem)
      .def_ro("version", &DriverInfo::version)
      .def_ro("devices", &DriverInfo::devices);
  m.def("query_driver", &gdn::cuda::query_driver, nb::call_guard<nb::gil_scoped_release>(),
        "Ask the CUDA driver for its version and devices.");
}
