// SPDX-License-Identifier: Apache-2.0
//
// What operations that convolve have in common.
#pragma once

#include "arguments.h"

namespace gdn::cpu {

// From about this size on, y would be out of the caches again before anyone reads it.
inline constexpr std::int64_t kFewestStreamedBytes = 1 << 20;

// None, 'silu' or 'swish'.
bool is_silu(handle activation);

// weight [C, W] and bias [C] or None; after num_channels.
void set_filter(ConvolutionParams& params, const TensorView& weight, const TensorView& bias);

// A pool [P, C, state_len] that is updated in place; after the filter.
void check_pool(const TensorView& pool, Name name, const ConvolutionParams& params);
ConvolutionStates states_of(const TensorView& view);

}  // namespace gdn::cpu
