// SPDX-License-Identifier: Apache-2.0
//
// Contexts that a single operating-system thread switches between, known to the sanitizers. Every switch goes from the
// scheduler to a fiber or back. Built with GDN_ASAN or GDN_TSAN for those sanitizers; for the thread sanitizer this and
// emulator.cpp are themselves not instrumented, since only what the kernel does is of interest.
#pragma once

#include <cstddef>

namespace gdn::emulator {

// Called before the first switch.
void enter_scheduler();

class Fiber {
 public:
  // `stack` outlives the fiber. The entry must end with a call of finish().
  void start(char* stack, std::size_t size, void (*entry)());
  // Runs the fiber until it yields or finishes.
  void resume();
  void release();

  // From inside a fiber: back to the scheduler.
  void yield();
  [[noreturn]] void finish();

 private:
  void* context_ = nullptr;
  void (*entry_)() = nullptr;
  char* stack_ = nullptr;
  std::size_t size_ = 0;
  void* sanitizer_ = nullptr;  // of ASAN: the fake stack; of TSAN: the fiber
};

// One stretch of memory, whose history no sanitizer remembers.
char* map_memory(std::size_t size);
void unmap_memory(char* memory, std::size_t size);

// What orders memory accesses for the thread sanitizer; nothing else does between fibers.
void release_to(void* token);
void acquire_from(void* token);

}  // namespace gdn::emulator
