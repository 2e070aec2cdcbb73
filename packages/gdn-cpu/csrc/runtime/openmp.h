// SPDX-License-Identifier: Apache-2.0
//
// The OpenMP runtime of the process, found at run time and never linked: two runtimes in one process fight over the
// cores, and torch has brought one already. GNU's entry point GOMP_parallel is also exported by LLVM's and Intel's.
#pragma once

#include <string>

namespace gdn::cpu {

struct OpenMp {
  void (*parallel)(void (*body)(void*), void* context, unsigned num_threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
  std::string library;  // path of the shared object

  [[nodiscard]] bool found() const { return parallel != nullptr; }
};

// In this order: what the global scope resolves (torch's own), a runtime that is mapped already, the system's.
const OpenMp& openmp();

}  // namespace gdn::cpu
