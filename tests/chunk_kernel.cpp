// SPDX-License-Identifier: Apache-2.0
//
// The chunked rule of one level behind a C function, for test_chunk_kernel_faults.py, which plants faults in copies of
// its headers: the one in force has the number `planted`.
namespace {
int planted = 0;
}

#include "kernels/chunk/chunk_rule.h"

#include <cstdlib>
#include <cstring>
#include <vector>

using namespace gdn::cpu;

namespace {

template <class AnyOperand, class T>
AnyOperand operand(T* data, std::int64_t head_stride, std::int64_t token_stride) {
  AnyOperand x;
  x.data = data;
  x.dtype = DType::kFloat32;
  x.token_stride = token_stride;
  x.head_stride = head_stride;
  return x;
}

using Engine = GDN_ISA::Fp32Engine;

// Working memory of NaN, which nothing may read before it is written.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) : data_(std::aligned_alloc(kScratchAlignment, static_cast<std::size_t>(bytes))) {
    std::memset(data_, 0xff, static_cast<std::size_t>(bytes));
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

void run(const RecurrenceParams& params, const ChunkTask& task) {
  const std::int64_t columns = task.v_end - task.v_begin, heads = task.head_end - task.head_begin;
  const Memory workspace(GDN_ISA::chunk_workspace<Engine>(params.key_dim, columns, heads));
  GDN_ISA::run_chunks<Engine>(params, task, workspace.data());
}

// The same in parts, one head: preparation and outputs in a workspace of their own, as by other threads, and the
// outputs of a chunk, if they are left, after the next one's step.
void run_in_parts(const RecurrenceParams& params, const ChunkTask& whole, bool leaves_outputs) {
  const ChunkSteps& steps = GDN_ISA::kChunkSteps<Engine>;
  const std::int64_t columns = whole.v_end - whole.v_begin, group = params.num_value_heads / params.num_key_heads;
  const Memory workspace(GDN_ISA::chunk_workspace<Engine>(params.key_dim, columns, 1));
  const Memory other(GDN_ISA::chunk_workspace<Engine>(params.key_dim, columns, 1));
  const std::int64_t prepared_size = steps.prepared_bytes(params.key_dim, group);
  const Memory prepared[] = {Memory(prepared_size), Memory(prepared_size)};
  const std::int64_t kept_size = steps.kept_bytes(params.key_dim, columns);
  const Memory kept[] = {Memory(kept_size), Memory(kept_size), Memory(kept_size)};
  const auto step_at = [&](std::int64_t chunk) {
    ChunkStep step{.task = whole, .tokens_end = whole.token_end, .prepared = prepared[chunk % 2].data()};
    step.task.token_begin = chunk * kChunkTokens;
    step.task.token_end = GDN_ISA::min_of(step.task.token_begin + kChunkTokens, whole.token_end);
    if (leaves_outputs) step.kept = kept[chunk % 3].data();
    if (leaves_outputs) step.next_kept = kept[(chunk + 1) % 3].data();
    return step;
  };
  steps.begin(params, step_at(0), workspace.data());
  bool was_left = false;
  std::int64_t chunk = 0;
  for (; chunk * kChunkTokens < whole.token_end; ++chunk) {
    const ChunkStep step = step_at(chunk);
    ChunkTask all = step.task;
    all.head_begin = whole.head_begin / group * group;
    all.head_end = all.head_begin + group;
    all.v_end = all.v_begin;
    steps.prepare(params, all, step.prepared, other.data());
    const bool is_left = steps.run(params, step, workspace.data());
    if (was_left) steps.output(params, step_at(chunk - 1), other.data());
    was_left = is_left;
  }
  if (was_left) steps.output(params, step_at(chunk - 1), other.data());
  steps.end(params, step_at(chunk), workspace.data());
}

}  // namespace

struct Call {
  std::int64_t sequences, key_heads, value_heads, key_dim, value_dim;
  std::int64_t columns;  // of a task
  std::int64_t turn;     // tokens of a task; 0: all
  std::int64_t parts;    // 1: in parts; 2: in parts that leave their outputs
  std::int64_t state_v_first;
  const std::int64_t* offsets;
  const std::int64_t* slots;
  const float *q, *k, *v, *g, *beta;  // packed
  float *out, *states;                // the states are updated in place
};

extern "C" void chunk_rule(int fault, const Call* call) {
  planted = fault;
  const std::int64_t keys = call->key_heads * call->key_dim, values = call->value_heads * call->value_dim;
  RecurrenceParams params;
  params.num_sequences = call->sequences;
  params.num_key_heads = call->key_heads;
  params.num_value_heads = call->value_heads;
  params.key_dim = call->key_dim;
  params.value_dim = call->value_dim;
  params.token_offsets = call->offsets;
  params.q = operand<Operand>(call->q, call->key_dim, keys);
  params.k = operand<Operand>(call->k, call->key_dim, keys);
  params.v = operand<Operand>(call->v, call->value_dim, values);
  params.out = operand<MutableOperand>(call->out, call->value_dim, values);
  params.gate = operand<Operand>(call->g, 1, call->value_heads);
  params.gate_kind = Gate::kLogDecay;
  params.beta = operand<Operand>(call->beta, 1, call->value_heads);
  params.beta_kind = Beta::kValue;
  params.scale = 0.2f;
  params.normalize_qk = true;
  params.state_v_first = call->state_v_first != 0;
  const std::int64_t sequence_states = values * call->key_dim;
  std::vector<float> carried(static_cast<std::size_t>(sequence_states));
  params.source = params.destination = call->states;
  params.source_slot_stride = params.destination_slot_stride = sequence_states;
  params.source_slots = params.destination_slots = call->slots;
  for (std::int64_t n = 0; n < call->sequences; ++n) {
    const std::int64_t length = call->offsets[n + 1] - call->offsets[n];
    const std::int64_t turn = call->turn > 0 ? call->turn : length;
    for (std::int64_t v = 0; v < call->value_dim; v += call->columns) {
      for (std::int64_t token = 0; token < length; token += turn) {
        ChunkTask task;
        task.sequence = n;
        task.head_end = call->value_heads;
        task.v_begin = v;
        task.v_end = v + call->columns < call->value_dim ? v + call->columns : call->value_dim;
        task.token_begin = token;
        task.token_end = token + turn < length ? token + turn : length;
        for (std::int64_t head = 0; call->parts > 0 && head < call->value_heads; ++head) {
          task.head_begin = head;
          task.head_end = head + 1;
          run_in_parts(params, task, call->parts == 2);
        }
        if (call->parts > 0) continue;
        if (token > 0) task.carried_in = carried.data();
        if (task.token_end < length) task.carried_out = carried.data();
        run(params, task);
      }
    }
  }
}
