// SPDX-License-Identifier: Apache-2.0
//
// y_t = act(bias + sum_j weight[:, j] x[t - (W-1) + j]), per channel, act SiLU or identity, fp32 until the store.
//
// x, y: [batch, token, channel] at any strides. weight: [C, W], bias: [C]. States: [slots, C, columns] at any strides.
// Every dtype is its operand's own. One call computes a block of channels of some pieces of rows; the first piece of a
// row reads its history and updates its state, before any output is written: y may be x itself.
//
// Where channels have unit stride in x and y, a lane is a channel, and a window of the last inputs stays in registers
// over a few tokens. Where tokens have, a lane is a token. Anything else goes lane by lane. The sum starts from the
// bias and adds the oldest tap first, by fma, whichever way: the values are the same. A few tokens on a packed state of
// the same dtype, as in decode, have loops of their own. SiLU that is stored as bfloat16 is computed within 2^-12.6.
// Bound by arithmetic, that of SiLU: multiply-adds, multiplications and the reciprocal of a value share the ports of
// one vector a cycle, 9 of them for width 4. Beyond the caches y goes past them, which overlaps with arithmetic as long
// as that never waits for its own results: where registers allow, three tokens are under way at once. A prompt on fewer
// registers has the sums of a few tokens before the rest of them: kept in memory, taps and windows cost more.
#include "convolution_state.h"
#include "kernels.h"
#include "simd/columns.h"
#include "vector_math.h"

namespace gdn::cpu::GDN_ISA {
namespace {

constexpr std::int64_t kMaxHistory = kMaxConvolutionWidth - 1;
constexpr std::int64_t kTokensPerPass = 8;  // the rows of x that are read side by side

// Of two vectors of bfloat16, one has the channels at even places and the other those at odd ones, where that is
// cheaper to load and to store.
template <class T>
constexpr bool kSplits = requires(T* to, Vec x) { stream_coarse_split(to, x, x); };

// fp32 copies of what belongs to the channels of the call.
struct Filter {
  alignas(kScratchAlignment) float tap[kMaxConvolutionWidth][kConvolutionChannels];
  alignas(kScratchAlignment) float bias[kConvolutionChannels];
  bool is_split = false;  // in which order the channels of two vectors are
};

// Brings the first n channels into the one or the other.
template <class V = Vec>
void order_channels(Filter& filter, int width, std::int64_t n, bool is_split) {
  if constexpr (kSplits<BFloat16>) {
    if (filter.is_split == is_split) return;
    filter.is_split = is_split;
    for (int j = 0; j <= width; ++j) {
      float* const values = j < width ? filter.tap[j] : filter.bias;
      for (std::int64_t c = 0; c + 2 * kLanes <= n; c += 2 * kLanes) {
        V a = load(values + c), b = load(values + c + kLanes);
        is_split ? split(a, b) : join(a, b);
        store(values + c, a);
        store(values + c + kLanes, b);
      }
    }
  }
}

struct History {
  alignas(kScratchAlignment) float input[kMaxHistory][kConvolutionChannels];
};

// Where SiLU is stored as bfloat16 it is computed only as well as that shows, from sums that the filter has scaled.
template <class T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;
template <bool kSilu, class T>
constexpr bool kIsCoarse = kSilu && kIsBFloat16<T>;

template <bool kSilu, class T, int kCount>
GDN_INLINE void activate(Vec (&y)[kCount]) {
  if constexpr (kIsCoarse<kSilu, T>) {
    coarse_silu(y);
  } else if constexpr (kSilu) {
    for (int i = 0; i < kCount; ++i) y[i] = silu(y[i]);
  }
}

// What activate left.
template <bool kSilu, class T>
GDN_INLINE void store_activated(T* to, Vec y, std::int64_t n) {
  if constexpr (kIsCoarse<kSilu, T>) {
    store_coarse(to, y, n);
  } else {
    store_up_to(to, y, n);
  }
}
template <bool kSilu, class T>
GDN_INLINE void store_activated_pair(T* to, Vec first, Vec second) {
  if constexpr (kIsCoarse<kSilu, T>) {
    store_coarse_pair(to, first, second);
  } else if constexpr (requires { store_pair(to, first, second); }) {
    store_pair(to, first, second);
  } else {
    store(to, first);
    store(to + kLanes, second);
  }
}

// --- a lane is a channel ---

// x and y of one batch entry in one dtype, channels side by side.
template <class T>
struct PackedChannels {
  const T* x;
  T* out;
  std::int64_t x_token_stride;
  std::int64_t out_token_stride;
};

template <class T>
GDN_INLINE Vec load_x(const PackedChannels<T>& at, std::int64_t token, std::int64_t channel, std::int64_t n) {
  return load_up_to(at.x + token * at.x_token_stride + channel, n);
}
template <bool kSilu, class T, int kCount>
GDN_INLINE void activate_for(const PackedChannels<T>&, Vec (&y)[kCount]) {
  activate<kSilu, T>(y);
}
// kVectors vectors, of which the last has as many lanes as n leaves for it.
template <bool kSilu, int kVectors, class T>
GDN_INLINE void store_out(const PackedChannels<T>& at, std::int64_t token, std::int64_t channel, const Vec* y,
                          std::int64_t n) {
  T* const to = at.out + token * at.out_token_stride + channel;
  if constexpr (kVectors == 2) {
    store_activated_pair<kSilu>(to, y[0], y[1]);
  } else {
    store_activated<kSilu>(to, y[0], n);
  }
}

// The row of x that comes a pass later, and its row of y, which stores would fetch one line at a time.
template <class T>
GDN_INLINE void prefetch_pass(const PackedChannels<T>& at, std::int64_t token, std::int64_t channel) {
  __builtin_prefetch(at.x + token * at.x_token_stride + channel, 0, 2);
  __builtin_prefetch(at.out + token * at.out_token_stride + channel, 1, 2);
}

// The same for any dtypes and strides.
struct ScatteredChannels {
  Lanes x;
  MutableLanes out;
  std::int64_t x_token_stride;
  std::int64_t out_token_stride;
};

GDN_INLINE Vec load_x(const ScatteredChannels& at, std::int64_t token, std::int64_t channel, std::int64_t n) {
  const std::int64_t offset = at.x.offset + token * at.x_token_stride + channel * at.x.stride;
  return load_lanes({at.x.data, at.x.dtype, at.x.stride, offset}, n);
}
template <bool kSilu, int kCount>
GDN_INLINE void activate_for(const ScatteredChannels& at, Vec (&y)[kCount]) {
  if (at.out.dtype == DType::kBFloat16) {
    activate<kSilu, BFloat16>(y);
  } else {
    activate<kSilu, float>(y);
  }
}
template <bool kSilu, int kVectors>
GDN_INLINE void store_out(const ScatteredChannels& at, std::int64_t token, std::int64_t channel, const Vec* y,
                          std::int64_t n) {
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t c = v * kLanes;
    const std::int64_t offset = at.out.offset + token * at.out_token_stride + (channel + c) * at.out.stride;
    const MutableLanes to{at.out.data, at.out.dtype, at.out.stride, offset};
    if (kSilu && at.out.dtype == DType::kBFloat16) {
      store_coarse_lanes(to, canonical_nan(y[v]), n - c);
    } else {
      store_lanes(to, y[v], n - c);
    }
  }
}

GDN_INLINE void prefetch_pass(const ScatteredChannels&, std::int64_t, std::int64_t) {}

template <class Channels>
GDN_INLINE void advance_stream(const Channels&) {}

// Tokens [begin, end) of kVectors vectors of channels from `channel` on, the last of which has n lanes. `local` is the
// first channel within the call's block. Without a history, x has the inputs before `begin`.
template <int kWidth, bool kSilu, int kVectors, class Channels>
GDN_INLINE void convolve_vectors(const Channels& channels, const Filter& filter, const History* history,
                                 std::int64_t begin, std::int64_t end, std::int64_t channel, std::int64_t local,
                                 std::int64_t n, bool more_passes) {
  Vec tap[kVectors][kWidth], bias[kVectors], window[kVectors][kWidth];
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t c = v * kLanes;
    bias[v] = load(filter.bias + local + c);
    for (int j = 0; j < kWidth; ++j) tap[v][j] = load(filter.tap[j] + local + c);
    for (int j = 0; j < kWidth - 1; ++j) {
      window[v][j] = history != nullptr ? load(history->input[j] + local + c)
                                        : load_x(channels, begin - (kWidth - 1) + j, channel + c, n - c);
    }
  }
  const auto sums = [&](std::int64_t t, Vec* y) __attribute__((always_inline)) {
    for (int v = 0; v < kVectors; ++v) {
      window[v][kWidth - 1] = load_x(channels, t, channel + v * kLanes, n - v * kLanes);
      y[v] = bias[v];
    }
    for (int j = 0; j < kWidth; ++j) {
      for (int v = 0; v < kVectors; ++v) y[v] = fma(window[v][j], tap[v][j], y[v]);
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int j = 0; j < kWidth - 1; ++j) window[v][j] = window[v][j + 1];
    }
    if (more_passes) prefetch_pass(channels, t + kTokensPerPass, channel);
    advance_stream(channels);
  };
  // The sums of the next token while the activation of this one waits for its own results.
  Vec y[kVectors], next[kVectors];
  const auto finish_token = [&](std::int64_t t) __attribute__((always_inline)) {
    activate_for<kSilu>(channels, y);
    store_out<kSilu, kVectors>(channels, t, channel, y, n);
  };
  const auto finish_and_begin = [&](std::int64_t t) __attribute__((always_inline)) {
    if (t + 1 < end) sums(t + 1, next);
    finish_token(t);
    for (int v = 0; v < kVectors; ++v) y[v] = next[v];
  };
  std::int64_t t = begin;
  sums(t, y);
  for (int v = 0; v < kVectors; ++v) next[v] = y[v];  // of a single token, which has no next one
  // By fours: a window of four inputs is then in the registers where it began.
  for (; t + 4 <= end; t += 4) {
    finish_and_begin(t);
    finish_and_begin(t + 1);
    finish_and_begin(t + 2);
    finish_and_begin(t + 3);
  }
  for (; t < end; ++t) finish_and_begin(t);
}

template <int kWidth, bool kSilu, class Channels>
void convolve_channels(const Channels& channels, const Filter& filter, const History* history, std::int64_t begin,
                       std::int64_t end, std::int64_t channel_begin, std::int64_t channel_end, bool more_passes) {
  constexpr std::int64_t kStep = 2 * kLanes;
  std::int64_t channel = channel_begin;
  for (; channel + kStep <= channel_end; channel += kStep) {
    convolve_vectors<kWidth, kSilu, 2>(channels, filter, history, begin, end, channel, channel - channel_begin, kStep,
                                       more_passes);
  }
  for (; channel < channel_end; channel += kLanes) {
    convolve_vectors<kWidth, kSilu, 1>(channels, filter, history, begin, end, channel, channel - channel_begin,
                                       channel_end - channel, more_passes);
  }
}

// A few tokens at a time: all channels of a row of x are read before the row is far behind. In place, the inputs before
// a pass would be outputs by then, so that one pass has to do.
template <int kWidth, bool kSilu, class Channels>
__attribute__((noinline)) void convolve_passes(const Channels& channels, const Filter& filter, const History* history,
                                               bool in_place, std::int64_t begin, std::int64_t end,
                                               std::int64_t channel_begin, std::int64_t channel_end) {
  const std::int64_t step = in_place ? end - begin : kTokensPerPass;
  for (std::int64_t t = begin; t < end; t += step) {
    convolve_channels<kWidth, kSilu>(channels, filter, t == begin ? history : nullptr, t, min_of(t + step, end),
                                     channel_begin, channel_end, t + step < end);
  }
}

// --- the same where there are registers for several tokens ---

// Whether the rows of y start on cache lines, where streamed stores exist.
template <class T>
GDN_INLINE bool can_stream(const ConvolutionParams& p, const T* out) {
  if constexpr (requires(T* to) { stream_line(to, to); }) {
    const auto row_bytes = static_cast<std::uint64_t>(p.out.token_stride) * sizeof(T);
    return p.stream_out && !p.in_place && (reinterpret_cast<std::uintptr_t>(out) | row_bytes) % kCacheLine == 0;
  } else {
    return false;
  }
}

constexpr bool kHasTiles = kSplits<BFloat16>;
// Rows of x and y side by side. Of more rows, streamed stores would be slower than ordinary ones.
constexpr std::int64_t kTokensPerTile = 4;

template <bool kSilu, bool kStreams, class T>
GDN_INLINE void store_out_pair(T* to, const Vec (&y)[2]) {
  if constexpr (kIsCoarse<kSilu, T>) {
    kStreams ? stream_coarse_split(to, y[0], y[1]) : store_coarse_split(to, y[0], y[1]);
  } else if constexpr (kSplits<T>) {
    kStreams ? stream_split(to, y[0], y[1]) : store_split(to, y[0], y[1]);
  } else if constexpr (kStreams) {
    stream_pair(to, y[0], y[1]);
  } else {
    for (int v = 0; v < 2; ++v) store(to + v * kLanes, y[v]);
  }
}

// Two vectors each of the tokens that are under way: of one there are the sums, of the one before it the activation is
// half done.
template <class T>
struct Pipeline {
  Vec sums[2], begun[2], power[2];
  T* sums_to;
  T* begun_to;
};

// What leaves before anything has entered goes to `nowhere`.
template <class T>
GDN_INLINE Pipeline<T> empty_pipeline(T* nowhere) {
  return {{zero(), zero()}, {zero(), zero()}, {zero(), zero()}, nowhere, nowhere};
}

// The sums of the next token come in while those before wait for their own results.
template <bool kSilu, bool kStreams, class T>
GDN_INLINE void push_sums(Pipeline<T>& line, const Vec (&next)[2], T* to) {
  Vec power[2];
  if constexpr (kIsCoarse<kSilu, T>) {
    begin_coarse_silu(line.sums, power);
    finish_coarse_silu(line.begun, line.power);
  } else {
    activate<kSilu, T>(line.sums);
  }
  store_out_pair<kSilu, kStreams>(line.begun_to, line.begun);
  for (int v = 0; v < 2; ++v) {
    line.begun[v] = line.sums[v];
    line.sums[v] = next[v];
    if constexpr (kIsCoarse<kSilu, T>) line.power[v] = power[v];
  }
  line.begun_to = line.sums_to;
  line.sums_to = to;
}

template <bool kSilu, bool kStreams = false, class T>
GDN_INLINE void finish_sums(Pipeline<T>& line, T* nowhere) {
  if constexpr (kHasTiles) {
    for (int i = 0; i < 2; ++i) push_sums<kSilu, kStreams>(line, line.sums, nowhere);
  }
}

// Whether y, as far into its page as x and a line or two more, makes loads wait: a CPU takes a load for one of what was
// just stored where the two agree in their places in a page. Rows of whole pages, whose x and y were allocated one
// after the other, do that in every token. From the last channel to the first the stores stay behind.
template <class T>
GDN_INLINE bool loads_meet_stores(const PackedChannels<T>& at) {
  constexpr std::uintptr_t kPage = 4096, kNear = 4 * kCacheLine;
  const auto distance = (reinterpret_cast<std::uintptr_t>(at.out) - reinterpret_cast<std::uintptr_t>(at.x)) % kPage;
  return distance != 0 && distance <= kNear;
}

// Of the inputs before those at x, number `index`, of two vectors of channels. Without a history, they lie before x.
template <int kWidth, class T, class V>
GDN_INLINE void load_before(const T* x, std::int64_t token_stride, const History* history, std::int64_t local,
                            int index, V (&input)[2]) {
  if (history == nullptr) {
    widen_two(load_two(x + (index - (kWidth - 1)) * token_stride), input);
  } else {
    for (int v = 0; v < 2; ++v) input[v] = load(history->input[index] + local + v * kLanes);
    if constexpr (kSplits<T>) split(input[0], input[1]);
  }
}

// Two vectors of channels of a tile: where they lie, and `local`, the first one within the call's block.
template <class T>
struct TilePair {
  const T* x;
  T* out;
  std::int64_t x_token_stride;
  std::int64_t out_token_stride;
  std::int64_t local;
  bool more_tiles;
};

template <bool kStreams, class T>
GDN_INLINE void prefetch_token(const TilePair<T>& at, std::int64_t token) {
  if (!at.more_tiles) return;
  __builtin_prefetch(at.x + token * at.x_token_stride, 0, 2);
  if constexpr (!kStreams) __builtin_prefetch(at.out + token * at.out_token_stride, 1, 2);
}

template <int kWidth, bool kSilu, bool kStreams, class T, class Count>
GDN_INLINE void convolve_pair(const TilePair<T>& at, const Filter& filter, const History* history, Count count,
                              Pipeline<T>& line) {
  Vec tap[kWidth][2], window[kWidth][2];
  for (int j = 0; j < kWidth; ++j) {
    for (int v = 0; v < 2; ++v) tap[j][v] = load(filter.tap[j] + at.local + v * kLanes);
  }
  for (int j = 0; j < kWidth - 1; ++j) {
    load_before<kWidth>(at.x, at.x_token_stride, history, at.local, j, window[j]);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    widen_two(load_two(at.x + i * at.x_token_stride), window[kWidth - 1]);
    prefetch_token<kStreams>(at, i + count);
    Vec y[2];
    for (int v = 0; v < 2; ++v) y[v] = load(filter.bias + at.local + v * kLanes);
    for (int j = 0; j < kWidth; ++j) {
      for (int v = 0; v < 2; ++v) y[v] = fma(window[j][v], tap[j][v], y[v]);
    }
    for (int j = 0; j < kWidth - 1; ++j) {
      for (int v = 0; v < 2; ++v) window[j][v] = window[j + 1][v];
    }
    push_sums<kSilu, kStreams>(line, y, at.out + i * at.out_token_stride);
  }
}

// The sums of a tile in one of its two vectors.
template <int kVector, int kWidth, class T, class Count>
GDN_INLINE void sum_vector(const TilePair<T>& at, const Filter& filter, const History* history, Count count,
                           Vec (*sums)[2]) {
  const std::int64_t c = at.local + kVector * kLanes;
  Vec tap[kWidth], window[kWidth], input[2];
  for (int j = 0; j < kWidth; ++j) tap[j] = load(filter.tap[j] + c);
  for (int j = 0; j < kWidth - 1; ++j) {
    load_before<kWidth>(at.x, at.x_token_stride, history, at.local, j, input);
    window[j] = input[kVector];
  }
  for (std::int64_t i = 0; i < count; ++i) {
    widen_two(load_two(at.x + i * at.x_token_stride), input);
    window[kWidth - 1] = input[kVector];
    Vec y = load(filter.bias + c);
    for (int j = 0; j < kWidth; ++j) y = fma(window[j], tap[j], y);
    for (int j = 0; j < kWidth - 1; ++j) window[j] = window[j + 1];
    sums[i][kVector] = y;
  }
}

// The same where taps and windows of two vectors and what is under way would not find room in the registers: all sums
// of a tile first, a vector after the other.
template <int kWidth, bool kSilu, bool kStreams, class T, class Count>
GDN_INLINE void convolve_pair_in_turn(const TilePair<T>& at, const Filter& filter, const History* history,
                                      Count count) {
  Vec sums[kTokensPerTile][2];
  for (std::int64_t i = 0; i < count; ++i) prefetch_token<kStreams>(at, i + count);
  sum_vector<0, kWidth>(at, filter, history, count, sums);
  sum_vector<1, kWidth>(at, filter, history, count, sums);
  for (std::int64_t i = 0; i < count; ++i) {
    activate<kSilu, T>(sums[i]);
    store_out_pair<kSilu, kStreams>(at.out + i * at.out_token_stride, sums[i]);
  }
}

// Tokens [begin, end), a few of all channels after a few. y is not x.
template <int kWidth, bool kSilu, bool kStreams, class T>
__attribute__((noinline)) void convolve_tiles(const PackedChannels<T>& at, const Filter& filter, const History* history,
                                              std::int64_t begin, std::int64_t end, std::int64_t channel_begin,
                                              std::int64_t channel_end) {
  constexpr std::int64_t kStep = 2 * kLanes;
  constexpr bool kHasRoom = kRegisters >= 32;
  alignas(kCacheLine) T nowhere[kStep];
  Pipeline<T> line = empty_pipeline(nowhere);
  const auto convolve = [&](auto count, std::int64_t t, std::int64_t channel) __attribute__((always_inline)) {
    const TilePair<T> pair{at.x + t * at.x_token_stride + channel,
                           at.out + t * at.out_token_stride + channel,
                           at.x_token_stride,
                           at.out_token_stride,
                           channel - channel_begin,
                           t + count < end};
    const History* const before = t == begin ? history : nullptr;
    if constexpr (kHasRoom) {
      convolve_pair<kWidth, kSilu, kStreams>(pair, filter, before, count, line);
    } else {
      convolve_pair_in_turn<kWidth, kSilu, kStreams>(pair, filter, before, count);
    }
  };
  const std::int64_t num_pairs = (channel_end - channel_begin) / kStep;
  const bool from_the_end = loads_meet_stores(at);
  const std::int64_t step = from_the_end ? -kStep : kStep;
  const std::int64_t first = from_the_end ? channel_begin + (num_pairs - 1) * kStep : channel_begin;
  for (std::int64_t t = begin; t < end; t += kTokensPerTile) {
    std::int64_t channel = first;
    if (end - t >= kTokensPerTile) {
      for (std::int64_t left = num_pairs; left > 0; --left, channel += step) {
        convolve(std::integral_constant<std::int64_t, kTokensPerTile>{}, t, channel);
      }
    } else {
      for (std::int64_t left = num_pairs; left > 0; --left, channel += step) convolve(end - t, t, channel);
    }
  }
  if constexpr (kHasRoom) finish_sums<kSilu, kStreams>(line, nowhere);
  if constexpr (kStreams) stream_fence();
  for (std::int64_t channel = channel_end - (channel_end - channel_begin) % kStep; channel < channel_end;
       channel += kLanes) {
    convolve_vectors<kWidth, kSilu, 1>(at, filter, history, begin, end, channel, channel - channel_begin,
                                       channel_end - channel, false);
  }
}

// --- the same, to memory instead of the caches ---

// Rows of y of one pass, on their way from where they were put together to memory.
template <class T>
struct RowStream {
  const T* from;
  T* to;
  std::int64_t to_stride;
  std::int64_t row_size;
  std::int64_t column;  // of the first row, that comes next
  std::int64_t rows_left;
};

// A line, or what is left of a row.
template <class T>
GDN_INLINE void advance(RowStream<T>& stream) {
  constexpr std::int64_t kLine = kCacheLine / static_cast<std::int64_t>(sizeof(T));
  if (stream.rows_left == 0) return;
  T* const to = stream.to + stream.column;
  const T* const from = stream.from + stream.column;
  const std::int64_t left = stream.row_size - stream.column;
  if (left >= kLine) {
    if constexpr (requires { stream_line(to, from); }) stream_line(to, from);
    stream.column += kLine;
    if (left > kLine) return;
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(left) * sizeof(T));
  }
  stream.from += kConvolutionChannels;
  stream.to += stream.to_stride;
  stream.column = 0;
  --stream.rows_left;
}

// `out` is a copy of the rows of a pass, which stays in the first-level cache. `stream` has those of the pass before.
template <class T>
struct StagedChannels : PackedChannels<T> {
  RowStream<T>* stream;
};
template <class T>
GDN_INLINE void prefetch_pass(const StagedChannels<T>& at, std::int64_t token, std::int64_t channel) {
  __builtin_prefetch(at.x + token * at.x_token_stride + channel, 0, 2);
}
template <class T>
GDN_INLINE void advance_stream(const StagedChannels<T>& at) {
  advance(*at.stream);
}

// Tokens [begin, end). Line by line from as many rows as a pass has, streaming would be slower than ordinary stores,
// and a pass at once would hold up the next: the rows of a pass are put together first, and go to memory one after the
// other while the next pass is computed.
template <int kWidth, bool kSilu, class T>
__attribute__((noinline)) void convolve_streamed(const PackedChannels<T>& channels, const Filter& filter,
                                                 const History* history, std::int64_t begin, std::int64_t end,
                                                 std::int64_t channel_begin, std::int64_t channel_end) {
  constexpr std::int64_t kTokens = kTokensPerPass * 2 / std::int64_t{sizeof(T)};  // 32 KiB of rows
  alignas(kCacheLine) T rows[2][kTokens * kConvolutionChannels];
  const std::int64_t n = channel_end - channel_begin;
  RowStream<T> stream{};
  const auto finish_stream = [&] {
    while (stream.rows_left != 0) advance(stream);
  };
  T* staging = rows[0];
  for (std::int64_t t = begin; t < end; t += kTokens) {
    const std::int64_t count = min_of(kTokens, end - t);
    const T* x = channels.x + t * channels.x_token_stride + channel_begin;
    const StagedChannels<T> staged{{x, staging, channels.x_token_stride, kConvolutionChannels}, &stream};
    convolve_channels<kWidth, kSilu>(staged, filter, t == begin ? history : nullptr, 0, count, 0, n, t + count < end);
    finish_stream();
    T* const out = channels.out + t * channels.out_token_stride + channel_begin;
    stream = {staging, out, channels.out_token_stride, n, 0, count};
    staging = staging == rows[0] ? rows[1] : rows[0];
  }
  finish_stream();
  stream_fence();
}

// --- a lane is a token ---

// All tokens of a piece of one channel, `num_tokens` from x on, tokens side by side. history: the inputs before them.
template <int kWidth, bool kSilu, class T>
void convolve_one_channel(const T* x, T* out, std::int64_t num_tokens, const float* history, const float* taps,
                          float bias) {
  float first[kMaxHistory + kLanes];  // the history and the inputs of the first vector
  for (int j = 0; j < kWidth - 1; ++j) first[j] = history[j];
  store(first + kWidth - 1, load_up_to(x, num_tokens));
  Vec tap[kWidth];
  for (int j = 0; j < kWidth; ++j) tap[j] = set1(taps[j]);
  Vec y[1] = {set1(bias)};
  for (int j = 0; j < kWidth; ++j) y[0] = fma(load(first + j), tap[j], y[0]);
  activate<kSilu, T>(y);
  store_activated<kSilu>(out, y[0], num_tokens);
  for (std::int64_t t = kLanes; t < num_tokens; t += kLanes) {
    y[0] = set1(bias);
    for (int j = 0; j < kWidth; ++j) y[0] = fma(load_up_to(x + t - (kWidth - 1) + j, num_tokens - t), tap[j], y[0]);
    activate<kSilu, T>(y);
    store_activated<kSilu>(out + t, y[0], num_tokens - t);
  }
}

template <int kWidth, bool kSilu, class T>
__attribute__((noinline)) void convolve_tokens(const ConvolutionParams& p, const ConvolutionPiece& piece, const T* x,
                                               T* out, const Filter& filter, const History* history,
                                               std::int64_t channel_begin, std::int64_t channel_end) {
  for (std::int64_t channel = channel_begin; channel < channel_end; ++channel) {
    const std::int64_t local = channel - channel_begin;
    const T* from = x + channel * p.x.head_stride + piece.begin;
    float taps[kWidth], before[kWidth - 1];
    for (int j = 0; j < kWidth; ++j) taps[j] = filter.tap[j][local];
    for (int j = 0; j < kWidth - 1; ++j) {
      before[j] = history != nullptr ? history->input[j][local] : to_float(from[j - (kWidth - 1)]);
    }
    convolve_one_channel<kWidth, kSilu>(from, out + channel * p.out.head_stride + piece.begin, piece.end - piece.begin,
                                        before, taps, filter.bias[local]);
  }
}

// --- one piece ---

template <int kWidth, bool kSilu, class T>
void convolve_typed(const ConvolutionParams& p, const ConvolutionPiece& piece, const T* x, T* out, Filter& filter,
                    const History* history, std::int64_t channel_begin, std::int64_t channel_end) {
  if (p.x.head_stride == 1 && p.out.head_stride == 1) {
    const PackedChannels<T> channels{x, out, p.x.token_stride, p.out.token_stride};
    const bool streams = can_stream(p, out + channel_begin);
    if constexpr (kHasTiles) {
      if (!p.in_place) {
        order_channels(filter, kWidth, channel_end - channel_begin, kSplits<T>);
        const auto run = streams ? convolve_tiles<kWidth, kSilu, true, T> : convolve_tiles<kWidth, kSilu, false, T>;
        return run(channels, filter, history, piece.begin, piece.end, channel_begin, channel_end);
      }
    } else if (streams) {
      return convolve_streamed<kWidth, kSilu>(channels, filter, history, piece.begin, piece.end, channel_begin,
                                              channel_end);
    }
    order_channels(filter, kWidth, channel_end - channel_begin, false);
    convolve_passes<kWidth, kSilu>(channels, filter, history, p.in_place, piece.begin, piece.end, channel_begin,
                                   channel_end);
  } else {
    order_channels(filter, kWidth, channel_end - channel_begin, false);
    convolve_tokens<kWidth, kSilu>(p, piece, x, out, filter, history, channel_begin, channel_end);
  }
}

template <int kWidth, bool kSilu>
void convolve_piece(const ConvolutionParams& p, const ConvolutionPiece& piece, Filter& filter, const History* history,
                    std::int64_t channel_begin, std::int64_t channel_end) {
  const std::int64_t x_offset = piece.row->batch * p.x.batch_stride;
  const std::int64_t out_offset = piece.row->batch * p.out.batch_stride;
  const bool packed_channels = p.x.head_stride == 1 && p.out.head_stride == 1;
  const bool packed_tokens = p.x.token_stride == 1 && p.out.token_stride == 1 && !p.in_place;
  if (p.x.dtype == p.out.dtype && (packed_channels || packed_tokens)) {
    return with_dtype(p.out.dtype, p.out.data, [&]<class T>(T* out) {
      convolve_typed<kWidth, kSilu>(p, piece, static_cast<const T*>(p.x.data) + x_offset, out + out_offset, filter,
                                    history, channel_begin, channel_end);
    });
  }
  order_channels(filter, kWidth, channel_end - channel_begin, false);
  const ScatteredChannels channels{{p.x.data, p.x.dtype, p.x.head_stride, x_offset},
                                   {p.out.data, p.out.dtype, p.out.head_stride, out_offset},
                                   p.x.token_stride,
                                   p.out.token_stride};
  convolve_passes<kWidth, kSilu>(channels, filter, history, p.in_place, piece.begin, piece.end, channel_begin,
                                 channel_end);
}

void clear_piece(const ConvolutionParams& p, const ConvolutionPiece& piece, std::int64_t channel, std::int64_t n) {
  const std::int64_t offset = piece.row->batch * p.out.batch_stride + channel * p.out.head_stride;
  for (std::int64_t t = piece.begin; t < piece.end; ++t) {
    clear_lanes({p.out.data, p.out.dtype, p.out.head_stride, offset + t * p.out.token_stride}, n);
  }
}

void store_states(const ConvolutionParams& p, const ConvolutionRow& row, std::int64_t channel, std::int64_t n) {
  const std::int64_t num_tokens = row.is_padding ? 0 : row.end - row.begin;
  if (row.final_slot >= 0) store_final_state(p, row, num_tokens, channel, n);
  if (row.destination >= 0) update_state(p, row, num_tokens, channel, n);
}

// --- a few tokens, on a state of the same dtype ---

constexpr std::int64_t kMaxStepTokens = 16;
constexpr std::int64_t kMaxStepColumns = kMaxStepTokens + kMaxConvolutionWidth - 2;

// What decode is made of: without copies of the history, all operands read once. Channels lie side by side in x and y.
template <int kWidth, class T>
struct Step {
  const T* x;
  std::int64_t x_token_stride;
  T* out;
  std::int64_t out_token_stride;
  const T* history[kWidth - 1];
  T* columns;  // that the row leaves, which may be the history's own
  std::int64_t column_stride;
  std::int64_t num_columns;
  std::int64_t num_tokens;
  std::int64_t dropped;  // of the history and x one after the other: column 0 becomes the one after these
};

// Which loop a row takes.
enum class StepKind {
  kNone,
  kToken,        // one token, channels of the state side by side
  kTokens,       // several
  kInterleaved,  // one token, columns side by side, no more of them than the history
  kSideBySide,   // columns side by side
};

// What the rows of a call have in common: of each layout of states, the first kind.
StepKind step_layout(const ConvolutionParams& p) {
  const bool keeps_history = p.update == ConvolutionUpdate::kRollback ||
                             (p.update == ConvolutionUpdate::kShift && p.num_columns == p.width - 1);
  const bool is_packed = p.x.head_stride == 1 && p.out.head_stride == 1;
  const bool is_alike = p.x.dtype == p.out.dtype && p.x.dtype == p.destination.dtype;
  if (!keeps_history || !is_packed || !is_alike || p.source.data != p.destination.data) return StepKind::kNone;
  if (p.destination.channel_stride == 1) return StepKind::kToken;
  const bool is_side_by_side = p.destination.column_stride == 1 && p.destination.channel_stride == p.num_columns;
  if (!is_side_by_side || p.num_columns > kMaxStepColumns) return StepKind::kNone;
  return p.num_columns == p.width - 1 ? StepKind::kInterleaved : StepKind::kSideBySide;
}

StepKind step_kind(StepKind layout, const ConvolutionRow& row) {
  const std::int64_t tokens = row.end - row.begin;
  const bool in_place = row.source >= 0 && row.source == row.destination;
  if (row.is_padding || row.final_slot >= 0 || !in_place || tokens < 1 || tokens > kMaxStepTokens) {
    return StepKind::kNone;
  }
  if (tokens == 1) return layout;
  if (layout == StepKind::kToken) return StepKind::kTokens;
  return layout == StepKind::kInterleaved ? StepKind::kSideBySide : layout;
}

template <int kWidth, class T>
GDN_INLINE Step<kWidth, T> step_of(const ConvolutionParams& p, const ConvolutionRow& row, const T* x, T* out) {
  Step<kWidth, T> step;
  step.x = x + row.batch * p.x.batch_stride + row.begin * p.x.token_stride;
  step.x_token_stride = p.x.token_stride;
  step.out = out + row.batch * p.out.batch_stride + row.begin * p.out.token_stride;
  step.out_token_stride = p.out.token_stride;
  step.columns = static_cast<T*>(p.destination.data) + row.destination * p.destination.slot_stride;
  step.column_stride = p.destination.column_stride;
  for (int j = 0; j < kWidth - 1; ++j) step.history[j] = step.columns + (row.first_column + j) * step.column_stride;
  step.num_tokens = row.end - row.begin;
  const bool is_shift = p.update == ConvolutionUpdate::kShift;
  step.num_columns = is_shift ? kWidth - 1 : kWidth - 2 + step.num_tokens;
  step.dropped = is_shift ? step.num_tokens : 1;
  return step;
}

// The row after this one lies somewhere else in the pool: the processor would see it coming only when it is read.
template <StepKind kKind, int kWidth, class T>
GDN_INLINE void prefetch_step(const Step<kWidth, T>& next, std::int64_t channel) {
  if constexpr (kKind == StepKind::kInterleaved) return;
  __builtin_prefetch(next.x + channel, 0, 2);
  for (int j = 0; j < kWidth - 1; ++j) __builtin_prefetch(next.history[j] + channel, 0, 2);
  __builtin_prefetch(next.out + channel, 0, 2);
}

template <int kVectors, class T>
GDN_INLINE void copy_channels(T* to, const T* from, std::int64_t n) {
  T moved[kVectors * kLanes];
  const std::size_t bytes = static_cast<std::size_t>(min_of(n, kVectors * kLanes)) * sizeof(T);
  std::memcpy(moved, from, bytes);
  std::memcpy(to, moved, bytes);
}

// The first n values of them.
template <int kVectors, class T>
GDN_INLINE void load_vectors(const T* from, Vec (&x)[kVectors], std::int64_t n) {
  if constexpr (kVectors == 2 && requires { load_pair(from, x); }) {
    load_pair(from, x);
  } else {
    for (int v = 0; v < kVectors; ++v) x[v] = load_up_to(from + v * kLanes, n - v * kLanes);
  }
}

template <bool kSilu, int kVectors, class T>
GDN_INLINE void store_step(T* to, const Vec (&y)[kVectors], std::int64_t n) {
  if constexpr (kVectors == 2) {
    store_activated_pair<kSilu>(to, y[0], y[1]);
  } else {
    store_activated<kSilu>(to, y[0], n);
  }
}

// The same in the order of a filter that is split where it can be.
template <int kVectors, class T>
GDN_INLINE void load_ordered(const T* from, Vec (&x)[kVectors], std::int64_t n) {
  if constexpr (kVectors == 2 && kSplits<T>) {
    widen_two(load_two(from), x);
  } else {
    load_vectors(from, x, n);
  }
}

// The filter of kVectors vectors of channels.
template <int kWidth, int kVectors>
struct Taps {
  Vec tap[kWidth][kVectors];
  Vec bias[kVectors];
};

template <int kWidth, int kVectors>
GDN_INLINE Taps<kWidth, kVectors> taps_at(const Filter& filter, std::int64_t local) {
  Taps<kWidth, kVectors> taps;
  for (int v = 0; v < kVectors; ++v) {
    for (int j = 0; j < kWidth; ++j) taps.tap[j][v] = load(filter.tap[j] + local + v * kLanes);
    taps.bias[v] = load(filter.bias + local + v * kLanes);
  }
  return taps;
}

// Where the operands of a row of one token begin.
template <class T>
struct RowPointers {
  const T* x;
  T* out;
  T* history;
  T* columns;
};
template <class T>
GDN_INLINE RowPointers<T> row_pointers(const ConvolutionParams& p, const ConvolutionRow& row, const T* x, T* out,
                                       std::int64_t channel) {
  T* const columns = static_cast<T*>(p.destination.data) + row.destination * p.destination.slot_stride + channel;
  return {x + row.batch * p.x.batch_stride + row.begin * p.x.token_stride + channel,
          out + row.batch * p.out.batch_stride + row.begin * p.out.token_stride + channel,
          columns + row.first_column * p.destination.column_stride, columns};
}
template <class T>
GDN_INLINE void advance(RowPointers<T>& at, std::int64_t channels) {
  at.x += channels;
  at.out += channels;
  at.history += channels;
  at.columns += channels;
}

// One token. All is read before anything is written: columns are often a multiple of 4 KiB apart, and a load from such
// a distance waits for the store.
template <int kWidth, bool kSilu, int kVectors, class T>
GDN_INLINE void step_token(const Step<kWidth, T>& step, const Taps<kWidth, kVectors>& taps, std::int64_t channel,
                           std::int64_t n) {
  Vec y[kVectors];
  for (int v = 0; v < kVectors; ++v) y[v] = taps.bias[v];
  for (int j = 0; j < kWidth; ++j) {
    Vec x[kVectors];
    load_vectors((j < kWidth - 1 ? step.history[j] : step.x) + channel, x, n);
    for (int v = 0; v < kVectors; ++v) y[v] = fma(x[v], taps.tap[j][v], y[v]);
  }
  const std::size_t bytes = static_cast<std::size_t>(min_of(n, kVectors * kLanes)) * sizeof(T);
  T moved[kWidth - 1][kVectors * kLanes];
  for (int j = 0; j < kWidth - 1; ++j) {
    std::memcpy(moved[j], (j < kWidth - 2 ? step.history[j + 1] : step.x) + channel, bytes);
  }
  activate<kSilu, T>(y);
  for (int j = 0; j < kWidth - 1; ++j) std::memcpy(step.columns + j * step.column_stride + channel, moved[j], bytes);
  store_step<kSilu>(step.out + channel, y, n);
}

// Two vectors of one token in the order of split taps, without the activation: what moves on stays in registers.
template <int kWidth, class T, class LoadTap>
GDN_INLINE void step_sums(const RowPointers<T>& at, std::int64_t column_stride, const Vec (&bias)[2],
                          const LoadTap& load_tap, Vec (&y)[2]) {
  decltype(load_two(at.x)) input[kWidth];
  for (int j = 0; j < kWidth - 1; ++j) input[j] = load_two(at.history + j * column_stride);
  input[kWidth - 1] = load_two(at.x);
  for (int v = 0; v < 2; ++v) y[v] = bias[v];
  for (int j = 0; j < kWidth; ++j) {
    Vec values[2];
    widen_two(input[j], values);
    for (int v = 0; v < 2; ++v) y[v] = fma(values[v], load_tap(j, v), y[v]);
  }
  // After all is read, as above.
  for (int j = 0; j < kWidth - 1; ++j) store_two(at.columns + j * column_stride, input[j + 1]);
}

// Several tokens, the same way. Two vectors are in the order of the filter, and leave through `line` where it is used.
template <int kWidth, bool kSilu, int kVectors, class T>
GDN_INLINE void step_tokens(const Step<kWidth, T>& step, const Filter& filter, std::int64_t channel, std::int64_t local,
                            std::int64_t n, Pipeline<T>& line) {
  Vec tap[kVectors][kWidth], window[kVectors][kWidth];
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t c = v * kLanes;
    for (int j = 0; j < kWidth; ++j) tap[v][j] = load(filter.tap[j] + local + c);
  }
  Vec x[kVectors];
  for (int j = 0; j < kWidth - 1; ++j) {
    load_ordered(step.history[j] + channel, x, n);
    for (int v = 0; v < kVectors; ++v) window[v][j] = x[v];
  }
  for (std::int64_t column = 0; column < step.num_columns; ++column) {
    const std::int64_t joined = column + step.dropped;
    const T* from = joined < kWidth - 1 ? step.history[joined] : step.x + (joined - (kWidth - 1)) * step.x_token_stride;
    copy_channels<kVectors>(step.columns + column * step.column_stride + channel, from + channel, n);
  }
  for (std::int64_t t = 0; t < step.num_tokens; ++t) {
    Vec y[kVectors];
    load_ordered(step.x + t * step.x_token_stride + channel, x, n);
    for (int v = 0; v < kVectors; ++v) {
      window[v][kWidth - 1] = x[v];
      y[v] = load(filter.bias + local + v * kLanes);
    }
    for (int j = 0; j < kWidth; ++j) {
      for (int v = 0; v < kVectors; ++v) y[v] = fma(window[v][j], tap[v][j], y[v]);
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int j = 0; j < kWidth - 1; ++j) window[v][j] = window[v][j + 1];
    }
    T* const to = step.out + t * step.out_token_stride + channel;
    if constexpr (kHasTiles && kVectors == 2) {
      push_sums<kSilu, false>(line, y, to);
    } else {
      activate<kSilu, T>(y);
      store_step<kSilu>(to, y, n);
    }
  }
}

// One token on a state whose columns lie side by side.
template <int kWidth, bool kSilu, int kVectors, class T>
GDN_INLINE void step_interleaved(const Step<kWidth, T>& step, const Filter& filter, std::int64_t channel,
                                 std::int64_t local, std::int64_t n) {
  constexpr int kColumns = kWidth - 1;
  Vec y[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t c = v * kLanes;
    T* const state = step.columns + (channel + c) * kColumns;
    Vec input[kColumns];
    if (n - c >= kLanes) {
      load_interleaved<kColumns>(state, input);
    } else {
      for (int j = 0; j < kColumns; ++j) input[j] = load_strided(state + j, kColumns, n - c);
    }
    y[v] = load(filter.bias + local + c);
    for (int j = 0; j < kColumns; ++j) y[v] = fma(input[j], load(filter.tap[j] + local + c), y[v]);
    const Vec last = load_up_to(step.x + channel + c, n - c);
    y[v] = fma(last, load(filter.tap[kColumns] + local + c), y[v]);
    shift_interleaved<kColumns>(state, step.x + channel + c, min_of(n - c, kLanes));
  }
  activate<kSilu, T>(y);
  store_step<kSilu>(step.out + channel, y, n);
}

template <StepKind kKind, int kWidth, bool kSilu, int kVectors, class T>
GDN_INLINE void step_vectors(const Step<kWidth, T>& step, const Filter& filter, std::int64_t channel,
                             std::int64_t local, std::int64_t n, Pipeline<T>& line) {
  if constexpr (kKind == StepKind::kToken) {
    step_token<kWidth, kSilu>(step, taps_at<kWidth, kVectors>(filter, local), channel, n);
  } else if constexpr (kKind == StepKind::kTokens) {
    step_tokens<kWidth, kSilu, kVectors>(step, filter, channel, local, n, line);
  } else {
    step_interleaved<kWidth, kSilu, kVectors>(step, filter, channel, local, n);
  }
}

// StepKind::kToken where there are registers for several tokens: two vectors of channels of one row after the other.
template <int kWidth, bool kSilu, bool kHasBias, class T>
__attribute__((noinline)) void step_tokens_deep(const ConvolutionParams& p, const ConvolutionPiece* pieces,
                                                std::int64_t num_rows, const T* x, T* out, const Filter& filter,
                                                std::int64_t channel_begin, std::int64_t channel_end) {
  constexpr std::int64_t kStep = 2 * kLanes;
  const std::int64_t stride = p.destination.column_stride;
  const std::int64_t whole = (channel_end - channel_begin) / kStep * kStep;
  // `soon` is a few steps ahead of `at`, on to the next row, which lies somewhere else in the pool: near enough that
  // what it fetches stays in the first-level cache until it is needed.
  const std::int64_t lead = min_of(8 * kStep, whole);
  alignas(kCacheLine) T nowhere[kStep];
  Pipeline<T> line = empty_pipeline(nowhere);
  RowPointers<T> soon = row_pointers(p, *pieces[0].row, x, out, channel_begin);
  advance(soon, lead);
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const ConvolutionRow& row = *pieces[i].row;
    RowPointers<T> at = row_pointers(p, row, x, out, channel_begin);
    for (std::int64_t c = 0; c < whole; c += kStep) {
      if (c == whole - lead) {
        // After the last row come the next channels of the first one.
        const bool is_last = i + 1 == num_rows;
        const std::int64_t next_channel = is_last && channel_end < p.num_channels ? channel_end : channel_begin;
        soon = row_pointers(p, *pieces[is_last ? 0 : i + 1].row, x, out, next_channel);
      }
      __builtin_prefetch(soon.x, 0, 3);
      __builtin_prefetch(soon.out, 0, 3);
      for (int j = 0; j < kWidth - 1; ++j) __builtin_prefetch(soon.history + j * stride, 0, 3);
      Vec bias[2], y[2];
      for (int v = 0; v < 2; ++v) bias[v] = kHasBias ? load(filter.bias + c + v * kLanes) : zero();
      step_sums<kWidth>(at, stride, bias, [&](int j, int v) { return load(filter.tap[j] + c + v * kLanes); }, y);
      push_sums<kSilu, false>(line, y, at.out);
      advance(at, kStep);
      advance(soon, kStep);
    }
    const Step<kWidth, T> step = step_of<kWidth>(p, row, x, out);
    for (std::int64_t c = whole; c < channel_end - channel_begin; c += kLanes) {
      const std::int64_t channel = channel_begin + c;
      step_token<kWidth, kSilu>(step, taps_at<kWidth, 1>(filter, c), channel, channel_end - channel);
    }
  }
  finish_sums<kSilu>(line, nowhere);
}

// `num_rows` rows that all take this loop.
template <StepKind kKind, int kWidth, bool kSilu, class T>
__attribute__((noinline)) void step_rows(const ConvolutionParams& p, const ConvolutionPiece* pieces,
                                         std::int64_t num_rows, const T* x, T* out, const Filter& filter,
                                         std::int64_t channel_begin, std::int64_t channel_end) {
  constexpr std::int64_t kStep = 2 * kLanes;
  alignas(kCacheLine) T nowhere[kStep];
  Pipeline<T> line = empty_pipeline(nowhere);
  Step<kWidth, T> next = step_of<kWidth>(p, *pieces[0].row, x, out);
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const Step<kWidth, T> step = next;
    const bool has_next = i + 1 < num_rows;
    if (has_next) next = step_of<kWidth>(p, *pieces[i + 1].row, x, out);
    std::int64_t channel = channel_begin;
    for (; channel + kStep <= channel_end; channel += kStep) {
      if (has_next) prefetch_step<kKind>(next, channel);
      step_vectors<kKind, kWidth, kSilu, 2>(step, filter, channel, channel - channel_begin, kStep, line);
    }
    for (; channel < channel_end; channel += kLanes) {
      step_vectors<kKind, kWidth, kSilu, 1>(step, filter, channel, channel - channel_begin, channel_end - channel,
                                            line);
    }
  }
  finish_sums<kSilu>(line, nowhere);
}

// Rows on states whose columns lie side by side: on a copy with the columns apart.
template <int kWidth, bool kSilu, class T>
__attribute__((noinline)) void step_rows_apart(const ConvolutionParams& p, const ConvolutionPiece* pieces,
                                               std::int64_t num_rows, const T* x, T* out, const Filter& filter,
                                               std::int64_t channel_begin, std::int64_t channel_end) {
  alignas(kScratchAlignment) T columns[kMaxStepColumns * kConvolutionChannels];
  constexpr std::int64_t kStep = 2 * kLanes;
  alignas(kCacheLine) T nowhere[kStep];
  Pipeline<T> line = empty_pipeline(nowhere);
  const std::int64_t n = channel_end - channel_begin;
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const ConvolutionRow& row = *pieces[i].row;
    Step<kWidth, T> step = step_of<kWidth>(p, row, x + channel_begin, out + channel_begin);
    T* const state = step.columns + channel_begin * p.num_columns;
    split_columns(columns, kConvolutionChannels, state, p.num_columns, n);
    step.columns = columns;
    step.column_stride = kConvolutionChannels;
    for (int j = 0; j < kWidth - 1; ++j) step.history[j] = columns + (row.first_column + j) * kConvolutionChannels;
    std::int64_t channel = 0;
    for (; channel + kStep <= n; channel += kStep) {
      step_tokens<kWidth, kSilu, 2>(step, filter, channel, channel, kStep, line);
    }
    for (; channel < n; channel += kLanes) {
      step_tokens<kWidth, kSilu, 1>(step, filter, channel, channel, n - channel, line);
    }
    join_columns(state, columns, kConvolutionChannels, p.num_columns, n);
  }
  finish_sums<kSilu>(line, nowhere);
}

// How many of the pieces, from the first on, take the loop of the first one.
std::int64_t count_alike(StepKind layout, StepKind kind, const ConvolutionPiece* pieces, std::int64_t num_pieces) {
  std::int64_t count = 1;
  while (count < num_pieces && step_kind(layout, *pieces[count].row) == kind) ++count;
  return count;
}

template <int kWidth, bool kSilu>
void take_steps(const ConvolutionParams& p, StepKind kind, const ConvolutionPiece* pieces, std::int64_t num_rows,
                Filter& filter, std::int64_t channel_begin, std::int64_t channel_end) {
  with_dtype(p.out.dtype, p.out.data, [&]<class T>(T* out) {
    order_channels(filter, kWidth, channel_end - channel_begin, kSplits<T> && kind != StepKind::kInterleaved);
    const auto run = [&]<StepKind kKind>() {
      step_rows<kKind, kWidth, kSilu>(p, pieces, num_rows, static_cast<const T*>(p.x.data), out, filter, channel_begin,
                                      channel_end);
    };
    if (kind == StepKind::kSideBySide) {
      step_rows_apart<kWidth, kSilu>(p, pieces, num_rows, static_cast<const T*>(p.x.data), out, filter, channel_begin,
                                     channel_end);
    } else if (kind == StepKind::kInterleaved) {
      run.template operator()<StepKind::kInterleaved>();
    } else if (kind == StepKind::kToken) {
      if constexpr (kHasTiles) {
        const auto run_deep = p.bias.data != nullptr ? step_tokens_deep<kWidth, kSilu, true, T>
                                                     : step_tokens_deep<kWidth, kSilu, false, T>;
        run_deep(p, pieces, num_rows, static_cast<const T*>(p.x.data), out, filter, channel_begin, channel_end);
      } else {
        run.template operator()<StepKind::kToken>();
      }
    } else {
      run.template operator()<StepKind::kTokens>();
    }
  });
}

template <int kWidth, bool kSilu>
void convolve_pieces(const ConvolutionParams& p, const ConvolutionPiece* pieces, std::int64_t num_pieces,
                     Filter& filter, std::int64_t channel_begin, std::int64_t channel_end) {
  const std::int64_t n = channel_end - channel_begin;
  const StepKind layout = step_layout(p);
  History history;
  for (std::int64_t i = 0; i < num_pieces; ++i) {
    const ConvolutionPiece& piece = pieces[i];
    const ConvolutionRow& row = *piece.row;
    const StepKind kind = step_kind(layout, row);
    if (kind != StepKind::kNone) {
      const std::int64_t count = count_alike(layout, kind, pieces + i, num_pieces - i);
      take_steps<kWidth, kSilu>(p, kind, pieces + i, count, filter, channel_begin, channel_end);
      i += count - 1;
      continue;
    }
    const bool is_first = piece.begin == row.begin;
    if (is_first) {
      if (!row.is_padding) load_history(p, row, channel_begin, n, history.input[0], kConvolutionChannels);
      store_states(p, row, channel_begin, n);
    }
    if (row.is_padding) {
      clear_piece(p, piece, channel_begin, n);
    } else if (piece.begin < piece.end) {
      convolve_piece<kWidth, kSilu>(p, piece, filter, is_first ? &history : nullptr, channel_begin, channel_end);
    }
  }
}

// n values from `from` on, times `scale`.
void load_scaled(float* to, const Lanes& from, Vec scale, std::int64_t n) {
  widen_lanes(to, from, n);
  for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, mul(load(to + i), scale));
}

// The taps of kLanes channels of [C, kWidth] as a module holds it: those of a channel side by side.
template <int kWidth, class T>
GDN_INLINE void load_taps(const T* weight, Vec scale, Vec (&tap)[kWidth]) {
  load_interleaved<kWidth>(weight, tap);
  for (int j = 0; j < kWidth; ++j) {
    // The low half of a NaN from bfloat16 is empty already.
    if constexpr (!kIsBFloat16<T>) tap[j] = canonical_nan(tap[j]);
    tap[j] = mul(tap[j], scale);
  }
}

// Whether there is a way to load taps split that costs no more than to load them in a row.
template <int kWidth, class T>
constexpr bool kSplitsTaps = requires(const T* from, Vec (&x)[kWidth]) { load_interleaved_split(from, x, x); };

// The same of two vectors, split or not.
template <int kWidth, bool kSplit, class V, class T>
GDN_INLINE void load_tap_pairs(const T* weight, Vec scale, V (&tap)[kWidth][2]) {
  V first[kWidth], second[kWidth];
  if constexpr (kSplit && kSplitsTaps<kWidth, T>) {
    load_interleaved_split(weight, first, second);
    for (int j = 0; j < kWidth; ++j) first[j] = mul(first[j], scale), second[j] = mul(second[j], scale);
  } else {
    load_taps<kWidth>(weight, scale, first);
    load_taps<kWidth>(weight + kLanes * kWidth, scale, second);
    if constexpr (kSplit) {
      for (int j = 0; j < kWidth; ++j) split(first[j], second[j]);
    }
  }
  for (int j = 0; j < kWidth; ++j) tap[j][0] = first[j], tap[j][1] = second[j];
}

template <int kWidth, class T>
GDN_INLINE std::int64_t load_interleaved_taps(const T* weight, Vec scale, std::int64_t n, Filter& filter) {
  std::int64_t c = 0;
  if constexpr (kSplits<BFloat16>) {
    for (; filter.is_split && c + 2 * kLanes <= n; c += 2 * kLanes) {
      Vec tap[kWidth][2];
      load_tap_pairs<kWidth, true>(weight + c * kWidth, scale, tap);
      for (int j = 0; j < kWidth; ++j) {
        for (int v = 0; v < 2; ++v) store(filter.tap[j] + c + v * kLanes, tap[j][v]);
      }
    }
  }
  for (; c + kLanes <= n; c += kLanes) {
    Vec tap[kWidth];
    load_taps<kWidth>(weight + c * kWidth, scale, tap);
    for (int j = 0; j < kWidth; ++j) store(filter.tap[j] + c, tap[j]);
  }
  return c;
}

GDN_INLINE Vec filter_scale(const ConvolutionParams& p) {
  return set1(p.silu && p.out.dtype == DType::kBFloat16 ? kCoarseSiluScale : 1.0f);
}

GDN_INLINE bool has_interleaved_taps(const ConvolutionParams& p) {
  return p.weight_tap_stride == 1 && p.weight_channel_stride == p.width;
}

// Whether most loops have the filter split for such a call, so that it is loaded like that.
bool likes_split(const ConvolutionParams& p) {
  const bool is_packed = p.x.head_stride == 1 && p.out.head_stride == 1;
  const bool is_bfloat16 = p.x.dtype == DType::kBFloat16 && p.out.dtype == DType::kBFloat16;
  return kSplits<BFloat16> && is_packed && is_bfloat16 && step_layout(p) != StepKind::kInterleaved;
}

template <int kWidth>
void load_filter(const ConvolutionParams& p, std::int64_t channel, std::int64_t n, Filter& filter) {
  const Vec scale = filter_scale(p);
  std::int64_t done = 0;
  filter.is_split = likes_split(p) && has_interleaved_taps(p) && p.bias.data == nullptr;
  if (has_interleaved_taps(p)) {
    with_dtype(p.weight_dtype, p.weight, [&](auto* weight) {
      done = load_interleaved_taps<kWidth>(weight + channel * kWidth, scale, n, filter);
    });
  }
  for (int j = 0; j < kWidth && done < n; ++j) {
    const std::int64_t offset = (channel + done) * p.weight_channel_stride + j * p.weight_tap_stride;
    load_scaled(filter.tap[j] + done, {p.weight, p.weight_dtype, p.weight_channel_stride, offset}, scale, n - done);
  }
  if (p.bias.data != nullptr) {
    load_scaled(filter.bias, {p.bias.data, p.bias.dtype, p.bias.stride, channel * p.bias.stride}, scale, n);
  } else {
    for (std::int64_t i = 0; i < n; i += kLanes) store(filter.bias + i, zero());
  }
}

// --- a single step, for which a filter in memory would not pay ---

// Returns the channel from which on nothing is done.
template <int kWidth, bool kSilu, class T>
__attribute__((noinline)) std::int64_t step_one_row(const ConvolutionParams& p, const ConvolutionRow& row, const T* x,
                                                    T* out, std::int64_t channel, std::int64_t channel_end) {
  constexpr std::int64_t kStep = 2 * kLanes;
  const Vec scale = filter_scale(p);
  const T* const weight = static_cast<const T*>(p.weight);
  const T* const bias = static_cast<const T*>(p.bias.data);
  const Step<kWidth, T> step = step_of<kWidth>(p, row, x, out);
  constexpr bool kSplit = kSplitsTaps<kWidth, T>;
  const auto load_taps_at = [&](std::int64_t c) __attribute__((always_inline)) {
    Taps<kWidth, 2> taps;
    load_tap_pairs<kWidth, kSplit>(weight + c * kWidth, scale, taps.tap);
    for (int v = 0; v < 2; ++v) taps.bias[v] = zero();
    if (bias != nullptr) {
      if constexpr (kSplit) {
        load_ordered(bias + c, taps.bias, kStep);
      } else {
        load_vectors(bias + c, taps.bias, kStep);
      }
      for (int v = 0; v < 2; ++v) taps.bias[v] = mul(canonical_nan(taps.bias[v]), scale);
    }
    return taps;
  };
  if constexpr (kSplit) {
    alignas(kCacheLine) T nowhere[kStep];
    Pipeline<T> line = empty_pipeline(nowhere);
    RowPointers<T> at = row_pointers(p, row, x, out, channel);
    for (; channel + kStep <= channel_end; channel += kStep) {
      const Taps<kWidth, 2> taps = load_taps_at(channel);
      Vec y[2];
      step_sums<kWidth>(at, step.column_stride, taps.bias, [&](int j, int v) { return taps.tap[j][v]; }, y);
      push_sums<kSilu, false>(line, y, at.out);
      advance(at, kStep);
    }
    finish_sums<kSilu>(line, nowhere);
  } else {
    for (; channel + kStep <= channel_end; channel += kStep) {
      step_token<kWidth, kSilu>(step, load_taps_at(channel), channel, kStep);
    }
  }
  return channel;
}

template <int kWidth>
std::int64_t take_one_row(const ConvolutionParams& p, const ConvolutionPiece* pieces, std::int64_t num_pieces,
                          std::int64_t channel_begin, std::int64_t channel_end) {
  const bool has_plain_bias = p.bias.data == nullptr || (p.bias.dtype == p.out.dtype && p.bias.stride == 1);
  const bool has_plain_filter = p.weight_dtype == p.out.dtype && has_interleaved_taps(p) && has_plain_bias;
  if (num_pieces != 1 || !has_plain_filter) return channel_begin;
  const StepKind layout = step_layout(p);
  const ConvolutionRow& row = *pieces[0].row;
  if (layout != StepKind::kToken || step_kind(layout, row) != StepKind::kToken) return channel_begin;
  std::int64_t channel = channel_begin;
  with_dtype(p.out.dtype, p.out.data, [&]<class T>(T* out) {
    const T* const x = static_cast<const T*>(p.x.data);
    channel = p.silu ? step_one_row<kWidth, true>(p, row, x, out, channel, channel_end)
                     : step_one_row<kWidth, false>(p, row, x, out, channel, channel_end);
  });
  return channel;
}

template <int kWidth>
void convolve_width(const ConvolutionParams& p, const ConvolutionPiece* pieces, std::int64_t num_pieces,
                    std::int64_t channel_begin, std::int64_t channel_end) {
  channel_begin = take_one_row<kWidth>(p, pieces, num_pieces, channel_begin, channel_end);
  if (channel_begin == channel_end) return;
  Filter filter;
  load_filter<kWidth>(p, channel_begin, channel_end - channel_begin, filter);
  if (p.silu) {
    convolve_pieces<kWidth, true>(p, pieces, num_pieces, filter, channel_begin, channel_end);
  } else {
    convolve_pieces<kWidth, false>(p, pieces, num_pieces, filter, channel_begin, channel_end);
  }
}

}  // namespace

void causal_conv1d(const ConvolutionParams& params, const ConvolutionPiece* pieces, std::int64_t num_pieces,
                   std::int64_t channel_begin, std::int64_t channel_end) {
  switch (params.width) {
    case 2:
      return convolve_width<2>(params, pieces, num_pieces, channel_begin, channel_end);
    case 3:
      return convolve_width<3>(params, pieces, num_pieces, channel_begin, channel_end);
    case 4:
      return convolve_width<4>(params, pieces, num_pieces, channel_begin, channel_end);
    default:
      return convolve_width<5>(params, pieces, num_pieces, channel_begin, channel_end);
  }
}

}  // namespace gdn::cpu::GDN_ISA
