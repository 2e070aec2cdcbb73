// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule with products of bf16 by BFMMLA, or by OpenBLAS.
#include "../chunk/arm_bf16_engine.h"
#include "../chunk/blas_engine.h"
#include "../chunk/chunk_rule.h"

namespace gdn::cpu::GDN_ISA {

const ChunkKernel kChunkOfBFloat16 = {
    .engine = "arm_bf16",
    .multiplies_bf16 = true,
    .calls_blas = false,
    .column_step = 16,
    .shortest = 8,
    .workspace_bytes = chunk_workspace<ArmBf16Engine>,
    .run = run_chunks<ArmBf16Engine>,
    .steps = &kChunkSteps<ArmBf16Engine>,
};

const ChunkKernel kBlasOfBFloat16 = {
    .engine = "openblas",
    .multiplies_bf16 = true,
    .calls_blas = true,
    .column_step = kWholePanels,
    .shortest = 14,
    .workspace_bytes = chunk_workspace<BlasEngine<BFloat16>>,
    .run = run_chunks<BlasEngine<BFloat16>>,
    .steps = &kChunkSteps<BlasEngine<BFloat16>>,
};

}  // namespace gdn::cpu::GDN_ISA
