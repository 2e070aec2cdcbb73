// SPDX-License-Identifier: Apache-2.0
//
// How the chunked rule is divided among threads. A chain is some heads and columns of one sequence: its chunks follow
// each other, and nothing else depends on them. Threads take turns of a chain: all its chunks, or a few at a time where
// whole chains would leave threads idle.
//
// Every chain computes what its columns share, and the finer the columns, the more of the work is that: of a chunk of
// one head with 16 columns 30 units of 49. With more threads than heads, long sequences are therefore shared
// (chunk_schedule.h): what does not depend on the state is prepared once a chunk, by whoever is free, and a chain has a
// thread from its begin to its end. Where threads are left over, they also compute outputs, which chains leave behind.
//
// Costs are in units of one column of a head in a chunk, as of 128 columns run together: 0.31 us with AVX512-BF16 and
// 0.53 us in fp32 on a core of Zen 4, K = V = 128. With 16 columns a step takes 19 units, outputs included, of which
// these are 6, and preparation 27 a key head and 2.5 a value head. What one core prepares another has to fetch: between
// two cores that share a third-level cache, with the next operands asked for during the step before, a step of 16
// columns then takes 38 units with its outputs, 23 without them, and outputs take 10 more; of 128 columns 125, 82 and
// the same. The plan counts on these. Beyond such a cache it takes longer, which was not measured.
//
// One sequence, units of the busiest thread a chunk, without and with sharing:
//   16 value heads: 64 threads 65 and 46, 192 threads 49 and 27
//   32 value heads: 64 threads 97 and 75, 192 threads 65 and 31
//   64 value heads: 64 threads 161 and 140, 192 threads 87 and 56
// Nothing else of a chain could leave it: u = T v - (T k) M has the solve outside, but makes T k an operand of products
// in bf16, which similar keys do not survive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/params.h"

namespace gdn::cpu {

struct ChunkWork {
  std::vector<std::int64_t> lengths;  // of the sequences, in tokens
  std::int64_t num_key_heads = 0, num_value_heads = 0;
  std::int64_t key_dim = 0, value_dim = 0;
  std::int64_t column_step = 16;  // columns are divided at multiples of this
  int threads = 1;
  const ChunkKernel* kernel = nullptr;  // whose memory is bounded; null: it is not
};

struct ChunkChain {
  std::int64_t sequence;  // an index of `lengths`
  std::int64_t head_begin, head_end;
  std::int64_t v_begin, v_end;
  std::int64_t length;
  double token_cost;  // in units of one head and column
};

// Chains that share what does not depend on their states: those of a sequence and key head.
struct ChunkGroup {
  std::size_t chain_begin, chain_end;
  double preparation_cost;  // a token
};

struct ChunkPlan {
  std::vector<ChunkChain> chains;  // those of groups first, then of most work first
  std::int64_t turn_tokens = 0;    // a multiple of 64; 0: whole chains
  std::vector<ChunkGroup> groups;
  bool leaves_outputs = false;       // of the chains of groups, to free threads
  std::int64_t prepared_chunks = 0;  // in memory at a time, of each group
  std::int64_t kept_chunks = 0;      // of each chain that leaves outputs

  [[nodiscard]] std::size_t shared_chains() const { return groups.empty() ? 0 : groups.back().chain_end; }
};

ChunkPlan plan_chunks(const ChunkWork& work);

// Of so many, those that find something to do.
int useful_threads(const ChunkPlan& plan, int threads);

// Costs a token: of a step of a shared chain; of its outputs, on its own thread or on another; and of a chunk that a
// chain of a group prepares for itself.
double step_cost(const ChunkPlan& plan, const ChunkChain& chain);
double output_cost(const ChunkChain& chain, bool is_own);
double unshared_cost(const ChunkGroup& group, const ChunkChain& chain);

// Who runs what in which order, were all costs as estimated.
struct Simulation {
  std::vector<double> work;  // of each thread, what it waits for not included
  double time = 0;           // until the last one is done
};
Simulation simulate(const ChunkPlan& plan, int threads);

// What is left to do. The thread that asks gets a turn of the chain with most work left, of those that nobody runs.
class ChunkQueue {
 public:
  explicit ChunkQueue(const ChunkPlan& plan);

  struct Turn {
    std::size_t chain;
    std::int64_t token_begin, token_end;
  };

  // False: all that is left is run by others. `previous`: the turn that the caller has just finished, or null.
  bool next(const Turn* previous, Turn& turn);

 private:
  double remaining(std::size_t chain) const;

  struct Ready {
    double work;
    std::size_t chain;
    bool operator<(const Ready& other) const { return work != other.work ? work < other.work : chain > other.chain; }
  };

  const ChunkPlan& plan_;
  std::vector<std::int64_t> done_;  // tokens of each chain
  std::vector<Ready> ready_;        // a heap
};

}  // namespace gdn::cpu
