// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include "kernels/fused_decode.cu"  // NOLINT: compiled as C++, with the device.h beside this file

namespace gdn::cuda {
namespace {

template <void (*kKernel)(DecodeParams)>
void call(const void* params) {
  kKernel(*static_cast<const DecodeParams*>(params));
}

}  // namespace

#define GDN_ENTRY(NAME) {#NAME, &call<&NAME>},
#define GDN_ENTRIES(KEY_DIM)                        \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_float32_slots)   \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_float32_replay)  \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_bfloat16_slots)  \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_bfloat16_replay) \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_float16_slots)   \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_float16_replay)

const std::map<std::string, EmulatedKernel>& emulated_kernels() {
  static const std::map<std::string, EmulatedKernel> kernels{GDN_ENTRIES(64) GDN_ENTRIES(128) GDN_ENTRIES(256)};
  return kernels;
}

}  // namespace gdn::cuda
