// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule with products of bf16 by BFMMLA.
#include "../chunk/arm_bf16_engine.h"
#include "../chunk/chunk_rule.h"

namespace gdn::cpu::GDN_ISA {

const ChunkKernel kChunkOfBFloat16 = {
    .engine = "arm_bf16",
    .multiplies_bf16 = true,
    .shortest = 8,
    .workspace_bytes = chunk_workspace<ArmBf16Engine>,
    .run = run_chunks<ArmBf16Engine>,
};

}  // namespace gdn::cpu::GDN_ISA
