// SPDX-License-Identifier: Apache-2.0
//
// The working memory of one task: operands of the products as the engine wants them, and the states of the task's
// heads between chunks. Columns of v lie in panels of kPanelColumns, each with all its rows, the last one narrower.
#pragma once

#include "../state_tile.h"
#include "fp32_engine.h"

namespace gdn::cpu::GDN_ISA {
namespace {

constexpr std::int64_t kTokens = kChunkTokens;

// Where the span of a token begins and ends.
template <class Engine>
constexpr std::int64_t span_begin(std::int64_t token) {
  return token / Engine::kSpan * Engine::kSpan;
}
template <class Engine>
constexpr std::int64_t span_end(std::int64_t token, std::int64_t count) {
  return min_of(span_begin<Engine>(token) + Engine::kSpan, count);
}

// Hands out parts of a block of memory; with a null block it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(std::int64_t count) {
    char* part = memory_ != nullptr ? memory_ + used_ : nullptr;
    used_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), static_cast<std::int64_t>(kScratchAlignment));
    return reinterpret_cast<T*>(part);
  }
  std::int64_t used() const { return used_; }

 private:
  char* memory_;
  std::int64_t used_ = 0;
};

// The state of a head, [rows, columns] in panels: fp32, and rounded as a right operand. The same where the engine
// multiplies in fp32.
template <class Engine>
struct HeadState {
  float* values;
  typename Engine::Element* packed;
};

// What is the same for all value heads of a key head.
template <class Engine>
struct KeyOperands {
  using Element = typename Engine::Element;
  Element* q;          // [kTokens, rows]
  Element* k;          // [kTokens, rows]
  Element* k_columns;  // right operand [rows, kTokens] of k k^T and q k^T
  Element* k_steps;    // the left operand k^T of the state's update, in the engine's order
  float* kk;           // [kTokens, kTokens], below the diagonal, blocks of kRowBlock
  float* qk;           // [kTokens, kTokens], the same and the diagonal
  float* q_factor;     // [kTokens]: inverse norms, or 1
  float* k_factor;
  const Blas* blas;  // what an engine calls that has its products from a library
};

// What is known of a chunk before its state.
struct ChunkSummary {
  bool is_whole;                     // no reset cuts it
  float decay[kTokens / kRowBlock];  // of each span from its first token to its last, where the chunk is whole
};

// What one value head needs of a chunk.
template <class Engine>
struct ChunkOperands {
  using Element = typename Engine::Element;
  ChunkSummary* summary;
  float* mixing;              // [kTokens, kTokens]: -beta_i exp(G_i - G_j) (k_i k_j), j < i
  Element* attention;         // [kTokens, kTokens]: exp(G_i - G_j) (q_i k_j), j <= i
  float* u;                   // panels [kTokens, columns]
  Element* u_packed;          // the same, a right operand
  Element* u_decayed;         // exp(G_last - G_j) u_j, a right operand
  Element* u_block;           // a copy of kRowBlock rows of a panel
  float* sums;                // of products, where the engine leaves them in memory: [2, rows, panel]
  Element* k_steps;           // those of a part of the chunk
  float *log_decay, *beta;    // [kTokens]: g, beta
  float *sum_high, *sum_low;  // [kTokens]: G, the sum of g, in two parts
  float* state_factor;        // [kTokens]: exp(G)
  float* end_factor;          // [kTokens]: exp(G_last - G)
};

// What a step keeps of a chunk for whoever computes its outputs.
struct KeptSummary {
  bool has_state;                                            // before the chunk
  std::uint8_t not_finite[kMaxHeadDim / kPanelColumns + 1];  // of each panel: a bit per block of rows of u
};
template <class Engine>
struct Kept {
  typename Engine::Element* state;  // before the chunk, packed
  typename Engine::Element* u;      // packed
  KeptSummary* summary;
};

template <class Engine>
struct Workspace {
  HeadState<Engine>* states;
  bool* has_state;  // per head: the state is not known to be zero
  KeyOperands<Engine> key;
  ChunkOperands<Engine> chunk;
};

// Key rows of an operand: whole vectors of steps.
template <class Engine>
constexpr std::int64_t padded_keys(std::int64_t key_dim) {
  return (key_dim + 16 * Engine::kStep - 1) / (16 * Engine::kStep) * (16 * Engine::kStep);
}

// Rows whose sums are in memory at a time.
template <class Engine>
constexpr std::int64_t kRowsOfSums = Engine::kSums == Sums::kOfChunks ? kTokens : kRowBlock;

constexpr std::int64_t padded_columns(std::int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

// What products with the state read of a key head: first what only outputs need.
template <class Engine>
void take_key_operands(Arena& arena, std::int64_t rows, KeyOperands<Engine>& key) {
  using Element = typename Engine::Element;
  key.q = arena.take<Element>(kTokens * rows);
  key.k = arena.take<Element>(kTokens * rows);
  key.k_steps = Engine::kStep > 1 ? arena.take<Element>(kTokens * rows) : key.k;
  key.q_factor = arena.take<float>(kTokens);
  key.k_factor = arena.take<float>(kTokens);
}

// The same of a value head: last what only outputs need.
template <class Engine>
void take_head_operands(Arena& arena, ChunkOperands<Engine>& chunk) {
  chunk.summary = arena.take<ChunkSummary>(1);
  chunk.mixing = arena.take<float>(kTokens * kTokens);
  chunk.beta = arena.take<float>(kTokens);
  chunk.state_factor = arena.take<float>(kTokens);
  chunk.end_factor = arena.take<float>(kTokens);
  chunk.attention = arena.take<typename Engine::Element>(kTokens * kTokens);
}

// Of a chunk that is prepared once for many tasks: the operands of a key head and of its first value heads up to number
// `head`, at which `chunk` points.
template <class Engine>
std::int64_t arrange_prepared(void* memory, std::int64_t key_dim, std::int64_t head, KeyOperands<Engine>& key,
                              ChunkOperands<Engine>& chunk) {
  Arena arena(memory);
  take_key_operands(arena, padded_keys<Engine>(key_dim), key);
  for (std::int64_t i = 0; i <= head; ++i) take_head_operands(arena, chunk);
  return arena.used();
}

template <class Engine>
std::int64_t arrange_kept(void* memory, std::int64_t key_dim, std::int64_t columns, Kept<Engine>& kept) {
  using Element = typename Engine::Element;
  const std::int64_t width = padded_columns(columns);
  Arena arena(memory);
  kept.state = arena.take<Element>(padded_keys<Engine>(key_dim) * width);
  kept.u = arena.take<Element>(kTokens * width);
  kept.summary = arena.take<KeptSummary>(1);
  return arena.used();
}

// What depends on the columns comes last: a thread between two steps of a task may use the rest for others.
template <class Engine>
std::int64_t arrange(Workspace<Engine>& w, void* memory, std::int64_t key_dim, std::int64_t columns,
                     std::int64_t heads) {
  using Element = typename Engine::Element;
  constexpr bool kIsRounded = !kIsFloat<Element>;
  const std::int64_t rows = padded_keys<Engine>(key_dim);
  const std::int64_t width = padded_columns(columns);
  Arena arena(memory);
  KeyOperands<Engine>& key = w.key;
  take_key_operands(arena, rows, key);
  key.k_columns = arena.take<Element>(round_up(kTokens, kPanelColumns) * rows);
  key.kk = arena.take<float>(kTokens * kTokens);
  key.qk = arena.take<float>(kTokens * kTokens);
  ChunkOperands<Engine>& chunk = w.chunk;
  take_head_operands(arena, chunk);
  chunk.u_block = arena.take<Element>(kRowBlock * kPanelColumns);
  chunk.sums =
      Engine::kSums != Sums::kInRegisters ? arena.take<float>(2 * kRowsOfSums<Engine> * kPanelColumns) : nullptr;
  chunk.k_steps = key.k_columns;  // which nothing reads after k k^T and q k^T
  chunk.log_decay = arena.take<float>(kTokens);
  chunk.sum_high = arena.take<float>(kTokens);
  chunk.sum_low = arena.take<float>(kTokens);
  chunk.u = arena.take<float>(kTokens * width);
  chunk.u_decayed = arena.take<Element>(kTokens * width);
  if constexpr (kIsRounded) {
    chunk.u_packed = arena.take<Element>(kTokens * width);
  } else {
    chunk.u_packed = chunk.u;
  }
  w.states = arena.take<HeadState<Engine>>(heads);
  w.has_state = arena.take<bool>(heads);
  for (std::int64_t head = 0; head < heads; ++head) {
    HeadState<Engine> state{};
    state.values = arena.take<float>(rows * width);
    if constexpr (kIsRounded) {
      state.packed = arena.take<Element>(rows * width);
    } else {
      state.packed = state.values;
    }
    if (memory != nullptr) w.states[head] = state;
  }
  return arena.used();
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
