// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution: whole sequences, and steps on a pool of last inputs.
#include <algorithm>
#include <cstring>

#include "convolution_call.h"
#include "dispatch/levels.h"
#include "ops.h"
#include "runtime/parallel.h"

namespace gdn::cpu {

bool is_silu(handle activation) {
  if (activation.is_none()) return false;
  if (PyUnicode_Check(activation.ptr())) {
    const char* utf8 = PyUnicode_AsUTF8AndSize(activation.ptr(), nullptr);
    if (utf8 == nullptr) throw nb::python_error();
    const std::string_view text = utf8;
    if (text == "silu" || text == "swish") return true;
  }
  raise_value(cat({"activation: expected one of None, 'silu', 'swish', got ", nb::repr(activation).c_str()}));
}

void set_filter(ConvolutionParams& params, const TensorView& weight, const TensorView& bias) {
  params.weight_dtype = check_floating(weight, "weight", {params.num_channels, "W"});
  params.width = weight.size(1);
  if (params.width < 2 || params.width > kMaxConvolutionWidth) {
    raise_value(cat({"weight: expected a width of 2 to 5, got ", describe(weight)}));
  }
  params.weight = weight.data();
  params.weight_channel_stride = weight.stride(0);
  params.weight_tap_stride = weight.stride(1);
  if (!bias.is_none()) params.bias = head_vector(bias, "bias", params.num_channels);
}

ConvolutionStates states_of(const TensorView& view) {
  return {view.data(), *floating_dtype<DType>(view), view.stride(0), view.stride(1), view.stride(2)};
}

void check_pool(const TensorView& pool, Name name, const ConvolutionParams& params) {
  check_floating(pool, name, {"P", params.num_channels, "state_len"});
  if (pool.size(2) < params.width - 1) {
    raise_value(
        cat({name, ": expected a state_len of at least ", std::to_string(params.width - 1), ", got ", describe(pool)}));
  }
  check_separate_elements(pool, name);
}

namespace {

using Rows = SmallVector<ConvolutionRow>;

void check_slot_count(const TensorView& pool, Name name, std::int64_t rows) {
  if (pool.size(0) < rows) {
    raise_value(cat({name, ": expected at least ", std::to_string(rows), " slots, got ", describe(pool)}));
  }
}

// Slot n for row n where there are no indices; padding becomes -1.
Indices row_slots(const TensorView& indices, Name name, std::int64_t rows, std::int64_t pool_size,
                  std::optional<std::int64_t> null_slot) {
  if (!indices.is_none()) return slot_indices(indices, name, rows, pool_size, null_slot);
  Indices slots;
  for (std::int64_t row = 0; row < rows; ++row) slots.push_back(row == null_slot ? -1 : row);
  return slots;
}

// Which dimensions of x and out are batch, token and channel; -1 for one that they lack.
struct Axes {
  int batch, token, channel;
};

std::int64_t stride_of(const TensorView& view, int axis) { return axis < 0 ? 0 : view.stride(axis); }
std::int64_t size_of(const TensorView& view, int axis) { return axis < 0 ? 1 : view.size(axis); }

// Columns [i, i + C) of the rows of one buffer, each with its own i, as parts of a projection are: they do not overlap
// though their spans do.
bool are_columns_of_one_buffer(const TensorView& left, const TensorView& right, const Axes& axes) {
  const std::int64_t size = left.dl.dtype.bits / 8;
  const std::int64_t channels = left.size(axes.channel);
  const int outer = axes.token >= 0 ? axes.token : axes.batch;
  if (left.ndim() != 2 || outer < 0 || left.dl.dtype.bits != right.dl.dtype.bits) return false;
  const std::int64_t pitch = left.stride(outer);
  if (right.stride(outer) != pitch || left.stride(axes.channel) != 1 || right.stride(axes.channel) != 1) return false;
  const std::int64_t bytes = static_cast<const char*>(right.data()) - static_cast<const char*>(left.data());
  if (pitch < channels || bytes % size != 0) return false;
  const std::int64_t shift = ((bytes / size) % pitch + pitch) % pitch;
  return shift >= channels && pitch - shift >= channels;
}

// x and out where they lie; out may be x itself. Where what is written lies on x in another way, x is copied first.
void set_operands(ConvolutionParams& params, TensorView& x, const TensorView& out, const Axes& axes,
                  std::initializer_list<const TensorView*> states) {
  params.in_place = same_elements(x, out);
  bool overlaps = !params.in_place && may_overlap(x, out) && !are_columns_of_one_buffer(x, out, axes);
  for (const TensorView* state : states) overlaps = overlaps || (!state->is_none() && may_overlap(x, *state));
  if (overlaps) {
    copy_into_view(x);
    params.in_place = false;
  }
  params.x = {x.data(), *floating_dtype<DType>(x), stride_of(x, axes.batch), stride_of(x, axes.token),
              x.stride(axes.channel)};
  params.out = {out.data(), *floating_dtype<DType>(out), stride_of(out, axes.batch), stride_of(out, axes.token),
                out.stride(axes.channel)};
  params.stream_out = out.numel() * (out.dl.dtype.bits / 8) >= kFewestStreamedBytes;
}

void check_out(const TensorView& out, const TensorView& x) {
  check_readable(out, "out");
  if (!floating_dtype<DType>(out)) raise_floating(out, "out", list_text(x.dl.shape, x.ndim()));
  const bool same =
      out.ndim() == x.ndim() &&
      std::memcmp(out.dl.shape, x.dl.shape, sizeof(std::int64_t) * static_cast<std::size_t>(x.ndim())) == 0;
  if (!same) raise_value(cat({"out: expected ", list_text(x.dl.shape, x.ndim()), ", got ", describe(out)}));
  check_separate_elements(out, "out");
}

// The rows of packed tokens, or of a batch.
class RowList {
 public:
  // With `covers_all`, tokens that are in none of them are rows of padding.
  RowList(const Indices& offsets, std::int64_t batch, std::int64_t tokens, bool covers_all = true)
      : packed_(!offsets.empty()) {
    if (!packed_) {
      for (std::int64_t n = 0; n < batch; ++n) append(n, 0, tokens);
      return;
    }
    for (std::size_t n = 0; n + 1 < offsets.size(); ++n) append(0, offsets[n], offsets[n + 1]);
    count_ = static_cast<std::int64_t>(rows.size());
    if (!covers_all) return;
    append_padding(0, offsets.front());
    append_padding(offsets.back(), tokens);
  }

  [[nodiscard]] std::int64_t size() const { return packed_ ? count_ : static_cast<std::int64_t>(rows.size()); }
  ConvolutionRow& operator[](std::int64_t n) { return rows.data()[n]; }

  Rows rows;

 private:
  void append(std::int64_t batch, std::int64_t begin, std::int64_t end) {
    ConvolutionRow row;
    row.batch = batch;
    row.begin = begin;
    row.end = end;
    rows.push_back(row);
  }
  void append_padding(std::int64_t begin, std::int64_t end) {
    append(0, begin, end);
    rows.data()[rows.size() - 1].is_padding = true;
  }

  bool packed_;
  std::int64_t count_ = 0;
};

void run(const ConvolutionParams& params, const Rows& rows) {
  const KernelTable& kernels = *active_level().kernels;
  const int threads = num_threads();
  nb::gil_scoped_release unlocked;
  run_causal_conv1d(kernels, params, rows, threads);
}

// --- segments ---

// [B, T] numbers of any stride.
class Segments {
 public:
  explicit Segments(const TensorView& view) : view_(view), wide_(is_dtype(view, dlpack::kInt, 64)) {}
  [[nodiscard]] std::int64_t at(std::int64_t batch, std::int64_t token) const {
    const std::int64_t index = batch * view_.stride(0) + token * view_.stride(1);
    return wide_ ? static_cast<const std::int64_t*>(view_.data())[index]
                 : static_cast<const std::int32_t*>(view_.data())[index];
  }

 private:
  const TensorView& view_;
  bool wide_;
};

// A run of tokens of one segment; of the inputs before it, those of the same segment are its history.
ConvolutionRow segment_row(const Segments& segments, std::int64_t batch, std::int64_t begin, std::int64_t end,
                           std::int64_t width) {
  ConvolutionRow row;
  row.batch = batch;
  row.begin = begin;
  row.end = end;
  const std::int64_t segment = segments.at(batch, begin);
  row.is_padding = segment < 0;
  for (std::int64_t i = 0; i < width - 1; ++i) {
    const std::int64_t token = begin - (width - 1) + i;
    if (token >= 0 && segments.at(batch, token) == segment) row.input_history |= 1u << i;
  }
  return row;
}

Rows segment_rows(const TensorView& seq_idx, std::int64_t width) {
  const Segments segments(seq_idx);
  Rows rows;
  for (std::int64_t batch = 0; batch < seq_idx.size(0); ++batch) {
    for (std::int64_t begin = 0, end = 0; begin < seq_idx.size(1); begin = end) {
      while (end < seq_idx.size(1) && segments.at(batch, end) == segments.at(batch, begin)) ++end;
      rows.push_back(segment_row(segments, batch, begin, end, width));
    }
  }
  return rows;
}

void check_segments(const TensorView& seq_idx, std::int64_t batch, std::int64_t tokens) {
  check_readable(seq_idx, "seq_idx");
  if (!is_dtype(seq_idx, dlpack::kInt, 64) && !is_dtype(seq_idx, dlpack::kInt, 32)) {
    raise_type(cat({"seq_idx: expected int32 or int64 ", shape_text({batch, tokens}), ", got ", describe(seq_idx)}));
  }
  check_shape(seq_idx, "seq_idx", {batch, tokens});
}

}  // namespace

void causal_conv1d_fn(TensorView& x, TensorView& weight, TensorView& bias, TensorView& seq_idx,
                      TensorView& initial_states, handle activation, TensorView& conv_states,
                      TensorView& query_start_loc, TensorView& cache_indices, TensorView& has_initial_state,
                      handle null_slot, TensorView& out, TensorView& final_states, bool dry_run) {
  const bool packed = !query_start_loc.is_none();
  const Axes axes = packed ? Axes{-1, 1, 0} : Axes{0, 2, 1};
  if (packed) {
    integers(query_start_loc, "query_start_loc", "N+1");
    check_floating(x, "x", {"C", "T"});
  } else {
    check_floating(x, "x", {"B", "C", "T"});
  }
  ConvolutionParams params;
  params.num_channels = x.size(axes.channel);
  const std::int64_t tokens = x.size(axes.token);
  set_filter(params, weight, bias);
  params.silu = is_silu(activation);
  const Indices offsets = packed ? row_offsets(query_start_loc, "query_start_loc", tokens) : Indices();
  RowList list(offsets, size_of(x, axes.batch), tokens);
  const std::int64_t rows = list.size();
  params.num_columns = params.width - 1;

  if (!seq_idx.is_none()) {
    const std::pair<Name, const TensorView*> others[] = {{"query_start_loc", &query_start_loc},
                                                         {"conv_states", &conv_states},
                                                         {"initial_states", &initial_states},
                                                         {"has_initial_state", &has_initial_state},
                                                         {"return_final_states", &final_states}};
    for (const auto& [name, other] : others) {
      if (!other->is_none()) raise_value(cat({"seq_idx: expected None with ", name, ", got a tensor"}));
    }
    check_segments(seq_idx, rows, tokens);
  }
  if (!initial_states.is_none()) {
    if (!conv_states.is_none()) raise_value("initial_states: expected None with conv_states, got a tensor");
    check_floating(initial_states, "initial_states", {rows, params.num_channels, params.width - 1});
  }
  const std::optional<std::int64_t> null = optional_integer(null_slot, "null_slot");
  Indices slots;
  if (!conv_states.is_none()) {
    check_pool(conv_states, "conv_states", params);
    if (cache_indices.is_none()) check_slot_count(conv_states, "conv_states", rows);
    slots = row_slots(cache_indices, "cache_indices", rows, conv_states.size(0), null);
  } else if (!cache_indices.is_none()) {
    raise_value("conv_states: expected a pool with cache_indices, got None");
  }
  const SmallVector<bool> has_state = booleans(has_initial_state, "has_initial_state", rows);
  check_out(out, x);
  if (!final_states.is_none()) {
    check_floating(final_states, "final_states_out", {rows, params.num_channels, params.width - 1});
    check_separate_elements(final_states, "final_states_out");
  }
  if (dry_run) return;

  for (std::int64_t n = 0; n < rows; ++n) {
    ConvolutionRow& row = list[n];
    const std::int64_t slot = slots.empty() ? n : slots[static_cast<std::size_t>(n)];
    const bool is_empty = row.begin == row.end;
    const bool has_source = !conv_states.is_none() || !initial_states.is_none();
    row.is_padding = slot < 0;
    // An empty row keeps its state, a fresh one too.
    if (has_source && (is_empty || has_state[static_cast<std::size_t>(n)])) row.source = slot;
    if (!conv_states.is_none() && !is_empty) row.destination = slot;
    if (!final_states.is_none()) row.final_slot = n;
  }
  if (!conv_states.is_none()) params.source = params.destination = states_of(conv_states);
  if (!initial_states.is_none()) {
    const bool misaligned = !final_states.is_none() && may_overlap(initial_states, final_states) &&
                            !same_elements(initial_states, final_states);
    if (misaligned) copy_into_view(initial_states);
    params.source = states_of(initial_states);
  }
  if (!final_states.is_none()) params.final_states = states_of(final_states);
  // A segment may resume after others, whose y would by then lie on its inputs.
  if (!seq_idx.is_none() && may_overlap(x, out)) copy_into_view(x);
  set_operands(params, x, out, axes, {&conv_states, &final_states});
  if (seq_idx.is_none()) {
    run(params, list.rows);
  } else {
    run(params, segment_rows(seq_idx, params.width));
  }
}

void causal_conv1d_update(TensorView& x, TensorView& conv_state, TensorView& weight, TensorView& bias,
                          handle activation, TensorView& cache_seqlens, TensorView& conv_state_indices,
                          TensorView& num_accepted_tokens, TensorView& query_start_loc, handle null_slot,
                          TensorView& row_indices, TensorView& out, bool dry_run) {
  const bool packed = !query_start_loc.is_none();
  Indices offsets;
  Axes axes{0, -1, 1};
  if (packed) {
    integers(query_start_loc, "query_start_loc", "N+1");
    axes = {-1, 0, 1};
    check_floating(x, "x", {"T", "C"});
    offsets = row_offsets(query_start_loc, "query_start_loc", x.size(0));
  } else {
    check_readable(x, "x");
    if (x.ndim() == 3) {
      axes.token = 2;
      check_floating(x, "x", {"B", "C", "q"});
    } else {
      check_floating(x, "x", {"B", "C"});
    }
  }
  RowList list(offsets, size_of(x, axes.batch), size_of(x, axes.token), row_indices.is_none());
  const std::int64_t rows = list.size();
  const Indices named = named_rows(row_indices, rows);
  ConvolutionParams params;
  params.num_channels = x.size(axes.channel);
  set_filter(params, weight, bias);
  params.silu = is_silu(activation);
  check_pool(conv_state, "conv_state", params);
  params.num_columns = conv_state.size(2);
  const std::optional<std::int64_t> null = optional_integer(null_slot, "null_slot");
  if (conv_state_indices.is_none()) check_slot_count(conv_state, "conv_state", rows);
  const Indices slots = row_slots(conv_state_indices, "conv_state_indices", rows, conv_state.size(0), null);
  if (!row_indices.is_none() && (!packed || conv_state_indices.is_none())) {
    raise_value("row_indices: expected query_start_loc and conv_state_indices with it, got None");
  }
  SmallVector<bool> is_named(static_cast<std::size_t>(rows), row_indices.is_none());
  for (const std::int64_t n : named) is_named[static_cast<std::size_t>(n)] = true;

  Indices positions;
  if (!num_accepted_tokens.is_none()) {
    const std::int64_t most = params.num_columns - params.width + 2;
    positions = accepted_tokens(num_accepted_tokens, "num_accepted_tokens", rows, most,
                                row_indices.is_none() ? nullptr : &named);
    std::int64_t longest = 0;
    for (std::int64_t n = 0; n < rows; ++n) {
      const auto i = static_cast<std::size_t>(n);
      if (is_named[i] && slots[i] >= 0) longest = std::max(longest, list[n].end - list[n].begin);
    }
    if (longest > most) {
      raise_value(cat({"x: expected rows of at most ", std::to_string(most), " tokens for a state_len of ",
                       std::to_string(params.num_columns), ", got ", std::to_string(longest)}));
    }
    params.update = ConvolutionUpdate::kRollback;
  }
  if (!cache_seqlens.is_none()) {
    if (!num_accepted_tokens.is_none() || packed) {
      raise_value("cache_seqlens: expected None with num_accepted_tokens or query_start_loc, got a tensor");
    }
    positions = integers(cache_seqlens, "cache_seqlens", rows);
    params.update = ConvolutionUpdate::kRing;
  }
  check_out(out, x);
  if (dry_run) return;

  const auto first_column = [&](std::int64_t n) -> std::int64_t {
    if (params.update == ConvolutionUpdate::kShift) return params.num_columns - (params.width - 1);
    const std::int64_t position = positions[static_cast<std::size_t>(n)];
    if (params.update == ConvolutionUpdate::kRollback) return position - 1;
    // Remainders of negative numbers are negative.
    const std::int64_t wrapped = (position % params.num_columns - (params.width - 1)) % params.num_columns;
    return (wrapped + params.num_columns) % params.num_columns;
  };
  for (std::int64_t n = 0; n < rows; ++n) {
    ConvolutionRow& row = list[n];
    row.source = row.destination = slots[static_cast<std::size_t>(n)];
    row.is_padding = row.source < 0;
    row.first_column = row.is_padding ? 0 : first_column(n);
  }
  params.source = params.destination = states_of(conv_state);
  set_operands(params, x, out, axes, {&conv_state});
  if (row_indices.is_none()) return run(params, list.rows);
  SmallVector<ConvolutionRow> chosen;
  for (const std::int64_t n : named) chosen.push_back(list[n]);
  run(params, chosen);
}

}  // namespace gdn::cpu
