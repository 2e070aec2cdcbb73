// SPDX-License-Identifier: Apache-2.0
#include "runtime/openblas.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace gdn::cpu {
namespace {

struct Library {
  Blas products;
  int (*get_num_threads)() = nullptr;
  void (*set_num_threads)(int) = nullptr;
  char* (*config)() = nullptr;
};

std::mutex mutex;  // of loading, and of the number of threads
std::atomic<const Library*> loaded{nullptr};
int users = 0;
int threads_before = 0;

template <typename Function>
void resolve(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
}

std::string missing(const Library& library) {
  if (library.products.sgemm == nullptr) return "has no scipy_cblas_sgemm";
  if (library.get_num_threads == nullptr) return "has no scipy_openblas_get_num_threads";
  if (library.set_num_threads == nullptr) return "has no scipy_openblas_set_num_threads";
  return "";
}

}  // namespace

std::string load_openblas(const std::string& path) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded.load() != nullptr) return "";
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return dlerror();
  static Library library;
  resolve(handle, "scipy_cblas_sgemm", library.products.sgemm);
  resolve(handle, "scipy_cblas_sbgemm", library.products.sbgemm);
  resolve(handle, "scipy_openblas_get_num_threads", library.get_num_threads);
  resolve(handle, "scipy_openblas_set_num_threads", library.set_num_threads);
  resolve(handle, "scipy_openblas_get_config", library.config);
  const std::string error = missing(library);
  if (!error.empty()) return path + " " + error;
  loaded.store(&library);
  return "";
}

const Blas& openblas() {
  static const Blas none;
  const Library* library = loaded.load();
  return library != nullptr ? library->products : none;
}

std::string openblas_config() {
  const Library* library = loaded.load();
  return library != nullptr && library->config != nullptr ? library->config() : "";
}

SerialOpenBlas::SerialOpenBlas() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (users++ > 0) return;
  const Library& library = *loaded.load();
  threads_before = library.get_num_threads();
  if (threads_before != 1) library.set_num_threads(1);
}

SerialOpenBlas::~SerialOpenBlas() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (--users > 0 || threads_before == 1) return;
  const Library& library = *loaded.load();
  if (library.get_num_threads() == 1) library.set_num_threads(threads_before);
}

}  // namespace gdn::cpu
