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
#define GDN_ENTRIES(KEY_DIM, STATE)                  \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_##STATE##_slots)  \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_##STATE##_replay) \
  GDN_ENTRY(gdn_decode_##KEY_DIM##_##STATE##_rows)
#define GDN_STATES(KEY_DIM) GDN_ENTRIES(KEY_DIM, float32) GDN_ENTRIES(KEY_DIM, bfloat16) GDN_ENTRIES(KEY_DIM, float16)

const std::map<std::string, EmulatedKernel>& emulated_kernels() {
  static const std::map<std::string, EmulatedKernel> kernels{GDN_STATES(64) GDN_STATES(128) GDN_STATES(256)};
  return kernels;
}

}  // namespace gdn::cuda
