// SPDX-License-Identifier: Apache-2.0
//
// The part of the DLPack C ABI that torch offers as `torch.Tensor.__dlpack_c_exchange_api__`, declared here so that
// neither torch's nor anyone's header is needed. Layouts follow DLPack 1.2, which promises to keep them within major
// version 1.
#pragma once

#include <cstdint>

namespace gdn::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2 };

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kComplex = 5, kBool = 6 };

// The names of the codes from 7 on, of floats of 8 bits and fewer.
inline constexpr std::uint8_t kFirstNarrowFloat = 7;
inline constexpr const char* kNarrowFloats[] = {
    "float8_e3m4",     "float8_e4m3",    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",      "float6_e3m2fn", "float4_e2m1fn"};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

// A borrowed view: shape and strides belong to the tensor it was taken from.
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* prev_api;
};

using Opaque = void (*)();

struct ExchangeApi {
  ExchangeApiHeader header;
  Opaque managed_tensor_allocator;
  Opaque managed_tensor_from_py_object_no_sync;
  Opaque managed_tensor_to_py_object_no_sync;
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);  // may be null
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

}  // namespace gdn::dlpack
