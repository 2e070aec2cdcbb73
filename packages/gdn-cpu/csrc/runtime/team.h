// SPDX-License-Identifier: Apache-2.0
//
// A body run by several threads of torch's OpenMP runtime at once.
#pragma once

namespace gdn::cpu {

// Whether work for so many threads has to be done by the calling one alone.
bool is_serial(int threads);

// Calls run(context) on up to `threads` threads, the calling one among them, and waits for all. On the calling one
// alone where there is no runtime, inside another parallel region, and in a forked child, whose parent's workers it
// would wait for.
void run_team(int threads, void (*run)(void*), void* context);

}  // namespace gdn::cpu
