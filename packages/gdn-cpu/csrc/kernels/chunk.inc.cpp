// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule on the vectors of the level that this file is compiled for, with products in fp32 or by OpenBLAS.
#include "chunk/blas_engine.h"
#include "chunk/chunk_rule.h"
#include "kernels.h"

namespace gdn::cpu::GDN_ISA {

const ChunkKernel kPortableChunk = {
    .engine = "portable",
    .multiplies_bf16 = false,
    .calls_blas = false,
    .column_step = 16,
    .shortest = 14,
    .workspace_bytes = chunk_workspace<Fp32Engine>,
    .run = run_chunks<Fp32Engine>,
};

// Whole panels: what the library makes of an element may depend on how many columns it is given.
const ChunkKernel kBlasChunk = {
    .engine = "openblas",
    .multiplies_bf16 = false,
    .calls_blas = true,
    .column_step = kWholePanels,
    .shortest = 14,
    .workspace_bytes = chunk_workspace<BlasEngine<float>>,
    .run = run_chunks<BlasEngine<float>>,
};

}  // namespace gdn::cpu::GDN_ISA
