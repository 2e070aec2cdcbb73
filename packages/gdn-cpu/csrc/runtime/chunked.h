// SPDX-License-Identifier: Apache-2.0
//
// Whole sequences by the chunked rule, divided among threads.
#pragma once

#include <vector>

#include "kernels/params.h"
#include "runtime/parallel.h"
#include "runtime/small_vector.h"

namespace gdn::cpu {

// What the threads of a call do besides.
struct ChunkCompanions {
  std::vector<RecurrenceWork*> before;  // work of its own
  // The norm of the outputs, which are fp32 then: rows [tokens, heads] as the last two dimensions, of all tokens of the
  // call, sizes aside. Of what a thread has just computed it does it at once.
  const RmsNormGatedParams* norm = nullptr;
};

// Runs the sequences listed in `live` with `chunk`, and with the recurrence of `table` the chunks that are too short
// for it: a sequence of few tokens, or what is left after the last whole chunk.
void run_chunked(const KernelTable& table, const ChunkKernel& chunk, const RecurrenceParams& params,
                 const Indices& live, int num_threads, const ChunkCompanions& companions = {});

}  // namespace gdn::cpu
