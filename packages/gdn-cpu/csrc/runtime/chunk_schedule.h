// SPDX-License-Identifier: Apache-2.0
//
// Who does what of sequences that threads share. A chain has one thread from its begin to its end. What its next chunk
// needs of q, k and the gates is prepared once for all chains of its group, some chunks ahead, by whoever is free:
// first threads without a chain. A chain that finds nothing prepared
// - prepares what nobody has claimed yet, for all;
// - waits, where another thread has claimed it;
// - prepares for itself, where memory is still taken by a chunk that a slower chain has not passed.
// A chain that leaves its outputs keeps what they need of some chunks. When there is no room for one more, it computes
// the oldest that nobody has claimed. Outputs that are left at the end are done by whoever is free.
//
// So threads wait only for what another one is computing, never for one that has yet to come: any number of threads
// finishes, a single one too. No lock is taken: every count below grows, and what it admits stays admitted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "runtime/chunk_plan.h"

namespace gdn::cpu {

class ChunkSchedule {
 public:
  enum class Kind : std::uint8_t {
    kPrepare,  // a chunk of a group
    kStep,     // a chunk of a chain of a group
    kOutput,   // the outputs that a step has left
    kChain,    // a whole chain of no group
    kWait,     // for others
    kDone,
  };
  struct Job {
    Kind kind;
    std::size_t index = 0;  // of the group, or of the chain
    std::int64_t chunk = 0;
    bool is_prepared = false;       // else the step prepares for itself
    bool is_next_prepared = false;  // by now
    bool is_own = false;            // outputs of the chain that the thread has
  };

  static constexpr std::size_t kMostKept = 4;  // chunks of a chain that leaves its outputs

  // What a thread has of its own.
  struct Worker {
    std::size_t chain = kNone;
    std::int64_t chunk = 0;   // the next of the chain
    std::int64_t passed = 0;  // chunks of it whose outputs are there too
    std::size_t group = 0;    // where it looks for work first
    std::size_t outputs = 0;
  };

  // `shortest`: what is left after whole chunks is a chunk if it has so many tokens.
  ChunkSchedule(const ChunkPlan& plan, std::int64_t shortest);

  Job next(Worker& worker);
  // After a job other than kWait. `leaves_outputs`: a step has kept what its outputs need.
  void finish(Worker& worker, const Job& job, bool leaves_outputs);

  [[nodiscard]] std::int64_t chunks(std::size_t chain) const;
  [[nodiscard]] std::int64_t tokens(std::size_t chain, std::int64_t chunk) const;
  [[nodiscard]] std::size_t group_index(std::size_t chain) const { return chains_[chain].group; }
  [[nodiscard]] const ChunkGroup& group_of(std::size_t chain) const { return plan_.groups[group_index(chain)]; }

 private:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  static constexpr std::int64_t kNothing = -1;
  static constexpr std::size_t kLine = 64;
  using Count = std::atomic<std::int64_t>;

  struct alignas(kLine) Group {
    Count claimed{0};                 // chunks whose preparation someone has begun
    Count limit{0};                   // of these, at most: the memory of older ones is free
    std::unique_ptr<Count[]> ready;   // in each place: the chunk that is prepared there, plus one
    std::unique_ptr<Count[]> passed;  // of each chain: chunks that it needs no more
  };

  // What a place keeps: a chunk, and how far its outputs are.
  enum class Outputs : std::int64_t { kLeft, kClaimed, kThere, kStates };
  static std::int64_t mark(std::int64_t chunk, Outputs outputs) {
    return (chunk + 1) * static_cast<std::int64_t>(Outputs::kStates) + static_cast<std::int64_t>(outputs);
  }
  struct alignas(kLine) Chain {
    Count kept[kMostKept] = {};
    std::size_t group = 0;
  };

  [[nodiscard]] bool is_ready(const Group& group, std::int64_t chunk) const;
  std::int64_t claim_preparation(std::size_t group);
  std::int64_t claim_output(std::size_t chain);
  bool has_room(Worker& worker);
  void pass(const Worker& worker, std::int64_t chunks);
  void collect(Worker& worker);
  Job next_of_chain(Worker& worker);
  Job own_output(const Worker& worker);
  bool take_shared_chain(Worker& worker);
  bool prepare_ahead(Worker& worker, Job& job);
  bool take_other_chain(Job& job);
  bool take_output(Worker& worker, Job& job);

  const ChunkPlan& plan_;
  std::int64_t shortest_;
  std::unique_ptr<Group[]> groups_;
  std::unique_ptr<Chain[]> chains_;
  alignas(kLine) std::atomic<std::size_t> next_shared_{0};
  alignas(kLine) std::atomic<std::size_t> next_other_;
  alignas(kLine) std::atomic<std::size_t> unfinished_;  // chains of groups
};

}  // namespace gdn::cpu
