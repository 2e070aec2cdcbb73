// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule with products of bf16 on AVX512-BF16.
#include "../chunk/avx512_bf16_engine.h"
#include "../chunk/chunk_rule.h"

namespace gdn::cpu::GDN_ISA {

const ChunkKernel kChunkOfBFloat16 = {
    .engine = "avx512_bf16",
    .multiplies_bf16 = true,
    .calls_blas = false,
    .column_step = 16,
    .shortest = 8,
    .workspace_bytes = chunk_workspace<Avx512Bf16Engine>,
    .run = run_chunks<Avx512Bf16Engine>,
    .steps = &kChunkSteps<Avx512Bf16Engine>,
};

}  // namespace gdn::cpu::GDN_ISA
