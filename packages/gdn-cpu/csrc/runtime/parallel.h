// SPDX-License-Identifier: Apache-2.0
//
// Serial kernels over a list of work items, divided among the threads of torch's OpenMP runtime. Which thread computes
// an item never changes its value: kernels see one item at a time.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "runtime/small_vector.h"

namespace gdn::cpu {

// Run the recurrence of `table` over the sequences listed in `live`.
void run_recurrence(const KernelTable& table, const RecurrenceParams& params, const Indices& live, int num_threads);

void run_gating(const KernelTable& table, const GatingParams& params, std::int64_t rows, int num_threads);

void run_rms_norm_gated(const KernelTable& table, const RmsNormGatedParams& params, std::int64_t rows, int num_threads);

// Rows in the order of their outputs in memory; each output belongs to one of them.
void run_causal_conv1d(const KernelTable& table, const ConvolutionParams& params,
                       const SmallVector<ConvolutionRow>& rows, int num_threads);

}  // namespace gdn::cpu
