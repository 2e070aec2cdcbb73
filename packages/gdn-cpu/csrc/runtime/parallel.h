// SPDX-License-Identifier: Apache-2.0
//
// Serial kernels over a list of work items, divided among the threads of torch's OpenMP runtime. Which thread computes
// an item never changes its value: kernels see one item at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/params.h"
#include "runtime/recurrence_plan.h"
#include "runtime/small_vector.h"

namespace gdn::cpu {

class SharedNorms;

// The recurrence of `table` over the sequences listed in `live`, cut into items. Threads that have other work too call
// run_share(); or run() wakes threads of its own.
class RecurrenceWork {
 public:
  RecurrenceWork(const KernelTable& table, const RecurrenceParams& params, const Indices& live, int num_threads);
  RecurrenceWork(const RecurrenceWork&) = delete;
  RecurrenceWork& operator=(const RecurrenceWork&) = delete;
  ~RecurrenceWork();

  [[nodiscard]] bool is_empty() const { return num_items_ == 0; }
  void run();
  // Items that nobody has taken, until there are none: neighbours together where all are alike, else the longest first.
  void run_share();
  // After the last item.
  void finish() const;

 private:
  [[nodiscard]] RecurrenceItem item_at(std::int64_t index) const;
  void run_item(std::int64_t index, std::int64_t next);
  // The next items, [begin, end); none when they are equal.
  struct Block {
    std::int64_t begin, end;
  };
  Block claim();

  const KernelTable& table_;
  RecurrenceParams params_;
  const Indices& live_;
  int num_threads_;
  RecurrencePlan plan_{};
  Indices order_;
  std::int64_t tiles_ = 0;
  std::int64_t num_items_ = 0;
  std::unique_ptr<SharedNorms> norms_;
  std::atomic<std::int64_t> unclaimed_{0};
};

// Run the recurrence of `table` over the sequences listed in `live`.
void run_recurrence(const KernelTable& table, const RecurrenceParams& params, const Indices& live, int num_threads);

void run_gating(const KernelTable& table, const GatingParams& params, std::int64_t rows, int num_threads);

void run_rms_norm_gated(const KernelTable& table, const RmsNormGatedParams& params, std::int64_t rows, int num_threads);

// Rows in the order of their outputs in memory; each output belongs to one of them.
void run_causal_conv1d(const KernelTable& table, const ConvolutionParams& params,
                       const SmallVector<ConvolutionRow>& rows, int num_threads);

}  // namespace gdn::cpu
