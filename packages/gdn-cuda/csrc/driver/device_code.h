// SPDX-License-Identifier: Apache-2.0
//
// The device code inside this module, for each architecture that it was compiled for.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace gdn::cuda {

struct DeviceCode {
  std::string architecture;  // "9.0a"
  int major, minor;
  char scope;  // 'a': this architecture only, 'f': its family, 0: this major version from here on
  bool is_ptx;
  const char* data;
  std::size_t size;
};

const std::vector<DeviceCode>& device_code();

// What compiled it: the name, empty when nothing did, and the CUDA version.
struct DeviceCompiler {
  const char* name;
  int major, minor;
};
DeviceCompiler device_compiler();

// The code for a device of this compute capability, machine code rather than PTX; null where there is none.
const DeviceCode* code_for(int major, int minor);

}  // namespace gdn::cuda
