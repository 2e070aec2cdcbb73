// SPDX-License-Identifier: Apache-2.0
//
// The instruction-set levels, which of them can run here, and the kernels of the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernels/params.h"

namespace gdn::cpu {

struct Level {
  const char* name;
  std::string reason;                             // why it cannot run here; empty when it can
  const KernelTable* kernels;                     // but for the chunked rule, a level may have those of the level below
  std::vector<const ChunkKernel*> chunk_kernels;  // that can run at this level, the preferred one first
};

// The level whose kernels `level` runs: itself, or the one below that it has all of them from.
const char* kernels_of(const Level& level);

// From the lowest to the highest level of this architecture.
const std::vector<Level>& levels();

// The level in use: the highest that can run here, capped by GDN_CPU_ISA or set_level.
const Level& active_level();

// Cap the level at `name` (never above what the machine can run); empty restores the environment's cap.
// Returns false for a name that no level of this architecture has.
bool set_level(const std::string& name);

// The kernel of the level in use for bf16 activations or others, which are never rounded to bf16: the one that
// GDN_CPU_GEMM or set_gemm forces, where it takes such activations, or the first that does. Null: the level in use has
// no such engine, or its library is not there.
const ChunkKernel* chunk_kernel(bool is_bfloat16);

// The engines that can run at the level in use, the preferred one first.
std::vector<std::string> chunk_engines();

// Force the engine of the chunked rule's products; empty restores what GDN_CPU_GEMM says. Returns false for a name that
// no level of this architecture has.
bool set_gemm(const std::string& name);

// The forced engine, or empty.
std::string forced_gemm();

// What is wrong with GDN_CPU_ISA or GDN_CPU_GEMM, or empty.
const std::string& environment_error();

}  // namespace gdn::cpu
