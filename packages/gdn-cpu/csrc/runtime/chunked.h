// SPDX-License-Identifier: Apache-2.0
//
// Whole sequences by the chunked rule, divided among threads.
#pragma once

#include <vector>

#include "kernels/params.h"
#include "runtime/parallel.h"
#include "runtime/small_vector.h"

namespace gdn::cpu {

// Runs the sequences listed in `live` with `chunk`, and with the recurrence of `table` the chunks that are too short
// for it: a sequence of few tokens, or what is left after the last whole chunk. The same threads do the items of
// `steps`, which are nobody's yet.
void run_chunked(const KernelTable& table, const ChunkKernel& chunk, const RecurrenceParams& params,
                 const Indices& live, int num_threads, const std::vector<RecurrenceWork*>& steps = {});

}  // namespace gdn::cpu
