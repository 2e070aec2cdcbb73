// SPDX-License-Identifier: Apache-2.0
//
// A libcuda.so.1 for tests: the functions of the CUDA driver that gdn-cuda calls, with launches that run in the
// emulator. The environment says what machine it is; fake_* functions change what happens next. Each call that matters
// becomes a line of the log.
//
//   FAKE_CUDA_VERSION=12090  FAKE_CUDA_DEVICES=9.0,8.6  FAKE_CUDA_INIT=0
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "emulator.h"
#include "kernels.h"

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kNoBinary = 209, kNotFound = 500;

struct FakeDevice {
  int major, minor;
};

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

const std::vector<FakeDevice>& devices() {
  static const std::vector<FakeDevice> all = [] {
    std::vector<FakeDevice> found;
    std::istringstream text(setting("FAKE_CUDA_DEVICES", "9.0"));
    std::string item;
    while (std::getline(text, item, ','))
      found.push_back({std::stoi(item), std::stoi(item.substr(item.find('.') + 1))});
    return found;
  }();
  return all;
}

std::string log_text;
std::vector<void*> context_stack;
unsigned long long capture_id = 0;
int launch_result = kSuccess;

template <class... Parts>
void log(const Parts&... parts) {
  std::ostringstream line;
  ((line << parts << ' '), ...);
  log_text += line.str() + "\n";
}

// Contexts are the addresses of devices.
void* context_of(int device) { return const_cast<FakeDevice*>(&devices()[static_cast<std::size_t>(device)]); }
long device_of(void* context) { return context == nullptr ? -1 : static_cast<FakeDevice*>(context) - devices().data(); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* fake_log() { return log_text.c_str(); }
void fake_clear_log() { log_text.clear(); }
void fake_set_capture(unsigned long long id) { capture_id = id; }
void fake_set_launch_result(int result) { launch_result = result; }
void fake_set_current_device(int device) { context_stack.assign(1, context_of(device)); }

int cuInit(unsigned) { return std::stoi(setting("FAKE_CUDA_INIT", "0")); }
int cuDriverGetVersion(int* version) {
  *version = std::stoi(setting("FAKE_CUDA_VERSION", "13000"));
  return kSuccess;
}
int cuGetErrorName(int result, const char** name) {
  *name = result == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
  return kSuccess;
}
int cuGetErrorString(int, const char** text) {
  *text = "as the test asked for";
  return kSuccess;
}
int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(devices().size());
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
int cuDeviceGetName(char* name, int length, int) {
  std::strncpy(name, "Fake GPU", static_cast<std::size_t>(length));
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const FakeDevice& fake = devices()[static_cast<std::size_t>(device)];
  constexpr int kMajor = 75, kMinor = 76;
  *value = attribute == kMajor ? fake.major : (attribute == kMinor ? fake.minor : 132);
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return kSuccess;
}
int cuCtxGetCurrent(void** context) {
  *context = context_stack.empty() ? nullptr : context_stack.back();
  return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) {
  context_stack.push_back(context);
  log("push", device_of(context));
  return kSuccess;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = context_stack.back();
  context_stack.pop_back();
  log("pop", device_of(*context));
  return kSuccess;
}
int cuStreamGetCaptureInfo_v2(void*, int* status, unsigned long long* id, void*, void*, void*) {
  *status = capture_id != 0;
  *id = capture_id;
  return kSuccess;
}
int cuLibraryLoadData(void** library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  if (std::strncmp(static_cast<const char*>(code), "fake code", 9) != 0) return kNoBinary;
  if (capture_id != 0) return kInvalidValue;
  *library = const_cast<void*>(code);
  log("load", static_cast<const char*>(code));
  return kSuccess;
}
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  const auto found = gdn::cuda::emulated_kernels().find(name);
  if (found == gdn::cuda::emulated_kernels().end()) return kNotFound;
  *kernel = const_cast<void*>(static_cast<const void*>(&*found));
  return kSuccess;
}
int cuKernelSetAttribute(int, int value, void*, int) { return value <= 99 * 1024 ? kSuccess : kInvalidValue; }
int cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned, unsigned block_x, unsigned, unsigned,
                   unsigned shared_bytes, void* stream, void** params, void**) {
  const auto& entry = *static_cast<const std::pair<const std::string, gdn::cuda::EmulatedKernel>*>(kernel);
  log("launch", entry.first, "device", device_of(context_stack.empty() ? nullptr : context_stack.back()), "stream",
      reinterpret_cast<long>(stream));
  if (launch_result != kSuccess) return launch_result;
  gdn::emulator::run_grid({}, {grid_x, grid_y, static_cast<int>(block_x), shared_bytes}, entry.second, params[0]);
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
