// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the level that this file is compiled for.
#include "kernels.h"

namespace gdn::cpu::GDN_ISA {

const KernelTable kTable = {
    .recurrence = recurrence,
    .recurrence_norm = recurrence_norm,
    .gating = gating,
    .rms_norm_gated = rms_norm_gated,
    .causal_conv1d = causal_conv1d,
    .chunk = &kPortableChunk,
    .blas_chunk = &kBlasChunk,
};

}  // namespace gdn::cpu::GDN_ISA
