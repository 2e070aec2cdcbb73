// SPDX-License-Identifier: Apache-2.0
#include "driver/driver.h"

#include <dlfcn.h>

#include <string>
#include <utility>

namespace gdn::cuda {
namespace {

// Of the driver's public C interface, only what is called here; results are CUresult, 0 for success.
using InitFn = int (*)(unsigned int flags);
using GetVersionFn = int (*)(int* version);
using GetCountFn = int (*)(int* count);
using GetDeviceFn = int (*)(int* device, int ordinal);
using GetNameFn = int (*)(char* name, int length, int device);
using GetAttributeFn = int (*)(int* value, int attribute, int device);

constexpr int kCapabilityMajorAttribute = 75;
constexpr int kCapabilityMinorAttribute = 76;
constexpr int kNameLength = 256;

template <typename Function>
bool load(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

Device describe(int device, GetNameFn get_name, GetAttributeFn get_attribute) {
  Device result;
  char name[kNameLength] = {};
  if (get_name(name, kNameLength, device) == 0) result.name = name;
  get_attribute(&result.capability_major, kCapabilityMajorAttribute, device);
  get_attribute(&result.capability_minor, kCapabilityMinorAttribute, device);
  return result;
}

DriverInfo without_device(std::string problem) {
  DriverInfo info;
  info.problem = std::move(problem);
  return info;
}

}  // namespace

DriverInfo query_driver() {
  // Never closed: the driver does not support being unloaded.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return without_device("no NVIDIA driver on this machine (libcuda.so.1 not found)");

  InitFn init;
  GetVersionFn get_version;
  GetCountFn get_count;
  GetDeviceFn get_device;
  GetNameFn get_name;
  GetAttributeFn get_attribute;
  if (!load(library, "cuInit", init) || !load(library, "cuDriverGetVersion", get_version) ||
      !load(library, "cuDeviceGetCount", get_count) || !load(library, "cuDeviceGet", get_device) ||
      !load(library, "cuDeviceGetName", get_name) || !load(library, "cuDeviceGetAttribute", get_attribute)) {
    return without_device("libcuda.so.1 lacks a function of the CUDA driver interface");
  }

  const int status = init(0);
  if (status != 0)
    return without_device("the CUDA driver does not start (cuInit returned " + std::to_string(status) + ")");

  DriverInfo info;
  get_version(&info.version);
  int count = 0;
  get_count(&count);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    if (get_device(&device, ordinal) == 0) info.devices.push_back(describe(device, get_name, get_attribute));
  }
  if (info.devices.empty()) info.problem = "no CUDA device is visible";
  return info;
}

}  // namespace gdn::cuda
