// SPDX-License-Identifier: Apache-2.0
//
// From a checked call to a launch: how the work is cut into blocks, which kernel, how much scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/params.h"

namespace gdn::cuda {

struct DecodeCall {
  DecodeParams params{};
  int key_dim = 0;
  DType state_dtype = DType::kFloat32;
  Form form = Form::kSlots;
  int device = 0;
};

// All that fused_decode.cu defines.
std::vector<std::string> decode_kernel_names();
// Whether there is a kernel for these dimensions.
bool has_decode_kernel(std::int64_t key_dim, std::int64_t value_dim);

struct DecodePlan {
  std::string kernel;
  std::int64_t blocks_x = 0, blocks_y = 0;
  int threads = 0;
  std::size_t shared_bytes = 0;
  std::size_t counter_bytes = 0;  // 0: none. Zeros before and after every launch, whatever its sizes
  std::size_t scratch_bytes = 0;  // holds nothing between launches
};

// Cuts a call for a device of `num_processors`, and sets row_blocks and num_splits. Depends on sizes only, never on
// what device memory holds, so that it holds for every replay of a captured graph.
DecodePlan plan_decode(DecodeCall& call, int num_processors);

// Points the parameters to their parts of the two, which no launch that may run at the same time shares.
void place_workspace(DecodeCall& call, void* counters, void* scratch);

// What runs decode calls: the CUDA driver, or in tests the emulator.
std::int32_t launch_device_type();  // as DLPack numbers them
// Why no decode call can run on a device, or an empty string.
std::string decode_problem(int device);
void launch_decode(DecodeCall& call);

}  // namespace gdn::cuda
