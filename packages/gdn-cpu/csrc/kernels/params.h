// SPDX-License-Identifier: Apache-2.0
//
// What a kernel is given: raw pointers, dtypes and strides, already checked by the binding.
// All strides are in elements. Nothing here knows of Python, torch or threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdn::cpu {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

// A read-only operand indexed by (batch, token, head); its last dimension has unit stride.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// The same for what is written.
struct MutableOperand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// One value per head: A_log, dt_bias.
struct HeadVector {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t stride = 1;
};

enum class Gate : std::uint8_t {
  kRaw,       // g = -exp(A_log) * softplus(a + dt_bias), from `gate` (a), `A_log`, `dt_bias`
  kLogDecay,  // `gate` is g itself
  kNone,      // g = 0
};

enum class Beta : std::uint8_t {
  kLogit,  // beta = sigmoid(b), from `beta` (b)
  kValue,  // `beta` is beta itself
  kOne,    // beta = 1
};

enum class GateActivation : std::uint8_t { kSilu, kSigmoid, kNone };

// The gated norm that a decode step may end in: out = o * rsqrt(mean(o * o) + eps) * weight * act(gate) per token and
// head, where o stays in fp32.
struct GatedNorm {
  Operand gate;
  HeadVector weight;  // [value_dim]
  float eps = 0.0f;
  GateActivation activation = GateActivation::kSilu;
};

// Records of what tokens did to the state of a slot: M = decay M + k u^T each. A call first replays the oldest
// `counts[n]` records of the source slot of sequence n into its state, and stores that; its tokens then run from the
// stored state, which they leave as it is, and are recorded in turn. Batch strides are those of slots, token strides
// those of records.
struct Replay {
  MutableOperand k;                      // per key head, as they came, not normalised
  MutableOperand u;                      // fp32, per value head; an item replaces those of its columns
  MutableOperand decay;                  // fp32, one value per value head
  const std::int64_t* counts = nullptr;  // [num_sequences], at most kMaxRecords
  // [tokens, num_value_heads], of the call's own tokens. Other items may still read k and decay of the slot: whoever
  // has run all of them stores the new ones.
  float* new_decay = nullptr;
};
inline constexpr std::int64_t kMaxRecords = 16;

// The gated delta rule over `num_sequences` rows of tokens. Per (sequence n, value head h), with the state M [K, V]:
//   M = exp(g) M;  u = beta (v - k M);  M = M + k u^T;  o = scale (q M)
// Key head of value head h: h / (num_value_heads / num_key_heads).
struct RecurrenceParams {
  std::int64_t num_sequences = 0;
  std::int64_t num_key_heads = 0;
  std::int64_t num_value_heads = 0;
  std::int64_t key_dim = 0;    // K, at most kMaxHeadDim
  std::int64_t value_dim = 0;  // V, at most kMaxHeadDim

  // Tokens of sequence n: [token_offsets[n], token_offsets[n + 1]) of batch 0; without token_offsets,
  // [0, tokens_per_sequence) of batch n.
  const std::int64_t* token_offsets = nullptr;
  std::int64_t tokens_per_sequence = 0;

  Operand q, k, v;
  Operand gate;  // one value per (batch, token, head); any head_stride
  Operand beta;  // the same
  Gate gate_kind = Gate::kNone;
  Beta beta_kind = Beta::kOne;
  bool double_beta = false;  // allow_neg_eigval: beta * 2, after the sigmoid
  HeadVector A_log, dt_bias;
  float softplus_beta = 1.0f;
  float softplus_threshold = 20.0f;
  float scale = 1.0f;
  bool normalize_qk = false;  // x * rsqrt(sum(x * x) + 1e-6) in fp32

  MutableOperand out;
  const GatedNorm* norm = nullptr;  // optional
  // [tokens, num_value_heads, value_dim] of a call with a norm whose items do not have all columns: they leave o here,
  // and recurrence_norm does the rest.
  float* unnormed_outputs = nullptr;

  // State of (sequence n, head h): data + index * slot_stride + h * K * V, packed inside,
  // [K, V] or (state_v_first) [V, K]. Source and destination may be the same memory.
  DType state_dtype = DType::kFloat32;
  bool state_v_first = false;
  const void* source = nullptr;
  std::int64_t source_slot_stride = 0;
  const std::int64_t* source_slots = nullptr;  // [num_sequences]; negative: start from zero, read nothing
  void* destination = nullptr;
  std::int64_t destination_slot_stride = 0;
  // [num_sequences], where the last token leaves the state; or, with destination_columns, [num_sequences,
  // destination_columns], where token t leaves it; or, with replay, [num_sequences], where what is replayed is stored.
  // Negative: store nothing.
  const std::int64_t* destination_slots = nullptr;
  std::int64_t destination_columns = 0;
  const Replay* replay = nullptr;  // optional
  // Slots other than the source are written past the caches: for more states than these hold.
  bool streams_states = false;

  // Optional fp32 states after 0, 64, 128, ... tokens of each sequence (ceil(len / 64) of them), packed, in the
  // layout of the state: chunk_states + (chunk_offsets[n] + i) * HV * K * V + h * K * V.
  float* chunk_states = nullptr;
  const std::int64_t* chunk_offsets = nullptr;
};

// g and beta from raw a and b; rows of `num_heads` values.
struct GatingParams {
  std::int64_t num_heads = 0;
  Operand a, b;  // row r: data + r * token_stride, unit head stride
  HeadVector A_log, dt_bias;
  float softplus_beta = 1.0f;
  float softplus_threshold = 20.0f;
  float* g = nullptr;     // [rows, num_heads] packed
  float* beta = nullptr;  // [rows, num_heads] packed
};

// Rows of a tensor whose leading dimensions were merged to at most four: row r has the mixed-radix index of `sizes`.
struct Rows {
  static constexpr int kMaxDims = 4;
  DType dtype = DType::kFloat32;
  std::int64_t strides[kMaxDims] = {0, 0, 0, 0};
};

// y = x * rsqrt(mean(x * x) + eps) * weight * act(gate), per row of `dim` values, fp32 until the store.
struct RmsNormGatedParams {
  std::int64_t dim = 0;
  std::int64_t sizes[Rows::kMaxDims] = {1, 1, 1, 1};
  const void* x = nullptr;
  Rows x_rows;
  const void* gate = nullptr;
  Rows gate_rows;
  void* out = nullptr;  // may be x or gate itself
  Rows out_rows;
  HeadVector weight;  // [dim]
  float eps = 0.0f;
  GateActivation activation = GateActivation::kSilu;
};

// The last inputs of sequences, [slots, channels, columns] in any memory order.
struct ConvolutionStates {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t slot_stride = 0;
  std::int64_t channel_stride = 0;
  std::int64_t column_stride = 0;
};

// What a sequence of n tokens leaves in the columns of its state, of the inputs joined = cat(source columns, x).
enum class ConvolutionUpdate : std::uint8_t {
  kShift,     // all columns: the last ones of `joined`
  kRollback,  // columns 0 .. W-2+n-1: the history without its oldest, then x
  kRing,      // columns (first_column + W-1 + t) % num_columns: x[t], for the last num_columns tokens
};

// Tokens [begin, end) of one batch entry that follow one history.
struct ConvolutionRow {
  std::int64_t batch = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t source = -1;       // slot of the history; negative: zeros, but what input_history says
  std::int64_t first_column = 0;  // of the history in the source; modulo num_columns
  std::int64_t destination = -1;  // slot that is updated; negative: none
  std::int64_t final_slot = -1;   // where the last W-1 inputs go as well; negative: nowhere
  unsigned input_history = 0;     // bit i: history i is x of token begin - (W-1) + i
  bool is_padding = false;        // the outputs are zeros
};

// A share of a row, tokens [begin, end). The first share of a row also updates the state.
struct ConvolutionPiece {
  const ConvolutionRow* row;
  std::int64_t begin;
  std::int64_t end;
};

// y_t = act(bias + sum_j weight[:, j] x[t - (W-1) + j]), per channel, over the tokens of rows.
struct ConvolutionParams {
  std::int64_t num_channels = 0;
  std::int64_t width = 0;  // W, from 2 to kMaxConvolutionWidth
  Operand x;               // head strides are those of channels; any strides
  MutableOperand out;      // the same; x itself with in_place
  bool in_place = false;
  bool stream_out = false;       // past the caches, which do not hold that much anyway
  const void* weight = nullptr;  // [C, W]
  DType weight_dtype = DType::kFloat32;
  std::int64_t weight_channel_stride = 0;
  std::int64_t weight_tap_stride = 0;
  HeadVector bias;  // [C]; without data: zeros
  bool silu = false;

  std::int64_t num_columns = 0;  // of source and destination
  ConvolutionStates source;      // may be the destination or the final states themselves
  ConvolutionStates destination;
  ConvolutionUpdate update = ConvolutionUpdate::kShift;
  ConvolutionStates final_states;  // [rows, C, W-1]
};
inline constexpr std::int64_t kMaxConvolutionWidth = 5;
inline constexpr std::int64_t kConvolutionChannels = 1024;  // at most, of one call of the kernel

inline constexpr std::int64_t kMaxHeadDim = 256;
inline constexpr std::int64_t kMaxBlockTokens = 16;
inline constexpr std::size_t kScratchAlignment = 64;

// Working memory of the recurrence, one a thread.
struct alignas(kScratchAlignment) RecurrenceScratch {
  float state[kMaxHeadDim * kMaxHeadDim];  // of one head, between tokens
  float qk[8 * kMaxHeadDim];               // q and k of a few tokens
  float q_factor[kMaxBlockTokens];         // their inverse norms, and products of q and k
  float k_factor[kMaxBlockTokens];
  float qk_product[kMaxBlockTokens];
  float decay[kMaxBlockTokens];  // of the same tokens, or of one token for several value heads
  float beta[kMaxBlockTokens];
  float outputs[kMaxBlockTokens * kMaxHeadDim];  // of the same tokens, where a norm follows
  float record_k[kMaxRecords * kMaxHeadDim];
  float record_k_factor[kMaxRecords];
  float record_u[kMaxRecords * kMaxHeadDim];

  // What an item leaves to the one that it named as the next: q and k of all tokens of a sequence and key head, with
  // its records, and the gates of a sequence's only token for some value heads. Sequence -1: of none.
  bool is_followed = false;
  std::int64_t key_sequence = -1, key_head = 0;
  std::int64_t gate_sequence = -1, gate_head_begin = 0, gate_head_end = 0;
};

// A share of a recurrence: value columns [v_begin, v_end) of one head of a sequence, multiples of 16 or V itself.
struct RecurrenceItem {
  std::int64_t sequence, head;
  std::int64_t v_begin, v_end;
};

// Products of OpenBLAS, as its cblas.h declares them: row-major c [m, n] = alpha op(a) op(b) + beta c. Null where the
// library has none.
struct Blas {
  static constexpr int kRowMajor = 101, kAsIs = 111, kTransposed = 112;
  template <class T>
  using Gemm = void (*)(int order, int op_a, int op_b, int m, int n, int k, float alpha, const T* a, int row_stride_a,
                        const T* b, int row_stride_b, float beta, float* c, int row_stride_c);
  Gemm<float> sgemm = nullptr;
  Gemm<std::uint16_t> sbgemm = nullptr;  // of bf16
};

// A share of the chunked rule: chunks of kChunkTokens tokens of one sequence, for some value heads and columns of v.
struct ChunkTask {
  std::int64_t sequence = 0;
  std::int64_t head_begin = 0, head_end = 0;
  std::int64_t v_begin = 0, v_end = 0;          // multiples of the kernel's column_step or V itself
  std::int64_t token_begin = 0, token_end = 0;  // of the sequence; token_begin is a multiple of kChunkTokens
  // Where the state is read from and left in place of the call's own source and destination: fp32, [heads, K, V] in the
  // layout of the state. Null: the call's own.
  const float* carried_in = nullptr;
  float* carried_out = nullptr;
  const Blas* blas = nullptr;  // for a kernel that calls it
  // What the thread will probably be given next, null if unknown: its first rows and state are asked for meanwhile.
  const ChunkTask* next = nullptr;
};
inline constexpr std::int64_t kChunkTokens = 64;

// The same for one head, chunk by chunk, where threads share a sequence. Between steps the state is in the workspace;
// or, if the outputs are left to others, in memory that is kept for them.
struct ChunkStep {
  ChunkTask task;                 // of one chunk; token_begin and token_end of no matter where states are moved
  std::int64_t tokens_end = 0;    // of the steps that follow
  void* prepared = nullptr;       // what prepare() has left; null: the step does it for itself
  void* next_prepared = nullptr;  // the same of the next step, to ask for meanwhile; null: it is not there yet
  void* kept = nullptr;           // the state before the chunk, and what its outputs need; null: in the workspace
  void* next_kept = nullptr;      // where the state goes
};

struct ChunkSteps {
  std::int64_t (*prepared_bytes)(std::int64_t key_dim, std::int64_t heads);  // value heads of one key head
  std::int64_t (*kept_bytes)(std::int64_t key_dim, std::int64_t columns);
  // What does not depend on the state, for a chunk of all value heads of a key head.
  void (*prepare)(const RecurrenceParams& params, const ChunkTask& task, void* prepared, void* workspace);
  void (*begin)(const RecurrenceParams& params, const ChunkStep& step, void* workspace);  // loads the state
  // Returns whether outputs are left: where the step keeps what they need, and no reset cuts the chunk.
  bool (*run)(const RecurrenceParams& params, const ChunkStep& step, void* workspace);
  void (*output)(const RecurrenceParams& params, const ChunkStep& step, void* workspace);  // on any thread
  void (*end)(const RecurrenceParams& params, const ChunkStep& step, void* workspace);     // stores it
};

// One way to run it. As with the recurrence, values do not depend on how the work is divided: not on the heads and
// columns of a task, nor on where it begins and ends, as long as that is between chunks.
struct ChunkKernel {
  const char* engine;
  bool multiplies_bf16;      // takes bf16 activations only
  bool calls_blas;           // sgemm, or sbgemm where it multiplies bf16
  std::int64_t column_step;  // columns are divided at multiples of this
  std::int64_t shortest;     // fewer tokens than this are faster token by token
  std::int64_t (*workspace_bytes)(std::int64_t key_dim, std::int64_t columns, std::int64_t heads);
  void (*run)(const RecurrenceParams& params, const ChunkTask& task, void* workspace);
  const ChunkSteps* steps;
};

// The kernels of one instruction-set level. Each computes its share serially; the caller divides the work.
// Values never depend on how: not on v_begin and v_end, not on the rows of a call.
struct KernelTable {
  // next: what the thread will be given next, with these params and this scratch, null if unknown. Its state is asked
  // for meanwhile, and it reuses what both need.
  void (*recurrence)(const RecurrenceParams& params, const RecurrenceItem& item, const RecurrenceItem* next,
                     RecurrenceScratch& scratch);
  // The norm of a head's outputs in unnormed_outputs.
  void (*recurrence_norm)(const RecurrenceParams& params, std::int64_t sequence, std::int64_t head);
  void (*gating)(const GatingParams& params, std::int64_t row_begin, std::int64_t row_end);
  void (*rms_norm_gated)(const RmsNormGatedParams& params, std::int64_t row_begin, std::int64_t row_end);
  // Channels [channel_begin, channel_end) of some pieces, at most kConvolutionChannels.
  void (*causal_conv1d)(const ConvolutionParams& params, const ConvolutionPiece* pieces, std::int64_t num_pieces,
                        std::int64_t channel_begin, std::int64_t channel_end);
  const ChunkKernel* chunk;  // for activations of every dtype
  const ChunkKernel* blas_chunk;
};

// One getter per compiled level, each in its own namespace of the level's name.
#define GDN_DECLARE_LEVEL(level)   \
  namespace level {                \
  extern const KernelTable kTable; \
  }
GDN_DECLARE_LEVEL(baseline)
GDN_DECLARE_LEVEL(x86_v3)
GDN_DECLARE_LEVEL(x86_v4)
#undef GDN_DECLARE_LEVEL

// The levels that add instructions for products of bf16, and run other kernels of the level below.
#define GDN_DECLARE_CHUNK_LEVEL(level)       \
  namespace level {                          \
  extern const ChunkKernel kChunkOfBFloat16; \
  }
GDN_DECLARE_CHUNK_LEVEL(x86_v4_bf16)
GDN_DECLARE_CHUNK_LEVEL(x86_amx)
GDN_DECLARE_CHUNK_LEVEL(arm_bf16)
#undef GDN_DECLARE_CHUNK_LEVEL

// AVX512-BF16 also rounds to bf16 in one instruction: the level has the recurrence of its own, for pools of bf16.
namespace x86_v4_bf16 {
void recurrence(const RecurrenceParams& params, const RecurrenceItem& item, const RecurrenceItem* next,
                RecurrenceScratch& scratch);
void recurrence_norm(const RecurrenceParams& params, std::int64_t sequence, std::int64_t head);
}  // namespace x86_v4_bf16

// OpenBLAS exports products of bf16 for Arm.
namespace arm_bf16 {
extern const ChunkKernel kBlasOfBFloat16;
}

}  // namespace gdn::cpu
