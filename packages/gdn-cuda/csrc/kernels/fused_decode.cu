// SPDX-License-Identifier: Apache-2.0
//
// The kernels by name: gdn_decode_<key dim>_<state dtype>_<slots, replay or rows>. launch/plan.cpp makes the same
// names.
#include "fused_decode.h"

namespace gdn::cuda {

// Two blocks of 256 threads on a processor: at most 128 registers.
#define GDN_DECODE(KEY_DIM, STATE_NAME, STATE, FORM, ENUMERATOR)                         \
  GDN_KERNEL(kMaxThreads, 2)                                                             \
  gdn_decode_##KEY_DIM##_##STATE_NAME##_##FORM(const GDN_GRID_CONSTANT DecodeParams p) { \
    DecodeBlock<KEY_DIM, STATE, Form::ENUMERATOR>(p).run();                              \
  }
#define GDN_DECODE_FORMS(KEY_DIM, STATE_NAME, STATE)      \
  GDN_DECODE(KEY_DIM, STATE_NAME, STATE, slots, kSlots)   \
  GDN_DECODE(KEY_DIM, STATE_NAME, STATE, replay, kReplay) \
  GDN_DECODE(KEY_DIM, STATE_NAME, STATE, rows, kRows)
#define GDN_DECODE_STATES(KEY_DIM)              \
  GDN_DECODE_FORMS(KEY_DIM, float32, Float32)   \
  GDN_DECODE_FORMS(KEY_DIM, bfloat16, BFloat16) \
  GDN_DECODE_FORMS(KEY_DIM, float16, Float16)

GDN_DECODE_STATES(64)
GDN_DECODE_STATES(128)
GDN_DECODE_STATES(256)

}  // namespace gdn::cuda
