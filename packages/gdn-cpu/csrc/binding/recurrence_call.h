// SPDX-License-Identifier: Apache-2.0
//
// What the operations that are the recurrence have in common: checks of their operands, and running the rows of a call.
#pragma once

#include "arguments.h"
#include "decode_ops.h"

namespace gdn::cpu {

// Heads must fit the kernels.
void check_head_dims(const Sizes& s);

void set_sizes(RecurrenceParams& params, const Sizes& s);
void set_scale(RecurrenceParams& params, handle scale);

// A state tensor [first, HV, K, V] or, V-first, [first, HV, V, K].
DType check_state(const TensorView& view, Name name, Dim first, const Sizes& s, bool state_v_first);

// A pool of states that is updated in place, and where it lies.
void set_pool(RecurrenceParams& params, const TensorView& pool, Name name, const Sizes& s, handle state_v_first);

// The raw inputs of the gates, [T, HV].
void set_raw_gates(RecurrenceParams& params, const Sizes& s, const TensorView& A_log, const TensorView& dt_bias,
                   const TensorView& a, const TensorView& b);

Sizes check_decode(const DecodeArguments& args, RecurrenceParams& params);

// Takes q, k and v as they lie, or copies of them, also where out lies on them; after all checks.
void set_qkv(RecurrenceParams& params, TensorView& q, TensorView& k, TensorView& v, const TensorView& out);

// Copies of the gates' inputs where out lies on them; after all checks.
void keep_gates(RecurrenceParams& params, TensorView& gate, TensorView& beta, const TensorView& out);

// The rows of a call: where each one's tokens and states are. The vectors outlive the kernel.
struct RowPlan {
  Indices offsets;            // [N + 1], or empty: one batch entry (or one token) a row
  Indices sources;            // [N], negative: starts from zero
  Indices destinations;       // [N] or [N, destination_columns], negative: not stored
  SmallVector<bool> padding;  // [N]: computes nothing
  // The rows that the call is about, where it leaves others alone, and tokens in no row.
  bool names_rows = false;
  Indices named;

  void name_rows(const TensorView& row_indices, std::int64_t rows);
  // Calls body(row) for the rows that the call is about.
  template <class Body>
  void for_each_row(std::int64_t rows, const Body& body) const {
    for (std::int64_t i = 0; i < (names_rows ? static_cast<std::int64_t>(named.size()) : rows); ++i) {
      body(names_rows ? named[static_cast<std::size_t>(i)] : i);
    }
  }
};

// Rows that are no padding have at most so many tokens.
void check_row_lengths(const RowPlan& plan, Name name, std::int64_t rows, std::int64_t most);

std::int64_t row_begin(const RowPlan& plan, const RecurrenceParams& params, std::int64_t row);

// Zeroes the outputs of tokens [begin, end) of a packed batch; tokens of different batch entries are numbered on.
void zero_tokens(const RecurrenceParams& params, std::int64_t tokens_per_batch, std::int64_t begin, std::int64_t end);

// The kernel of the chunked rule for activations of `dtype`.
const ChunkKernel& chunk_kernel_of(const RecurrenceParams& params, DType dtype);

// How the tokens of a row are run.
enum class Method {
  kTokenByToken,
  kChunked,
};

// Runs the rows that are no padding, and zeroes the outputs that none of them computes.
void execute(RecurrenceParams& params, RowPlan& plan, std::int64_t tokens_per_batch,
             Method method = Method::kTokenByToken);

}  // namespace gdn::cpu
