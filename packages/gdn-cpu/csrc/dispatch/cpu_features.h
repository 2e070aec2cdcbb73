// SPDX-License-Identifier: Apache-2.0
//
// What this CPU and its operating system can run. Compiled without any instruction-set flag.
#pragma once

#include <string>

namespace gdn::cpu {

struct CpuFeatures {
  bool x86_v3 = false;         // AVX2, FMA, F16C, BMI2, and the OS saves ymm
  bool x86_v4 = false;         // AVX-512 F, BW, DQ, VL, CD, and the OS saves zmm
  bool x86_v4_bf16 = false;    // AVX512-BF16 and VNNI
  bool slow_bf16_dot = false;  // AVX512-BF16 multiplies at half the rate of fp32: Intel's
  bool x86_amx = false;        // AMX tiles and BF16, and the OS saves tiles; permission is asked separately
  bool arm_bf16 = false;       // BF16, dot product and half-precision arithmetic
};

const CpuFeatures& cpu_features();

// Ask the kernel for the use of AMX tile data, once; empty when granted, else why not.
const std::string& amx_permission_error();

}  // namespace gdn::cpu
