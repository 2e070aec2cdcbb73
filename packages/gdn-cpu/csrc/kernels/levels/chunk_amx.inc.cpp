// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule with products of bf16 on AMX tiles.
#include "../chunk/amx_engine.h"
#include "../chunk/chunk_rule.h"

namespace gdn::cpu::GDN_ISA {

const ChunkKernel kChunkOfBFloat16 = {
    .engine = "amx",
    .multiplies_bf16 = true,
    .calls_blas = false,
    .column_step = 16,
    .shortest = 8,
    .workspace_bytes = chunk_workspace<AmxEngine>,
    .run = run_chunks<AmxEngine>,
    .steps = &kChunkSteps<AmxEngine>,
};

}  // namespace gdn::cpu::GDN_ISA
