// SPDX-License-Identifier: Apache-2.0
//
// The records of the slots of a pool, as calls that replay them are given them.
#pragma once

#include <vector>

#include "recurrence_call.h"

namespace gdn::cpu {

// Rows with one slot each, and the records of it. The vectors outlive the kernel.
struct ReplayPlan {
  Replay replay;
  Indices counts;                // [N], records to replay
  std::vector<float> new_decay;  // [T, HV]

  // After all checks, for a call of so many tokens.
  void attach(RecurrenceParams& params, std::int64_t tokens);
};

// Checks them. Returns how many records a slot has room for. `activations` has the dtype of k.
std::int64_t set_records(const RecordTensors& records, const TensorView& activations, std::int64_t pool_size,
                         const Sizes& s, Replay& replay);

std::int32_t& live_records(const TensorView& live, std::int64_t slot);

// How many records of a slot, negative for padding, are replayed where so many tokens were accepted.
std::int64_t replayed_records(const TensorView& live, std::int64_t slot, std::int64_t accepted);

}  // namespace gdn::cpu
