// SPDX-License-Identifier: Apache-2.0
//
// A decode step after the convolution, for rows of one or several tokens. Per row n and value head h, with the state
// M [V, K] of the slot that the row resumes from, for each of its tokens t in order:
//
//     decay = exp(-exp(A_log) softplus(a_t + dt_bias)),  beta = sigmoid(b_t)
//     u     = beta (v_t - decay M k_t)
//     o_t   = scale (decay M q_t + (k_t . q_t) u)          which is scale M q_t with the new M
//     M     = decay M + u k_t^T
//     out_t = o_t rsqrt(mean(o_t^2) + eps) weight act(gate_t)
//
// q and k of key head h / (HV / H), divided by their norms. M stays in fp32 registers; the new M does not enter o, so
// that one pass over the old one gives both products, and one reduction both sums.
//
// Several slots: the row resumes from slots[n, accepted - 1]; the state after token t goes to slots[n, t].
// Long rows: the row has one slot, where the state after its last token goes, and any length; neither norm nor gate.
// Its tokens come to shared memory num_columns at a time. Replay: the row has one slot. First its records of the last
// step's accepted tokens (k, u, decay) are applied to the state with the same last line as above, so with the same
// bits, and the state is stored; then the new tokens run, and leave records instead of states.
//
// Memory: state [num_slots, HV, V, K], a slot packed; the operands as params.h says.
//
// With row_indices, row n of the call is row row_indices[n] of the tables, and tokens of other rows are left alone.
//
// A block has one row, one value head, and value_dim / num_splits of its columns (rows of M), in one or more passes; 8
// threads share a row of M (state_tile.h). Warps bring tokens to shared memory, one each at a time, while the state is
// on its way, and norm one token each at the end. Where a head is split over blocks, the last one to arrive norms, from
// the o of all in device memory: the sum has the order that it has in one block. Where a row's records are renewed, the
// last block of the row to have read them writes them.
//
// Bound by memory: a state is read once and written once a token (once in all with replay), 16 bytes a thread at a
// time; q, k, v, gate and out are a hundredth of that. A small batch is bound by latency: the chain of loads (row ->
// slot -> state) and the tokens one after the other; that is what num_splits is for.
#pragma once

#include "state_tile.h"

namespace gdn::cuda {

template <int kKeyDim, class State, Form kForm>
struct DecodeBlock {
  static constexpr bool kReplay = kForm == Form::kReplay, kLongRows = kForm == Form::kRows;
  using Tile = StateTile<kKeyDim, State>;
  using Storage = typename Tile::Storage;
  static constexpr int kPerLane = kKeyDim / kWarp;

  struct Row {
    Index index;  // in the tables of the call
    Index start;  // tokens [start, start + length)
    Index source;
    Index length;
    int num_replayed;
    bool is_live;
  };
  // Tokens of a row that are in shared memory at the same time.
  struct Part {
    Index start;
    int length;
  };

  const DecodeParams& p;
  const int n;
  const int head, key_head, split;
  const int width, v_begin;  // this block's columns of V
  const int lane, warp, num_warps;
  float* const shared;
  const SharedRows at;

  GDN_DEVICE explicit DecodeBlock(const DecodeParams& params)
      : p(params),
        n(block_x() / params.num_splits),
        head(block_y()),
        key_head(block_y() / (params.num_value_heads / params.num_key_heads)),
        split(block_x() % params.num_splits),
        width(params.value_dim / params.num_splits),
        v_begin(split * width),
        lane(thread_index() % kWarp),
        warp(thread_index() / kWarp),
        num_warps(num_threads() / kWarp),
        shared(reinterpret_cast<float*>(shared_memory())),
        at(shared_rows(kKeyDim, width, params.num_columns, kReplay)) {}

  GDN_DEVICE void run() {
    if (n < p.num_rows) run_row(read_row());
    clear_uncovered_rows();
  }

 private:
  // --- rows ---

  GDN_DEVICE bool is_slot(Index slot) const {
    return slot >= 0 && slot < p.num_slots && !(p.has_null_slot && slot == p.null_slot);
  }

  GDN_DEVICE Index row_start(Index row) const {
    return p.cu_seqlens.data == nullptr ? row : load_index(p.cu_seqlens, row);
  }

  // A row that is out of range in any way is padding; of its tokens those that exist are cleared.
  GDN_DEVICE Row read_row() const {
    const Index index = p.row_indices.data == nullptr ? n : load_index(p.row_indices, n);
    Row row{index, 0, -1, 0, 0, false};
    if (index < 0 || index >= p.num_table_rows) return row;
    const Index start = row_start(index), end = row_start(index + 1);
    Index accepted = p.num_accepted_tokens.data == nullptr ? 1 : load_index(p.num_accepted_tokens, index);
    if (accepted == 0) accepted = 1;
    const bool is_valid = 0 <= start && start <= end && end <= p.num_tokens &&
                          (kLongRows || end - start <= p.num_columns) && 0 < accepted && accepted <= p.num_columns;
    if (!is_valid) {
      const Index first = start < 0 ? 0 : start, last = end < p.num_tokens ? end : p.num_tokens;
#pragma unroll 1
      for (Index t = first; t < last; ++t) clear_token(t);
      return row;
    }
    row.start = start;
    row.length = end - start;
    row.source = load_index(p.slots, index, kForm == Form::kSlots ? accepted - 1 : 0);
    row.is_live = is_slot(row.source);
    if (kReplay && row.is_live) {
      const int live = p.records.live[row.source * p.records.live_stride];
      row.num_replayed = live < accepted ? (live > 0 ? live : 0) : static_cast<int>(accepted);
    }
    return row;
  }

  GDN_DEVICE void clear_token(Index token) const {
    const Index index = token * p.out.token_stride + head * p.out.head_stride + v_begin;
    with_dtype(p.out.dtype, [&](auto type) {
#pragma unroll 1
      for (int c = thread_index(); c < width; c += num_threads()) {
        store_as<decltype(type)>(p.out.data, index + c, 0.0f);
      }
    });
  }

  // Tokens before the first row and after the last, shared out over the blocks. With chosen rows the others are not
  // this call's.
  GDN_DEVICE void clear_uncovered_rows() const {
    if (p.row_indices.data != nullptr) return;
    Index first = row_start(0), last = row_start(p.num_rows);
    first = first < 0 ? 0 : (first > p.num_tokens ? p.num_tokens : first);
    last = last < first ? first : (last > p.num_tokens ? p.num_tokens : last);
#pragma unroll 1
    for (Index t = n; t < first; t += p.row_blocks) clear_token(t);
#pragma unroll 1
    for (Index t = last + n; t < p.num_tokens; t += p.row_blocks) clear_token(t);
  }

  GDN_DEVICE void run_row(const Row& row) {
    if (!row.is_live) {
#pragma unroll 1
      for (Index t = 0; t < row.length; ++t) clear_token(row.start + t);
      return;
    }
    if (row.length == 0) return;
    const int group = thread_index() / kRowLanes, group_lane = thread_index() % kRowLanes;
    const int pass_rows = num_threads() / kRowLanes * Tile::kRows;
    Tile tile;
    tile.load(state_rows(row.source, group * Tile::kRows), group_lane);
    if (kLongRows) tile.widen();
    Part part{row.start, 0};
#pragma unroll 1
    while (true) {
      part = part_after(row, part);
      stage(row, part);
      barrier();
      if (kReplay && thread_index() == 0) arrive_at_row();
      if (!kLongRows) tile.widen();
      int v = group * Tile::kRows;
      while (true) {
        if (kReplay && row.num_replayed > 0) {
          replay(row, tile, v, group_lane);
          tile.store_and_round(state_rows(row.source, v), group_lane);
        }
#pragma unroll 1
        for (int t = 0; t < part.length; ++t) {
          run_token(row, tile, t, v, group_lane);
          if (kForm == Form::kSlots) {
            const Index slot = destinations()[t];
            if (slot >= 0) tile.store(state_rows(slot, v), group_lane);
          }
        }
        v += pass_rows;
        if (kLongRows || v >= width) break;
        tile.load(state_rows(row.source, v), group_lane);
        tile.widen();
      }
      if (!kLongRows) break;
      store_outputs(part);
      if (part.start + part.length == row.start + row.length) break;
    }
    if (kLongRows) {
      tile.store(state_rows(row.source, group * Tile::kRows), group_lane);
    } else {
      finish(part);
    }
    if (kReplay) renew_records(row);
  }

  GDN_DEVICE Part part_after(const Row& row, const Part& part) const {
    const Index start = part.start + part.length, left = row.start + row.length - start;
    return {start, left < p.num_columns ? static_cast<int>(left) : p.num_columns};
  }

  // `v` counts from the block's first column.
  GDN_DEVICE Storage* state_rows(Index slot, int v) const {
    const Index v_rows = static_cast<Index>(head) * p.value_dim + v_begin + v;
    return static_cast<Storage*>(p.state) + slot * p.slot_stride + v_rows * kKeyDim;
  }

  GDN_DEVICE Index* destinations() const { return reinterpret_cast<Index*>(shared + shared_at::kDestinations); }
  GDN_DEVICE int* flags() const { return reinterpret_cast<int*>(shared + shared_at::kFlags); }

  // --- tokens to shared memory, a warp each ---

  GDN_DEVICE void stage(const Row& row, const Part& part) const {
#pragma unroll 1
    for (int t = warp; t < part.length; t += num_warps) stage_token(row, part.start + t, t);
    if constexpr (kReplay) {
#pragma unroll 1
      for (int i = num_warps - 1 - warp; i < row.num_replayed; i += num_warps) stage_record(row, i);
    }
  }

  GDN_DEVICE void stage_token(const Row& row, Index token, int t) const {
    float q[kPerLane], k[kPerLane];
    float* v = shared + at.v + t * width;
    with_dtype(p.q.dtype, [&](auto type) {
      using Type = decltype(type);
      const Index q_index = token * p.q.token_stride + key_head * p.q.head_stride + lane;
      const Index k_index = token * p.k.token_stride + key_head * p.k.head_stride + lane;
      const Index v_index = token * p.v.token_stride + head * p.v.head_stride + v_begin;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        q[i] = load_as<Type>(p.q.data, q_index + i * kWarp);
        k[i] = load_as<Type>(p.k.data, k_index + i * kWarp);
      }
#pragma unroll 1
      for (int c = lane; c < width; c += kWarp) v[c] = load_as<Type>(p.v.data, v_index + c);
    });
    float qk = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) qk = multiply_add(q[i], k[i], qk);
    const float q_factor = inverse_norm(q), k_factor = inverse_norm(k);
    qk = warp_sum(qk) * q_factor * k_factor;
    put_row(shared + at.q + t * kKeyDim, q, q_factor);
    put_row(shared + at.k + t * kKeyDim, k, k_factor);
    if (lane == 0) {
      const float b = load_value(p.b.data, p.b.dtype, token * p.b.token_stride + head * p.b.head_stride);
      shared[shared_at::kDecay + t] = decay_of(token, head);
      shared[shared_at::kBeta + t] = sigmoid(b);
      shared[shared_at::kQk + t] = qk;
      if constexpr (kForm == Form::kSlots) {
        const Index slot = load_index(p.slots, row.index, t);
        destinations()[t] = is_slot(slot) ? slot : -1;
      }
    }
  }

  GDN_DEVICE void stage_record(const Row& row, int i) const {
    const Records& records = p.records;
    float k[kPerLane];
    with_dtype(p.k.dtype, [&](auto type) {
      const Index index =
          row.source * records.k_slot_stride + i * records.k_record_stride + key_head * records.k_head_stride + lane;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) k[j] = load_as<decltype(type)>(records.k, index + j * kWarp);
    });
    const float* u = records.u + row.source * records.u_slot_stride + i * records.u_record_stride +
                     head * records.u_head_stride + v_begin;
    float* staged_u = shared + at.o + i * width;
#pragma unroll 1
    for (int c = lane; c < width; c += kWarp) staged_u[c] = u[c];
    put_row(shared + at.old_k + i * kKeyDim, k, inverse_norm(k));
    if (lane == 0) shared[shared_at::kOldDecay + i] = *decay_record(row.source, i, head);
  }

  GDN_DEVICE float inverse_norm(const float (&x)[kPerLane]) const {
    if (!p.normalize_qk) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum = multiply_add(x[i], x[i], sum);
    return 1.0f / square_root(warp_sum(sum) + 1e-6f);
  }

  GDN_DEVICE void put_row(float* row, const float (&x)[kPerLane], float factor) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) row[Tile::place(lane + i * kWarp)] = x[i] * factor;
  }

  GDN_DEVICE float decay_of(Index token, int value_head) const {
    const float a = load_value(p.a.data, p.a.dtype, token * p.a.token_stride + value_head * p.a.head_stride);
    const float A_log = load_value(p.A_log.data, p.A_log.dtype, value_head * p.A_log.stride);
    const float dt_bias = load_value(p.dt_bias.data, p.dt_bias.dtype, value_head * p.dt_bias.stride);
    return exponential(log_decay(A_log, a + dt_bias, p.softplus_beta, p.softplus_threshold));
  }

  // --- the recurrence ---

  // The decay of 0 is a reset: what the state holds, NaN too, ends here.
  GDN_DEVICE void replay(const Row& row, Tile& tile, int v, int group_lane) const {
#pragma unroll 1
    for (int i = 0; i < row.num_replayed; ++i) {
      const float decay = shared[shared_at::kOldDecay + i];
      float u[Tile::kRows];
      const float* staged_u = shared + at.o + i * width + v;
      if constexpr (Tile::kRows == 4) {
        const Float4 four = *reinterpret_cast<const Float4*>(staged_u);
        u[0] = four.x;
        u[1] = four.y;
        u[2] = four.z;
        u[3] = four.w;
      } else {
        u[0] = *staged_u;
      }
      if (decay == 0.0f) tile.clear();
      tile.update(decay, shared + at.old_k + i * kKeyDim, group_lane, u);
    }
    // The staged u are read: run_token puts o in their place, in the group's own columns.
    warp_barrier();
  }

  GDN_DEVICE void run_token(const Row& row, Tile& tile, int t, int v, int group_lane) const {
    constexpr int kRows = Tile::kRows;
    const float decay = shared[shared_at::kDecay + t], beta = shared[shared_at::kBeta + t],
                qk = shared[shared_at::kQk + t];
    const float *q = shared + at.q + t * kKeyDim, *k = shared + at.k + t * kKeyDim;
    if (decay == 0.0f) tile.clear();
    // M k of each row, then M q.
    float sums[2 * kRows];
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      const Float4 key = *reinterpret_cast<const Float4*>(k + Tile::quad_place(quad, group_lane));
      const Float4 query = *reinterpret_cast<const Float4*>(q + Tile::quad_place(quad, group_lane));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* m = tile.value[r] + 4 * quad;
        add_products(sums[r], m, key);
        add_products(sums[kRows + r], m, query);
      }
    }
    const float sum = group_sums<kRowLanes / 2>(sums, group_lane);
    // The first four threads of a group have the sums with k, the others those with q, of the same rows.
    const bool has_key_sum = group_lane < kRowLanes / 2;
    constexpr int kThreadsPerSum = 4 / kRows;
    const int row_of_sum = v + group_lane % 4 / kThreadsPerSum;
    float u = 0.0f;
    if (has_key_sum) u = beta * multiply_add(-decay, sum, shared[at.v + t * width + row_of_sum]);
    const float other_u = shuffle_xor(u, 4);
    float row_u[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_u[r] = shuffle(u, lane - group_lane + r * kThreadsPerSum);
    if (group_lane % kThreadsPerSum == 0) {
      if (!has_key_sum) {
        shared[at.o + t * width + row_of_sum] = p.scale * multiply_add(qk, other_u, decay * sum);
      } else if (kReplay) {
        record_u(row.source, t)[row_of_sum] = u;
      }
    }
    tile.update(decay, k, group_lane, row_u);
  }

  static GDN_DEVICE void add_products(float& sum, const float* m, const Float4& x) {
    sum = multiply_add(m[0], x.x, sum);
    sum = multiply_add(m[1], x.y, sum);
    sum = multiply_add(m[2], x.z, sum);
    sum = multiply_add(m[3], x.w, sum);
  }

  // Long rows have neither norm nor gate. After the barrier nobody reads the staged tokens, and the next may take their
  // place; o is written again only after those are all there.
  GDN_DEVICE void store_outputs(const Part& part) const {
    barrier();
    with_dtype(p.out.dtype, [&](auto type) {
#pragma unroll 1
      for (int t = warp; t < part.length; t += num_warps) {
        const Index index = (part.start + t) * p.out.token_stride + head * p.out.head_stride + v_begin;
#pragma unroll 1
        for (int c = lane; c < width; c += kWarp) {
          store_as<decltype(type)>(p.out.data, index + c, shared[at.o + t * width + c]);
        }
      }
    });
  }

  // --- the norm, a warp a token ---

  GDN_DEVICE void finish(const Part& part) const {
    barrier();
    const bool is_shared_out = p.norm_weight.data != nullptr && p.num_splits > 1;
    const float* o = shared + at.o;
    Index token_stride = width;
    int begin = v_begin, count = width;
    if (is_shared_out) {
      float* partial =
          p.partial_outputs + (static_cast<Index>(n) * p.num_columns * p.num_value_heads + head) * p.value_dim;
      token_stride = static_cast<Index>(p.num_value_heads) * p.value_dim;
      if (!is_last_of_head(part, partial, token_stride)) return;
      o = partial;
      begin = 0;
      count = p.value_dim;
    }
#pragma unroll 1
    for (int t = warp; t < part.length; t += num_warps) {
      finish_token(part.start + t, o + t * token_stride, is_shared_out, begin, count);
    }
  }

  // Hands the block's o to whichever block of the head arrives last.
  GDN_DEVICE bool is_last_of_head(const Part& part, float* partial, Index token_stride) const {
#pragma unroll 1
    for (int t = warp; t < part.length; t += num_warps) {
      for (int c = lane; c < width; c += kWarp) {
        partial[t * token_stride + v_begin + c] = shared[at.o + t * width + c];
      }
    }
    barrier();
    if (thread_index() == 0) {
      flags()[0] = is_last_to_arrive(p.head_counters + static_cast<Index>(n) * p.num_value_heads + head, p.num_splits);
    }
    barrier();
    return flags()[0] != 0;
  }

  // `o` is of columns [begin, begin + count), with a norm all of them.
  GDN_DEVICE void finish_token(Index token, const float* o, bool from_other_blocks, int begin, int count) const {
    constexpr int kMost = kMaxValueDim / kWarp;
    float y[kMost], gate[kMost], weight[kMost];
    const bool has_norm = p.norm_weight.data != nullptr, has_gate = p.gate_activation != Activation::kNone;
    const Index gate_index = token * p.gate.token_stride + head * p.gate.head_stride + begin;
    const Index out_index = token * p.out.token_stride + head * p.out.head_stride + begin;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int c = lane + i * kWarp;
      y[i] = c >= count ? 0.0f : (from_other_blocks ? load_uncached(o + c) : o[c]);
      gate[i] = c < count && has_gate ? load_value(p.gate.data, p.gate.dtype, gate_index + c) : 0.0f;
      weight[i] =
          c < count && has_norm ? load_value(p.norm_weight.data, p.norm_weight.dtype, c * p.norm_weight.stride) : 1.0f;
      sum = multiply_add(y[i], y[i], sum);
    }
    const float inverse_rms =
        has_norm ? 1.0f / square_root(warp_sum(sum) / static_cast<float>(count) + p.norm_eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int c = lane + i * kWarp;
      if (c >= count) continue;
      float value = y[i] * inverse_rms * weight[i];
      if (has_gate) value *= activate(gate[i]);
      store_value(p.out.data, p.out.dtype, out_index + c, value);
    }
  }

  GDN_DEVICE float activate(float gate) const {
    const float s = sigmoid(gate);
    return p.gate_activation == Activation::kSilu ? gate * s : s;
  }

  // Tells the last of `count` blocks to come here, which then sees what the others wrote before.
  static GDN_DEVICE int is_last_to_arrive(unsigned* counter, int count) {
    const unsigned last = static_cast<unsigned>(count) - 1;
    device_fence();
    const bool is_last = atomic_increment(counter, last) == last;
    device_fence();
    return is_last ? 1 : 0;
  }

  // --- records ---

  GDN_DEVICE float* decay_record(Index slot, int i, int value_head) const {
    const Records& records = p.records;
    return records.decay + slot * records.decay_slot_stride + i * records.decay_record_stride +
           value_head * records.decay_head_stride;
  }

  GDN_DEVICE float* record_u(Index slot, int i) const {
    return p.records.u + slot * p.records.u_slot_stride + i * p.records.u_record_stride +
           head * p.records.u_head_stride + v_begin;
  }

  // Once this block has read the records of the row, and their count.
  GDN_DEVICE void arrive_at_row() const {
    flags()[1] = is_last_to_arrive(p.row_counters + n, p.num_value_heads * p.num_splits);
  }

  // The keys and decays of a row's tokens belong to more than one block: the last one to have read the old ones
  // writes the new ones of all heads. Columns of u belong to one block, which has written them already.
  GDN_DEVICE void renew_records(const Row& row) const {
    if (!flags()[1]) return;
    const Records& records = p.records;
    const int length = static_cast<int>(row.length);
#pragma unroll 1
    for (int job = warp; job < length * p.num_key_heads; job += num_warps) {
      const int t = job / p.num_key_heads, h = job % p.num_key_heads;
      const Index from = (row.start + t) * p.k.token_stride + h * p.k.head_stride;
      const Index to = row.source * records.k_slot_stride + t * records.k_record_stride + h * records.k_head_stride;
      with_dtype(p.k.dtype, [&](auto type) {
        using Element = typename decltype(type)::Storage;
#pragma unroll 1
        for (int i = lane; i < kKeyDim; i += kWarp) {
          static_cast<Element*>(records.k)[to + i] = static_cast<const Element*>(p.k.data)[from + i];
        }
      });
    }
#pragma unroll 1
    for (int job = thread_index(); job < length * p.num_value_heads; job += num_threads()) {
      const int t = job / p.num_value_heads, h = job % p.num_value_heads;
      *decay_record(row.source, t, h) = decay_of(row.start + t, h);
    }
    if (thread_index() == 0) records.live[row.source * records.live_stride] = length;
  }
};

}  // namespace gdn::cuda
