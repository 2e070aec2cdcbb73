// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "emulator.h"

namespace gdn::cuda {

// What the emulated launches of this process run on.
struct EmulatedDevice {
  emulator::Settings settings;
  int num_processors = 2;
};
EmulatedDevice& emulated_device();

}  // namespace gdn::cuda
