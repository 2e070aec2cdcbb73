// SPDX-License-Identifier: Apache-2.0
//
// The plan of the chunked rule behind a C function, for test_chunk_plan_faults.py.
#include "runtime/chunk_plan.h"

#include <algorithm>

// Writes the time, the work of each thread, and six numbers of each chain. Returns how many chains there are, or -1
// where they are more than `most`.
extern "C" std::int64_t chunk_plan(const std::int64_t* lengths, std::int64_t count, std::int64_t key_heads,
                                   std::int64_t value_heads, std::int64_t key_dim, std::int64_t value_dim, int threads,
                                   double* time, double* work, std::int64_t* chains, std::int64_t most) {
  const gdn::cpu::ChunkPlan plan = gdn::cpu::plan_chunks({.lengths = {lengths, lengths + count},
                                                          .num_key_heads = key_heads,
                                                          .num_value_heads = value_heads,
                                                          .key_dim = key_dim,
                                                          .value_dim = value_dim,
                                                          .threads = threads});
  const gdn::cpu::Simulation run = gdn::cpu::simulate(plan, threads);
  *time = run.time;
  std::copy(run.work.begin(), run.work.end(), work);
  if (static_cast<std::int64_t>(plan.chains.size()) > most) return -1;
  for (const gdn::cpu::ChunkChain& c : plan.chains) {
    for (const std::int64_t x : {c.sequence, c.head_begin, c.head_end, c.v_begin, c.v_end, c.length}) *chains++ = x;
  }
  return static_cast<std::int64_t>(plan.chains.size());
}
