// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gdn::cuda {

// Loads the device code for device `ordinal`, as its first call would.
void prepare_device(int ordinal);

}  // namespace gdn::cuda
