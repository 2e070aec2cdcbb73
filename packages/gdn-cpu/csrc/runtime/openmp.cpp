// SPDX-License-Identifier: Apache-2.0
#include "runtime/openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>

namespace gdn::cpu {
namespace {

constexpr const char* kRuntimeNames[] = {"libgomp", "libomp", "libiomp5"};
constexpr const char* kSystemRuntime = "libgomp.so.1";

template <typename Function>
Function symbol(void* scope, const char* name) {
  return reinterpret_cast<Function>(dlsym(scope, name));
}

// All entry points from one scope, or none of them.
OpenMp resolve(void* scope) {
  OpenMp runtime;
  runtime.parallel = symbol<decltype(runtime.parallel)>(scope, "GOMP_parallel");
  runtime.thread_num = symbol<decltype(runtime.thread_num)>(scope, "omp_get_thread_num");
  runtime.num_threads = symbol<decltype(runtime.num_threads)>(scope, "omp_get_num_threads");
  runtime.in_parallel = symbol<decltype(runtime.in_parallel)>(scope, "omp_in_parallel");
  if (runtime.parallel == nullptr || runtime.thread_num == nullptr || runtime.num_threads == nullptr ||
      runtime.in_parallel == nullptr) {
    return {};
  }
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(runtime.parallel), &info) != 0 && info.dli_fname != nullptr) {
    runtime.library = info.dli_fname;
  }
  return runtime;
}

bool is_runtime(const char* path) {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash != nullptr ? slash + 1 : path;
  for (const char* known : kRuntimeNames) {
    const std::size_t length = std::strlen(known);
    const bool whole_word = name[length] == '.' || name[length] == '-';  // wheels append a hash: libgomp-a1b2c3.so.1
    if (std::strncmp(name, known, length) == 0 && whole_word) return true;
  }
  return false;
}

int remember_runtime(dl_phdr_info* info, std::size_t /*size*/, void* path) {
  if (info->dlpi_name == nullptr || !is_runtime(info->dlpi_name)) return 0;
  *static_cast<std::string*>(path) = info->dlpi_name;
  return 1;
}

OpenMp mapped_runtime() {
  std::string path;
  dl_iterate_phdr(remember_runtime, &path);
  if (path.empty()) return {};
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library != nullptr ? resolve(library) : OpenMp{};
}

OpenMp system_runtime() {
  void* library = dlopen(kSystemRuntime, RTLD_LAZY | RTLD_LOCAL);
  return library != nullptr ? resolve(library) : OpenMp{};
}

OpenMp find() {
  OpenMp runtime = resolve(RTLD_DEFAULT);
  if (!runtime.found()) runtime = mapped_runtime();
  if (!runtime.found()) runtime = system_runtime();
  return runtime;
}

}  // namespace

const OpenMp& openmp() {
  static const OpenMp runtime = find();
  return runtime;
}

}  // namespace gdn::cpu
