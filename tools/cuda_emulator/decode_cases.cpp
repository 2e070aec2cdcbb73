// SPDX-License-Identifier: Apache-2.0
//
// Runs the decode kernel over a few small calls, on operands that end where their memory ends: for the sanitizers, and
// to see that a barrier or fence left out (by its line) is noticed. Values are looked at only so far as that all of
// them have been written, and are finite.
//
//   decode_cases [--skip LINE] [--order forward|reverse|random] [--seed N]
#include <device.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "kernels.h"
#include "launch/launch.h"

namespace {

using namespace gdn::cuda;
using namespace gdn::device;

struct Case {
  int key_dim, value_dim, key_heads, value_heads, columns, num_processors;
  DType state_dtype, dtype;
  Form form;
  bool has_norm, has_row_indices;
  Activation activation;
  std::vector<int> lengths, accepted;
};

constexpr Form kSlots = Form::kSlots, kReplay = Form::kReplay, kRows = Form::kRows;
constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
constexpr Activation kNone = Activation::kNone, kSilu = Activation::kSilu, kSigmoid = Activation::kSigmoid;

const Case kCases[] = {
    {64, 64, 1, 2, 3, 1, kF32, kBF16, kSlots, true, false, kSilu, {3, 0, 2}, {2, 1, 0}},
    {64, 64, 1, 2, 3, 64, kBF16, kF16, kSlots, true, true, kSigmoid, {3, 1}, {3, 1}},
    {64, 64, 2, 4, 3, 1, kF32, kBF16, kReplay, true, false, kSilu, {3, 2}, {2, 3}},
    {64, 64, 2, 4, 3, 64, kF16, kF32, kReplay, true, true, kSilu, {1, 3}, {3, 0}},
    {64, 64, 1, 1, 2, 64, kF32, kBF16, kReplay, false, false, kNone, {2}, {2}},
    {256, 128, 1, 1, 2, 1, kF32, kBF16, kReplay, true, false, kNone, {2}, {1}},
    {128, 128, 1, 1, 2, 1, kBF16, kBF16, kSlots, true, false, kSilu, {2}, {2}},
    {64, 64, 1, 2, 2, 1, kF32, kBF16, kRows, false, false, kNone, {5, 0, 1}, {}},
    {64, 256, 1, 1, 2, 1, kBF16, kF32, kRows, false, true, kNone, {3, 4}, {}},
};

std::mt19937 random_engine(7);

std::size_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void put(char* to, DType dtype, float value) {
  const unsigned bits = bits_of(value);
  const unsigned short half =
      static_cast<unsigned short>(dtype == DType::kBFloat16 ? bfloat16_bits(value) : float16_bits(value));
  if (dtype == DType::kFloat32) {
    std::memcpy(to, &bits, 4);
  } else {
    std::memcpy(to, &half, 2);
  }
}

float get(const char* from, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  unsigned short half;
  std::memcpy(&half, from, 2);
  return dtype == DType::kBFloat16 ? widen_bfloat16(half) : widen_float16(half);
}

// Memory of exactly so many values.
struct Buffer {
  DType dtype;
  std::size_t count;
  std::unique_ptr<char[]> data;

  Buffer(DType of, std::size_t size, float spread) : dtype(of), count(size), data(new char[size * bytes_of(of)]) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (std::size_t i = 0; i < count; ++i)
      put(data.get() + i * bytes_of(dtype), dtype, spread * normal(random_engine));
  }
  Buffer(const Buffer& other) : dtype(other.dtype), count(other.count), data(new char[count * bytes_of(dtype)]) {
    std::memcpy(data.get(), other.data.get(), count * bytes_of(dtype));
  }
  bool operator==(const Buffer& other) const { return has_start_of(other, count); }
  bool has_start_of(const Buffer& other, std::size_t size) const {
    return std::memcmp(data.get(), other.data.get(), size * bytes_of(dtype)) == 0;
  }
  void fill(float value) {
    for (std::size_t i = 0; i < count; ++i) put(data.get() + i * bytes_of(dtype), dtype, value);
  }
  bool is_finite() const {
    for (std::size_t i = 0; i < count; ++i) {
      if (!std::isfinite(get(data.get() + i * bytes_of(dtype), dtype))) return false;
    }
    return true;
  }
};

template <class T>
std::unique_ptr<T[]> copied(const std::vector<T>& values) {
  std::unique_ptr<T[]> copy(new T[values.size()]);
  std::copy(values.begin(), values.end(), copy.get());
  return copy;
}

// Returns whether the counters are zeros again.
bool launch(DecodeCall& call, int num_processors, const gdn::emulator::Settings& settings) {
  const DecodePlan plan = plan_decode(call, num_processors);
  const auto counters = copied(std::vector<unsigned>(plan.counter_bytes / sizeof(unsigned), 0));
  const auto scratch = copied(std::vector<float>(plan.scratch_bytes / sizeof(float), NAN));
  place_workspace(call, counters.get(), scratch.get());
  gdn::emulator::run_grid(settings, {plan.blocks_x, plan.blocks_y, plan.threads, plan.shared_bytes},
                          emulated_kernels().at(plan.kernel), &call.params);
  return std::all_of(counters.get(), counters.get() + plan.counter_bytes / sizeof(unsigned),
                     [](unsigned counter) { return counter == 0; });
}

bool run(const Case& c, const gdn::emulator::Settings& settings) {
  const int N = static_cast<int>(c.lengths.size()), H = c.key_heads, HV = c.value_heads, S = c.columns;
  const int K = c.key_dim, V = c.value_dim;
  std::vector<int> offsets{0};
  for (const int length : c.lengths) offsets.push_back(offsets.back() + length);
  const int spare = 1;  // tokens after the last row
  const int T = offsets.back() + spare;
  const int slots = c.form == kSlots ? N * S : N;
  const auto size = [](auto... sizes) { return (static_cast<std::size_t>(sizes) * ...); };

  Buffer q(c.dtype, size(T, H, K), 1), k(c.dtype, size(T, H, K), 1), v(c.dtype, size(T, HV, V), 1);
  Buffer a(c.dtype, size(T, HV), 1), b(c.dtype, size(T, HV), 1), gate(c.dtype, size(T, HV, V), 1);
  Buffer A_log(DType::kFloat32, size(HV), 1), dt_bias(c.dtype, size(HV), 1), weight(c.dtype, size(V), 1);
  Buffer out(c.dtype, size(T, HV, V), 1), state(c.state_dtype, size(slots, HV, V, K), 1);
  Buffer record_k(c.dtype, size(slots, S, H, K), 1), record_u(DType::kFloat32, size(slots, S, HV, V), 1);
  Buffer record_decay(DType::kFloat32, size(slots, S, HV), 0);
  record_decay.fill(0.5f);
  out.fill(NAN);

  std::vector<int> table, live(static_cast<std::size_t>(slots), S), rows{-1};
  for (int i = 0; i < slots; ++i) table.push_back(slots - 1 - i);
  for (int n = 0; n < N; ++n) rows.push_back(N - 1 - n);
  const auto table_data = copied(table), accepted_data = copied(c.accepted), offsets_data = copied(offsets);
  const auto live_data = copied(live), rows_data = copied(rows);

  DecodeCall call;
  call.key_dim = K;
  call.state_dtype = c.state_dtype;
  call.form = c.form;
  DecodeParams& p = call.params;
  p.q = {q.data.get(), c.dtype, H * K, K};
  p.k = {k.data.get(), c.dtype, H * K, K};
  p.v = {v.data.get(), c.dtype, HV * V, V};
  p.a = {a.data.get(), c.dtype, HV, 1};
  p.b = {b.data.get(), c.dtype, HV, 1};
  p.gate = {gate.data.get(), c.dtype, HV * V, V};
  p.A_log = {A_log.data.get(), DType::kFloat32, 1};
  p.dt_bias = {dt_bias.data.get(), c.dtype, 1};
  if (c.has_norm) p.norm_weight = {weight.data.get(), c.dtype, 1};
  p.out = {out.data.get(), c.dtype, HV * V, V};
  p.cu_seqlens = {offsets_data.get(), false, 1, 0};
  if (!c.accepted.empty()) p.num_accepted_tokens = {accepted_data.get(), false, 1, 0};
  p.slots = {table_data.get(), false, c.form == kSlots ? S : 1, 1};
  p.state = state.data.get();
  p.slot_stride = static_cast<Index>(size(HV, V, K));
  p.num_slots = slots;
  p.records = {record_k.data.get(),
               S * H * K,
               H * K,
               K,
               reinterpret_cast<float*>(record_u.data.get()),
               S * HV * V,
               HV * V,
               V,
               reinterpret_cast<float*>(record_decay.data.get()),
               S * HV,
               HV,
               1,
               live_data.get(),
               1};
  p.num_rows = p.num_table_rows = N;
  p.num_tokens = T;
  p.num_columns = S;
  p.num_key_heads = H;
  p.num_value_heads = HV;
  p.value_dim = V;
  p.normalize_qk = true;
  p.gate_activation = c.activation;
  p.softplus_beta = 1.0f;
  p.softplus_threshold = 20.0f;
  p.scale = 0.1f;
  p.norm_eps = 1e-6f;

  bool is_same = true;
  if (c.has_row_indices) {
    // Every row by its index, and one of padding, give what the rows in their order give, but for tokens of no row.
    const Buffer state2(state), record_k2(record_k), record_u2(record_u), record_decay2(record_decay), out2(out);
    const auto live2 = copied(live);
    DecodeCall by_index = call;
    DecodeParams& p2 = by_index.params;
    p2.row_indices = {rows_data.get(), false, 1, 0};
    p2.num_rows = N + 1;
    p2.state = state2.data.get();
    p2.records.k = record_k2.data.get();
    p2.records.u = reinterpret_cast<float*>(record_u2.data.get());
    p2.records.decay = reinterpret_cast<float*>(record_decay2.data.get());
    p2.records.live = live2.get();
    p2.out.data = out2.data.get();
    const std::size_t covered = out.count / static_cast<std::size_t>(T) * static_cast<std::size_t>(T - spare);
    is_same = launch(by_index, c.num_processors, settings) && launch(call, c.num_processors, settings) &&
              out.has_start_of(out2, covered) && !out2.is_finite() && state == state2 && record_k == record_k2 &&
              record_u == record_u2 && record_decay == record_decay2;
  } else {
    is_same = launch(call, c.num_processors, settings);
  }

  bool is_right = is_same && out.is_finite() && state.is_finite() && record_u.is_finite() && record_decay.is_finite();
  if (c.form == kReplay) {
    for (int n = 0; n < N; ++n) is_right = is_right && live_data[table[n]] == c.lengths[static_cast<std::size_t>(n)];
  }
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  gdn::emulator::Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--skip") settings.skipped_line = std::atoi(value.c_str());
    if (option == "--seed") settings.seed = static_cast<unsigned>(std::atoi(value.c_str()));
    if (option == "--order" && value == "reverse") settings.order = gdn::emulator::Order::kReverse;
    if (option == "--order" && value == "random") settings.order = gdn::emulator::Order::kRandom;
  }
  int status = 0;
  for (const Case& c : kCases) {
    const auto number = &c - kCases;
    try {
      if (run(c, settings)) continue;
      std::fprintf(stderr, "case %td: wrong values\n", number);
    } catch (const gdn::emulator::Fault& fault) {
      std::fprintf(stderr, "case %td: %s\n", number, fault.what());
      std::_Exit(1);  // the threads of the block are still where they were
    }
    status = 1;
  }
  return status;
}
