// SPDX-License-Identifier: Apache-2.0
#include "runtime/team.h"

#include <pthread.h>

#include <atomic>

#include "runtime/openmp.h"

namespace gdn::cpu {
namespace {

// A forked child has none of its parent's worker threads, and an OpenMP region would wait for them for ever.
std::atomic<bool> forked{false};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

}  // namespace

bool is_serial(int threads) {
  const OpenMp& runtime = openmp();
  return threads <= 1 || forked.load(std::memory_order_relaxed) || !runtime.found() || runtime.in_parallel() != 0;
}

void run_team(int threads, void (*run)(void*), void* context) {
  if (is_serial(threads)) return run(context);
  openmp().parallel(run, context, static_cast<unsigned>(threads), 0);
}

}  // namespace gdn::cpu
