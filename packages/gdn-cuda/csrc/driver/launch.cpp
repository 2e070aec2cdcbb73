// SPDX-License-Identifier: Apache-2.0
//
// Decode calls on the CUDA driver: on torch's current stream of the tensors' device, with no allocation after the first
// call of a size, no synchronisation, and every result checked. Python's lock is held, but where torch allocates: there
// another thread may come in between, and finds everything whole.
#include "launch/launch.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dlpack_abi.h"
#include "driver/device_code.h"
#include "driver/driver.h"
#include "driver/launch.h"

// Where tensors have to be; a test has a driver for another kind of memory.
#ifndef GDN_LAUNCH_DEVICE
#define GDN_LAUNCH_DEVICE dlpack::kCuda
#endif

namespace gdn::cuda {
namespace {

namespace nb = nanobind;

constexpr int kCapabilityMajorAttribute = 75;
constexpr int kCapabilityMinorAttribute = 76;
constexpr int kProcessorCountAttribute = 16;
constexpr int kMaxSharedAttribute = 8;  // of a function: the most dynamic shared memory
constexpr int kCaptureActive = 1;

// A tensor of bytes.
struct Memory {
  nb::object tensor;
  std::size_t bytes = 0;
  void* data = nullptr;
};

// Memory that launches of one stream hand on to each other. As tensors, it is of torch's own pool, and during a capture
// of the graph's.
struct Workspace {
  unsigned long long capture = 0;  // 0: of no capture
  Memory counters, scratch;
};

struct DeviceState {
  int num_processors = 0;
  Context context = nullptr;
  std::map<std::string, Kernel> kernels;
  std::map<Stream, Workspace> workspaces;
};

std::map<int, std::unique_ptr<DeviceState>>& devices() {
  static auto* all = new std::map<int, std::unique_ptr<DeviceState>>();  // never destroyed: Python may be gone by then
  return *all;
}

// For free-threaded Pythons, which hold no lock over a call.
nb::ft_mutex& mutex() {
  static nb::ft_mutex instance;
  return instance;
}

int attribute(const Driver& d, int which, int device) {
  int value = 0;
  check(d.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

std::string no_code_for(int device, int major, int minor) {
  return "cuda:" + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
         std::to_string(minor) + ", for which this gdn-cuda has no device code";
}

// As many as any call may ask for, so that no launch has to set it.
int most_shared_bytes(const std::string& kernel) {
  const int key_dim = std::stoi(kernel.substr(std::string("gdn_decode_").size()));
  const bool replays = kernel.ends_with("replay");
  return shared_rows(key_dim, kMaxValueDim, kMaxColumns, replays).end * static_cast<int>(sizeof(float));
}

std::unique_ptr<DeviceState> load_device(int ordinal) {
  const Driver& d = driver();
  if (const std::string problem = launch_problem(); !problem.empty()) throw std::runtime_error(problem);
  auto state = std::make_unique<DeviceState>();
  int device = 0;
  check(d.device_get(&device, ordinal), "cuDeviceGet");
  state->num_processors = attribute(d, kProcessorCountAttribute, device);
  const int major = attribute(d, kCapabilityMajorAttribute, device);
  const int minor = attribute(d, kCapabilityMinorAttribute, device);
  const DeviceCode* code = code_for(major, minor);
  if (code == nullptr) throw std::runtime_error(no_code_for(ordinal, major, minor));
  check(d.primary_context_retain(&state->context, device), "cuDevicePrimaryCtxRetain");
  check(d.context_push_current(state->context), "cuCtxPushCurrent");
  Library library = nullptr;
  Result result = d.library_load_data(&library, code->data, nullptr, nullptr, 0, nullptr, nullptr, 0);
  for (const std::string& name : decode_kernel_names()) {
    Kernel kernel = nullptr;
    if (result == 0) result = d.library_get_kernel(&kernel, library, name.c_str());
    if (result == 0) result = d.kernel_set_attribute(kMaxSharedAttribute, most_shared_bytes(name), kernel, device);
    state->kernels[name] = kernel;
  }
  Context popped = nullptr;
  check(d.context_pop_current(&popped), "cuCtxPopCurrent");
  check(result, ("loading the device code for " + code->architecture).c_str());
  return state;
}

unsigned long long active_capture(const Driver& d, Stream stream) {
  int status = 0;
  unsigned long long id = 0;
  check(d.stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr), "cuStreamGetCaptureInfo");
  return status == kCaptureActive ? id : 0;
}

DeviceState& device_state(int ordinal, bool is_capturing) {
  std::unique_ptr<DeviceState>& state = devices()[ordinal];
  if (state == nullptr) {
    if (is_capturing) {
      throw std::runtime_error("the first call on cuda:" + std::to_string(ordinal) +
                               " is inside of a CUDA graph capture, where no code can be loaded: call "
                               "gdn_cuda.prepare() before");
    }
    state = load_device(ordinal);
  }
  return *state;
}

Stream current_stream(int device) {
  static const nb::object* get = [] {
    nb::object torch_c = nb::module_::import_("torch").attr("_C");
    return new nb::object(torch_c.attr("_cuda_getCurrentRawStream"));
  }();
  return reinterpret_cast<Stream>(nb::cast<std::uintptr_t>((*get)(device)));
}

void grow(int device, std::size_t wanted, Memory& memory) {
  if (wanted <= memory.bytes) return;
  const std::size_t size = std::max(wanted, 2 * memory.bytes);
  nb::object torch = nb::module_::import_("torch");
  nb::object tensor = torch.attr("zeros")(size, nb::arg("dtype") = torch.attr("uint8"),
                                          nb::arg("device") = "cuda:" + std::to_string(device));
  void* data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
  memory = Memory{std::move(tensor), size, data};
}

// One for each stream, since launches of a stream follow each other. A captured graph has its own, and its counters are
// cleared whenever it runs: the clearing is captured with it. Graphs of one pool never run at the same time.
Workspace& workspace_of(DeviceState& state, int device, Stream stream, unsigned long long capture,
                        const DecodePlan& plan) {
  Workspace& workspace = state.workspaces[stream];
  if (workspace.capture != capture) {
    workspace = Workspace();
    workspace.capture = capture;
  }
  grow(device, plan.counter_bytes, workspace.counters);
  grow(device, plan.scratch_bytes, workspace.scratch);
  return workspace;
}

// The device's context, for as long as a launch takes, where another one is current.
class CurrentContext {
 public:
  CurrentContext(const Driver& d, Context context) : driver_(d) {
    Context current = nullptr;
    check(d.context_get_current(&current), "cuCtxGetCurrent");
    if (current == context) return;
    check(d.context_push_current(context), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  ~CurrentContext() {
    Context popped = nullptr;
    if (is_pushed_) driver_.context_pop_current(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  bool is_pushed_ = false;
};

}  // namespace

std::int32_t launch_device_type() { return GDN_LAUNCH_DEVICE; }

std::string decode_problem(int device) {
  static auto* problems = new std::map<int, std::string>();
  const nb::ft_lock_guard lock(mutex());
  const auto known = problems->find(device);
  if (known != problems->end()) return known->second;
  const Driver& d = driver();
  int handle = 0;
  check(d.device_get(&handle, device), "cuDeviceGet");
  const int major = attribute(d, kCapabilityMajorAttribute, handle);
  const int minor = attribute(d, kCapabilityMinorAttribute, handle);
  std::string problem;
  if (code_for(major, minor) == nullptr) {
    problem = no_code_for(device, major, minor);
  }
  return (*problems)[device] = problem;
}

void prepare_device(int ordinal) {
  const nb::ft_lock_guard lock(mutex());
  device_state(ordinal, false);
}

void launch_decode(DecodeCall& call) {
  const nb::ft_lock_guard lock(mutex());
  const Driver& d = driver();
  const Stream stream = current_stream(call.device);
  const unsigned long long capture = active_capture(d, stream);
  DeviceState& state = device_state(call.device, capture != 0);
  const DecodePlan plan = plan_decode(call, state.num_processors);
  if (plan.counter_bytes > 0) {
    const Workspace& workspace = workspace_of(state, call.device, stream, capture, plan);
    place_workspace(call, workspace.counters.data, workspace.scratch.data);
  }
  const CurrentContext current(d, state.context);
  void* params[] = {&call.params};
  check(d.launch_kernel(state.kernels.at(plan.kernel), static_cast<unsigned>(plan.blocks_x),
                        static_cast<unsigned>(plan.blocks_y), 1, static_cast<unsigned>(plan.threads), 1, 1,
                        static_cast<unsigned>(plan.shared_bytes), stream, params, nullptr),
        "cuLaunchKernel");
}

}  // namespace gdn::cuda
