// SPDX-License-Identifier: Apache-2.0
//
// How a recurrence is cut into items and how many threads share them: a pure function of its sizes. Values do not
// depend on it.
#pragma once

#include <cstdint>

#include "runtime/small_vector.h"

namespace gdn::cpu {

struct RecurrencePlan {
  std::int64_t tile;  // value columns of an item
  std::int64_t num_threads;
  bool is_ragged;  // items differ in work: the longest go first, each to whoever is free
};

// For sequences of `lengths` tokens, each with `num_heads` heads of `value_dim` columns. The work of an item is its
// tokens times its columns.
RecurrencePlan plan_recurrence(const Indices& lengths, std::int64_t num_heads, std::int64_t value_dim, int num_threads);

}  // namespace gdn::cpu
