// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule with products in fp32, on the vectors of the level that this file is compiled for.
#include "chunk/chunk_rule.h"
#include "kernels.h"

namespace gdn::cpu::GDN_ISA {

const ChunkKernel kPortableChunk = {
    .engine = "portable",
    .multiplies_bf16 = false,
    .shortest = 14,
    .workspace_bytes = chunk_workspace<Fp32Engine>,
    .run = run_chunks<Fp32Engine>,
};

}  // namespace gdn::cpu::GDN_ISA
