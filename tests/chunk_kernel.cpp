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

// A task in working memory of NaN, which nothing may read before it is written.
void run(const RecurrenceParams& params, const ChunkTask& task) {
  using Engine = GDN_ISA::Fp32Engine;
  const std::int64_t columns = task.v_end - task.v_begin, heads = task.head_end - task.head_begin;
  const auto bytes = static_cast<std::size_t>(GDN_ISA::chunk_workspace<Engine>(params.key_dim, columns, heads));
  void* workspace = std::aligned_alloc(kScratchAlignment, bytes);
  std::memset(workspace, 0xff, bytes);
  GDN_ISA::run_chunks<Engine>(params, task, workspace);
  std::free(workspace);
}

}  // namespace

struct Call {
  std::int64_t sequences, key_heads, value_heads, key_dim, value_dim;
  std::int64_t columns;  // of a task
  std::int64_t turn;     // tokens of a task; 0: all
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
        if (token > 0) task.carried_in = carried.data();
        if (task.token_end < length) task.carried_out = carried.data();
        run(params, task);
      }
    }
  }
}
