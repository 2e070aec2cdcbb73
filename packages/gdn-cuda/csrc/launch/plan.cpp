// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "launch/launch.h"

namespace gdn::cuda {
namespace {

constexpr int kSmallestWidth = 32;
constexpr int kBlocksPerProcessor = 2;  // that run at the same time, see fused_decode.cu

constexpr int kDims[] = {64, 128, 256};

bool is_kernel_dim(std::int64_t dim) { return std::find(std::begin(kDims), std::end(kDims), dim) != std::end(kDims); }

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    default:
      return "float32";
  }
}

const char* form_name(Form form) {
  switch (form) {
    case Form::kReplay:
      return "replay";
    case Form::kRows:
      return "rows";
    default:
      return "slots";
  }
}

std::string kernel_name(int key_dim, DType state, Form form) {
  return "gdn_decode_" + std::to_string(key_dim) + "_" + dtype_name(state) + "_" + form_name(form);
}

bool norms_over_blocks(const DecodeParams& p) { return p.norm_weight.data != nullptr && p.num_splits > 1; }

// As few blocks a head as fill the device: each of them brings q and k to its shared memory again. The state of long
// rows stays in registers: no more columns than those hold.
int choose_splits(const DecodeCall& call, int num_processors) {
  const DecodeParams& p = call.params;
  const std::int64_t wanted = static_cast<std::int64_t>(num_processors) * kBlocksPerProcessor;
  const int most_columns = kMaxThreads / kRowLanes * rows_per_thread(call.key_dim);
  int splits = call.form == Form::kRows ? std::max(1, p.value_dim / most_columns) : 1;
  while (p.row_blocks * p.num_value_heads * splits < wanted && p.value_dim / splits > kSmallestWidth) splits *= 2;
  return splits;
}

}  // namespace

std::vector<std::string> decode_kernel_names() {
  std::vector<std::string> names;
  for (const int key_dim : kDims) {
    for (const DType state : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const Form form : {Form::kSlots, Form::kReplay, Form::kRows}) {
        names.push_back(kernel_name(key_dim, state, form));
      }
    }
  }
  return names;
}

bool has_decode_kernel(std::int64_t key_dim, std::int64_t value_dim) {
  return is_kernel_dim(key_dim) && is_kernel_dim(value_dim);
}

DecodePlan plan_decode(DecodeCall& call, int num_processors) {
  DecodeParams& p = call.params;
  p.row_blocks = std::max<Index>(p.num_rows, 1);
  p.num_splits = choose_splits(call, num_processors);
  const int width = p.value_dim / p.num_splits;
  DecodePlan plan;
  plan.kernel = kernel_name(call.key_dim, call.state_dtype, call.form);
  plan.blocks_x = p.row_blocks * p.num_splits;
  plan.blocks_y = p.num_value_heads;
  plan.threads = std::min(kMaxThreads, width * kRowLanes / rows_per_thread(call.key_dim));
  plan.shared_bytes =
      static_cast<std::size_t>(shared_rows(call.key_dim, width, p.num_columns, call.form == Form::kReplay).end) *
      sizeof(float);
  const auto rows = static_cast<std::size_t>(p.num_rows), heads = static_cast<std::size_t>(p.num_value_heads);
  if (call.form == Form::kReplay) plan.counter_bytes += rows * sizeof(unsigned);
  if (norms_over_blocks(p)) {
    const auto columns = static_cast<std::size_t>(p.num_columns), outputs = static_cast<std::size_t>(p.value_dim);
    plan.counter_bytes += rows * heads * sizeof(unsigned);
    plan.scratch_bytes = rows * columns * heads * outputs * sizeof(float);
  }
  return plan;
}

void place_workspace(DecodeCall& call, void* counters, void* scratch) {
  DecodeParams& p = call.params;
  p.row_counters = static_cast<unsigned*>(counters);
  p.head_counters = p.row_counters + (call.form == Form::kReplay ? p.num_rows : 0);
  p.partial_outputs = static_cast<float*>(scratch);
}

}  // namespace gdn::cuda
