// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#ifdef GDN_ASAN
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef GDN_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#ifdef __x86_64__

// void gdn_switch(void** from, void* to): saves what a call must preserve, and the stack pointer.
extern "C" void gdn_switch(void** from, void* to);
__asm__(R"(
.text
.globl gdn_switch
.hidden gdn_switch
.type gdn_switch, @function
gdn_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gdn_switch, .-gdn_switch
)");

namespace {

void* make_context(char* stack, std::size_t size, void (*entry)()) {
  auto* top = reinterpret_cast<std::uintptr_t*>((reinterpret_cast<std::uintptr_t>(stack) + size) & ~std::uintptr_t{15});
  *--top = 0;  // entry never returns; the stack is aligned as after a call
  *--top = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}
void* scheduler_context = nullptr;
void switch_to_fiber(void* context) { gdn_switch(&scheduler_context, context); }
void switch_to_scheduler(void** context) { gdn_switch(context, scheduler_context); }
void free_context(void*) {}

}  // namespace

#else

#include <ucontext.h>

namespace {

ucontext_t scheduler_context;
void* make_context(char* stack, std::size_t size, void (*entry)()) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = size;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
void switch_to_fiber(void* context) { swapcontext(&scheduler_context, static_cast<ucontext_t*>(context)); }
void switch_to_scheduler(void** context) { swapcontext(static_cast<ucontext_t*>(*context), &scheduler_context); }
void free_context(void* context) { delete static_cast<ucontext_t*>(context); }

}  // namespace

#endif

namespace gdn::emulator {
namespace {

#ifdef GDN_ASAN
const void* scheduler_stack = nullptr;
std::size_t scheduler_size = 0;
void* scheduler_fake_stack = nullptr;
#endif
#ifdef GDN_TSAN
constexpr unsigned kNoSync = __tsan_switch_to_fiber_no_sync;
void* scheduler_fiber = nullptr;
#endif
Fiber* running = nullptr;

}  // namespace

void enter_scheduler() {
#ifdef GDN_ASAN
  pthread_attr_t attributes;
  void* stack = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &scheduler_size);
  pthread_attr_destroy(&attributes);
  scheduler_stack = stack;
#endif
#ifdef GDN_TSAN
  scheduler_fiber = __tsan_get_current_fiber();
#endif
}

void Fiber::start(char* stack, std::size_t size, void (*entry)()) {
  stack_ = stack;
  size_ = size;
  entry_ = entry;
  context_ = make_context(stack, size, [] {
#ifdef GDN_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    running->entry_();
  });
#ifdef GDN_TSAN
  sanitizer_ = __tsan_create_fiber(0);
#endif
}

void Fiber::resume() {
  running = this;
#ifdef GDN_ASAN
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_, size_);
#endif
#ifdef GDN_TSAN
  __tsan_switch_to_fiber(sanitizer_, kNoSync);
#endif
  switch_to_fiber(context_);
#ifdef GDN_ASAN
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::yield() {
#ifdef GDN_ASAN
  __sanitizer_start_switch_fiber(&sanitizer_, scheduler_stack, scheduler_size);
#endif
#ifdef GDN_TSAN
  __tsan_switch_to_fiber(scheduler_fiber, kNoSync);
#endif
  switch_to_scheduler(&context_);
#ifdef GDN_ASAN
  __sanitizer_finish_switch_fiber(sanitizer_, nullptr, nullptr);
#endif
}

void Fiber::finish() {
#ifdef GDN_ASAN
  __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_size);
#endif
#ifdef GDN_TSAN
  __tsan_switch_to_fiber(scheduler_fiber, kNoSync);
#endif
  switch_to_scheduler(&context_);
  std::abort();
}

void Fiber::release() {
#ifdef GDN_TSAN
  __tsan_destroy_fiber(sanitizer_);
#endif
  free_context(context_);
}

char* map_memory(std::size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for the stacks of a block");
  return static_cast<char*>(memory);
}
void unmap_memory(char* memory, std::size_t size) { munmap(memory, size); }

void release_to([[maybe_unused]] void* token) {
#ifdef GDN_TSAN
  __tsan_release(token);
#endif
}
void acquire_from([[maybe_unused]] void* token) {
#ifdef GDN_TSAN
  __tsan_acquire(token);
#endif
}

}  // namespace gdn::emulator
