// SPDX-License-Identifier: Apache-2.0
#include "runtime/recurrence_plan.h"

#include <algorithm>
#include <numeric>

namespace gdn::cpu {
namespace {

// Narrower tiles would not be faster: two vectors of columns keep the multipliers busy, one waits for its own sums.
constexpr std::int64_t kSmallestTile = 32;
// The busiest thread may have this much more than its share of the work.
constexpr double kSlack = 0.15;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t narrower(std::int64_t tile) { return ceil_div(ceil_div(tile, 2), kSmallestTile) * kSmallestTile; }

// The widest tile with which `busiest` threads do not exceed their share.
template <typename Busiest>
std::int64_t widest_tile(std::int64_t value_dim, double share, const Busiest& busiest) {
  std::int64_t tile = value_dim;
  while (tile > kSmallestTile && busiest(tile) > (1 + kSlack) * share) tile = std::min(narrower(tile), tile - 1);
  return tile;
}

}  // namespace

RecurrencePlan plan_recurrence(const Indices& lengths, std::int64_t num_heads, std::int64_t value_dim,
                               int num_threads) {
  const auto [shortest, longest] = std::minmax_element(lengths.begin(), lengths.end());
  const auto rows = static_cast<std::int64_t>(lengths.size());
  const std::int64_t heads = rows * num_heads;
  const std::int64_t threads = std::max(1, num_threads);
  if (*shortest == *longest) {
    const double share = static_cast<double>(heads * value_dim) / static_cast<double>(threads);
    const auto items_each = [&](std::int64_t tile) { return ceil_div(heads * ceil_div(value_dim, tile), threads); };
    const std::int64_t tile = widest_tile(
        value_dim, share, [&](std::int64_t columns) { return static_cast<double>(items_each(columns) * columns); });
    // Threads that would only shorten the share of others that wait for the busiest anyway are not woken.
    return {tile, ceil_div(heads * ceil_div(value_dim, tile), items_each(tile)), false};
  }
  // Whoever takes the last item had less than a full share before.
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const double share = static_cast<double>(tokens * num_heads * value_dim) / static_cast<double>(threads);
  const std::int64_t tile = widest_tile(
      value_dim, share, [&](std::int64_t columns) { return share + static_cast<double>(*longest * columns); });
  return {tile, std::min(threads, heads * ceil_div(value_dim, tile)), true};
}

}  // namespace gdn::cpu
