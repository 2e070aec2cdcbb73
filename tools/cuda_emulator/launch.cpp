// SPDX-License-Identifier: Apache-2.0
//
// Runs decode calls in the emulator instead of on a GPU.
#include "launch/launch.h"

#include <map>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "emulated.h"
#include "kernels.h"

namespace gdn::cuda {
namespace {

// As a stream has them on a GPU: counters are zeros at first, then as the launch before left them.
std::vector<unsigned char> counters, scratch;

}  // namespace

EmulatedDevice& emulated_device() {
  static EmulatedDevice device;
  return device;
}

std::int32_t launch_device_type() { return dlpack::kCpu; }

std::string decode_problem(int) { return ""; }

void launch_decode(DecodeCall& call) {
  const EmulatedDevice& device = emulated_device();
  const DecodePlan plan = plan_decode(call, device.num_processors);
  const auto kernel = emulated_kernels().find(plan.kernel);
  if (kernel == emulated_kernels().end()) throw std::runtime_error("no kernel " + plan.kernel);
  if (counters.size() < plan.counter_bytes) counters.assign(plan.counter_bytes, 0);
  scratch.assign(plan.scratch_bytes, 0xff);
  place_workspace(call, counters.data(), scratch.data());
  const emulator::Grid grid{plan.blocks_x, plan.blocks_y, plan.threads, plan.shared_bytes};
  emulator::run_grid(device.settings, grid, kernel->second, &call.params);
}

}  // namespace gdn::cuda
