// SPDX-License-Identifier: Apache-2.0
//
// gdn-cuda's own binding, in front of the emulator: it takes CPU tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "binding/ops.h"
#include "emulated.h"

namespace nb = nanobind;
using gdn::cuda::emulated_device;
using gdn::emulator::Order;

namespace {

void configure(const std::string& order, unsigned seed, int num_processors) {
  gdn::cuda::EmulatedDevice& device = emulated_device();
  device.settings.order = order == "reverse" ? Order::kReverse : (order == "random" ? Order::kRandom : Order::kForward);
  device.settings.seed = seed;
  device.num_processors = num_processors;
}

}  // namespace

NB_MODULE(_C, m) {
  using namespace nb::literals;
  m.def("configure", &configure, "order"_a = "forward", "seed"_a = 0u, "num_processors"_a = 2);
  gdn::cuda::bind_ops(m);
}
