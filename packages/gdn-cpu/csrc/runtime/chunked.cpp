// SPDX-License-Identifier: Apache-2.0
#include "runtime/chunked.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/chunk_schedule.h"
#include "runtime/openblas.h"
#include "runtime/parallel.h"
#include "runtime/team.h"
#include "runtime/thread_memory.h"

namespace gdn::cpu {
namespace {

ThreadMemory& workspace_memory() {
  thread_local ThreadMemory memory;
  return memory;
}
// Of the thread that calls: what threads that share a sequence leave each other.
ThreadMemory& shared_memory() {
  thread_local ThreadMemory memory;
  return memory;
}
ThreadMemory& carried_memory() {
  thread_local ThreadMemory memory;
  return memory;
}
RecurrenceScratch& recurrence_scratch() {
  thread_local ThreadMemory memory;
  return *new (memory.at_least(sizeof(RecurrenceScratch))) RecurrenceScratch;
}

std::int64_t sequence_length(const RecurrenceParams& params, std::int64_t sequence) {
  if (params.token_offsets == nullptr) return params.tokens_per_sequence;
  return params.token_offsets[sequence + 1] - params.token_offsets[sequence];
}

std::int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <typename AnyOperand>
void advance(AnyOperand& x, std::int64_t batch, std::int64_t token, std::int64_t head) {
  if (x.data == nullptr) return;
  const std::int64_t index = batch * x.batch_stride + token * x.token_stride + head * x.head_stride;
  x.data = reinterpret_cast<decltype(x.data)>(reinterpret_cast<std::uintptr_t>(x.data) +
                                              static_cast<std::uintptr_t>(index * element_size(x.dtype)));
}

// Tells the core that its thread does nothing but look again.
void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// The last tokens of a sequence, for some heads of one key head, as a call of its own that starts from `carried`
// [heads, K, V]. An fp32 state goes where the call wants it, another one back to `carried`.
struct Tail {
  RecurrenceParams params;
  std::int64_t offsets[2] = {0, 0};
  std::int64_t source_slot = 0;
  std::int64_t destination_slot = 0;
  std::int64_t chunk_offset = 0;

  Tail(const RecurrenceParams& whole, std::int64_t sequence, std::int64_t head, std::int64_t token, std::int64_t count,
       float* carried)
      : params(whole) {
    const std::int64_t group = whole.num_value_heads / whole.num_key_heads;
    const std::int64_t head_size = whole.key_dim * whole.value_dim;
    const bool is_packed = whole.token_offsets != nullptr;
    const std::int64_t batch = is_packed ? 0 : sequence;
    const std::int64_t first = (is_packed ? whole.token_offsets[sequence] : 0) + token;
    advance(params.q, batch, first, head / group);
    advance(params.k, batch, first, head / group);
    for (Operand* x : {&params.v, &params.gate, &params.beta}) advance(*x, batch, first, head);
    advance(params.out, batch, first, head);
    params.num_sequences = 1;
    params.num_key_heads = 1;
    params.num_value_heads = 1;
    offsets[1] = count;
    params.token_offsets = offsets;
    params.source = carried;
    params.source_slots = &source_slot;
    params.destination_slots = &destination_slot;
    params.state_dtype = DType::kFloat32;
    const std::int64_t slot = whole.destination != nullptr ? whole.destination_slots[sequence] : -1;
    if (slot < 0) {
      destination_slot = -1;
    } else if (whole.state_dtype == DType::kFloat32) {
      params.destination =
          static_cast<float*>(whole.destination) + slot * whole.destination_slot_stride + head * head_size;
    } else {
      params.destination = carried;
    }
    if (whole.chunk_states != nullptr) {
      const std::int64_t chunk = whole.chunk_offsets[sequence] + token / kChunkTokens;
      params.chunk_states = whole.chunk_states + (chunk * whole.num_value_heads + head) * head_size;
      params.chunk_offsets = &chunk_offset;
    }
  }
};

// What a thread keeps for the heads and columns of one chain.
std::int64_t workspace_bytes(const ChunkKernel& chunk, std::int64_t key_dim, const ChunkChain& chain) {
  return chunk.workspace_bytes(key_dim, chain.v_end - chain.v_begin, chain.head_end - chain.head_begin);
}
// Whether its last tokens are too few for a chunk.
bool has_tail(const ChunkKernel& chunk, const ChunkChain& chain) {
  const std::int64_t tail = chain.length % kChunkTokens;
  return tail > 0 && tail < chunk.shortest;
}
// The states of its heads, before a tail; between turns they are in memory of the call.
std::int64_t carried_floats(const ChunkPlan& plan, std::int64_t head_size, const ChunkChain& chain) {
  return plan.turn_tokens > 0 ? 0 : (chain.head_end - chain.head_begin) * head_size;
}
std::int64_t turn_floats(const ChunkPlan& plan, const ChunkWork& work) {
  if (plan.turn_tokens == 0) return 0;
  return static_cast<std::int64_t>(work.lengths.size()) * work.num_value_heads * work.key_dim * work.value_dim;
}

// Where what is prepared of each group and kept of each shared chain lies.
struct SharedLayout {
  std::int64_t prepared_bytes = 0, kept_bytes = 0;  // of a chunk
  std::int64_t kept_begin = 0, end = 0;

  SharedLayout() = default;
  SharedLayout(const ChunkPlan& plan, const ChunkWork& work) {
    if (plan.groups.empty()) return;
    const ChunkSteps& steps = *work.kernel->steps;
    prepared_bytes = steps.prepared_bytes(work.key_dim, work.num_value_heads / work.num_key_heads);
    for (std::size_t i = 0; i < plan.shared_chains(); ++i) {
      const ChunkChain& chain = plan.chains[i];
      kept_bytes = std::max(kept_bytes, steps.kept_bytes(work.key_dim, chain.v_end - chain.v_begin));
    }
    kept_begin = static_cast<std::int64_t>(plan.groups.size()) * plan.prepared_chunks * prepared_bytes;
    end = kept_begin + static_cast<std::int64_t>(plan.shared_chains()) * plan.kept_chunks * kept_bytes;
  }
};

// One call: who has run what of it, and the states between turns.
class ChunkedCall {
 public:
  ChunkedCall(const KernelTable& table, const ChunkKernel& chunk, const RecurrenceParams& params,
              const Indices& sequences, int threads, const std::vector<RecurrenceWork*>& steps)
      : table_(table), chunk_(chunk), params_(params), sequences_(sequences), steps_(steps) {
    ChunkWork work{.lengths = {},
                   .num_key_heads = params.num_key_heads,
                   .num_value_heads = params.num_value_heads,
                   .key_dim = params.key_dim,
                   .value_dim = params.value_dim,
                   .column_step = chunk.column_step,
                   .threads = threads,
                   .kernel = &chunk};
    for (const std::int64_t sequence : sequences) work.lengths.push_back(sequence_length(params, sequence));
    plan_ = plan_chunks(work);
    carried_.resize(static_cast<std::size_t>(turn_floats(plan_, work)));
    team_ = static_cast<std::size_t>(useful_threads(threads));
    if (plan_.groups.empty()) {
      queue_ = std::make_unique<ChunkQueue>(plan_);
      return;
    }
    layout_ = SharedLayout(plan_, work);
    shared_ = static_cast<char*>(shared_memory().at_least(layout_.end));
    schedule_ = std::make_unique<ChunkSchedule>(plan_, chunk.shortest);
  }

  int useful_threads(int threads) const { return steps_.empty() ? cpu::useful_threads(plan_, threads) : threads; }

  // First what streams states through the caches, which the outputs of the chunks are to be in afterwards.
  void run_share() {
    for (RecurrenceWork* work : steps_) work->run_share();
    schedule_ != nullptr ? run_jobs() : run_turns();
  }

 private:
  using Job = ChunkSchedule::Job;
  using Kind = ChunkSchedule::Kind;

  void run_jobs() {
    ChunkSchedule::Worker worker;
    int waits = 0;
    for (Job job = schedule_->next(worker); job.kind != Kind::kDone; job = schedule_->next(worker)) {
      if (job.kind == Kind::kWait) {
        wait(waits++);
        continue;
      }
      waits = 0;
      const bool leaves_outputs = run(job);
      schedule_->finish(worker, job, leaves_outputs);
    }
  }

  // What is waited for takes a few microseconds, unless its thread has no core.
  static void wait(int waits) {
    constexpr int kSpins = 16;
    if (waits >= kSpins) return std::this_thread::yield();
    for (int i = 0; i < 16; ++i) pause_thread();
  }

  bool run(const Job& job) {
    switch (job.kind) {
      case Kind::kPrepare:
        prepare(job);
        return false;
      case Kind::kStep:
        return run_step(job);
      case Kind::kOutput:
        run_output(job);
        return false;
      default:
        run(ChunkQueue::Turn{job.index, 0, plan_.chains[job.index].length});
        return false;
    }
  }

  char* prepared(std::size_t group, std::int64_t chunk) const {
    const auto place = static_cast<std::int64_t>(group) * plan_.prepared_chunks + chunk % plan_.prepared_chunks;
    return shared_ + place * layout_.prepared_bytes;
  }
  char* kept(std::size_t chain, std::int64_t chunk) const {
    if (!plan_.leaves_outputs) return nullptr;
    const auto place = static_cast<std::int64_t>(chain) * plan_.kept_chunks + chunk % plan_.kept_chunks;
    return shared_ + layout_.kept_begin + place * layout_.kept_bytes;
  }

  ChunkTask task_of(const ChunkChain& chain, std::int64_t token_begin, std::int64_t token_end) const {
    return {.sequence = sequences_[static_cast<std::size_t>(chain.sequence)],
            .head_begin = chain.head_begin,
            .head_end = chain.head_end,
            .v_begin = chain.v_begin,
            .v_end = chain.v_end,
            .token_begin = token_begin,
            .token_end = token_end,
            .blas = &openblas()};
  }
  ChunkTask task_of(std::size_t chain, std::int64_t chunk) const {
    const std::int64_t begin = chunk * kChunkTokens;
    return task_of(plan_.chains[chain], begin, begin + schedule_->tokens(chain, chunk));
  }

  // Columns of no chain: only what is before them in the workspace, where a thread may have a state, is used.
  void prepare(const Job& job) {
    const ChunkGroup& group = plan_.groups[job.index];
    ChunkTask task = task_of(group.chain_begin, job.chunk);
    task.head_end = plan_.chains[group.chain_end - 1].head_end;
    task.v_end = task.v_begin;
    void* workspace = workspace_memory().at_least(chunk_.workspace_bytes(params_.key_dim, 0, 0));
    chunk_.steps->prepare(params_, task, prepared(job.index, job.chunk), workspace);
  }

  ChunkStep step_of(const Job& job) const {
    const std::size_t group = schedule_->group_index(job.index);
    const std::int64_t last = schedule_->chunks(job.index) - 1;
    return {.task = task_of(job.index, job.chunk),
            .tokens_end = last * kChunkTokens + schedule_->tokens(job.index, last),
            .prepared = job.is_prepared ? prepared(group, job.chunk) : nullptr,
            .next_prepared = job.is_next_prepared ? prepared(group, job.chunk + 1) : nullptr,
            .kept = kept(job.index, job.chunk),
            .next_kept = kept(job.index, job.chunk + 1)};
  }

  bool run_step(const Job& job) {
    const ChunkChain& chain = plan_.chains[job.index];
    ChunkStep step = step_of(job);
    void* workspace = workspace_memory().at_least(workspace_bytes(chunk_, params_.key_dim, chain));
    if (job.chunk == 0) chunk_.steps->begin(params_, step, workspace);
    const bool leaves_outputs = chunk_.steps->run(params_, step, workspace);
    if (job.chunk + 1 < schedule_->chunks(job.index)) return leaves_outputs;
    const bool ends_in_tail = step.tokens_end < chain.length;
    step.kept = step.next_kept;
    if (ends_in_tail) step.task.carried_out = carried(chain);
    chunk_.steps->end(params_, step, workspace);
    if (ends_in_tail) run_tail(step.task, step.tokens_end, chain.length - step.tokens_end, carried(chain), workspace);
    return leaves_outputs;
  }

  void run_output(const Job& job) {
    ChunkStep step = step_of(job);
    step.prepared = prepared(schedule_->group_index(job.index), job.chunk);
    void* workspace = workspace_memory().at_least(workspace_bytes(chunk_, params_.key_dim, plan_.chains[job.index]));
    chunk_.steps->output(params_, step, workspace);
  }

  void run_turns() {
    ChunkQueue::Turn turn{};
    for (bool has_turn = next(nullptr, turn); has_turn;) {
      run(turn);
      const ChunkQueue::Turn previous = turn;
      has_turn = next(&previous, turn);
    }
  }

  std::int64_t head_size() const { return params_.key_dim * params_.value_dim; }

  bool next(const ChunkQueue::Turn* previous, ChunkQueue::Turn& turn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_->next(previous, turn);
  }

  // Where the state of a chain's heads is between its turns, or before its tail.
  float* carried(const ChunkChain& chain) {
    if (plan_.turn_tokens == 0) {
      const std::int64_t floats = carried_floats(plan_, head_size(), chain);
      return static_cast<float*>(carried_memory().at_least(floats * static_cast<std::int64_t>(sizeof(float))));
    }
    return carried_.data() + (chain.sequence * params_.num_value_heads + chain.head_begin) * head_size();
  }

  // What the thread is likely to get after this turn, null if nothing: whole chains go in order, to one thread after
  // the other.
  const ChunkChain* chain_after(const ChunkQueue::Turn& turn) const {
    const std::size_t after = turn.chain + team_;
    const bool is_in_order = plan_.turn_tokens == 0 && plan_.groups.empty();
    return is_in_order && after < plan_.chains.size() ? &plan_.chains[after] : nullptr;
  }

  void run(const ChunkQueue::Turn& turn) {
    const ChunkChain& chain = plan_.chains[turn.chain];
    const std::int64_t tail = chain.length % kChunkTokens;
    const bool ends_in_tail = turn.token_end == chain.length && has_tail(chunk_, chain);
    const std::int64_t chunks_end = ends_in_tail ? chain.length - tail : turn.token_end;
    ChunkTask task = task_of(chain, turn.token_begin, chunks_end);
    ChunkTask following;
    if (const ChunkChain* after = chain_after(turn)) {
      following = task_of(*after, 0, after->length);
      task.next = &following;
    }
    if (turn.token_begin > 0) task.carried_in = carried(chain);
    if (chunks_end < chain.length) task.carried_out = carried(chain);
    void* workspace = workspace_memory().at_least(workspace_bytes(chunk_, params_.key_dim, chain));
    if (turn.token_begin < chunks_end) chunk_.run(params_, task, workspace);
    if (ends_in_tail) run_tail(task, chunks_end, tail, carried(chain), workspace);
  }

  void run_tail(const ChunkTask& chain, std::int64_t token, std::int64_t count, float* carried, void* workspace) {
    for (std::int64_t head = chain.head_begin; head < chain.head_end; ++head) {
      float* state = carried + (head - chain.head_begin) * head_size();
      const Tail tail(params_, chain.sequence, head, token, count, state);
      const RecurrenceItem item{0, 0, chain.v_begin, chain.v_end};
      table_.recurrence(tail.params, item, nullptr, recurrence_scratch());
    }
    if (params_.state_dtype == DType::kFloat32) return;
    ChunkTask store = chain;  // of no tokens: rounds the state
    store.token_begin = store.token_end = token + count;
    store.carried_in = carried;
    store.carried_out = nullptr;
    chunk_.run(params_, store, workspace);
  }

  const KernelTable& table_;
  const ChunkKernel& chunk_;
  const RecurrenceParams& params_;
  const Indices& sequences_;
  const std::vector<RecurrenceWork*>& steps_;
  ChunkPlan plan_;
  std::vector<float> carried_;  // [sequences, HV, K, V]
  std::mutex mutex_;
  std::unique_ptr<ChunkQueue> queue_;
  std::size_t team_;  // threads that take turns
  // Where sequences are shared.
  std::unique_ptr<ChunkSchedule> schedule_;
  SharedLayout layout_;
  char* shared_ = nullptr;
};

}  // namespace

void run_chunked(const KernelTable& table, const ChunkKernel& chunk, const RecurrenceParams& params,
                 const Indices& live, int num_threads, const std::vector<RecurrenceWork*>& steps) {
  Indices shorts, longs;
  for (const std::int64_t sequence : live) {
    (sequence_length(params, sequence) < chunk.shortest ? shorts : longs).push_back(sequence);
  }
  run_recurrence(table, params, shorts, num_threads);
  if (longs.empty() || params.num_value_heads == 0) return;
  ChunkedCall call(table, chunk, params, longs, num_threads, steps);
  std::optional<SerialOpenBlas> serial;
  if (chunk.calls_blas) serial.emplace();
  run_team(
      call.useful_threads(num_threads), [](void* context) { static_cast<ChunkedCall*>(context)->run_share(); }, &call);
}

std::int64_t chunked_memory(const ChunkKernel& chunk, const ChunkWork& work) {
  const ChunkPlan plan = plan_chunks(work);
  constexpr auto float_size = static_cast<std::int64_t>(sizeof(float));
  std::int64_t workspace = 0, of_tail = 0;
  for (const ChunkChain& chain : plan.chains) {
    workspace = std::max(workspace, workspace_bytes(chunk, work.key_dim, chain));
    if (!has_tail(chunk, chain)) continue;
    const std::int64_t carried = carried_floats(plan, work.key_dim * work.value_dim, chain) * float_size;
    of_tail = std::max(of_tail, carried + static_cast<std::int64_t>(sizeof(RecurrenceScratch)));
  }
  const auto threads = static_cast<std::int64_t>(useful_threads(plan, work.threads));
  return threads * (workspace + of_tail) + turn_floats(plan, work) * float_size + SharedLayout(plan, work).end;
}

}  // namespace gdn::cpu
