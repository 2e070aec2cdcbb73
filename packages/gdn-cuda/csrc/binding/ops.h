// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace gdn::cuda {

// Puts the decode operations into a module.
void bind_ops(nanobind::module_& m);

}  // namespace gdn::cuda
