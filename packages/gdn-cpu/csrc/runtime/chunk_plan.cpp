// SPDX-License-Identifier: Apache-2.0
#include "runtime/chunk_plan.h"

#include <algorithm>
#include <numeric>

#include "runtime/chunk_schedule.h"

namespace gdn::cpu {
namespace {

// Costs relative to one column of one head. Measured, K = V = 128.
constexpr double kKeyHeadCost = 27.0;      // q and k as operands, k k^T, q k^T
constexpr double kHeadCost = 2.5;          // the decays of a value head, and what they make of the products
constexpr double kTileCost = 3.0;          // what columns of one head do not share with others
constexpr double kOutputShare = 0.34;      // of a tile's cost
constexpr double kFetchedOutput = 10.0;    // what outputs cost more on another thread
constexpr double kFetchedOperands = 38.0;  // at least, of a step that fetches all operands
constexpr double kFetchedForU = 23.0;      // of one that leaves its outputs
constexpr std::int64_t kVector = 16;       // columns that cost as much as one

// Heads of one task: their states are to stay in the second-level cache, at most 256 KiB in fp32.
constexpr std::int64_t kStateElements = 4 * 128 * 128;
// Chunks of a turn, where chains are cut: a state is written and read once a turn.
constexpr std::int64_t kTurnChunks = 2;
// What a plan of smaller pieces has to gain, and what it may lose where the plan before it leaves threads idle.
constexpr double kWorthwhile = 0.95;
constexpr double kAcceptable = 1.2;
constexpr double kBalanced = 1.15;  // of the busiest thread's work to the mean
constexpr double kEven = 1.05;      // the same where it is not simulated
// With so many chains a thread, any order balances.
constexpr std::size_t kPlenty = 16;
// With fewer than these, one that is held up holds up the call.
constexpr std::size_t kSlack = 4;
// Chunks in memory at a time.
constexpr std::int64_t kMostPrepared = 8, kFewestPrepared = 4, kKept = ChunkSchedule::kMostKept;
constexpr std::int64_t kMostBytes = std::int64_t{60} << 20;

double tile_cost(std::int64_t columns) {
  return kTileCost + static_cast<double>((columns + kVector - 1) / kVector * kVector);
}
double tile_cost(const ChunkChain& chain) { return tile_cost(chain.v_end - chain.v_begin); }

double token_cost(const ChunkWork& work, std::int64_t head_begin, std::int64_t head_end, std::int64_t columns) {
  const std::int64_t group = work.num_value_heads / work.num_key_heads;
  const std::int64_t key_heads = (head_end - 1) / group - head_begin / group + 1;
  return static_cast<double>(key_heads) * kKeyHeadCost +
         static_cast<double>(head_end - head_begin) * (kHeadCost + tile_cost(columns));
}

// How a sequence is divided: value heads and columns of a chain.
struct Division {
  std::int64_t heads, columns;
};

// From the coarsest to the finest.
std::vector<Division> divisions(const ChunkWork& work) {
  const std::int64_t state = std::max<std::int64_t>(1, work.key_dim * work.value_dim);
  const std::int64_t most_heads = std::min(work.num_value_heads, std::max<std::int64_t>(1, kStateElements / state));
  std::vector<Division> all;
  for (std::int64_t heads = most_heads; heads > 0; heads /= 2) all.push_back({heads, work.value_dim});
  for (std::int64_t columns = work.value_dim; columns > work.column_step;) {
    columns = (columns / 2 + work.column_step - 1) / work.column_step * work.column_step;
    all.push_back({1, columns});
  }
  return all;
}

double largest_cost(const ChunkWork& work, const Division& division, std::int64_t length) {
  return static_cast<double>(length) * token_cost(work, 0, division.heads, division.columns);
}

void divide_sequence(const ChunkWork& work, std::int64_t sequence, const Division& division, ChunkPlan& plan) {
  // Parts of one key head, or several whole ones.
  const std::int64_t group = work.num_value_heads / work.num_key_heads;
  const std::int64_t span = std::max(group, division.heads / group * group);
  const std::int64_t length = work.lengths[static_cast<std::size_t>(sequence)];
  for (std::int64_t first = 0; first < work.num_value_heads; first += span) {
    const std::int64_t last = std::min(first + span, work.num_value_heads);
    for (std::int64_t head = first; head < last; head += division.heads) {
      const std::int64_t head_end = std::min(head + division.heads, last);
      for (std::int64_t v = 0; v < work.value_dim; v += division.columns) {
        const std::int64_t v_end = std::min(v + division.columns, work.value_dim);
        const double cost = token_cost(work, head, head_end, v_end - v);
        plan.chains.push_back({sequence, head, head_end, v, v_end, length, cost});
      }
    }
  }
}

double cost_of(const ChunkChain& chain) { return static_cast<double>(chain.length) * chain.token_cost; }

// The longest sequences by the division of number `finest`, others as coarsely as their length allows.
ChunkPlan divide(const ChunkWork& work, const std::vector<Division>& all, std::size_t finest) {
  ChunkPlan plan;
  const std::int64_t longest = *std::max_element(work.lengths.begin(), work.lengths.end());
  const double limit = largest_cost(work, all[finest], longest);
  for (std::size_t n = 0; n < work.lengths.size(); ++n) {
    if (work.lengths[n] == 0) continue;
    std::size_t level = 0;
    while (level < finest && largest_cost(work, all[level], work.lengths[n]) > limit) ++level;
    divide_sequence(work, static_cast<std::int64_t>(n), all[level], plan);
  }
  std::stable_sort(plan.chains.begin(), plan.chains.end(),
                   [](const ChunkChain& left, const ChunkChain& right) { return cost_of(left) > cost_of(right); });
  return plan;
}

double total_cost(const ChunkPlan& plan) {
  return std::accumulate(plan.chains.begin(), plan.chains.end(), 0.0,
                         [](double sum, const ChunkChain& chain) { return sum + cost_of(chain); });
}

// The coarsest plan, or the next ones as long as they are no more work.
ChunkPlan coarsest_plan(const ChunkWork& work, const std::vector<Division>& all) {
  ChunkPlan plan = divide(work, all, 0);
  if (work.threads <= 1) return plan;
  const auto enough = kSlack * static_cast<std::size_t>(work.threads);
  for (std::size_t finest = 1; finest < all.size() && plan.chains.size() < enough; ++finest) {
    ChunkPlan finer = divide(work, all, finest);
    if (total_cost(finer) > total_cost(plan)) break;
    plan = std::move(finer);
  }
  return plan;
}

struct Estimate {
  double time;  // of the busiest thread
  bool is_balanced;
};

Estimate estimate(const ChunkPlan& plan, int threads) {
  const Simulation run = simulate(plan, threads);
  const double mean = std::accumulate(run.work.begin(), run.work.end(), 0.0) / static_cast<double>(threads);
  return {run.time, run.time <= kBalanced * mean};
}

bool is_better(const Estimate& candidate, const Estimate& best) {
  if (candidate.time <= kWorthwhile * best.time) return true;
  return candidate.is_balanced && !best.is_balanced && candidate.time <= kAcceptable * best.time;
}

// --- shared sequences ---

// Which sequences are shared, in chains of so many columns.
struct Sharing {
  std::int64_t columns;
  std::vector<std::int64_t> sequences;
  bool leaves_outputs;
};

// The chains of a group are of one sequence and key head, and follow each other.
void share_sequence(const ChunkWork& work, std::int64_t sequence, std::int64_t columns, ChunkPlan& plan) {
  const std::int64_t group = work.num_value_heads / work.num_key_heads;
  const std::int64_t length = work.lengths[static_cast<std::size_t>(sequence)];
  for (std::int64_t first = 0; first < work.num_value_heads; first += group) {
    const std::size_t chain_begin = plan.chains.size();
    for (std::int64_t head = first; head < first + group; ++head) {
      for (std::int64_t v = 0; v < work.value_dim; v += columns) {
        const std::int64_t v_end = std::min(v + columns, work.value_dim);
        plan.chains.push_back({sequence, head, head + 1, v, v_end, length, 0.0});
      }
    }
    plan.groups.push_back({chain_begin, plan.chains.size(), kKeyHeadCost + static_cast<double>(group) * kHeadCost});
  }
}

double longest_step(const ChunkPlan& plan) {
  double longest = 0.0;
  for (std::size_t i = 0; i < plan.shared_chains(); ++i) longest = std::max(longest, cost_of(plan.chains[i]));
  return longest;
}

// The other sequences, as coarsely as leaves all chains at most half as long as those of the shared ones; where these
// leave no outputs to fill the time, an eighth.
void divide_others(const ChunkWork& work, const std::vector<Division>& all, const Sharing& sharing, ChunkPlan& plan) {
  const double limit = longest_step(plan) / (plan.leaves_outputs ? 2.0 : 8.0);
  for (std::size_t n = 0; n < work.lengths.size(); ++n) {
    const auto sequence = static_cast<std::int64_t>(n);
    const bool is_shared = std::count(sharing.sequences.begin(), sharing.sequences.end(), sequence) > 0;
    if (is_shared || work.lengths[n] == 0) continue;
    std::size_t level = 0;
    while (level + 1 < all.size() && largest_cost(work, all[level], work.lengths[n]) > limit) ++level;
    divide_sequence(work, sequence, all[level], plan);
  }
  std::stable_sort(plan.chains.begin() + static_cast<std::ptrdiff_t>(plan.shared_chains()), plan.chains.end(),
                   [](const ChunkChain& left, const ChunkChain& right) { return cost_of(left) > cost_of(right); });
}

ChunkPlan share(const ChunkWork& work, const std::vector<Division>& all, const Sharing& sharing) {
  ChunkPlan plan;
  plan.leaves_outputs = sharing.leaves_outputs;
  plan.prepared_chunks = kMostPrepared;
  plan.kept_chunks = sharing.leaves_outputs ? kKept : 0;
  for (const std::int64_t sequence : sharing.sequences) share_sequence(work, sequence, sharing.columns, plan);
  for (ChunkChain& chain : plan.chains) chain.token_cost = step_cost(plan, chain);
  divide_others(work, all, sharing, plan);
  return plan;
}

// Keeps as much prepared as there is memory for beside the workspaces of the shared chains; false where that is too
// little. What other chains need, they need in any plan.
bool fit_memory(const ChunkWork& work, ChunkPlan& plan) {
  if (work.kernel == nullptr) return true;
  const ChunkSteps& steps = *work.kernel->steps;
  std::int64_t workspace = 0, kept = 0;
  for (std::size_t i = 0; i < plan.shared_chains(); ++i) {
    const std::int64_t columns = plan.chains[i].v_end - plan.chains[i].v_begin;
    workspace = std::max(workspace, work.kernel->workspace_bytes(work.key_dim, columns, 1));
    kept = std::max(kept, steps.kept_bytes(work.key_dim, columns));
  }
  const std::int64_t of_chunk = static_cast<std::int64_t>(plan.groups.size()) *
                                steps.prepared_bytes(work.key_dim, work.num_value_heads / work.num_key_heads);
  const std::int64_t rest = kMostBytes - useful_threads(plan, work.threads) * workspace -
                            static_cast<std::int64_t>(plan.shared_chains()) * plan.kept_chunks * kept;
  plan.prepared_chunks = std::min(plan.prepared_chunks, rest / of_chunk);
  return plan.prepared_chunks >= kFewestPrepared;
}

// The work of a plan by what it is, were it run without waiting.
struct SharedWork {
  double preparation = 0.0, steps = 0.0, outputs = 0.0, others = 0.0;
};

SharedWork work_of(const ChunkPlan& plan) {
  SharedWork sum;
  for (const ChunkGroup& group : plan.groups) {
    sum.preparation += static_cast<double>(plan.chains[group.chain_begin].length) * group.preparation_cost;
  }
  for (std::size_t i = 0; i < plan.chains.size(); ++i) {
    const ChunkChain& chain = plan.chains[i];
    (i < plan.shared_chains() ? sum.steps : sum.others) += cost_of(chain);
    if (i < plan.shared_chains() && plan.leaves_outputs) {
      sum.outputs += static_cast<double>(chain.length) * output_cost(chain, true);
    }
  }
  return sum;
}

// The time of a plan whose work is divided evenly. Threads without a chain compute as many of the outputs as makes all
// end at once.
double even_time(const ChunkPlan& plan, int threads) {
  const SharedWork work = work_of(plan);
  if (!plan.leaves_outputs) return (work.preparation + work.steps + work.others) / threads;
  const ChunkChain& chain = plan.chains.front();
  const double fetched = output_cost(chain, false) / output_cost(chain, true);
  const auto owners = static_cast<double>(plan.shared_chains());
  const double all = work.preparation + work.others + fetched * (work.outputs + work.steps);
  return all / (threads - owners + fetched * owners);
}

// The time of the longest chain. Its first chunk waits for its preparation, and as long as the threads without a chain
// run other sequences, it computes its own outputs.
double critical_time(const ChunkPlan& plan, int threads) {
  double time = longest_step(plan) + static_cast<double>(kChunkTokens) * plan.groups.front().preparation_cost;
  const auto owners = static_cast<double>(plan.shared_chains());
  if (plan.leaves_outputs) time += work_of(plan).others / (threads - owners) * kOutputShare;
  return time;
}

// About: simulating a plan takes longer than most calls.
Estimate estimate_shared(const ChunkPlan& plan, int threads) {
  const double even = even_time(plan, threads), time = std::max(even, critical_time(plan, threads));
  return {time, time <= kEven * even};
}

// The longest sequence, or all that are at least half as long, where every chain has a thread of its own.
std::vector<Sharing> sharings(const ChunkWork& work) {
  const std::int64_t longest = *std::max_element(work.lengths.begin(), work.lengths.end());
  std::vector<std::int64_t> one, many;
  for (std::size_t n = 0; n < work.lengths.size(); ++n) {
    const auto sequence = static_cast<std::int64_t>(n);
    if (one.empty() && work.lengths[n] == longest) one.push_back(sequence);
    if (2 * work.lengths[n] >= longest) many.push_back(sequence);
  }
  std::vector<Sharing> all;
  const std::int64_t steps = (work.value_dim + work.column_step - 1) / work.column_step;
  for (std::int64_t tiles = 1, last = 0; tiles <= steps; ++tiles) {
    const std::int64_t columns = std::min(work.value_dim, (steps + tiles - 1) / tiles * work.column_step);
    if (columns == last) continue;
    last = columns;
    for (const auto* sequences : {&one, &many}) {
      const auto count = static_cast<std::int64_t>(sequences->size());
      const std::int64_t chains = count * work.num_value_heads * ((work.value_dim + columns - 1) / columns);
      if (chains > work.threads || (sequences == &many && count == 1)) continue;
      all.push_back({columns, *sequences, false});
      if (chains < work.threads) all.push_back({columns, *sequences, true});
    }
  }
  return all;
}

struct SharedPlan {
  ChunkPlan plan;
  Estimate estimate{};
};

// Of no chains where there is none.
SharedPlan best_shared_plan(const ChunkWork& work, const std::vector<Division>& all) {
  SharedPlan best;
  for (const Sharing& sharing : sharings(work)) {
    ChunkPlan plan = share(work, all, sharing);
    const Estimate candidate = estimate_shared(plan, work.threads);
    const bool is_first = best.plan.chains.empty();
    if ((!is_first && !is_better(candidate, best.estimate)) || !fit_memory(work, plan)) continue;
    best = {std::move(plan), candidate};
  }
  // Other chains end when they do: as compared with plans that are simulated, half of one late.
  const std::size_t first_other = best.plan.shared_chains();
  if (first_other < best.plan.chains.size()) best.estimate.time += cost_of(best.plan.chains[first_other]) / 2.0;
  return best;
}

// What no plan without sharing is faster than.
double least_time(const ChunkWork& work, const std::vector<Division>& all) {
  const std::int64_t longest = *std::max_element(work.lengths.begin(), work.lengths.end());
  double least = 0.0;
  for (const Division& division : all) {
    ChunkPlan plan;
    for (std::size_t n = 0; n < work.lengths.size(); ++n) {
      if (work.lengths[n] > 0) divide_sequence(work, static_cast<std::int64_t>(n), division, plan);
    }
    const double time = std::max(largest_cost(work, division, longest), total_cost(plan) / work.threads);
    least = least == 0.0 ? time : std::min(least, time);
  }
  return least;
}

}  // namespace

// Beside chains, what a group prepares keeps two threads busy, and the outputs of a chain one.
int useful_threads(const ChunkPlan& plan, int threads) {
  const std::size_t helpers = 2 * plan.groups.size() + (plan.leaves_outputs ? plan.shared_chains() : 0);
  return static_cast<int>(std::min(static_cast<std::size_t>(threads), plan.chains.size() + helpers));
}

double step_cost(const ChunkPlan& plan, const ChunkChain& chain) {
  const double tile = tile_cost(chain);
  if (plan.leaves_outputs) return std::max(kFetchedForU, tile * (1.0 - kOutputShare));
  return std::max(kFetchedOperands, tile);
}

double output_cost(const ChunkChain& chain, bool is_own) {
  return tile_cost(chain) * kOutputShare + (is_own ? 0.0 : kFetchedOutput);
}

double unshared_cost(const ChunkGroup& group, const ChunkChain& chain) {
  return group.preparation_cost + tile_cost(chain);
}

ChunkPlan plan_chunks(const ChunkWork& work) {
  const std::vector<Division> all = divisions(work);
  if (work.lengths.empty()) return {};
  ChunkPlan best = coarsest_plan(work, all);
  if (work.threads <= 1 || best.chains.size() >= kPlenty * static_cast<std::size_t>(work.threads)) return best;
  Estimate best_estimate = estimate(best, work.threads);
  // Smaller pieces are no less work in all: where even that divided evenly is hardly faster, none needs to be tried.
  if (best_estimate.is_balanced && kWorthwhile * best_estimate.time < total_cost(best) / work.threads) return best;
  SharedPlan shared = best_shared_plan(work, all);
  const bool has_shared = !shared.plan.chains.empty();
  if (has_shared && shared.estimate.time <= kWorthwhile * least_time(work, all)) return std::move(shared.plan);
  for (std::size_t finest = 0; finest < all.size(); ++finest) {
    for (const std::int64_t turn : {std::int64_t{0}, kTurnChunks * kChunkTokens}) {
      ChunkPlan plan = divide(work, all, finest);
      plan.turn_tokens = turn;
      const Estimate candidate = estimate(plan, work.threads);
      if (!is_better(candidate, best_estimate)) continue;
      best = std::move(plan);
      best_estimate = candidate;
    }
  }
  if (has_shared && is_better(shared.estimate, best_estimate)) return std::move(shared.plan);
  return best;
}

namespace {

Simulation simulate_turns(const ChunkPlan& plan, int threads) {
  // The next to ask is whoever is free first.
  struct Thread {
    double time;
    std::size_t index;
    bool has_turn;
    ChunkQueue::Turn turn;
    bool operator<(const Thread& other) const { return time != other.time ? time > other.time : index > other.index; }
  };
  ChunkQueue queue(plan);
  Simulation run{.work = std::vector<double>(static_cast<std::size_t>(threads), 0.0), .time = 0.0};
  std::vector<double>& times = run.work;
  std::vector<Thread> heap;
  for (std::size_t i = 0; i < times.size(); ++i) heap.push_back({0.0, i, false, {}});
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    Thread& thread = heap.back();
    times[thread.index] = thread.time;
    ChunkQueue::Turn turn{};
    if (!queue.next(thread.has_turn ? &thread.turn : nullptr, turn)) {
      heap.pop_back();
      continue;
    }
    thread.time += static_cast<double>(turn.token_end - turn.token_begin) * plan.chains[turn.chain].token_cost;
    thread.has_turn = true;
    thread.turn = turn;
    std::push_heap(heap.begin(), heap.end());
  }
  run.time = *std::max_element(times.begin(), times.end());
  return run;
}

double cost_of(const ChunkPlan& plan, const ChunkSchedule& schedule, const ChunkSchedule::Job& job) {
  using Kind = ChunkSchedule::Kind;
  if (job.kind == Kind::kPrepare) {
    const ChunkGroup& group = plan.groups[job.index];
    return group.preparation_cost * static_cast<double>(schedule.tokens(group.chain_begin, job.chunk));
  }
  const ChunkChain& chain = plan.chains[job.index];
  if (job.kind == Kind::kChain) return cost_of(chain);
  const auto tokens = static_cast<double>(schedule.tokens(job.index, job.chunk));
  if (job.kind == Kind::kOutput) return tokens * output_cost(chain, job.is_own);
  return tokens * (job.is_prepared ? chain.token_cost : unshared_cost(schedule.group_of(job.index), chain));
}

// The schedule itself, by threads whose time is simulated. Who has to wait asks again a little later.
Simulation simulate_jobs(const ChunkPlan& plan, int threads) {
  using Kind = ChunkSchedule::Kind;
  struct Thread {
    double time;
    std::size_t index;
    bool operator<(const Thread& other) const { return time != other.time ? time > other.time : index > other.index; }
  };
  constexpr double kPoll = static_cast<double>(kChunkTokens);
  ChunkSchedule schedule(plan, 1);
  Simulation run{.work = std::vector<double>(static_cast<std::size_t>(threads), 0.0), .time = 0.0};
  std::vector<ChunkSchedule::Worker> workers(run.work.size());
  std::vector<ChunkSchedule::Job> jobs(run.work.size(), {.kind = Kind::kWait});
  std::vector<Thread> heap;
  for (std::size_t i = 0; i < run.work.size(); ++i) heap.push_back({0.0, i});
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    Thread& thread = heap.back();
    ChunkSchedule::Job& job = jobs[thread.index];
    ChunkSchedule::Worker& worker = workers[thread.index];
    if (job.kind != Kind::kWait) {
      run.time = std::max(run.time, thread.time);
      schedule.finish(worker, job, plan.leaves_outputs && job.is_prepared);
    }
    job = schedule.next(worker);
    if (job.kind == Kind::kDone) {
      heap.pop_back();
      continue;
    }
    const double cost = job.kind == Kind::kWait ? 0.0 : cost_of(plan, schedule, job);
    run.work[thread.index] += cost;
    thread.time += job.kind == Kind::kWait ? kPoll : cost;
    std::push_heap(heap.begin(), heap.end());
  }
  return run;
}

}  // namespace

Simulation simulate(const ChunkPlan& plan, int threads) {
  return plan.groups.empty() ? simulate_turns(plan, threads) : simulate_jobs(plan, threads);
}

ChunkQueue::ChunkQueue(const ChunkPlan& plan) : plan_(plan), done_(plan.chains.size(), 0) {
  for (std::size_t i = 0; i < plan.chains.size(); ++i) ready_.push_back({remaining(i), i});
  std::make_heap(ready_.begin(), ready_.end());
}

double ChunkQueue::remaining(std::size_t chain) const {
  const ChunkChain& c = plan_.chains[chain];
  return static_cast<double>(c.length - done_[chain]) * c.token_cost;
}

bool ChunkQueue::next(const Turn* previous, Turn& turn) {
  if (previous != nullptr && previous->token_end < plan_.chains[previous->chain].length) {
    ready_.push_back({remaining(previous->chain), previous->chain});
    std::push_heap(ready_.begin(), ready_.end());
  }
  if (ready_.empty()) return false;
  std::pop_heap(ready_.begin(), ready_.end());
  const std::size_t chain = ready_.back().chain;
  ready_.pop_back();
  const std::int64_t length = plan_.chains[chain].length;
  turn.chain = chain;
  turn.token_begin = done_[chain];
  turn.token_end = plan_.turn_tokens > 0 ? std::min(length, turn.token_begin + plan_.turn_tokens) : length;
  done_[chain] = turn.token_end;
  return true;
}

}  // namespace gdn::cpu
