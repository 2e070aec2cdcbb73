// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, opened at run time, so that this module loads on machines that have none.
#pragma once

#include <string>
#include <vector>

namespace gdn::cuda {

struct Device {
  std::string name;
  int capability_major = 0;
  int capability_minor = 0;
};

struct DriverInfo {
  std::string problem;  // why there is nothing to run on; empty when there is
  int version = 0;      // 1000 * major + 10 * minor, as the driver says it; 0 when unknown
  std::vector<Device> devices;
};

// Asks the driver anew on every call. Makes no CUDA context.
DriverInfo query_driver();

}  // namespace gdn::cuda
