// SPDX-License-Identifier: Apache-2.0
//
// The entry points of one level, which its table points to. KernelTable says what they do.
#pragma once

#include "params.h"

namespace gdn::cpu::GDN_ISA {

void recurrence(const RecurrenceParams& params, const RecurrenceItem& item, const RecurrenceItem* next,
                RecurrenceScratch& scratch);
void recurrence_norm(const RecurrenceParams& params, std::int64_t sequence, std::int64_t head);
extern const ChunkKernel kPortableChunk;
extern const ChunkKernel kBlasChunk;
void gating(const GatingParams& params, std::int64_t row_begin, std::int64_t row_end);
void rms_norm_gated(const RmsNormGatedParams& params, std::int64_t row_begin, std::int64_t row_end);
void causal_conv1d(const ConvolutionParams& params, const ConvolutionPiece* pieces, std::int64_t num_pieces,
                   std::int64_t channel_begin, std::int64_t channel_end);

}  // namespace gdn::cpu::GDN_ISA
