// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule, token by token. Per (sequence, value head), with the state M [K, V]:
//   M = exp(g) M;  u = beta (v - k M);  M = M + k u^T;  o = scale (q M)
// rearranged so that the state is read for both products at once, before it is written:
//   u = beta (v - decay (k M)),  o = scale (decay (q M) + (q k) u),  M = decay M + k u^T.
//
// q, k: [K], v, o: [V] per token, fp32, bf16 or fp16, any strides. State: [K, V] or [V, K] packed, fp32, bf16 or fp16.
// g, beta: one value per token and head. All arithmetic is fp32. The state goes to a slot of the pool after the last
// token, or after every token. A half-precision one is rounded where it is stored: between tokens it stays in the fp32
// scratch, as does an fp32 one; slots that the call does not read again are streamed past the caches when it stores
// more than 1 MiB. Where the gated norm follows, o stays fp32 in the scratch until the norm has read a token's columns.
// Or records of earlier tokens are replayed into the slot first, and the tokens leave records of their own instead of a
// state.
//
// One call computes columns [v_begin, v_end) of one (sequence, head) for all its tokens. Every element sees the same
// operations in the same order whatever the columns and the number of tokens of the call: decoding token by token, with
// an fp32 state, equals one call bit for bit.
//
// A single token reads and writes the state once: bound by memory, and from the caches by arithmetic, four vector
// operations a vector of state. Several tokens keep a tile of columns in the caches.
// One core of Zen 4, K = V = 128, fp32 state, bf16 operands, us a head and token (the arithmetic alone: 1.12),
// the best of many runs on a machine that others used too:
//            [K, V] from L2 / L3 / memory     [V, K]                  64 tokens, [K, V] / [V, K]
//   x86_v4   1.4 / 1.5 / 3.0 (22 GB/s)        1.7 / 1.8 / 3.4         1.2 / 1.5
//   x86_v3   1.6 / 1.8 / 4.1 (16 GB/s)        1.6 / 1.8 / 4.1         1.3 / 1.4
#include "gated_norm.h"
#include "kernels.h"
#include "recurrence_k_first.h"
#include "recurrence_v_first.h"
#include "replay.h"
#include "token_block.h"

namespace gdn::cpu::GDN_ISA {
namespace {

// Of several tokens: a tile that stays in the first-level cache, or with 32 wide registers one strip of whole rows,
// which leaves the second level at the speed of the arithmetic.
constexpr std::int64_t kTileColumns = kLanes == 16 ? 128 : 32;

// The norm touches no state: what it asks for of the next one, a token.
constexpr std::int64_t kBytesANorm = 4096;

struct HeadTask {
  const RecurrenceParams& params;
  std::int64_t sequence, head;
  std::int64_t v_begin, v_end;
  TokenRow row;
  const void* source;  // state of the head, null: zero
  void* replayed;      // where it is stored after a replay
  NextState* next;
  RecurrenceScratch& scratch;
};

std::int64_t head_elements(const RecurrenceParams& p) { return p.key_dim * p.value_dim; }

TokenRow tokens_of(const RecurrenceParams& p, std::int64_t sequence) {
  if (p.token_offsets == nullptr) return {sequence, 0, p.tokens_per_sequence};
  return {0, p.token_offsets[sequence], p.token_offsets[sequence + 1] - p.token_offsets[sequence]};
}

const void* source_state(const RecurrenceParams& p, std::int64_t sequence, std::int64_t head) {
  if (p.source == nullptr || p.source_slots[sequence] < 0) return nullptr;
  const std::int64_t index = p.source_slots[sequence] * p.source_slot_stride + head * head_elements(p);
  return static_cast<const char*>(p.source) + index * element_size(p.state_dtype);
}

// Of an item that has all columns: its state lies in one piece.
NextState state_of(const RecurrenceParams& p, const RecurrenceItem& item) {
  const auto* state = static_cast<const char*>(source_state(p, item.sequence, item.head));
  if (state == nullptr || item.v_end - item.v_begin != p.value_dim) return {};
  return {state, state + head_elements(p) * element_size(p.state_dtype)};
}

void* slot_state(const RecurrenceParams& p, std::int64_t slot, std::int64_t head) {
  if (slot < 0) return nullptr;
  const std::int64_t index = slot * p.destination_slot_stride + head * head_elements(p);
  return static_cast<char*>(p.destination) + index * element_size(p.state_dtype);
}

void* replayed_state(const RecurrenceParams& p, std::int64_t sequence, std::int64_t head) {
  return p.replay != nullptr ? slot_state(p, p.destination_slots[sequence], head) : nullptr;
}

// Where token t of `count` leaves the state of the head; null: nowhere.
void* destination_state(const RecurrenceParams& p, std::int64_t sequence, std::int64_t head, std::int64_t t,
                        std::int64_t count) {
  if (p.destination == nullptr || p.replay != nullptr) return nullptr;
  if (p.destination_columns == 0 && t + 1 < count) return nullptr;
  const std::int64_t row = p.destination_columns == 0 ? sequence : sequence * p.destination_columns + t;
  return slot_state(p, p.destination_slots[row], head);
}

// Columns [v, ...) of a packed state, and of the scratch, where rows are padded to whole vectors.
template <class T>
GDN_INLINE Tile<T> state_tile(KFirst, T* state, const RecurrenceParams& p, std::int64_t v) {
  return {state + v, p.value_dim};
}
template <class T>
GDN_INLINE Tile<T> state_tile(VFirst, T* state, const RecurrenceParams& p, std::int64_t v) {
  return {state + v * p.key_dim, p.key_dim};
}
GDN_INLINE Tile<float> scratch_tile(KFirst, const HeadTask& task, std::int64_t v, std::int64_t v_end) {
  return {task.scratch.state + (v - task.v_begin) * task.params.key_dim, padded_row(v_end - v)};
}
GDN_INLINE Tile<float> scratch_tile(VFirst, const HeadTask& task, std::int64_t v, std::int64_t) {
  const std::int64_t stride = padded_row(task.params.key_dim);
  return {task.scratch.state + (v - task.v_begin) * stride, stride};
}

template <class Source, class T>
GDN_INLINE void copy_state(KFirst, const HeadTask& task, Source source, Tile<T> destination, std::int64_t width) {
  copy_tile(source, destination, task.params.key_dim, width);
}
template <class Source, class T>
GDN_INLINE void copy_state(VFirst, const HeadTask& task, Source source, Tile<T> destination, std::int64_t width) {
  copy_tile(source, destination, width, task.params.key_dim);
}

// Where o waits for the norm, fp32: token `position` of a row at row position - first.
struct Unnormed {
  float* data;
  std::int64_t first;
  std::int64_t token_stride;

  std::int64_t index(std::int64_t position) const { return (position - first) * token_stride; }
};

// Of one head, in the tensor of all tokens.
Unnormed all_unnormed(const RecurrenceParams& p, const TokenRow& row, std::int64_t head) {
  const std::int64_t stride = p.num_value_heads * p.value_dim;
  return {p.unnormed_outputs + row.batch * p.tokens_per_sequence * stride + head * p.value_dim, 0, stride};
}

// Of a block of tokens from number t of the row on: in the scratch, unless other items have other columns.
Unnormed unnormed(const HeadTask& task, std::int64_t t) {
  if (task.params.unnormed_outputs != nullptr) return all_unnormed(task.params, task.row, task.head);
  return {task.scratch.outputs, task.row.first + t, kMaxHeadDim};
}

template <class Layout, class State>
struct TilePass {
  const HeadTask& task;
  std::int64_t v_begin, v_end;

  Tile<float> scratch() const { return scratch_tile(Layout{}, task, v_begin, v_end); }

  // The slot that token t leaves the state in; null: none.
  State* slot_after(std::int64_t t) const {
    return static_cast<State*>(destination_state(task.params, task.sequence, task.head, t, task.row.count));
  }
  template <class T>
  Tile<T> tile_of(T* state) const {
    return state_tile(Layout{}, state, task.params, v_begin);
  }

  // Calls body with what the state is read from before token t: nothing, the source or the scratch.
  template <class Body>
  void with_source(std::int64_t t, bool is_reset, Body body) const {
    if (is_reset || (t == 0 && task.source == nullptr)) return body(Absent{});
    if (t == 0) return body(tile_of(static_cast<const State*>(task.source)));
    body(Tile<const float>{scratch().data, scratch().stride});
  }

  // Calls body with what token t writes the state to: the scratch, unless it is the last, and a slot.
  template <class Body>
  void with_destination(std::int64_t t, Body body) const {
    const bool is_last = t + 1 == task.row.count;
    State* slot = slot_after(t);
    if (slot == nullptr) return is_last ? body(Absent{}) : body(scratch());
    with_slot(slot, [&](auto tile) {
      if (is_last) return body(tile);
      body(KeptTile<decltype(tile)>{scratch(), tile});
    });
  }

  // Calls body with the tile of a slot, streamed where that is wanted and the rows lie at multiples of a vector.
  template <class Body>
  void with_slot(State* slot, Body body) const {
    const Tile<State> tile = tile_of(slot);
    const std::int64_t row_bytes = tile.stride * static_cast<std::int64_t>(sizeof(State));
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tile.data));
    if (task.params.streams_states && slot != task.source && (row_bytes | address) % kCacheLine == 0) {
      return body(StreamedTile<State>{tile.data, tile.stride});
    }
    body(tile);
  }

  // In fp32, with the sums of token 0 of the block. Of half precision it reads the state as it was rounded.
  void replay(const RecordBlock& records, const TokenBlock& block, Sums& sums) const {
    const Tile<State> to = tile_of(static_cast<State*>(task.replayed));
    with_source(0, records.is_reset, [&](auto from) {
      if constexpr (kIsKFirst<Layout> && kIsFloat<State>) {
        if (v_end - v_begin == kStripVectors * kLanes && !is_reset(block.decay[0])) {
          return replay_and_accumulate(records, from, to, v_begin - task.v_begin, token(block, 0, 0), sums);
        }
      }
      replay_records(Layout{}, records, from, to, v_begin - task.v_begin, v_end - v_begin, task.params.key_dim,
                     *task.next);
    });
  }

  // Where u of token t is recorded, from column v_begin on; null: nowhere.
  float* record_of(std::int64_t t) const {
    const RecurrenceParams& p = task.params;
    if (p.replay == nullptr) return nullptr;
    const MutableOperand& u = p.replay->u;
    return static_cast<float*>(u.data) + element_index(u, p.source_slots[task.sequence], t, task.head) + v_begin;
  }

  void save_chunk_state(std::int64_t t) const {
    const RecurrenceParams& p = task.params;
    const std::int64_t chunk = p.chunk_offsets[task.sequence] + t / kChunkTokens;
    float* state = p.chunk_states + (chunk * p.num_value_heads + task.head) * head_elements(p);
    with_source(t, false, [&](auto source) {
      copy_state(Layout{}, task, source, state_tile(Layout{}, state, p, v_begin), v_end - v_begin);
    });
  }

  Token token(const TokenBlock& block, std::int64_t i, std::int64_t t) const {
    const RecurrenceParams& p = task.params;
    const std::int64_t position = task.row.first + t;
    const Unnormed o = p.norm != nullptr ? unnormed(task, t - i) : Unnormed{};
    return {.q = block.q + i * block.row_stride,
            .k = block.k + i * block.row_stride,
            .q_factor = block.q_factor[i],
            .k_factor = block.k_factor[i],
            .qk = block.qk[i],
            .decay = block.decay[i],
            .beta = block.beta[i],
            .scale = p.scale,
            .is_resident = t > 0,
            .next = task.next,
            .key_dim = p.key_dim,
            .v_begin = v_begin,
            .v_end = v_end,
            .v_dtype = p.v.dtype,
            .out_dtype = p.norm != nullptr ? DType::kFloat32 : p.out.dtype,
            .v = p.v.data,
            .v_index = element_index(p.v, task.row.batch, position, task.head) + v_begin,
            .out = p.norm != nullptr ? o.data : p.out.data,
            .out_index =
                (p.norm != nullptr ? o.index(position) : element_index(p.out, task.row.batch, position, task.head)) +
                v_begin,
            .record = record_of(t)};
  }

  // Tokens [first, first + block.count) of the row.
  void run(const TokenBlock& block, std::int64_t first, const RecordBlock& records) const {
    Sums sums;
    if (first == 0 && records.count > 0) replay(records, block, sums);
    for (std::int64_t i = 0; i < block.count; ++i) {
      const std::int64_t t = first + i;
      if (task.params.chunk_states != nullptr && t % kChunkTokens == 0) save_chunk_state(t);
      const Token current = token(block, i, t);
      const bool is_followed = i + 1 < block.count && !is_reset(block.decay[i + 1]);
      const Token after = is_followed ? token(block, i + 1, t + 1) : Token{};
      with_source(t, is_reset(current.decay), [&](auto source) {
        with_destination(t, [&](auto destination) {
          step(Layout{}, current, is_followed ? &after : nullptr, source, destination, sums);
        });
      });
    }
  }
};

// A sequence without tokens: the final state is the initial one. In a pool that is updated in place, a slot that would
// have started from zero stays as it is.
template <class Layout, class State>
void copy_head(const HeadTask& task) {
  const RecurrenceParams& p = task.params;
  if (p.destination_columns != 0) return;
  void* destination = destination_state(p, task.sequence, task.head, 0, 0);
  if (destination == nullptr || destination == task.source) return;
  if (task.source == nullptr && p.source == p.destination) return;
  const TilePass<Layout, State> pass{task, task.v_begin, task.v_end};
  const Tile<State> to = pass.tile_of(static_cast<State*>(destination));
  pass.with_source(0, false, [&](auto from) { copy_state(Layout{}, task, from, to, task.v_end - task.v_begin); });
}

// From o of tokens [first, first + count) of a row to the outputs of the call.
void norm_outputs(const RecurrenceParams& p, const TokenRow& row, std::int64_t head, const Unnormed& o,
                  std::int64_t first, std::int64_t count) {
  const GatedNorm& norm = *p.norm;
  with_activation(norm.activation, [&](auto activation) {
    for (std::int64_t position = row.first + first; position < row.first + first + count; ++position) {
      normalize_row<decltype(activation)::kValue>({.dim = p.value_dim,
                                                   .x = o.data,
                                                   .x_dtype = DType::kFloat32,
                                                   .x_index = o.index(position),
                                                   .gate = norm.gate.data,
                                                   .gate_dtype = norm.gate.dtype,
                                                   .gate_index = element_index(norm.gate, row.batch, position, head),
                                                   .out = p.out.data,
                                                   .out_dtype = p.out.dtype,
                                                   .out_index = element_index(p.out, row.batch, position, head),
                                                   .weight = norm.weight,
                                                   .eps = norm.eps});
    }
  });
}

void keep_decays(const HeadTask& task, const TokenBlock& block, std::int64_t first) {
  const RecurrenceParams& p = task.params;
  for (std::int64_t i = 0; i < block.count; ++i) {
    p.replay->new_decay[(task.row.first + first + i) * p.num_value_heads + task.head] = block.decay[i];
  }
}

template <class Layout, class State>
void run_head(const HeadTask& task) {
  if (task.row.count == 0) return copy_head<Layout, State>(task);
  const std::int64_t capacity = block_tokens(task.params.key_dim);
  RecordBlock records;
  if (task.replayed != nullptr) {
    records = load_records(task.params, task.sequence, task.head, task.v_begin, task.v_end, task.scratch);
  }
  const std::int64_t tile = task.row.count == 1 ? kMaxHeadDim : kTileColumns;
  for (std::int64_t t = 0; t < task.row.count; t += capacity) {
    const TokenBlock block = load_token_block(task.params, task.row, task.sequence, task.head, t,
                                              min_of(capacity, task.row.count - t), task.scratch);
    if (task.params.replay != nullptr && task.v_begin == 0) keep_decays(task, block, t);
    prefetch_tokens(task.params, task.row, task.head, t + block.count, min_of(t + 2 * capacity, task.row.count));
    prefetch_outputs(task.params, task.row, task.head, t, t + block.count);
    for (std::int64_t v = task.v_begin; v < task.v_end; v += tile) {
      const TilePass<Layout, State> pass{task, v, min_of(v + tile, task.v_end)};
      pass.run(block, t, records);
    }
    if (task.params.norm != nullptr && task.params.unnormed_outputs == nullptr) {
      ask_for(*task.next, kBytesANorm * block.count);
      norm_outputs(task.params, task.row, task.head, unnormed(task, t), t, block.count);
    }
  }
}

template <class Layout>
void run_dtype(const HeadTask& task) {
  switch (task.params.state_dtype) {
    case DType::kFloat32:
      return run_head<Layout, float>(task);
    case DType::kBFloat16:
      return run_head<Layout, BFloat16>(task);
    case DType::kFloat16:
      return run_head<Layout, Float16>(task);
  }
}

// What an item reads besides its state.
void prefetch_operands(const RecurrenceParams& p, const RecurrenceItem& item) {
  const TokenRow row = tokens_of(p, item.sequence);
  prefetch_tokens(p, row, item.head, 0, min_of(row.count, block_tokens(p.key_dim)));
  if (p.replay != nullptr) prefetch_records(p, item.sequence, item.head);
}

}  // namespace

void recurrence(const RecurrenceParams& params, const RecurrenceItem& item, const RecurrenceItem* next,
                RecurrenceScratch& scratch) {
  if (!scratch.is_followed) scratch.key_sequence = scratch.gate_sequence = -1;
  scratch.is_followed = next != nullptr;
  NextState next_state;
  if (next != nullptr) {
    next_state = state_of(params, *next);
    prefetch_operands(params, *next);
  }
  const HeadTask task{.params = params,
                      .sequence = item.sequence,
                      .head = item.head,
                      .v_begin = item.v_begin,
                      .v_end = item.v_end,
                      .row = tokens_of(params, item.sequence),
                      .source = source_state(params, item.sequence, item.head),
                      .replayed = replayed_state(params, item.sequence, item.head),
                      .next = &next_state,
                      .scratch = scratch};
  if (params.state_v_first) {
    run_dtype<VFirst>(task);
  } else {
    run_dtype<KFirst>(task);
  }
  if (params.streams_states) stream_fence();
}

void recurrence_norm(const RecurrenceParams& params, std::int64_t sequence, std::int64_t head) {
  const TokenRow row = tokens_of(params, sequence);
  norm_outputs(params, row, head, all_unnormed(params, row, head), 0, row.count);
}

}  // namespace gdn::cpu::GDN_ISA
