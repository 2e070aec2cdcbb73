// SPDX-License-Identifier: Apache-2.0
//
// Kernels that are wrong in one way each, and right ones beside them: what the emulator is for.
//
//   planted_faults NAME [forward|reverse|random]
//
// Prints what came out, or the fault.
#include <device.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

namespace {

using namespace gdn::device;

constexpr int kThreads = 64;

struct Params {
  float* out;       // [blocks, kThreads]
  const float* in;  // [kThreads]
  unsigned* counter;
};

float* shared_floats() { return reinterpret_cast<float*>(shared_memory()); }

// Each thread hands its value to its mirror image.
template <bool kHasBarrier>
void mirror(const Params& p) {
  shared_floats()[thread_index()] = p.in[thread_index()];
  if (kHasBarrier) barrier();
  p.out[block_x() * kThreads + thread_index()] = shared_floats()[kThreads - 1 - thread_index()];
}

// Twice, in the same memory: the second round must not start before everybody has read the first.
template <bool kHasSecondBarrier>
void mirror_twice(const Params& p) {
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    if (kHasSecondBarrier) barrier();
    shared_floats()[thread_index()] = p.in[thread_index()] + static_cast<float>(round);
    barrier();
    sum += shared_floats()[kThreads - 1 - thread_index()];
  }
  p.out[block_x() * kThreads + thread_index()] = sum;
}

// Only within warps.
template <bool kHasBarrier>
void mirror_in_warp(const Params& p) {
  shared_floats()[thread_index()] = p.in[thread_index()];
  // A shuffle keeps a warp together, but orders no memory.
  const float other = shuffle_xor(p.in[thread_index()], 1);
  if (kHasBarrier) warp_barrier();
  p.out[block_x() * kThreads + thread_index()] = shared_floats()[thread_index() ^ 1] - other;
}

void barrier_in_both_arms(const Params& p) {
  if (thread_index() < kThreads / 2) {
    barrier();
  } else {
    barrier();
  }
  p.out[thread_index()] = 0.0f;
}

void barrier_in_half_a_warp(const Params& p) {
  if (thread_index() % kWarp < kWarp / 2) barrier();
  p.out[thread_index()] = 0.0f;
}

void shuffle_in_half_a_warp(const Params& p) {
  float sum = p.in[thread_index()];
  if (thread_index() % kWarp < kWarp / 2) sum += shuffle_xor(sum, 1);
  p.out[thread_index()] = sum;
}

void return_before_barrier(const Params& p) {
  if (thread_index() >= kWarp) return;
  barrier();
  p.out[thread_index()] = 0.0f;
}

template <bool kAwaits>
void copy(const Params& p) {
  float* to = shared_floats();
  if (thread_index() < kThreads / 4) copy16_async(to + 4 * thread_index(), p.in + 4 * thread_index());
  if (kAwaits) await_copies();
  barrier();
  p.out[block_x() * kThreads + thread_index()] = to[thread_index()];
}

// Reads what was copied before it waits for the copies.
void read_before_await(const Params& p) {
  float* to = shared_floats();
  if (thread_index() < kThreads / 4) copy16_async(to + 4 * thread_index(), p.in + 4 * thread_index());
  barrier();
  p.out[block_x() * kThreads + thread_index()] = to[thread_index()];
  await_copies();
}

void read_what_nobody_wrote(const Params& p) {
  if (thread_index() != 5) shared_floats()[thread_index()] = p.in[thread_index()];
  barrier();
  p.out[block_x() * kThreads + thread_index()] = shared_floats()[thread_index()];
}

void overrun_shared(const Params& p) {
  shared_floats()[thread_index() + 1] = p.in[thread_index()];
  barrier();
  p.out[thread_index()] = shared_floats()[thread_index()];
}

void overrun_global(const Params& p) { p.out[thread_index()] = p.in[thread_index() + 1]; }

// All blocks write the same place, be it with the same value.
void write_from_all_blocks(const Params& p) { p.out[thread_index()] = p.in[thread_index()]; }

void wait_for_next_block(const Params& p) {
  if (block_x() == 0) {
    while (load_uncached(p.out + kThreads) != 1.0f) {
    }
  }
  p.out[block_x() * kThreads] = 1.0f;
}

// The last block adds up what all have left.
template <bool kHasFence>
void add_in_last_block(const Params& p) {
  p.out[block_x() * kThreads + thread_index()] = p.in[thread_index()];
  barrier();
  int* is_last = reinterpret_cast<int*>(shared_memory());
  if (thread_index() == 0) {
    if (kHasFence) device_fence();
    *is_last = atomic_increment(p.counter, 1) == 1;
    if (kHasFence) device_fence();
  }
  barrier();
  if (!*is_last) return;
  const float sum = load_uncached(p.out + thread_index()) + load_uncached(p.out + kThreads + thread_index());
  barrier();
  p.out[thread_index()] = sum;
}

using Kernel = void (*)(const Params&);
template <Kernel kKernel>
void entry(const void* params) {
  kKernel(*static_cast<const Params*>(params));
}

const std::map<std::string, void (*)(const void*)> kKernels{
    {"mirror", &entry<mirror<true>>},
    {"mirror_without_barrier", &entry<mirror<false>>},
    {"mirror_twice", &entry<mirror_twice<true>>},
    {"mirror_twice_without_barrier", &entry<mirror_twice<false>>},
    {"mirror_in_warp", &entry<mirror_in_warp<true>>},
    {"mirror_in_warp_without_barrier", &entry<mirror_in_warp<false>>},
    {"barrier_in_both_arms", &entry<barrier_in_both_arms>},
    {"barrier_in_half_a_warp", &entry<barrier_in_half_a_warp>},
    {"shuffle_in_half_a_warp", &entry<shuffle_in_half_a_warp>},
    {"return_before_barrier", &entry<return_before_barrier>},
    {"copy", &entry<copy<true>>},
    {"copy_without_await", &entry<copy<false>>},
    {"read_before_await", &entry<read_before_await>},
    {"read_what_nobody_wrote", &entry<read_what_nobody_wrote>},
    {"overrun_shared", &entry<overrun_shared>},
    {"overrun_global", &entry<overrun_global>},
    {"write_from_all_blocks", &entry<write_from_all_blocks>},
    {"wait_for_next_block", &entry<wait_for_next_block>},
    {"add_in_last_block", &entry<add_in_last_block<true>>},
    {"add_in_last_block_without_fence", &entry<add_in_last_block<false>>},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  gdn::emulator::Settings settings;
  const std::string order = argc > 2 ? argv[2] : "forward";
  if (order == "reverse") settings.order = gdn::emulator::Order::kReverse;
  if (order == "random") settings.order = gdn::emulator::Order::kRandom;

  constexpr int kBlocks = 2;
  const std::unique_ptr<float[]> out(new float[kBlocks * kThreads]()), in(new float[kThreads]);
  unsigned counter = 0;
  for (int i = 0; i < kThreads; ++i) in[i] = static_cast<float>(i);
  const Params params{out.get(), in.get(), &counter};
  try {
    gdn::emulator::run_grid(settings, {kBlocks, 1, kThreads, kThreads * sizeof(float)}, kKernels.at(argv[1]), &params);
  } catch (const gdn::emulator::Fault& fault) {
    std::printf("%s\n", fault.what());
    std::fflush(stdout);
    std::_Exit(1);  // the threads of the block are still where they were
  }
  for (int i = 0; i < kBlocks * kThreads; ++i) std::printf("%g ", static_cast<double>(out[i]));
  std::printf("\n");
  return 0;
}
