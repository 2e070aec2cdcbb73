// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule on the vectors of the level that this file is compiled for, with products in fp32 or by OpenBLAS.
#include "chunk/blas_engine.h"
#include "chunk/chunk_rule.h"
#include "kernels.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Measured, us of the chunk against the recurrence, 32 value heads: with 32 registers 702 against 677 for 14 tokens and
// 776 against 856 for 16; with 16 registers, where a tile is small, 3286 against 3147 for 63 (AVX2; 14 to 40 tokens are
// 0.94 to 0.98 times, and more with a value head a key head). On SSE2 whole chunks take 1.08 to 1.14 times as long as
// the recurrence with one value head a key head, 0.98 to 1.05 with two, 0.91 to 1.02 with four: both are bound by
// arithmetic, of which chunks have more and share some. Which it is may not depend on that number, since a head's
// values do not depend on other heads.
constexpr std::int64_t kShortest = kRegisters >= 32 ? 16 : kChunkTokens;

}  // namespace

const ChunkKernel kPortableChunk = {
    .engine = "portable",
    .multiplies_bf16 = false,
    .calls_blas = false,
    .column_step = 16,
    .shortest = kShortest,
    .workspace_bytes = chunk_workspace<Fp32Engine>,
    .run = run_chunks<Fp32Engine>,
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
};

}  // namespace gdn::cpu::GDN_ISA
