// SPDX-License-Identifier: Apache-2.0
//
// The core of a layer over any mix of rows: convolution, gates, recurrence or chunked rule, gated norm.
#pragma once

#include "kernels/params.h"
#include "runtime/small_vector.h"

namespace gdn::cpu {

// One kind of row: what the recurrence is given, and which of the batch's rows it is about. All kinds number their
// sequences as the batch does.
struct AttentionRows {
  RecurrenceParams params;  // with the norm, and without q, k and v
  Indices live;
  ConvolutionParams convolution;  // without out
  SmallVector<ConvolutionRow> convolved;
};

struct AttentionCall {
  AttentionRows prefills;  // without gates, which a call computes from those of the steps
  AttentionRows steps, replays;
  std::int64_t num_tokens = 0;
};

// Convolves all rows. Then the chunked rule and the steps share one parallel region; a batch of one kind has that for
// itself, and needs no `chunk` where it has no prefills. Between the parts everything stays in memory that the calling
// thread keeps.
void run_attention(const KernelTable& table, const ChunkKernel* chunk, const AttentionCall& call, int num_threads);

}  // namespace gdn::cpu
