// SPDX-License-Identifier: Apache-2.0
//
// How the chunked rule is divided among threads. A chain is some heads and columns of one sequence: its chunks follow
// each other, and nothing else depends on them. Threads take turns of a chain: all its chunks, or a few at a time where
// whole chains would leave threads idle.
//
// With fewer chains than threads some have nothing to do: a sequence has as many chains as value heads times tiles of
// column_step columns, 128 where 16 heads have 128 columns each, so that with 192 threads the busiest has 1.5 times the
// mean. What would change that, per chunk and in units of one head and column (chunk_plan.cpp):
// - Half tiles: 256 chains. A vector of 16 columns costs the same with 8 in it, 46 with its head's and key head's part:
//   the mean grows to the busiest thread's work, and the call takes a third longer.
// - What does not depend on the state (q and k as operands, their products, the decays: 30 of those 46), computed for
//   several chunks at once by whoever is free, and handed to the chains, which keep 16. All is then 16 x 30 + 128 x 16
//   = 2528 units a chunk, 13.2 for each of 192 threads: the chain is 1.21 times the mean.
// - The solve out of the chain too, as u = T v - (T k) M: a chain keeps 14.9 and the mean is 14.0, but T k becomes an
//   operand of products of bf16, which similar keys do not survive, and all threads pay for it.
// The second would take 2.9 times less for one sequence on more threads than chains. It needs operands of all chunks in
// flight, 60 KiB a head, which threads leave each other, and waits between them.
#pragma once

#include <cstdint>
#include <vector>

namespace gdn::cpu {

struct ChunkWork {
  std::vector<std::int64_t> lengths;  // of the sequences, in tokens
  std::int64_t num_key_heads = 0, num_value_heads = 0;
  std::int64_t key_dim = 0, value_dim = 0;
  std::int64_t column_step = 16;  // columns are divided at multiples of this
  int threads = 1;
};

struct ChunkChain {
  std::int64_t sequence;  // an index of `lengths`
  std::int64_t head_begin, head_end;
  std::int64_t v_begin, v_end;
  std::int64_t length;
  double token_cost;  // in units of one head and column
};

struct ChunkPlan {
  std::vector<ChunkChain> chains;  // of most work first
  std::int64_t turn_tokens = 0;    // a multiple of 64; 0: whole chains
};

ChunkPlan plan_chunks(const ChunkWork& work);

// Who runs what in which order, were all costs as estimated: the work of each thread until it has none left, the time
// it waits included.
std::vector<double> simulate(const ChunkPlan& plan, int threads);

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
