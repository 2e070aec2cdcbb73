// SPDX-License-Identifier: Apache-2.0
#include "driver/driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "driver/device_code.h"

namespace gdn::cuda {
namespace {

constexpr int kCapabilityMajorAttribute = 75;
constexpr int kCapabilityMinorAttribute = 76;
constexpr int kProcessorCountAttribute = 16;
constexpr int kNameLength = 256;
// The first driver interface with libraries, which do not belong to a context.
constexpr int kOldestVersion = 12000;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

template <typename Function>
bool load(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

struct Loaded {
  Driver driver{};
  int version = 0;
  std::string problem;
};

// Of a driver so old that it lacks the rest, this much still tells its version.
bool load_basics(void* library, Driver& d) {
  return load(library, "cuInit", d.init) && load(library, "cuDriverGetVersion", d.driver_get_version) &&
         load(library, "cuGetErrorName", d.get_error_name) && load(library, "cuGetErrorString", d.get_error_string) &&
         load(library, "cuDeviceGetCount", d.device_get_count) && load(library, "cuDeviceGet", d.device_get) &&
         load(library, "cuDeviceGetName", d.device_get_name) &&
         load(library, "cuDeviceGetAttribute", d.device_get_attribute);
}

bool load_rest(void* library, Driver& d) {
  return load(library, "cuDevicePrimaryCtxRetain", d.primary_context_retain) &&
         load(library, "cuCtxGetCurrent", d.context_get_current) &&
         load(library, "cuCtxPushCurrent_v2", d.context_push_current) &&
         load(library, "cuCtxPopCurrent_v2", d.context_pop_current) &&
         load(library, "cuStreamGetCaptureInfo_v2", d.stream_get_capture_info) &&
         load(library, "cuLibraryLoadData", d.library_load_data) &&
         load(library, "cuLibraryGetKernel", d.library_get_kernel) &&
         load(library, "cuKernelSetAttribute", d.kernel_set_attribute) &&
         load(library, "cuLaunchKernel", d.launch_kernel);
}

Loaded load_driver() {
  Loaded loaded;
  // Never closed: the driver does not support being unloaded.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.problem = "no NVIDIA driver on this machine (libcuda.so.1 not found)";
    return loaded;
  }
  Driver& d = loaded.driver;
  if (!load_basics(library, d)) {
    loaded.problem = "libcuda.so.1 lacks a function of the CUDA driver interface";
    return loaded;
  }
  d.driver_get_version(&loaded.version);
  if (const Result status = d.init(0); status != 0) {
    const char* name = nullptr;
    d.get_error_name(status, &name);
    loaded.problem =
        "the CUDA driver does not start (cuInit: " + (name != nullptr ? name : std::to_string(status)) + ")";
    return loaded;
  }
  if (loaded.version < kOldestVersion || !load_rest(library, d)) {
    loaded.problem = "the driver is for CUDA " + version_text(loaded.version) + ", gdn-cuda needs one for CUDA " +
                     version_text(kOldestVersion) + " or newer";
  }
  return loaded;
}

const Loaded& loaded_driver() {
  static const Loaded loaded = load_driver();
  return loaded;
}

DeviceInfo describe(const Driver& d, int device) {
  DeviceInfo result;
  char name[kNameLength] = {};
  if (d.device_get_name(name, kNameLength, device) == 0) result.name = name;
  d.device_get_attribute(&result.capability_major, kCapabilityMajorAttribute, device);
  d.device_get_attribute(&result.capability_minor, kCapabilityMinorAttribute, device);
  d.device_get_attribute(&result.num_processors, kProcessorCountAttribute, device);
  return result;
}

}  // namespace

const Driver& driver() {
  const Loaded& loaded = loaded_driver();
  if (!loaded.problem.empty()) throw std::runtime_error(loaded.problem);
  return loaded.driver;
}

void check(Result result, const char* call) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  const Driver& d = loaded_driver().driver;
  d.get_error_name(result, &name);
  d.get_error_string(result, &text);
  throw std::runtime_error(std::string(call) + ": " + (name != nullptr ? name : std::to_string(result)) +
                           (text != nullptr ? " (" + std::string(text) + ")" : ""));
}

DriverInfo query_driver() {
  const Loaded& loaded = loaded_driver();
  DriverInfo info;
  info.problem = loaded.problem;
  info.version = loaded.version;
  if (!info.problem.empty()) return info;
  const Driver& d = loaded.driver;
  int count = 0;
  d.device_get_count(&count);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    if (d.device_get(&device, ordinal) == 0) info.devices.push_back(describe(d, device));
  }
  if (info.devices.empty()) info.problem = "no CUDA device is visible";
  return info;
}

std::string launch_problem() {
  const DriverInfo info = query_driver();
  if (!info.problem.empty()) return info.problem;
  const DeviceCompiler compiler = device_compiler();
  if (device_code().empty()) {
    return "this gdn-cuda was built without device code: neither NVRTC nor nvcc was found at build time";
  }
  if (info.version / 1000 < compiler.major) {
    return "the driver is for CUDA " + version_text(info.version) + ", and this gdn-cuda was compiled by CUDA " +
           std::to_string(compiler.major) + "." + std::to_string(compiler.minor) + ": it needs a driver for CUDA " +
           std::to_string(compiler.major) + ".0 or newer";
  }
  for (const DeviceInfo& device : info.devices) {
    if (code_for(device.capability_major, device.capability_minor) != nullptr) return "";
  }
  const DeviceInfo& first = info.devices.front();
  return first.name + " has compute capability " + std::to_string(first.capability_major) + "." +
         std::to_string(first.capability_minor) + ", for which this gdn-cuda has no device code";
}

}  // namespace gdn::cuda
