// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule in chunks of 64 tokens. Per (sequence, value head) and chunk, with the state M [K, V] from
// before it, G_i the sum of g over the chunk's tokens up to i, and the rows k_i, q_i, v_i:
//   u_i = beta_i (v_i - exp(G_i) k_i M - sum_{j < i} exp(G_i - G_j) (k_i k_j) u_j)
//   o_i = scale (exp(G_i) q_i M + sum_{j <= i} exp(G_i - G_j) (q_i k_j) u_j)
//   M   = exp(G_last) M + sum_j k_j^T (exp(G_last - G_j) u_j)
//
// q, k: [tokens, K], v, o: [tokens, V], any strides; g, beta: one value per token and head. State: [K, V] or [V, K],
// fp32, bf16 or fp16 in memory, fp32 in between. The engine multiplies k k^T, q k^T, k M, q M, the masked q k^T with u,
// and k^T with u; everything else is fp32: G in two parts, the decays, the solve for u, the state. The inverse norms of
// q and k are factors of products, so that an engine of bf16 multiplies q and k as they came.
//
// One call runs consecutive chunks of one sequence, for some value heads and some columns of v. The value heads of a
// key head share k k^T and q k^T. Several heads take each chunk in turn, so that pages of q, k and v serve all of them.
// No sum crosses columns: values do not depend on how these are divided. A chunk is cut where g is -inf, and what is
// before the cut is not read after it.
//
// An engine may have its chunks run in spans of fewer tokens, each from the state that the one before it leaves; the
// equations then hold for a span. Products of tokens with tokens grow with the span, updates of the state with their
// number.
//
// The same in parts, for threads that share a sequence: prepare() computes all that does not depend on the state for
// one chunk of a key head and its value heads; step() runs a chunk of some columns of a head from it, whose state stays
// with the thread; output() computes o of a step from the state before it and u, on any thread. Each does what a call
// of consecutive chunks does, in the same order within each element.
//
// Bound by arithmetic: per head and chunk, K = V = 128, 4.0 million multiply-adds, of them 0.25 in the solve; 3.6
// million in spans of 32 tokens. One core of Zen 4, two value heads a key head, 1024 tokens, us a head and chunk (the
// arithmetic alone: 37 with bf16, 62 in fp32):
//   avx512_bf16 44, portable 70 on x86_v4 and 74 on x86_v3. In fp32 that is 88 and 84 % of the peak, everything
//   included. With the products of OpenBLAS 0.3.34, in turn with an earlier 83 and 89: 90 on x86_v4; 118 on x86_v3 with
//   its kernels for Haswell; and 398 against 335 on baseline with those for Nehalem. It wins nowhere, and so runs only
//   where it is asked for.
#pragma once

#include "state.h"

namespace gdn::cpu::GDN_ISA {
namespace {

GDN_INLINE TokenRow chunk_tokens(const RecurrenceParams& p, std::int64_t sequence) {
  if (p.token_offsets == nullptr) return {sequence, 0, p.tokens_per_sequence};
  return {0, p.token_offsets[sequence], p.token_offsets[sequence + 1] - p.token_offsets[sequence]};
}

template <class Engine>
struct ChunkCall {
  const RecurrenceParams& params;
  const ChunkTask& task;
  Workspace<Engine> work;
  TokenRow row;
  std::int64_t keys, columns;
  std::int64_t tokens_end = 0;  // of those that the thread runs next
  // Of a step: whether q and k come from prepare(), and where the states before and after it are.
  bool is_prepared = false;
  void* next_prepared = nullptr;
  Kept<Engine> kept{}, next_kept{};

  std::int64_t head_size() const { return params.key_dim * params.value_dim; }

  // The first value head of this task for its key head.
  bool is_first_of_key_head(std::int64_t head) const {
    return head == task.head_begin || key_head_of(params, head) != key_head_of(params, head - 1);
  }

  // --- states ---

  // Calls body with the head's state in memory, where there is one.
  template <class Body>
  bool with_source(std::int64_t head, Body body) const {
    if (task.carried_in != nullptr) {
      body(task.carried_in + (head - task.head_begin) * head_size());
      return true;
    }
    const std::int64_t slot = params.source != nullptr ? params.source_slots[task.sequence] : -1;
    if (slot < 0) return false;
    const std::int64_t index = slot * params.source_slot_stride + head * head_size();
    with_dtype(params.state_dtype, params.source, [&](auto data) { body(data + index); });
    return true;
  }

  // The same of where it goes.
  template <class Body>
  void with_destination(std::int64_t head, Body body) const {
    if (task.carried_out != nullptr) return body(task.carried_out + (head - task.head_begin) * head_size());
    const std::int64_t slot = params.destination != nullptr ? params.destination_slots[task.sequence] : -1;
    if (slot < 0) return;
    const std::int64_t index = slot * params.destination_slot_stride + head * head_size();
    with_dtype(params.state_dtype, params.destination, [&](auto data) { body(data + index); });
  }

  void load_head(std::int64_t head) const {
    work.has_state[head - task.head_begin] = with_source(head, [&](const auto* state) {
      load_state(params, stored_state(params, state, task.v_begin), columns, work.states[head - task.head_begin]);
    });
  }

  template <class T>
  void store_head(std::int64_t head, T* state) const {
    const HeadState<Engine>& from = work.states[head - task.head_begin];
    if (!work.has_state[head - task.head_begin]) clear_rows(from.values, keys * padded_columns(columns));
    store_state(params, from, stored_state(params, state, task.v_begin), columns);
  }

  void store_head(std::int64_t head) const {
    with_destination(head, [&](auto* state) { store_head(head, state); });
  }

  // A head's state in memory where the task has all of it, and so in one piece.
  template <class T>
  NextState whole_state(T* state) const {
    if (columns < params.value_dim) return {};
    const auto* from = reinterpret_cast<const char*>(state);
    return {from, from + head_size() * static_cast<std::int64_t>(sizeof(T))};
  }

  // The call of the next task, for where its operands are.
  ChunkCall next_call() const {
    return {.params = params,
            .task = *task.next,
            .work = {},
            .row = chunk_tokens(params, task.next->sequence),
            .keys = keys,
            .columns = task.next->v_end - task.next->v_begin,
            .tokens_end = task.next->token_end};
  }

  // What is moved next: in the first chunk the state of the head after this one, in the last one this head's own, and
  // with the last head that of the next task.
  StatesAhead states_ahead(std::int64_t head, std::int64_t first, std::int64_t count) const {
    StatesAhead ahead{};
    const auto load_next = [&](const ChunkCall& call, std::int64_t next) {
      call.with_source(next, [&](const auto* state) { ahead.loaded = call.whole_state(state); });
    };
    if (head + 1 < task.head_end) {
      if (first == task.token_begin) load_next(*this, head + 1);
    } else if (first + count == task.token_end && task.next != nullptr) {
      load_next(next_call(), task.next->head_begin);
    }
    if (first + count == task.token_end) {
      with_destination(head, [&](auto* state) { ahead.stored = whole_state(state); });
    }
    ahead.row_bytes = bytes_of_row(head_size() * static_cast<std::int64_t>(sizeof(float)), count);
    return ahead;
  }

  // Of so many bytes, what each row of a chunk and panel asks for.
  std::int64_t bytes_of_row(std::int64_t bytes, std::int64_t count) const {
    const std::int64_t rows = round_up(count, kRowBlock) * ((columns + kPanelColumns - 1) / kPanelColumns);
    return round_up((bytes + rows - 1) / rows, kCacheLine);
  }

  void save_chunk_state(std::int64_t head, std::int64_t first) const {
    if (params.chunk_states == nullptr) return;
    const std::int64_t chunk = params.chunk_offsets[task.sequence] + first / kTokens;
    store_head(head, params.chunk_states + (chunk * params.num_value_heads + head) * head_size());
  }

  // --- one chunk of one head ---

  static bool is_whole_span(const Segment& segment, std::int64_t count) {
    return segment.begin == span_begin<Engine>(segment.begin) && segment.end == span_end<Engine>(segment.begin, count);
  }

  // k^T of the span's tokens, those outside of the segment zero: they would be multiplied by zero, which they may not
  // survive.
  const typename Engine::Element* k_steps(const Segment& segment, std::int64_t count) const {
    const std::int64_t first = Engine::step_index(span_begin<Engine>(segment.begin), 0, keys);
    if (is_whole_span(segment, count)) return work.key.k_steps + first;
    auto* steps = work.chunk.k_steps;
    std::memcpy(steps, work.key.k_steps, sizeof(*steps) * static_cast<std::size_t>(kTokens * keys));
    for (std::int64_t token = 0; token < round_up(count, kRowBlock); ++token) {
      if (token >= segment.begin && token < segment.end) continue;
      for (std::int64_t key = 0; key < keys; ++key) steps[Engine::step_index(token, key, keys)] = {};
    }
    return steps + first;
  }

  // Steps of the state's update, from the span's first; u of tokens after the segment's last block counts as zero.
  template <int kVectors>
  std::int64_t update_steps(const Segment& segment, typename Engine::Element* u) const {
    if constexpr (Engine::kSums == Sums::kOfChunks) return round_up(segment.end, kRowBlock);
    if constexpr (Engine::kSums == Sums::kOfBlocks) {
      const std::int64_t end = round_up(segment.end, kRowBlock), tokens = round_up(segment.end, 2 * kRowBlock);
      clear_rows(u + end * kVectors * kLanes, (tokens - end) * kVectors * kLanes);
      return tokens / Engine::kStep;
    }
    return (round_up(segment.end, 4) - span_begin<Engine>(segment.begin)) / Engine::kStep;
  }

  // u of the span's tokens before the segment counts as zero.
  void clear_before(const Segment& segment) const {
    const std::int64_t span = span_begin<Engine>(segment.begin);
    if (segment.begin == span) return;
    const std::int64_t tokens = round_up(segment.begin, kRowBlock) - span;
    for_each_panel(columns, [&](std::int64_t first, auto n) {
      constexpr std::int64_t width = decltype(n)::value * kLanes;
      const std::int64_t index = kTokens * first + span * width, count = tokens * width;
      clear_rows(work.chunk.u + index, count);
      clear_rows(work.chunk.u_packed + index, count);
      clear_rows(work.chunk.u_decayed + index, count);
    });
  }

  template <class AnyOperand>
  NextRows::Operand next_operand(const AnyOperand& x, std::int64_t token, std::int64_t head, std::int64_t column,
                                 std::int64_t count) const {
    const std::int64_t size = element_size(x.dtype);
    const std::int64_t index = element_index(x, row.batch, row.first + token, head) + column;
    return {static_cast<const char*>(x.data) + index * size, x.token_stride * size, count * size};
  }

  // Rows of one head from a token of the sequence on: some columns of v and o, and q and k where it is the first of its
  // key head.
  NextRows rows_of(std::int64_t head, std::int64_t token, std::int64_t column, std::int64_t width) const {
    NextRows rows{};
    rows.count = min_of(kTokens, tokens_end - token);
    if (rows.count <= 0) return rows;
    rows.operands[0] = next_operand(params.v, token, head, task.v_begin + column, width);
    if (kept.state == nullptr) {
      rows.operands[1] = next_operand(params.out, token, head, task.v_begin + column, width);
    }
    if (column > 0 || is_prepared || !is_first_of_key_head(head)) return rows;
    const std::int64_t key_head = key_head_of(params, head);
    rows.operands[2] = next_operand(params.q, token, key_head, 0, params.key_dim);
    rows.operands[3] = next_operand(params.k, token, key_head, 0, params.key_dim);
    return rows;
  }

  // What is run after this chunk of this head: the next head, the next chunk, or the next task. q and k are asked for
  // with the first panel.
  NextRows next_rows(std::int64_t head, std::int64_t first, std::int64_t column, std::int64_t width) const {
    if (head + 1 < task.head_end) return rows_of(head + 1, first, column, width);
    if (first + kTokens < task.token_end || task.next == nullptr) {
      return rows_of(task.head_begin, first + kTokens, column, width);
    }
    return next_call().rows_of(task.next->head_begin, task.next->token_begin, column, width);
  }

  // What all panels of a head's segment have in common.
  struct SegmentTask {
    std::int64_t head, first, count;
    const Segment& segment;
    StatesAhead& states;
    bool leaves_outputs;
  };

  PanelTask<Engine> panel_task(const SegmentTask& of, std::int64_t column, const NextRows& next) const {
    const std::int64_t token = row.first + of.first;
    const bool has_state = work.has_state[of.head - task.head_begin];
    return {.params = params,
            .key = work.key,
            .chunk = work.chunk,
            .segment = of.segment,
            .next = next,
            .states = of.states,
            .keys = keys,
            .chunk_rows = round_up(of.count, kRowBlock),
            .v_index = element_index(params.v, row.batch, token, of.head) + task.v_begin + column,
            .out_index = element_index(params.out, row.batch, token, of.head) + task.v_begin + column,
            .columns = columns - column,
            .state = has_state ? panel_of(work.states[of.head - task.head_begin], keys, column).packed : nullptr,
            .leaves_outputs = of.leaves_outputs,
            .u = work.chunk.u + kTokens * column,
            .u_packed = work.chunk.u_packed + kTokens * column,
            .u_decayed = work.chunk.u_decayed + kTokens * column};
  }

  // u, the outputs unless they are left, and the state.
  void run_panels(const SegmentTask& of, float decay) const {
    HeadState<Engine>& state = work.states[of.head - task.head_begin];
    bool& has_state = work.has_state[of.head - task.head_begin];
    const HeadState<Engine> to = next_state(state);
    const auto* k = k_steps(of.segment, of.count);
    for_each_panel(columns, [&](std::int64_t column, auto n) {
      constexpr int kVectors = decltype(n)::value;
      const NextRows next = next_rows(of.head, of.first, column, kVectors * kLanes);
      const PanelTask<Engine> panel = panel_task(of, column, next);
      const unsigned not_finite = run_rows<Engine, kVectors>(panel);
      if (of.leaves_outputs) {
        std::uint8_t& blocks = kept.summary->not_finite[column / kPanelColumns];
        blocks = static_cast<std::uint8_t>(of.segment.begin == 0 ? not_finite : blocks | not_finite);
      }
      update_columns<kVectors>(of.segment, {has_state, decay, k}, column, state, to);
    });
    state = to;
    has_state = true;
  }

  // What all panels of a head's segment need for the update of its state.
  struct SegmentUpdate {
    bool has_state;
    float decay;
    const typename Engine::Element* k_steps;
  };

  template <int kVectors>
  void update_columns(const Segment& segment, const SegmentUpdate& of, std::int64_t column,
                      const HeadState<Engine>& from, const HeadState<Engine>& to) const {
    auto* u = work.chunk.u_decayed + kTokens * column + span_begin<Engine>(segment.begin) * kVectors * kLanes;
    const Update<Engine> update{.keys = keys,
                                .has_state = of.has_state,
                                .decay = of.decay,
                                .k_steps = of.k_steps,
                                .u = u,
                                .steps = update_steps<kVectors>(segment, u),
                                .sums = work.chunk.sums,
                                .blas = work.key.blas};
    update_panel<Engine, kVectors>(update, panel_of(from, keys, column), panel_of(to, keys, column));
  }

  void run_segment(std::int64_t head, std::int64_t first, std::int64_t count, const Segment& segment,
                   StatesAhead& states) const {
    if (segment.is_reset) work.has_state[head - task.head_begin] = false;
    const float decay = sum_gates(segment, work.key, work.chunk);
    mix_tokens(segment, work.key, work.chunk);
    clear_before(segment);
    run_panels({head, first, count, segment, states, false}, decay);
  }

  void run_chunk(std::int64_t head, std::int64_t first, std::int64_t count) const {
    load_chunk_gates(params, row, head, first, count, work.chunk);
    StatesAhead states = states_ahead(head, first, count);
    for (std::int64_t begin = 0; begin < count;) {
      const Segment segment = next_segment(work.chunk, begin, count);
      run_segment(head, first, count, segment, states);
      begin = segment.end;
    }
  }

  void run_head(std::int64_t head, std::int64_t first, std::int64_t count) const {
    if (first == task.token_begin) load_head(head);
    if (count > 0) {
      if (is_first_of_key_head(head)) {
        load_key_operands(params, row, key_head_of(params, head), first, count, work.key);
      }
      save_chunk_state(head, first);
      run_chunk(head, first, count);
    }
    if (first + count == task.token_end) store_head(head);
  }

  // --- in parts ---

  // The operands of a value head, in what prepare() leaves.
  void use_prepared(void* memory, std::int64_t head) {
    const std::int64_t group = params.num_value_heads / params.num_key_heads;
    arrange_prepared(memory, params.key_dim, head % group, work.key, work.chunk);
  }

  // The state of the task's only head is where a step has left it, and its next one goes elsewhere.
  void use_kept() const {
    work.states[0].packed = kept.state;
    if constexpr (kIsFloat<typename Engine::Element>) work.states[0].values = kept.state;
  }
  HeadState<Engine> next_state(const HeadState<Engine>& state) const {
    if (next_kept.state == nullptr) return state;
    if constexpr (kIsFloat<typename Engine::Element>) {
      return {next_kept.state, next_kept.state};
    } else {
      return {state.values, next_kept.state};
    }
  }
  void use_kept_u() {
    work.chunk.u_packed = kept.u;
    if constexpr (kIsFloat<typename Engine::Element>) work.chunk.u = kept.u;
  }

  std::int64_t count_of_step() const { return task.token_end - task.token_begin; }

  void prepare_head(std::int64_t head) const {
    load_chunk_gates(params, row, head, task.token_begin, count_of_step(), work.chunk);
    ChunkSummary& summary = *work.chunk.summary;
    for (std::int64_t begin = 0; begin < count_of_step(); begin += Engine::kSpan) {
      const Segment segment = next_segment(work.chunk, begin, count_of_step());
      summary.is_whole = is_whole_span(segment, count_of_step()) && !segment.is_reset;
      if (!summary.is_whole) return;
      summary.decay[begin / Engine::kSpan] = sum_gates(segment, work.key, work.chunk);
      mix_tokens(segment, work.key, work.chunk);
    }
  }

  void prepare(void* memory) {
    use_prepared(memory, task.head_begin);
    const std::int64_t key_head = key_head_of(params, task.head_begin);
    load_key_operands(params, row, key_head, task.token_begin, count_of_step(), work.key);
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      use_prepared(memory, head);
      prepare_head(head);
    }
  }

  // What the next step reads of what is prepared for it.
  StatesAhead prepared_ahead() const {
    if (next_prepared == nullptr) return {};
    ChunkCall next = *this;
    next.use_prepared(next_prepared, task.head_begin);
    const KeyOperands<Engine>& key = next.work.key;
    const ChunkOperands<Engine>& chunk = next.work.chunk;
    const bool needs_all = kept.state == nullptr;
    StatesAhead ahead{};
    ahead.loaded = between(needs_all ? key.q : key.k, key.k_factor + kTokens);
    ahead.stored = between(chunk.mixing, needs_all ? chunk.attention + kTokens * kTokens : chunk.attention);
    ahead.row_bytes = bytes_of_row(ahead.loaded.end - ahead.loaded.from, count_of_step());
    return ahead;
  }
  template <class First, class End>
  static NextState between(const First* first, const End* end) {
    return {reinterpret_cast<const char*>(first), reinterpret_cast<const char*>(end)};
  }

  bool run_prepared() {
    const bool leaves_outputs = kept.state != nullptr;
    if (leaves_outputs) {
      use_kept_u();
      kept.summary->has_state = work.has_state[0];
    }
    StatesAhead states = prepared_ahead();
    for (std::int64_t begin = 0; begin < count_of_step(); begin += Engine::kSpan) {
      const Segment segment{begin, span_end<Engine>(begin, count_of_step()), false};
      run_panels({task.head_begin, task.token_begin, count_of_step(), segment, states, leaves_outputs},
                 work.chunk.summary->decay[begin / Engine::kSpan]);
    }
    return leaves_outputs;
  }

  // Returns whether it leaves the outputs. A chunk that resets cut is not left.
  bool run_step(void* operands) {
    const std::int64_t head = task.head_begin;
    save_chunk_state(head, task.token_begin);
    ChunkCall with_prepared = *this;
    if (operands != nullptr) with_prepared.use_prepared(operands, head);
    if (operands != nullptr && with_prepared.work.chunk.summary->is_whole) return with_prepared.run_prepared();
    load_key_operands(params, row, key_head_of(params, head), task.token_begin, count_of_step(), work.key);
    run_chunk(head, task.token_begin, count_of_step());
    return false;
  }

  // The states between spans are computed again, in the workspace: to keep them would take too much memory.
  void output_step(void* operands) {
    [[maybe_unused]] const HeadState<Engine> computed = work.states[0];
    bool is_from_state = kept.summary->has_state;
    work.has_state = &is_from_state;
    use_prepared(operands, task.head_begin);
    use_kept();
    use_kept_u();
    for (std::int64_t begin = 0; begin < count_of_step(); begin += Engine::kSpan) {
      const Segment segment{begin, span_end<Engine>(begin, count_of_step()), false};
      output_segment(segment);
      if constexpr (Engine::kSpan < kTokens) {
        if (segment.end == count_of_step()) return;
        update_again(segment, computed);
        work.states[0] = computed;
        is_from_state = true;
      }
    }
  }

  // The state after a whole span, from the u that is kept.
  void update_again(const Segment& segment, const HeadState<Engine>& to) const {
    const float decay = work.chunk.summary->decay[segment.begin / Engine::kSpan];
    const SegmentUpdate update{*work.has_state, decay, k_steps(segment, count_of_step())};
    for_each_panel(columns, [&](std::int64_t column, auto n) {
      constexpr int kVectors = decltype(n)::value;
      decay_rows<kVectors>(segment, work.chunk, kTokens * column);
      update_columns<kVectors>(segment, update, column, work.states[0], to);
    });
  }

  void output_segment(const Segment& segment) const {
    StatesAhead states{};
    const NextRows next{};
    const SegmentTask of{task.head_begin, task.token_begin, count_of_step(), segment, states, false};
    for_each_panel(columns, [&](std::int64_t column, auto n) {
      run_outputs<Engine, decltype(n)::value>(panel_task(of, column, next),
                                              kept.summary->not_finite[column / kPanelColumns]);
    });
  }

  // --- consecutive chunks ---

  // A task of no tokens moves its states. The first rows are asked for all at once: perhaps nobody has done so.
  void run() const {
    prefetch_rows<kTokens>(rows_of(task.head_begin, task.token_begin, 0, columns), 0);
    for (std::int64_t first = task.token_begin;; first += kTokens) {
      const std::int64_t count = min_of(kTokens, task.token_end - first);
      for (std::int64_t head = task.head_begin; head < task.head_end; ++head) run_head(head, first, count);
      if (first + count == task.token_end) return;
    }
  }
};

template <class Engine>
std::int64_t chunk_workspace(std::int64_t key_dim, std::int64_t columns, std::int64_t heads) {
  Workspace<Engine> work;
  return arrange(work, nullptr, key_dim, columns, heads);
}

// With the states of some heads in its workspace.
template <class Engine>
ChunkCall<Engine> chunk_call(const RecurrenceParams& params, const ChunkTask& task, std::int64_t heads,
                             void* workspace) {
  const std::int64_t columns = task.v_end - task.v_begin;
  ChunkCall<Engine> call{.params = params,
                         .task = task,
                         .work = {},
                         .row = chunk_tokens(params, task.sequence),
                         .keys = padded_keys<Engine>(params.key_dim),
                         .columns = columns};
  arrange(call.work, workspace, params.key_dim, columns, heads);
  call.work.key.blas = task.blas;
  call.tokens_end = task.token_end;
  return call;
}

template <class Engine>
void run_chunks(const RecurrenceParams& params, const ChunkTask& task, void* workspace) {
  const ChunkCall<Engine> call = chunk_call<Engine>(params, task, task.head_end - task.head_begin, workspace);
  [[maybe_unused]] const typename Engine::Session session;
  call.run();
}

// --- the same in parts ---

template <class Engine>
std::int64_t prepared_bytes(std::int64_t key_dim, std::int64_t heads) {
  KeyOperands<Engine> key;
  ChunkOperands<Engine> chunk;
  return arrange_prepared(nullptr, key_dim, heads - 1, key, chunk);
}

template <class Engine>
std::int64_t kept_bytes(std::int64_t key_dim, std::int64_t columns) {
  Kept<Engine> kept;
  return arrange_kept(nullptr, key_dim, columns, kept);
}

template <class Engine>
void prepare_chunk(const RecurrenceParams& params, const ChunkTask& task, void* prepared, void* workspace) {
  ChunkCall<Engine> call = chunk_call<Engine>(params, task, 0, workspace);
  [[maybe_unused]] const typename Engine::Session session;
  call.prepare(prepared);
}

template <class Engine>
ChunkCall<Engine> step_call(const RecurrenceParams& params, const ChunkStep& step, void* workspace) {
  ChunkCall<Engine> call = chunk_call<Engine>(params, step.task, 1, workspace);
  call.tokens_end = step.tokens_end;
  call.is_prepared = step.prepared != nullptr;
  call.next_prepared = step.next_prepared;
  if (step.kept != nullptr) arrange_kept(step.kept, params.key_dim, call.columns, call.kept);
  if (step.next_kept != nullptr) arrange_kept(step.next_kept, params.key_dim, call.columns, call.next_kept);
  return call;
}

// With the state of the chain.
template <class Engine>
ChunkCall<Engine> chain_call(const RecurrenceParams& params, const ChunkStep& step, void* workspace) {
  ChunkCall<Engine> call = step_call<Engine>(params, step, workspace);
  if (step.kept != nullptr) call.use_kept();
  return call;
}

template <class Engine>
void begin_steps(const RecurrenceParams& params, const ChunkStep& step, void* workspace) {
  chain_call<Engine>(params, step, workspace).load_head(step.task.head_begin);
}

template <class Engine>
bool run_step(const RecurrenceParams& params, const ChunkStep& step, void* workspace) {
  ChunkCall<Engine> call = chain_call<Engine>(params, step, workspace);
  [[maybe_unused]] const typename Engine::Session session;
  return call.run_step(step.prepared);
}

template <class Engine>
void output_step(const RecurrenceParams& params, const ChunkStep& step, void* workspace) {
  ChunkCall<Engine> call = step_call<Engine>(params, step, workspace);
  [[maybe_unused]] const typename Engine::Session session;
  call.output_step(step.prepared);
}

template <class Engine>
void end_steps(const RecurrenceParams& params, const ChunkStep& step, void* workspace) {
  chain_call<Engine>(params, step, workspace).store_head(step.task.head_begin);
}

template <class Engine>
constexpr ChunkSteps kChunkSteps = {
    .prepared_bytes = prepared_bytes<Engine>,
    .kept_bytes = kept_bytes<Engine>,
    .prepare = prepare_chunk<Engine>,
    .begin = begin_steps<Engine>,
    .run = run_step<Engine>,
    .output = output_step<Engine>,
    .end = end_steps<Engine>,
};

}  // namespace
}  // namespace gdn::cpu::GDN_ISA
