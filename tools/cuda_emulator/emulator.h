// SPDX-License-Identifier: Apache-2.0
//
// Runs the blocks of a CUDA grid on the CPU, one after the other, each thread as a fiber. A fiber runs until it calls a
// collective; the collective completes when all threads that have to take part are at it, at the same source line.
// What a GPU would do silently ends the launch with a message: threads of one warp or block at different collectives,
// or gone; asynchronous copies that nobody waited for; threads that wait for something that never comes.
//
// Asynchronous copies land when they are waited for, no sooner. Shared memory is a fresh piece of the heap for each
// block, filled with NaN. Under the thread sanitizer only what the CUDA model orders is ordered: barriers, and fences
// with atomics. Not modelled: an order of memory weaker than the CPU's, bank conflicts, timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace gdn::emulator {

enum class Order { kForward, kReverse, kRandom };

struct Settings {
  Order order = Order::kForward;  // of blocks, of warps, and of the threads of a warp
  unsigned seed = 0;              // of random orders
  int skipped_line = 0;           // barriers and fences at this line do nothing: to see that it is noticed
};

struct Grid {
  std::int64_t blocks_x = 1;
  std::int64_t blocks_y = 1;
  int threads = 1;
  std::size_t shared_bytes = 0;
};

// What is wrong with a kernel; the message names threads and source lines.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls `kernel(params)` in every thread. Throws Fault.
void run_grid(const Settings& settings, const Grid& grid, void (*kernel)(const void* params), const void* params);

// --- for device.h ---

struct Place {
  const char* file;
  int line;
};

int thread_index();
int block_threads();
int block_x();
int block_y();
char* shared_memory();
void barrier(Place place);
void warp_barrier(Place place);
float shuffle(float value, int source_lane, Place place);
void device_fence(Place place);
unsigned atomic_increment(unsigned* counter, unsigned last);
// Counts what a thread reads while it may be waiting for another block.
void note_uncached_load(Place place);
void copy16_async(void* shared, const void* global, Place place);
void await_copies();

}  // namespace gdn::emulator
