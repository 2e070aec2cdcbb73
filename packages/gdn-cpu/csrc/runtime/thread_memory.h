// SPDX-License-Identifier: Apache-2.0
//
// Memory that a thread keeps from call to call, as large as it ever needed: fresh pages cost more than what is done
// with them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "kernels/params.h"

namespace gdn::cpu {

class ThreadMemory {
 public:
  // Aligned to kScratchAlignment; what it holds is not kept where it has to grow.
  void* at_least(std::int64_t bytes) {
    if (bytes > size_) {
      const auto alignment = static_cast<std::int64_t>(kScratchAlignment);
      const std::int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
      memory_.reset();
      memory_.reset(std::aligned_alloc(kScratchAlignment, static_cast<std::size_t>(rounded)));
      if (memory_ == nullptr) std::abort();  // in a parallel region: nothing sensible is left to do
      size_ = rounded;
    }
    return memory_.get();
  }

  // Gives back more than this.
  void keep_at_most(std::int64_t bytes) {
    if (size_ <= bytes) return;
    memory_.reset();
    size_ = 0;
  }

 private:
  struct FreeDeleter {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, FreeDeleter> memory_;
  std::int64_t size_ = 0;
};

}  // namespace gdn::cpu
