// SPDX-License-Identifier: Apache-2.0
#include "runtime/team.h"

#include <pthread.h>

#include <atomic>

#include "runtime/openmp.h"

namespace gdn::cpu {
namespace {

std::atomic<bool> forked{false};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

}  // namespace

void run_team(int threads, void (*run)(void*), void* context) {
  const OpenMp& runtime = openmp();
  const bool serial =
      threads <= 1 || forked.load(std::memory_order_relaxed) || !runtime.found() || runtime.in_parallel() != 0;
  if (serial) return run(context);
  runtime.parallel(run, context, static_cast<unsigned>(threads), 0);
}

}  // namespace gdn::cpu
