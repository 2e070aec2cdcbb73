// SPDX-License-Identifier: Apache-2.0
#include "runtime/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "runtime/openmp.h"
#include "runtime/recurrence_plan.h"
#include "runtime/team.h"

namespace gdn::cpu {
namespace {

enum class Schedule {
  kStatic,   // one contiguous share a thread: neighbouring items are neighbours in memory
  kDynamic,  // next item to whoever is free: items of unequal cost
};

constexpr std::int64_t kNone = -1;

// Calls body(item, item after) for the items that a thread is given; kNone where there is none.
template <typename Body>
struct Region {
  const Body& body;
  std::int64_t num_items;
  Schedule schedule;
  std::atomic<std::int64_t> unclaimed{0};

  void run_share() {
    const OpenMp& runtime = openmp();
    const std::int64_t thread = runtime.thread_num();
    const std::int64_t threads = runtime.num_threads();
    if (schedule == Schedule::kStatic) {
      return run_range(num_items * thread / threads, num_items * (thread + 1) / threads);
    }
    // One item is claimed ahead, so that its memory can be asked for.
    for (std::int64_t item = claim(); item != kNone;) {
      const std::int64_t next = claim();
      body(item, next);
      item = next;
    }
  }

  void run_range(std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) body(item, item + 1 < end ? item + 1 : kNone);
  }

  std::int64_t claim() {
    const std::int64_t item = unclaimed++;
    return item < num_items ? item : kNone;
  }
};

template <typename Body>
void for_each_with_next(std::int64_t num_items, int num_threads, Schedule schedule, const Body& body) {
  const OpenMp& runtime = openmp();
  const std::int64_t threads = std::min<std::int64_t>(num_threads, num_items);
  const bool serial = is_serial(static_cast<int>(threads));
  Region<Body> region{body, num_items, schedule};
  if (serial) return region.run_range(0, num_items);
  runtime.parallel([](void* context) { static_cast<Region<Body>*>(context)->run_share(); }, &region,
                   static_cast<unsigned>(threads), 0);
}

template <typename Body>
void for_each(std::int64_t num_items, int num_threads, Schedule schedule, const Body& body) {
  for_each_with_next(num_items, num_threads, schedule, [&](std::int64_t item, std::int64_t) { body(item); });
}

// Working memory of the calling thread, allocated on its first use and kept.
RecurrenceScratch& thread_scratch() {
  thread_local const std::unique_ptr<RecurrenceScratch> scratch{new (std::nothrow) RecurrenceScratch};
  if (scratch == nullptr) std::abort();  // out of memory inside a parallel region: nothing sensible is left to do
  return *scratch;
}

std::int64_t sequence_length(const RecurrenceParams& params, std::int64_t sequence) {
  if (params.token_offsets == nullptr) return params.tokens_per_sequence;
  return params.token_offsets[sequence + 1] - params.token_offsets[sequence];
}

}  // namespace

namespace {

// Rows in blocks that are worth a thread's while. Gating costs 0.9 ns a value and the norm 0.65 ns an element on one
// thread: below kFewestElements that is about 100 us at most, which stays on one thread, since waking the others gains
// little and, where they share their cores with something else, loses more than it gains.
template <typename Kernel>
void run_rows(std::int64_t rows, std::int64_t row_elements, int num_threads, const Kernel& kernel) {
  constexpr std::int64_t kFewestElements = 131072;
  constexpr std::int64_t kElementsPerItem = 16384;
  if (rows * row_elements < kFewestElements) num_threads = 1;
  const std::int64_t block = std::max<std::int64_t>(1, kElementsPerItem / std::max<std::int64_t>(1, row_elements));
  for_each((rows + block - 1) / block, num_threads, Schedule::kStatic,
           [&](std::int64_t item) { kernel(item * block, std::min(rows, (item + 1) * block)); });
}

template <typename AnyOperand>
std::int64_t element_index(const AnyOperand& x, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return batch * x.batch_stride + token * x.token_stride + head * x.head_stride;
}

// k and decay of token `token` of the call, to record `record` of its slot.
void store_record(const RecurrenceParams& params, std::int64_t slot, std::int64_t record, std::int64_t token) {
  const Replay& replay = *params.replay;
  const std::int64_t size = params.k.dtype == DType::kFloat32 ? 4 : 2;
  for (std::int64_t head = 0; head < params.num_key_heads; ++head) {
    std::memcpy(static_cast<char*>(replay.k.data) + element_index(replay.k, slot, record, head) * size,
                static_cast<const char*>(params.k.data) + element_index(params.k, 0, token, head) * size,
                static_cast<std::size_t>(params.key_dim * size));
  }
  for (std::int64_t head = 0; head < params.num_value_heads; ++head) {
    static_cast<float*>(replay.decay.data)[element_index(replay.decay, slot, record, head)] =
        replay.new_decay[token * params.num_value_heads + head];
  }
}

void store_records(const RecurrenceParams& params, const Indices& live, int num_threads) {
  const std::int64_t row_elements = kMaxRecords * params.num_key_heads * params.key_dim;
  run_rows(static_cast<std::int64_t>(live.size()), row_elements, num_threads,
           [&](std::int64_t begin, std::int64_t end) {
             for (std::int64_t i = begin; i < end; ++i) {
               const std::int64_t sequence = live[static_cast<std::size_t>(i)];
               for (std::int64_t t = 0; t < sequence_length(params, sequence); ++t) {
                 store_record(params, params.source_slots[sequence], t, params.token_offsets[sequence] + t);
               }
             }
           });
}

// Where the tokens of the live sequences end, one batch entry after the other.
std::int64_t end_of_tokens(const RecurrenceParams& params, const Indices& live) {
  if (params.token_offsets == nullptr) return params.num_sequences * params.tokens_per_sequence;
  std::int64_t end = 0;
  for (const std::int64_t sequence : live) end = std::max(end, params.token_offsets[sequence + 1]);
  return end;
}

// Whether a call stores more states than the nearer caches hold. The next call that reads them comes a model's layers
// later: written past the caches, they cost half the traffic.
bool streams_states(const RecurrenceParams& params, const Indices& live) {
  constexpr std::int64_t kCachedBytes = std::int64_t{1} << 20;
  if (params.destination == nullptr) return false;
  std::int64_t states = 0;
  for (const std::int64_t sequence : live) {
    states += params.destination_columns != 0 ? sequence_length(params, sequence) : 1;
  }
  const std::int64_t state_elements = params.num_value_heads * params.key_dim * params.value_dim;
  return states * state_elements * (params.state_dtype == DType::kFloat32 ? 4 : 2) > kCachedBytes;
}

}  // namespace

// Tiles of a head that share a norm over all its columns: whoever finishes the last one applies it.
class SharedNorms {
 public:
  SharedNorms(RecurrenceParams& params, std::int64_t num_rows, std::int64_t num_tokens, std::int64_t num_tiles)
      : unfinished_(new std::atomic<std::int64_t>[static_cast<std::size_t>(num_rows * params.num_value_heads)]),
        outputs_(new float[static_cast<std::size_t>(num_tokens * params.num_value_heads * params.value_dim)]) {
    for (std::int64_t i = 0; i < num_rows * params.num_value_heads; ++i) unfinished_[i] = num_tiles;
    params.unnormed_outputs = outputs_.get();
  }

  bool is_last_tile(std::int64_t row_head) {
    return unfinished_[row_head].fetch_sub(1, std::memory_order_acq_rel) == 1;
  }

 private:
  std::unique_ptr<std::atomic<std::int64_t>[]> unfinished_;
  std::unique_ptr<float[]> outputs_;
};

namespace {

Indices longest_first(const RecurrenceParams& params, const Indices& live) {
  Indices order = live;
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t left, std::int64_t right) {
    return sequence_length(params, left) > sequence_length(params, right);
  });
  return order;
}

}  // namespace

RecurrenceWork::RecurrenceWork(const KernelTable& table, const RecurrenceParams& params, const Indices& live,
                               int num_threads)
    : table_(table), params_(params), live_(live), num_threads_(num_threads) {
  if (live.empty() || params.num_value_heads == 0) return;
  params_.streams_states = streams_states(params, live);
  Indices lengths;
  for (const std::int64_t sequence : live) lengths.push_back(sequence_length(params_, sequence));
  plan_ = plan_recurrence(lengths, params_.num_value_heads, params_.value_dim, num_threads);
  order_ = plan_.is_ragged ? longest_first(params_, live) : live;
  tiles_ = (params_.value_dim + plan_.tile - 1) / plan_.tile;
  const auto rows = static_cast<std::int64_t>(order_.size());
  num_items_ = rows * params_.num_value_heads * tiles_;
  if (params_.norm != nullptr && tiles_ > 1) {
    norms_ = std::make_unique<SharedNorms>(params_, rows, end_of_tokens(params_, live), tiles_);
  }
}

RecurrenceWork::~RecurrenceWork() = default;

RecurrenceItem RecurrenceWork::item_at(std::int64_t index) const {
  const std::int64_t v_begin = index % tiles_ * plan_.tile;
  const std::int64_t row_head = index / tiles_;
  return {order_[static_cast<std::size_t>(row_head / params_.num_value_heads)], row_head % params_.num_value_heads,
          v_begin, std::min(v_begin + plan_.tile, params_.value_dim)};
}

void RecurrenceWork::run_item(std::int64_t index, std::int64_t next) {
  const RecurrenceItem item = item_at(index);
  const RecurrenceItem next_item = item_at(next >= 0 ? next : index);
  table_.recurrence(params_, item, next >= 0 ? &next_item : nullptr, thread_scratch());
  if (norms_ && norms_->is_last_tile(index / tiles_)) table_.recurrence_norm(params_, item.sequence, item.head);
}

void RecurrenceWork::run() {
  for_each_with_next(num_items_, static_cast<int>(plan_.num_threads),
                     plan_.is_ragged ? Schedule::kDynamic : Schedule::kStatic,
                     [this](std::int64_t index, std::int64_t next) { run_item(index, next); });
}

RecurrenceWork::Block RecurrenceWork::claim() {
  std::int64_t begin = unclaimed_.load(std::memory_order_relaxed);
  while (begin < num_items_) {
    const std::int64_t share = plan_.is_ragged ? 1 : (num_items_ - begin) / (2 * std::max(1, num_threads_));
    const std::int64_t end = begin + std::max<std::int64_t>(1, share);
    if (unclaimed_.compare_exchange_weak(begin, end)) return {begin, end};
  }
  return {num_items_, num_items_};
}

void RecurrenceWork::run_share() {
  for (Block block = claim(); block.begin < block.end;) {
    const Block next = claim();
    for (std::int64_t index = block.begin; index < block.end; ++index) {
      const std::int64_t after = index + 1 < block.end ? index + 1 : (next.begin < next.end ? next.begin : kNone);
      run_item(index, after);
    }
    block = next;
  }
}

void RecurrenceWork::finish() const {
  if (params_.replay != nullptr) store_records(params_, live_, num_threads_);
}

void run_recurrence(const KernelTable& table, const RecurrenceParams& params, const Indices& live, int num_threads) {
  RecurrenceWork work(table, params, live, num_threads);
  work.run();
  work.finish();
}

void run_gating(const KernelTable& table, const GatingParams& params, std::int64_t rows, int num_threads) {
  run_rows(rows, params.num_heads, num_threads,
           [&](std::int64_t begin, std::int64_t end) { table.gating(params, begin, end); });
}

void run_rms_norm_gated(const KernelTable& table, const RmsNormGatedParams& params, std::int64_t rows,
                        int num_threads) {
  run_rows(rows, params.dim, num_threads,
           [&](std::int64_t begin, std::int64_t end) { table.rms_norm_gated(params, begin, end); });
}

namespace {

// What one item of the convolution computes, in all channels of a block: enough tokens to be worth preparing the
// filter and fetching the first rows, few enough for ragged rows to spread evenly over threads.
constexpr std::int64_t kTokensPerItem = 128;
// Rows no longer than this are those of decode, a state each.
constexpr std::int64_t kMostStepTokens = 16;

// A row in pieces of kTokensPerItem. In place, a piece would read what the one before it has written: all in one. A
// row without tokens has a piece only to hand its history on.
void append_pieces(const ConvolutionRow& row, bool in_place, SmallVector<ConvolutionPiece>& pieces) {
  if (row.begin == row.end && row.final_slot >= 0) pieces.push_back({&row, row.begin, row.end});
  const std::int64_t step = in_place ? row.end - row.begin : kTokensPerItem;
  for (std::int64_t begin = row.begin; begin < row.end; begin += step) {
    pieces.push_back({&row, begin, std::min(begin + step, row.end)});
  }
}

// Bounds of equal runs of rows, as many as there are threads. Where two threads shared rows by their channels, each
// would fetch ahead beyond its own, into lines that the other has just written. Few rows to a filter would not pay.
Indices share_rows(std::size_t rows, int num_threads) {
  constexpr std::size_t kFewestRows = 4;
  const std::size_t shares = std::clamp<std::size_t>(rows / kFewestRows, 1, static_cast<std::size_t>(num_threads));
  Indices bounds;
  for (std::size_t i = 0; i <= shares; ++i) bounds.push_back(static_cast<std::int64_t>(rows * i / shares));
  return bounds;
}

// Bounds of runs of pieces that have kTokensPerItem tokens together, or are one piece.
Indices group_pieces(const SmallVector<ConvolutionPiece>& pieces) {
  Indices bounds;
  std::int64_t tokens = kTokensPerItem;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::int64_t size = std::max<std::int64_t>(1, pieces.data()[i].end - pieces.data()[i].begin);
    if (tokens + size > kTokensPerItem) {
      bounds.push_back(static_cast<std::int64_t>(i));
      tokens = 0;
    }
    tokens += size;
  }
  bounds.push_back(static_cast<std::int64_t>(pieces.size()));
  return bounds;
}

}  // namespace

void run_causal_conv1d(const KernelTable& table, const ConvolutionParams& params,
                       const SmallVector<ConvolutionRow>& rows, int num_threads) {
  SmallVector<ConvolutionPiece> pieces;
  std::int64_t num_tokens = 0, longest = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    append_pieces(rows.data()[i], params.in_place, pieces);
    const std::int64_t length = rows.data()[i].end - rows.data()[i].begin;
    num_tokens += length;
    longest = std::max(longest, length);
  }
  // 0.25 ns an element: below this, waking other threads costs more than it gains.
  constexpr std::int64_t kFewestElements = 65536;
  if (num_tokens * params.num_channels < kFewestElements) num_threads = 1;
  if (pieces.empty()) return;
  const bool is_decode = longest <= kMostStepTokens;
  const Indices bounds = is_decode ? share_rows(pieces.size(), num_threads) : group_pieces(pieces);
  const auto num_groups = static_cast<std::int64_t>(bounds.size()) - 1;
  const auto blocks_of = [&](std::int64_t channels) { return (params.num_channels + channels - 1) / channels; };
  // Rows and states are read in runs of a block: the longer, the better, as long as all threads have some.
  const bool is_plenty = num_groups * blocks_of(kConvolutionChannels) >= 2 * num_threads;
  const std::int64_t block = is_plenty ? kConvolutionChannels : kConvolutionChannels / 2;
  const std::int64_t blocks = blocks_of(block);
  // States that one core has just written are slow to reach from another: in decode each keeps its rows.
  const Schedule schedule = is_decode ? Schedule::kStatic : Schedule::kDynamic;
  for_each(num_groups * blocks, num_threads, schedule, [&](std::int64_t item) {
    const std::int64_t first = bounds[static_cast<std::size_t>(item / blocks)];
    const std::int64_t last = bounds[static_cast<std::size_t>(item / blocks + 1)];
    const std::int64_t channel = item % blocks * block;
    table.causal_conv1d(params, pieces.data() + first, last - first, channel,
                        std::min(channel + block, params.num_channels));
  });
}

}  // namespace gdn::cpu
