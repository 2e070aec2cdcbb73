// SPDX-License-Identifier: Apache-2.0
//
// The kernels of gdn-cuda, compiled for the emulator, by their names on a GPU.
#pragma once

#include <map>
#include <string>

namespace gdn::cuda {

using EmulatedKernel = void (*)(const void* params);
const std::map<std::string, EmulatedKernel>& emulated_kernels();

}  // namespace gdn::cuda
