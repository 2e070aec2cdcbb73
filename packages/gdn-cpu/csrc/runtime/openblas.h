// SPDX-License-Identifier: Apache-2.0
//
// OpenBLAS, found at run time and never linked: the library of the Python package scipy-openblas32, which others in the
// process may use as well.
#pragma once

#include <string>

#include "kernels/params.h"

namespace gdn::cpu {

// Opens the library at `path`, once in a process; empty when it has what is needed, else why not.
std::string load_openblas(const std::string& path);

// Its products; all null before it is loaded.
const Blas& openblas();

// Its version and the kernels that it picked, or empty.
std::string openblas_config();

// While one of these lives, the library runs each call on the thread that makes it. That setting is the whole
// library's: the first of several changes it, and the last puts it back, unless somebody else has changed it meanwhile.
class SerialOpenBlas {
 public:
  SerialOpenBlas();
  ~SerialOpenBlas();
  SerialOpenBlas(const SerialOpenBlas&) = delete;
  SerialOpenBlas& operator=(const SerialOpenBlas&) = delete;
};

}  // namespace gdn::cpu
