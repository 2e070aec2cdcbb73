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
  std::string reason;          // why it cannot run here; empty when it can
  const KernelTable* kernels;  // a level without kernels of its own has those of the level below
};

// The level whose kernels `level` runs: itself, or the one below that it has them from.
const char* kernels_of(const Level& level);

// From the lowest to the highest level of this architecture.
const std::vector<Level>& levels();

// The level in use: the highest that can run here, capped by GDN_CPU_ISA or set_level.
const Level& active_level();

// Cap the level at `name` (never above what the machine can run); empty restores the environment's cap.
// Returns false for a name that no level of this architecture has.
bool set_level(const std::string& name);

// What is wrong with GDN_CPU_ISA, or empty.
const std::string& environment_error();

}  // namespace gdn::cpu
