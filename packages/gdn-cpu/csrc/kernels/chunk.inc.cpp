// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule on the vectors of the level that this file is compiled for, with products in fp32 or by OpenBLAS.
#include "chunk/blas_engine.h"
#include "chunk/chunk_rule.h"
#include "kernels.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Fewer tokens than a whole chunk go token by token: which method it is may depend on a chunk's length alone, since a
// head's values do not depend on other heads, and with fp32 products that is never the slower one for every number of
// value heads a key head. Measured before chunks were run in spans, which take 8 to 11 % less, the chunk's time to the
// recurrence's with 1, 2 and 4 of them, one core of Zen 4:
//   AVX-512: 16 tokens 1.06, 1.01, 0.98; 32 tokens 1.02, 0.95, 0.92; 63 tokens 1.09, 1.00, 0.94
//   AVX2: 14 to 40 tokens 0.94 to 0.98 with 2, and more with 1; 63 tokens 1.04 with 2
// Whole chunks, which share more: AVX-512 64 tokens 1.08, 0.93, 0.93, 1024 tokens 0.81, 0.81, 0.74; AVX2 1.07, 1.00,
// 0.94 and 0.83, 0.83, 0.81; SSE2 1.15, 1.05, 1.01, and 512 tokens 1.11, 0.95, 0.95: bound by arithmetic, of which
// chunks have more.
constexpr std::int64_t kShortest = kChunkTokens;

}  // namespace

const ChunkKernel kPortableChunk = {
    .engine = "portable",
    .multiplies_bf16 = false,
    .calls_blas = false,
    .column_step = 16,
    .shortest = kShortest,
    .workspace_bytes = chunk_workspace<Fp32Engine>,
    .run = run_chunks<Fp32Engine>,
    .steps = &kChunkSteps<Fp32Engine>,
};

// Whole panels: what the library makes of an element may depend on how many columns it is given.
const ChunkKernel kBlasChunk = {
    .engine = "openblas",
    .multiplies_bf16 = false,
    .calls_blas = true,
    .column_step = kWholePanels,
    .shortest = kShortest,
    .workspace_bytes = chunk_workspace<BlasEngine<float>>,
    .run = run_chunks<BlasEngine<float>>,
    .steps = &kChunkSteps<BlasEngine<float>>,
};

}  // namespace gdn::cpu::GDN_ISA
