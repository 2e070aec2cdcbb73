// SPDX-License-Identifier: Apache-2.0
//
// Runs whole chunks of one head by the kernel of arm_bf16, for test_arm_counts.py to count what is executed.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/params.h"

using gdn::cpu::DType;

namespace {

constexpr std::int64_t kTokens = 128, kDim = 128;

template <class AnyOperand, class T>
AnyOperand operand(T* data, DType dtype, std::int64_t token_stride) {
  AnyOperand x;
  x.data = data;
  x.dtype = dtype;
  x.token_stride = token_stride;
  return x;
}

}  // namespace

int main() {
  const gdn::cpu::ChunkKernel& kernel = gdn::cpu::arm_bf16::kChunkOfBFloat16;
  const std::uint16_t one_eighth = 0x3e00;
  const std::vector<std::uint16_t> x(kTokens * kDim, one_eighth);
  std::vector<std::uint16_t> out(kTokens * kDim);
  const std::vector<float> beta(kTokens, 0.5f);
  std::vector<float> state(kDim * kDim, 1.0f);
  const std::int64_t slot = 0;

  gdn::cpu::RecurrenceParams params;
  params.num_sequences = params.num_key_heads = params.num_value_heads = 1;
  params.key_dim = params.value_dim = kDim;
  params.tokens_per_sequence = kTokens;
  params.q = params.k = params.v = operand<gdn::cpu::Operand>(x.data(), DType::kBFloat16, kDim);
  params.beta = operand<gdn::cpu::Operand>(beta.data(), DType::kFloat32, 1);
  params.beta_kind = gdn::cpu::Beta::kValue;
  params.normalize_qk = true;
  params.out = operand<gdn::cpu::MutableOperand>(out.data(), DType::kBFloat16, kDim);
  params.source = params.destination = state.data();
  params.source_slots = params.destination_slots = &slot;

  gdn::cpu::ChunkTask task;
  task.head_end = 1;
  task.v_end = kDim;
  task.token_end = kTokens;
  void* workspace = std::aligned_alloc(64, static_cast<std::size_t>(kernel.workspace_bytes(kDim, kDim, 1)));
  kernel.run(params, task, workspace);
  std::free(workspace);
  std::printf("%g\n", static_cast<double>(state[0]));
  return 0;
}
