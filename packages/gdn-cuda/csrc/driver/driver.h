// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, opened at run time, so that this module loads on machines that have none. Of its public C interface
// only what is called here, with the layouts that CUDA 12 gave it.
#pragma once

#include <string>
#include <vector>

namespace gdn::cuda {

using Result = int;  // CUresult: 0 is success
using Context = void*;
using Stream = void*;
using Library = void*;
using Kernel = void*;

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int* version);
  Result (*get_error_name)(Result result, const char** name);
  Result (*get_error_string)(Result result, const char** text);
  Result (*device_get_count)(int* count);
  Result (*device_get)(int* device, int ordinal);
  Result (*device_get_name)(char* name, int length, int device);
  Result (*device_get_attribute)(int* value, int attribute, int device);
  Result (*primary_context_retain)(Context* context, int device);
  Result (*context_get_current)(Context* context);
  Result (*context_push_current)(Context context);
  Result (*context_pop_current)(Context* context);
  Result (*stream_get_capture_info)(Stream stream, int* status, unsigned long long* id, void* graph, void* dependencies,
                                    void* num_dependencies);
  Result (*library_load_data)(Library* library, const void* code, int* jit_options, void** jit_values,
                              unsigned num_jit_options, int* options, void** values, unsigned num_options);
  Result (*library_get_kernel)(Kernel* kernel, Library library, const char* name);
  Result (*kernel_set_attribute)(int attribute, int value, Kernel kernel, int device);
  Result (*launch_kernel)(Kernel kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** params,
                          void** extra);
};

// The driver, started. Throws std::runtime_error with the reason where there is none that serves.
const Driver& driver();

// Throws std::runtime_error: "cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (invalid argument)".
void check(Result result, const char* call);

struct DeviceInfo {
  std::string name;
  int capability_major = 0;
  int capability_minor = 0;
  int num_processors = 0;
};

struct DriverInfo {
  std::string problem;  // why there is nothing to run on; empty when there is
  int version = 0;      // 1000 * major + 10 * minor, as the driver says it; 0 when unknown
  std::vector<DeviceInfo> devices;
};

// Asks the driver anew on every call. Makes no CUDA context.
DriverInfo query_driver();

// Why no call can run on this machine, or an empty string.
std::string launch_problem();

}  // namespace gdn::cuda
