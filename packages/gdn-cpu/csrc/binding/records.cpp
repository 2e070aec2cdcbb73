// SPDX-License-Identifier: Apache-2.0
#include "records.h"

#include <algorithm>

namespace gdn::cpu {
namespace {

MutableOperand record_operand(const TensorView& view, Name name, DType dtype) {
  if (view.ndim() == 4 && view.numel() > 0 && view.size(3) > 1 && view.stride(3) != 1) {
    decline(cat({name, ": not of unit stride in the last dimension"}));
  }
  return {view.data(), dtype, view.stride(0), view.stride(1), view.stride(2)};
}

}  // namespace

std::int64_t set_records(const RecordTensors& records, const TensorView& activations, std::int64_t pool_size,
                         const Sizes& s, Replay& replay) {
  const std::int64_t columns = check_records(records, activations, pool_size, s, check_exact);
  if (columns > kMaxRecords) decline(cat({"records: more than ", std::to_string(kMaxRecords), " a slot"}));
  replay.k = record_operand(records.k, "records.k", *floating_dtype<DType>(records.k));
  replay.u = record_operand(records.u, "records.u", DType::kFloat32);
  replay.decay = record_operand(records.decay, "records.decay", DType::kFloat32);
  return columns;
}

std::int32_t& live_records(const TensorView& live, std::int64_t slot) {
  return static_cast<std::int32_t*>(live.data())[slot * live.stride(0)];
}

std::int64_t replayed_records(const TensorView& live, std::int64_t slot, std::int64_t accepted) {
  const std::int64_t recorded = slot < 0 ? 0 : live_records(live, slot);
  if (0 < recorded && recorded < accepted) {
    raise_value(cat({"num_accepted_tokens: expected at most the ", std::to_string(recorded), " live records of slot ",
                     std::to_string(slot), ", got ", std::to_string(accepted)}));
  }
  return std::max<std::int64_t>(0, std::min(recorded, accepted));
}

void ReplayPlan::attach(RecurrenceParams& params, std::int64_t tokens) {
  new_decay.resize(static_cast<std::size_t>(tokens * params.num_value_heads));
  replay.new_decay = new_decay.data();
  replay.counts = counts.data();
  params.replay = &replay;
}

}  // namespace gdn::cpu
