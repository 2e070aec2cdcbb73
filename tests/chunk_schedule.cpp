// SPDX-License-Identifier: Apache-2.0
//
// Threads that run a schedule of shared sequences whose jobs only leave marks, for test_chunk_schedule.py. The marks
// are plain memory: the thread sanitizer sees whatever the schedule does not order.
//
//   chunk_schedule <threads> <groups> <chains of each> <chunks> <prepared chunks> <leaves outputs> <others> <seed>
#include "runtime/chunk_schedule.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

using namespace gdn::cpu;
using Kind = ChunkSchedule::Kind;
using Marks = std::vector<std::vector<std::int64_t>>;

namespace {

void require(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

ChunkPlan plan_of(std::int64_t groups, std::int64_t chains, std::int64_t chunks, std::int64_t others) {
  ChunkPlan plan;
  const auto add = [&](std::int64_t head) { plan.chains.push_back({0, head, head + 1, 0, 16, chunks * 64, 1.0}); };
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::size_t begin = plan.chains.size();
    for (std::int64_t chain = 0; chain < chains; ++chain) add(group);
    plan.groups.push_back({begin, plan.chains.size(), 1.0});
  }
  for (std::int64_t i = 0; i < others; ++i) add(groups);
  return plan;
}

class Run {
 public:
  Run(const ChunkPlan& plan, std::int64_t chunks, unsigned seed)
      : plan_(plan), schedule_(plan, 1), seed_(seed), chunks_(chunks) {
    prepared_.assign(plan.groups.size(), std::vector<std::int64_t>(size(plan.prepared_chunks), -1));
    kept_.assign(plan.shared_chains(), std::vector<std::int64_t>(ChunkSchedule::kMostKept, -1));
    outputs_.assign(plan.shared_chains(), std::vector<std::int64_t>(size(chunks), 0));
    done_.assign(plan.chains.size(), 0);
  }

  void run(unsigned thread) {
    std::mt19937 random(seed_ + thread);
    ChunkSchedule::Worker worker;
    for (ChunkSchedule::Job job = schedule_.next(worker); job.kind != Kind::kDone; job = schedule_.next(worker)) {
      if (random() % 4 == 0) std::this_thread::yield();
      if (job.kind == Kind::kWait) continue;
      const bool leaves_outputs = run(job, random() % 8 != 0);
      if (job.kind == Kind::kPrepare && random() % 16 == 0) {
        // As long as others may take to get past the chunk without it.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        prepared(job.index, job.chunk) = job.chunk;
      }
      schedule_.finish(worker, job, leaves_outputs);
    }
  }

  void check() const {
    for (std::size_t chain = 0; chain < plan_.chains.size(); ++chain) {
      const bool is_shared = chain < plan_.shared_chains();
      require(done_[chain] == (is_shared ? chunks_ : 1), "a chain was not run to its end");
      if (!is_shared) continue;
      for (const std::int64_t count : outputs_[chain]) require(count == 1, "outputs were not computed once");
    }
  }

 private:
  static std::size_t size(std::int64_t x) { return static_cast<std::size_t>(x); }

  std::int64_t& prepared(std::size_t group, std::int64_t chunk) {
    return prepared_[group][size(chunk % plan_.prepared_chunks)];
  }
  std::int64_t& kept(std::size_t chain, std::int64_t chunk) { return kept_[chain][size(chunk % plan_.kept_chunks)]; }

  bool run(const ChunkSchedule::Job& job, bool is_whole) {
    if (job.kind == Kind::kPrepare) prepared(job.index, job.chunk) = job.chunk;
    if (job.kind == Kind::kStep) return step(job, is_whole);
    if (job.kind == Kind::kOutput) output(job);
    if (job.kind == Kind::kChain) ++done_[job.index];
    return false;
  }

  bool step(const ChunkSchedule::Job& job, bool is_whole) {
    const std::size_t group = schedule_.group_index(job.index);
    require(done_[job.index]++ == job.chunk, "steps are out of order");
    if (job.is_prepared) require(prepared(group, job.chunk) == job.chunk, "what was prepared is of another chunk");
    if (job.is_next_prepared) require(prepared(group, job.chunk + 1) == job.chunk + 1, "the next chunk is another");
    const bool leaves_outputs = plan_.leaves_outputs && job.is_prepared && is_whole;
    if (plan_.leaves_outputs) {
      require(job.chunk == 0 || kept(job.index, job.chunk) == job.chunk, "the state is of another chunk");
      kept(job.index, job.chunk) = job.chunk;
      kept(job.index, job.chunk + 1) = job.chunk + 1;
    }
    if (!leaves_outputs) ++outputs_[job.index][size(job.chunk)];
    return leaves_outputs;
  }

  void output(const ChunkSchedule::Job& job) {
    require(prepared(schedule_.group_index(job.index), job.chunk) == job.chunk,
            "outputs want another chunk's operands");
    require(kept(job.index, job.chunk) == job.chunk, "outputs want another chunk's state");
    ++outputs_[job.index][size(job.chunk)];
  }

  const ChunkPlan& plan_;
  ChunkSchedule schedule_;
  unsigned seed_;
  std::int64_t chunks_;
  Marks prepared_, kept_, outputs_;
  std::vector<std::int64_t> done_;
};

}  // namespace

int main(int, char** arguments) {
  const auto number = [&](int i) { return std::strtoll(arguments[i], nullptr, 10); };
  ChunkPlan plan = plan_of(number(2), number(3), number(4), number(7));
  plan.prepared_chunks = number(5);
  plan.leaves_outputs = number(6) != 0;
  plan.kept_chunks = plan.leaves_outputs ? static_cast<std::int64_t>(ChunkSchedule::kMostKept) : 0;
  Run run(plan, number(4), static_cast<unsigned>(number(8)));
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < number(1); ++i) threads.emplace_back([&run, i] { run.run(static_cast<unsigned>(i)); });
  for (std::thread& thread : threads) thread.join();
  run.check();
  return 0;
}
