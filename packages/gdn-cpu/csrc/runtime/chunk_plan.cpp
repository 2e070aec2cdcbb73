// SPDX-License-Identifier: Apache-2.0
#include "runtime/chunk_plan.h"

#include <algorithm>
#include <numeric>

#include "kernels/params.h"

namespace gdn::cpu {
namespace {

// Costs relative to one column of one head: what all columns of a head share (its decays), and what all value heads of
// a key head share (q and k as operands, k k^T, q k^T). Measured, K = V = 128.
constexpr double kHeadCost = 10.0;
constexpr double kKeyHeadCost = 20.0;
constexpr std::int64_t kVector = 16;  // columns that cost as much as one

// Heads of one task: their states are to stay in the second-level cache, at most 256 KiB in fp32.
constexpr std::int64_t kStateElements = 4 * 128 * 128;
// Chunks of a turn, where chains are cut: a state is written and read once a turn.
constexpr std::int64_t kTurnChunks = 2;
// What a plan of smaller pieces has to gain, and what it may lose where the plan before it leaves threads idle.
constexpr double kWorthwhile = 0.95;
constexpr double kAcceptable = 1.2;
constexpr double kBalanced = 1.15;  // of the busiest thread's work to the mean
// With so many chains a thread, any order balances.
constexpr std::size_t kPlenty = 16;
// With fewer than these, one that is held up holds up the call.
constexpr std::size_t kSlack = 4;

double token_cost(const ChunkWork& work, std::int64_t head_begin, std::int64_t head_end, std::int64_t columns) {
  const std::int64_t group = work.num_value_heads / work.num_key_heads;
  const std::int64_t key_heads = (head_end - 1) / group - head_begin / group + 1;
  const std::int64_t padded = (columns + kVector - 1) / kVector * kVector;
  return static_cast<double>(key_heads) * kKeyHeadCost +
         static_cast<double>(head_end - head_begin) * (kHeadCost + static_cast<double>(padded));
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
  const std::vector<double> times = simulate(plan, threads);
  const double busiest = *std::max_element(times.begin(), times.end());
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(threads);
  return {busiest, busiest <= kBalanced * mean};
}

bool is_better(const Estimate& candidate, const Estimate& best) {
  if (candidate.time <= kWorthwhile * best.time) return true;
  return candidate.is_balanced && !best.is_balanced && candidate.time <= kAcceptable * best.time;
}

}  // namespace

ChunkPlan plan_chunks(const ChunkWork& work) {
  const std::vector<Division> all = divisions(work);
  if (work.lengths.empty()) return {};
  ChunkPlan best = coarsest_plan(work, all);
  if (work.threads <= 1 || best.chains.size() >= kPlenty * static_cast<std::size_t>(work.threads)) return best;
  Estimate best_estimate = estimate(best, work.threads);
  // Smaller pieces are no less work in all: where even that divided evenly is hardly faster, none needs to be tried.
  if (best_estimate.is_balanced && kWorthwhile * best_estimate.time < total_cost(best) / work.threads) return best;
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
  return best;
}

std::vector<double> simulate(const ChunkPlan& plan, int threads) {
  // The next to ask is whoever is free first.
  struct Thread {
    double time;
    std::size_t index;
    bool has_turn;
    ChunkQueue::Turn turn;
    bool operator<(const Thread& other) const { return time != other.time ? time > other.time : index > other.index; }
  };
  ChunkQueue queue(plan);
  std::vector<double> times(static_cast<std::size_t>(threads), 0.0);
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
  return times;
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
