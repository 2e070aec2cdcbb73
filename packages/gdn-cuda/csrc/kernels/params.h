// SPDX-License-Identifier: Apache-2.0
//
// What the decode kernel is given, by value. The host checks all of it except what lies in device memory: offsets,
// slots and counts, which the kernel treats as padding where they are out of range. Strides are in elements.
#pragma once

namespace gdn::cuda {

using Index = long long;

enum class DType : int { kFloat32, kBFloat16, kFloat16 };
enum class Activation : int { kNone, kSilu, kSigmoid };

// [tokens, heads, dim], the last dimension of unit stride; [tokens, heads] where there is one value a head.
struct Operand {
  const void* data;
  DType dtype;
  Index token_stride;
  Index head_stride;
};
struct MutableOperand {
  void* data;
  DType dtype;
  Index token_stride;
  Index head_stride;
};

// [heads] or [dim].
struct Vector {
  const void* data;
  DType dtype;
  Index stride;
};

// int32 or int64, [rows] or [rows, columns]; no data: absent.
struct Indices {
  const void* data;
  bool is_wide;
  Index row_stride;
  Index column_stride;
};

// Several slots a row; one slot and records; one slot and any number of tokens.
enum class Form : int { kSlots, kReplay, kRows };

// Records of what the tokens of the last step did to each slot; see fused_decode.h.
struct Records {
  void* k;  // [slots, records, H, K], the activation dtype of k
  Index k_slot_stride, k_record_stride, k_head_stride;
  float* u;  // [slots, records, HV, V]
  Index u_slot_stride, u_record_stride, u_head_stride;
  float* decay;  // [slots, records, HV]
  Index decay_slot_stride, decay_record_stride, decay_head_stride;
  int* live;  // [slots]
  Index live_stride;
};

// Sizes that the host needs for a launch and the kernel for its addresses.
#ifdef __CUDACC__
#define GDN_HOST_DEVICE __host__ __device__
#else
#define GDN_HOST_DEVICE
#endif

inline constexpr int kMaxThreads = 256;
inline constexpr int kMaxValueDim = 256;
inline constexpr int kRowLanes = 8;  // threads that share a row of the state

// Rows of the state that a thread has a part of. Up to 64 values; with fewer of the wide rows nothing else has to leave
// the registers.
GDN_HOST_DEVICE constexpr int rows_per_thread(int key_dim) { return key_dim > 128 ? 1 : 4; }

inline constexpr int kMaxColumns = 16;        // tokens of a row
inline constexpr int kColumnsOfLongRows = 8;  // tokens at a time of rows that may have more

// Shared memory, in floats: first what there is one of a token, at places that the compiler knows.
namespace shared_at {
inline constexpr int kDecay = 0, kBeta = kMaxColumns, kQk = 2 * kMaxColumns, kOldDecay = 3 * kMaxColumns;
inline constexpr int kDestinations = 4 * kMaxColumns;  // an Index each
inline constexpr int kFlags = 6 * kMaxColumns, kRows = kFlags + 4;
}  // namespace shared_at

// Then rows of the key dimension and of a block's `width` columns of V, for `columns` tokens.
struct SharedRows {
  int q, k, old_k, v, o, end;
};
GDN_HOST_DEVICE constexpr SharedRows shared_rows(int key_dim, int width, int columns, bool replay) {
  SharedRows at{};
  at.q = shared_at::kRows;
  at.k = at.q + columns * key_dim;
  at.old_k = at.k + columns * key_dim;
  at.v = at.old_k + (replay ? columns * key_dim : 0);
  at.o = at.v + columns * width;
  at.end = at.o + columns * width;
  return at;
}

struct DecodeParams {
  Operand q, k, v;  // q and k of H heads, v of HV
  Operand a, b;     // one value per value head
  Operand gate;     // of the output; not read with Activation::kNone
  Vector A_log, dt_bias;
  Vector norm_weight;  // no data: no norm
  MutableOperand out;

  Indices cu_seqlens;           // [num_table_rows + 1], absent: one token a row
  Indices num_accepted_tokens;  // [num_table_rows], absent: 1 everywhere
  Indices slots;                // [num_table_rows, num_columns], else [num_table_rows]
  Indices row_indices;          // [num_rows]: which rows of the tables the call runs; absent: all

  void* state;  // [num_slots, HV, V, K], the inside of a slot packed
  Index slot_stride;
  Index num_slots;
  Records records;  // with replay only

  // Zero between launches, and left so: the blocks of a row and of a row's head that are done.
  unsigned* row_counters;   // [num_rows], with replay
  unsigned* head_counters;  // [num_rows, HV], with a norm over several blocks
  float* partial_outputs;   // [num_rows, num_columns, HV, V], the same

  Index num_rows;
  Index num_table_rows;
  Index row_blocks;  // blocks in x / num_splits, at least num_rows
  Index num_tokens;
  Index null_slot;
  int num_columns;  // most tokens of a row; of long rows, most that are in shared memory
  int num_key_heads;
  int num_value_heads;
  int value_dim;
  int num_splits;  // blocks that share the columns of one head
  bool has_null_slot;
  bool normalize_qk;
  Activation gate_activation;
  float softplus_beta, softplus_threshold;
  float scale;
  float norm_eps;
};

}  // namespace gdn::cuda
