// SPDX-License-Identifier: Apache-2.0
#include "emulator.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "fiber.h"

namespace gdn::emulator {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr std::size_t kStackBytes = 128 * 1024;
// A thread that reads other blocks' values so often between two collectives waits for one of them.
constexpr int kPatience = 1 << 20;
constexpr int kMaxCopies = 64;  // of a thread, at a time

enum class Wait { kNothing, kBarrier, kWarpBarrier, kShuffle };

const char* name_of(Wait wait) {
  switch (wait) {
    case Wait::kBarrier:
      return "barrier";
    case Wait::kWarpBarrier:
      return "warp_barrier";
    case Wait::kShuffle:
      return "shuffle";
    default:
      return "nothing";
  }
}

struct Copy {
  void* to;
  const void* from;
  Place place;
};

// What a fiber finds: the scheduler says it, since fibers leave the heap alone.
enum class Finding { kNothing, kCopyNotAwaited, kTooManyCopies, kWaitsForBlock };

struct Thread {
  Fiber fiber;
  int index = 0;
  bool is_done = false;
  Wait wait = Wait::kNothing;
  Place place{};
  // A shuffle's values alternate between two places: a thread may be one shuffle ahead of another.
  float exchanged[2] = {};
  unsigned num_shuffles = 0;
  // The same for what barriers order.
  unsigned num_barriers = 0, num_warp_barriers = 0;
  bool is_fenced = false;               // a fence since the last atomic
  unsigned* unfenced_atomic = nullptr;  // the atomic that the next fence completes
  int num_uncached_loads = 0;
  int num_copies = 0;
  Copy copies[kMaxCopies];
};

// Addresses that stand for what orders memory; a block has its own, as no barrier orders two blocks.
struct Tokens {
  long of_block[2];
  long of_warp[2][kMaxThreads / kWarp];
};

struct Launch {
  const Settings* settings;
  const Grid* grid;
  void (*kernel)(const void*);
  const void* params;
  std::int64_t x, y;
  std::vector<Thread> threads;
  Thread* current;
  char* shared;
  Tokens* tokens;
  long done_token;
  Finding finding;
  Place finding_place;
  std::mt19937 random;
};
Launch launch;

std::string text(Place place) {
  const char* slash = std::strrchr(place.file, '/');
  return std::string(slash != nullptr ? slash + 1 : place.file) + ":" + std::to_string(place.line);
}

std::string where(const Thread& thread) {
  const std::string who = "thread " + std::to_string(thread.index);
  if (thread.is_done) return who + " has returned";
  return who + " is at " + name_of(thread.wait) + " in " + text(thread.place);
}

[[noreturn]] void fault(const std::string& what) {
  throw Fault("block (" + std::to_string(launch.x) + ", " + std::to_string(launch.y) + "): " + what);
}

[[noreturn]] void fault_in_fiber(Finding finding, Place place) {
  launch.finding = finding;
  launch.finding_place = place;
  launch.current->fiber.finish();
}

void raise_finding() {
  if (launch.finding == Finding::kNothing) return;
  const std::string who = "thread " + std::to_string(launch.current->index), place = text(launch.finding_place);
  if (launch.finding == Finding::kWaitsForBlock) fault(who + " waits for another block in " + place);
  if (launch.finding == Finding::kTooManyCopies) fault(who + " has too many copies under way in " + place);
  fault(who + " returned without having waited for the copy of " + place);
}

bool same_place(const Thread& a, const Thread& b) {
  return a.wait == b.wait && a.place.line == b.place.line && std::strcmp(a.place.file, b.place.file) == 0;
}

void run_thread() {
  launch.kernel(launch.params);
  Thread& thread = *launch.current;
  if (thread.num_copies > 0) fault_in_fiber(Finding::kCopyNotAwaited, thread.copies[0].place);
  thread.is_done = true;
  release_to(&launch.done_token);
  thread.fiber.finish();
}

std::vector<std::int64_t> ordered(std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  if (launch.settings->order == Order::kReverse) std::reverse(order.begin(), order.end());
  if (launch.settings->order == Order::kRandom) std::shuffle(order.begin(), order.end(), launch.random);
  return order;
}

// Runs the warp's threads up to their next collective, and over those of the warp, until it needs other warps.
void run_warp(Thread* warp) {
  while (true) {
    bool moved = false;
    for (const std::int64_t lane : ordered(kWarp)) {
      Thread& thread = warp[lane];
      if (thread.is_done || thread.wait != Wait::kNothing) continue;
      launch.current = &thread;
      thread.fiber.resume();
      moved = true;
      raise_finding();
    }
    if (!moved) return;
    for (int lane = 1; lane < kWarp; ++lane) {
      if (warp[lane].is_done != warp[0].is_done) fault("a warp parts: " + where(warp[0]) + ", " + where(warp[lane]));
      if (!warp[0].is_done && !same_place(warp[0], warp[lane])) {
        fault("a warp parts: " + where(warp[0]) + ", " + where(warp[lane]));
      }
    }
    if (warp[0].is_done || warp[0].wait == Wait::kBarrier) return;
    for (int lane = 0; lane < kWarp; ++lane) warp[lane].wait = Wait::kNothing;
  }
}

void run_threads() {
  std::vector<Thread>& threads = launch.threads;
  const auto num_warps = static_cast<std::int64_t>(threads.size()) / kWarp;
  while (true) {
    for (const std::int64_t warp : ordered(num_warps)) run_warp(threads.data() + warp * kWarp);
    const auto is_done = [](const Thread& thread) { return thread.is_done; };
    if (std::all_of(threads.begin(), threads.end(), is_done)) return;
    for (const Thread& thread : threads) {
      if (thread.is_done || !same_place(thread, threads[0])) {
        fault("a block parts: " + where(threads[0]) + ", " + where(thread));
      }
    }
    for (Thread& thread : threads) thread.wait = Wait::kNothing;
  }
}

// Of addresses that no block before had. They are only named, never touched.
Tokens* new_tokens() {
  constexpr std::size_t kReserved = std::size_t{1} << 32;
  static auto* const first = reinterpret_cast<Tokens*>(map_memory(kReserved));
  static std::size_t used = 0;
  if ((used + 1) * sizeof(Tokens) > kReserved) used = 0;
  return first + used++;
}

#ifdef GDN_TSAN

// Stacks and shared memory of one block, at addresses whose use by other blocks is forgotten.
class BlockMemory {
 public:
  BlockMemory(std::size_t stacks, std::size_t shared)
      : size_(stacks + shared), stacks_(map_memory(size_)), shared_(stacks_ + stacks) {}
  ~BlockMemory() { unmap_memory(stacks_, size_); }
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;
  char* stacks() { return stacks_; }
  char* shared() { return shared_; }

 private:
  std::size_t size_;
  char *stacks_, *shared_;
};

#else

// Shared memory of one block, on the heap: an overrun leaves it. Stacks serve one block after the other.
class BlockMemory {
 public:
  BlockMemory(std::size_t, std::size_t shared) : shared_(new char[shared + (shared == 0)]) {}
  char* stacks() {
    static char* const memory = map_memory(kMaxThreads * kStackBytes);
    return memory;
  }
  char* shared() { return shared_.get(); }

 private:
  std::unique_ptr<char[]> shared_;
};

#endif

void run_block(std::int64_t block) {
  const Grid& grid = *launch.grid;
  launch.x = block % grid.blocks_x;
  launch.y = block / grid.blocks_x;
  BlockMemory memory(static_cast<std::size_t>(grid.threads) * kStackBytes, grid.shared_bytes);
  launch.shared = memory.shared();
  launch.tokens = new_tokens();
  std::memset(launch.shared, 0xff, grid.shared_bytes);
  launch.threads = std::vector<Thread>(static_cast<std::size_t>(grid.threads));
  for (std::size_t i = 0; i < launch.threads.size(); ++i) {
    launch.threads[i].index = static_cast<int>(i);
    launch.threads[i].fiber.start(memory.stacks() + i * kStackBytes, kStackBytes, &run_thread);
  }
  run_threads();
  for (Thread& thread : launch.threads) thread.fiber.release();
}

}  // namespace

void run_grid(const Settings& settings, const Grid& grid, void (*kernel)(const void* params), const void* params) {
  if (grid.threads < kWarp || grid.threads > kMaxThreads || grid.threads % kWarp != 0) {
    throw Fault("a block has whole warps, up to " + std::to_string(kMaxThreads) + " threads; got " +
                std::to_string(grid.threads));
  }
  launch.settings = &settings;
  launch.grid = &grid;
  launch.kernel = kernel;
  launch.params = params;
  launch.finding = Finding::kNothing;
  launch.random.seed(settings.seed);
  enter_scheduler();
  for (const std::int64_t block : ordered(grid.blocks_x * grid.blocks_y)) run_block(block);
  acquire_from(&launch.done_token);
}

// --- for device.h ---

namespace {

void wait_at(Wait wait, Place place) {
  Thread& thread = *launch.current;
  thread.wait = wait;
  thread.place = place;
  thread.num_uncached_loads = 0;
  thread.fiber.yield();
}

bool is_skipped(Place place) { return place.line == launch.settings->skipped_line; }

void synchronize(Wait wait, long* token, Place place) {
  release_to(token);
  wait_at(wait, place);
  acquire_from(token);
}

}  // namespace

int thread_index() { return launch.current->index; }
int block_threads() { return launch.grid->threads; }
int block_x() { return static_cast<int>(launch.x); }
int block_y() { return static_cast<int>(launch.y); }
char* shared_memory() { return launch.shared; }

void barrier(Place place) {
  if (is_skipped(place)) return;
  synchronize(Wait::kBarrier, &launch.tokens->of_block[launch.current->num_barriers++ % 2], place);
}

void warp_barrier(Place place) {
  if (is_skipped(place)) return;
  Thread& thread = *launch.current;
  synchronize(Wait::kWarpBarrier, &launch.tokens->of_warp[thread.num_warp_barriers++ % 2][thread.index / kWarp], place);
}

__attribute__((no_sanitize("thread"))) float shuffle(float value, int source_lane, Place place) {
  Thread& thread = *launch.current;
  const unsigned parity = thread.num_shuffles++ % 2;
  thread.exchanged[parity] = value;
  wait_at(Wait::kShuffle, place);
  return launch.threads[static_cast<std::size_t>(thread.index / kWarp * kWarp + source_lane)].exchanged[parity];
}

// A fence before an atomic hands on what came before; one after it receives what the others handed on there.
void device_fence(Place place) {
  if (is_skipped(place)) return;
  Thread& thread = *launch.current;
  thread.is_fenced = true;
  if (thread.unfenced_atomic != nullptr) acquire_from(thread.unfenced_atomic);
  thread.unfenced_atomic = nullptr;
}

unsigned atomic_increment(unsigned* counter, unsigned last) {
  Thread& thread = *launch.current;
  if (thread.is_fenced) release_to(counter);
  thread.is_fenced = false;
  thread.unfenced_atomic = counter;
  unsigned before = __atomic_load_n(counter, __ATOMIC_RELAXED);
  __atomic_store_n(counter, before >= last ? 0 : before + 1, __ATOMIC_RELAXED);
  return before;
}

void note_uncached_load(Place place) {
  Thread& thread = *launch.current;
  if (++thread.num_uncached_loads > kPatience) fault_in_fiber(Finding::kWaitsForBlock, place);
}

void copy16_async(void* shared, const void* global, Place place) {
  Thread& thread = *launch.current;
  if (thread.num_copies == kMaxCopies) fault_in_fiber(Finding::kTooManyCopies, place);
  thread.copies[thread.num_copies++] = {shared, global, place};
}

void await_copies() {
  Thread& thread = *launch.current;
  for (int i = 0; i < thread.num_copies; ++i) std::memcpy(thread.copies[i].to, thread.copies[i].from, 16);
  thread.num_copies = 0;
}

}  // namespace gdn::emulator
