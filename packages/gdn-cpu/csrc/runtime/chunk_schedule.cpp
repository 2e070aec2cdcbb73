// SPDX-License-Identifier: Apache-2.0
#include "runtime/chunk_schedule.h"

#include <algorithm>

namespace gdn::cpu {

ChunkSchedule::ChunkSchedule(const ChunkPlan& plan, std::int64_t shortest)
    : plan_(plan),
      shortest_(shortest),
      groups_(new Group[plan.groups.size()]),
      chains_(new Chain[plan.shared_chains()]),
      next_other_(plan.shared_chains()),
      unfinished_(plan.shared_chains()) {
  for (std::size_t i = 0; i < plan.groups.size(); ++i) {
    const ChunkGroup& planned = plan.groups[i];
    groups_[i].limit = plan.prepared_chunks;
    groups_[i].ready.reset(new Count[static_cast<std::size_t>(plan.prepared_chunks)]{});
    groups_[i].passed.reset(new Count[planned.chain_end - planned.chain_begin]{});
    for (std::size_t chain = planned.chain_begin; chain < planned.chain_end; ++chain) chains_[chain].group = i;
  }
}

std::int64_t ChunkSchedule::chunks(std::size_t chain) const {
  const std::int64_t length = plan_.chains[chain].length;
  return length / kChunkTokens + (length % kChunkTokens >= shortest_ ? 1 : 0);
}

std::int64_t ChunkSchedule::tokens(std::size_t chain, std::int64_t chunk) const {
  return std::min(kChunkTokens, plan_.chains[chain].length - chunk * kChunkTokens);
}

// --- preparation ---

bool ChunkSchedule::is_ready(const Group& group, std::int64_t chunk) const {
  return group.ready[static_cast<std::size_t>(chunk % plan_.prepared_chunks)].load(std::memory_order_acquire) ==
         chunk + 1;
}

// The next chunk of the group that nobody has begun, where there is memory for it: its place is done with, by the
// chains and by who prepared there.
std::int64_t ChunkSchedule::claim_preparation(std::size_t index) {
  Group& group = groups_[index];
  std::int64_t chunk = group.claimed.load(std::memory_order_relaxed);
  if (chunk >= chunks(plan_.groups[index].chain_begin)) return kNothing;
  if (chunk >= group.limit.load(std::memory_order_acquire)) return kNothing;
  if (chunk >= plan_.prepared_chunks && !is_ready(group, chunk - plan_.prepared_chunks)) return kNothing;
  return group.claimed.compare_exchange_strong(chunk, chunk + 1) ? chunk : kNothing;
}

// The worker's chain needs the first `chunks` no more. Of two that come at once, one sees both.
void ChunkSchedule::pass(const Worker& worker, std::int64_t chunks) {
  Group& group = groups_[group_index(worker.chain)];
  const ChunkGroup& planned = group_of(worker.chain);
  group.passed[worker.chain - planned.chain_begin].store(chunks);
  std::int64_t all = chunks;
  for (std::size_t i = 0; i < planned.chain_end - planned.chain_begin; ++i) {
    all = std::min(all, group.passed[i].load());
  }
  const std::int64_t limit = all + plan_.prepared_chunks;
  std::int64_t current = group.limit.load();
  while (current < limit && !group.limit.compare_exchange_weak(current, limit)) {
  }
}

// --- outputs ---

std::int64_t ChunkSchedule::claim_output(std::size_t chain) {
  Count* oldest = nullptr;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (Count& kept : chains_[chain].kept) {
    const std::int64_t value = kept.load(std::memory_order_relaxed);
    const bool is_left = value != 0 && value % mark(0, Outputs::kLeft) == 0;
    if (!is_left || value >= least) continue;
    oldest = &kept;
    least = value;
  }
  const std::int64_t chunk = least / mark(0, Outputs::kLeft) - 1;
  const bool is_mine = oldest != nullptr && oldest->compare_exchange_strong(least, mark(chunk, Outputs::kClaimed));
  return is_mine ? chunk : kNothing;
}

// The chunks whose outputs are there, without a gap.
void ChunkSchedule::collect(Worker& worker) {
  const std::int64_t before = worker.passed;
  const Chain& chain = chains_[worker.chain];
  const auto is_there = [&](std::int64_t chunk) {
    const auto place = static_cast<std::size_t>(chunk % plan_.kept_chunks);
    return chain.kept[place].load(std::memory_order_acquire) == mark(chunk, Outputs::kThere);
  };
  while (worker.passed < worker.chunk && is_there(worker.passed)) ++worker.passed;
  if (worker.passed > before) pass(worker, worker.passed);
}

// For this chunk's state and the next one.
bool ChunkSchedule::has_room(Worker& worker) {
  if (!plan_.leaves_outputs) return true;
  collect(worker);
  return worker.chunk + 2 - worker.passed <= plan_.kept_chunks;
}

ChunkSchedule::Job ChunkSchedule::own_output(const Worker& worker) {
  const std::int64_t chunk = plan_.leaves_outputs ? claim_output(worker.chain) : kNothing;
  if (chunk == kNothing) return {.kind = Kind::kWait};
  return {.kind = Kind::kOutput, .index = worker.chain, .chunk = chunk, .is_own = true};
}

// --- what a thread does next ---

ChunkSchedule::Job ChunkSchedule::next_of_chain(Worker& worker) {
  if (!has_room(worker)) return own_output(worker);
  const std::size_t index = group_index(worker.chain);
  const Group& group = groups_[index];
  const std::int64_t chunk = worker.chunk;
  if (is_ready(group, chunk)) {
    const bool is_next_prepared = chunk + 1 < chunks(worker.chain) && is_ready(group, chunk + 1);
    return {.kind = Kind::kStep,
            .index = worker.chain,
            .chunk = chunk,
            .is_prepared = true,
            .is_next_prepared = is_next_prepared};
  }
  if (group.claimed.load() >= chunk) {
    const std::int64_t claimed = claim_preparation(index);
    if (claimed != kNothing) return {.kind = Kind::kPrepare, .index = index, .chunk = claimed};
  }
  if (group.claimed.load() > chunk) return own_output(worker);
  return {.kind = Kind::kStep, .index = worker.chain, .chunk = chunk};
}

bool ChunkSchedule::take_shared_chain(Worker& worker) {
  if (next_shared_.load(std::memory_order_relaxed) >= plan_.shared_chains()) return false;
  const std::size_t chain = next_shared_++;
  if (chain >= plan_.shared_chains()) return false;
  worker.chain = chain;
  worker.chunk = worker.passed = 0;
  return true;
}

bool ChunkSchedule::prepare_ahead(Worker& worker, Job& job) {
  for (std::size_t i = 0; i < plan_.groups.size(); ++i) {
    const std::size_t group = worker.group;
    worker.group = (group + 1) % plan_.groups.size();
    const std::int64_t chunk = claim_preparation(group);
    if (chunk == kNothing) continue;
    job = {.kind = Kind::kPrepare, .index = group, .chunk = chunk};
    return true;
  }
  return false;
}

bool ChunkSchedule::take_other_chain(Job& job) {
  if (next_other_.load(std::memory_order_relaxed) >= plan_.chains.size()) return false;
  const std::size_t chain = next_other_++;
  if (chain >= plan_.chains.size()) return false;
  job = {.kind = Kind::kChain, .index = chain};
  return true;
}

// Neighbours share operands: the search goes on where it has found something.
bool ChunkSchedule::take_output(Worker& worker, Job& job) {
  if (!plan_.leaves_outputs) return false;
  for (std::size_t i = 0; i < plan_.shared_chains(); ++i) {
    const std::size_t chain = worker.outputs;
    worker.outputs = (chain + 1) % plan_.shared_chains();
    const std::int64_t chunk = claim_output(chain);
    if (chunk == kNothing) continue;
    job = {.kind = Kind::kOutput, .index = chain, .chunk = chunk};
    return true;
  }
  return false;
}

ChunkSchedule::Job ChunkSchedule::next(Worker& worker) {
  if (worker.chain != kNone || take_shared_chain(worker)) return next_of_chain(worker);
  Job job{.kind = Kind::kWait};
  if (prepare_ahead(worker, job) || take_other_chain(job) || take_output(worker, job)) return job;
  // What a chain has left before this was seen is found by its own thread at the latest.
  return {.kind = unfinished_.load() > 0 ? Kind::kWait : Kind::kDone};
}

void ChunkSchedule::finish(Worker& worker, const Job& job, bool leaves_outputs) {
  const auto place = [&](std::int64_t places) { return static_cast<std::size_t>(job.chunk % places); };
  if (job.kind == Kind::kPrepare) {
    groups_[job.index].ready[place(plan_.prepared_chunks)].store(job.chunk + 1, std::memory_order_release);
  } else if (job.kind == Kind::kOutput) {
    chains_[job.index].kept[place(plan_.kept_chunks)].store(mark(job.chunk, Outputs::kThere),
                                                            std::memory_order_release);
  } else if (job.kind == Kind::kStep) {
    worker.chunk = job.chunk + 1;
    if (plan_.leaves_outputs) {
      const Outputs outputs = leaves_outputs ? Outputs::kLeft : Outputs::kThere;
      chains_[job.index].kept[place(plan_.kept_chunks)].store(mark(job.chunk, outputs), std::memory_order_release);
      collect(worker);
    } else {
      pass(worker, worker.chunk);
    }
    if (worker.chunk < chunks(job.index)) return;
    worker.outputs = worker.chain;
    worker.chain = kNone;
    --unfinished_;
  }
}

}  // namespace gdn::cpu
