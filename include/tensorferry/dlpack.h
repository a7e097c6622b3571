/// DLPack: exchanges tensors with torch, numpy, JAX and other libraries without a copy.
///
/// The structs have the layout of DLPack's ABI. A program that also includes DLPack's own dlpack.h may cast between the
/// two.
#pragma once

#include <cstdint>

#include "tensorferry/tensor.h"

namespace tensorferry::dlpack {

/// Types of devices: kDLCPU, kDLCUDA, kDLCUDAHost.
inline constexpr std::int32_t cpu = 1, cuda = 2, cuda_host = 3;
/// Codes of dtypes: kDLInt, kDLUInt, kDLFloat, kDLBfloat, kDLComplex, kDLBool.
inline constexpr std::uint8_t signed_integer = 0, unsigned_integer = 1, floating = 2, bfloat = 4, complex = 5,
                              boolean = 6;

/// DLDevice.
struct DLPackDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};
/// DLDataType.
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
/// DLTensor.
struct Array {
  void* data;
  DLPackDevice device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: row-major
  std::uint64_t byte_offset;
};
/// DLManagedTensor. Its consumer calls `deleter(self)` once.
struct ManagedTensor {
  Array dl_tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
};
static_assert(sizeof(void*) != 8 || (sizeof(Array) == 48 && sizeof(ManagedTensor) == 64));

}  // namespace tensorferry::dlpack

namespace tensorferry {

/// Takes ownership of `managed` and returns a tensor in its memory.
///
/// The deleter runs when the last tensor that shares the memory is destroyed, on the thread that destroys it. If this
/// function throws, the deleter runs at once. The tensor records no CUDA stream: the caller makes sure that the memory
/// may be read. Pinned host memory becomes host memory. Throws InvalidArgument for a null pointer, and for a device,
/// dtype, number of lanes or stride that has no counterpart here.
Tensor from_dlpack(dlpack::ManagedTensor* managed);

/// Returns a DLPack tensor in the memory of `tensor`. It keeps the memory until the consumer calls the deleter. Throws
/// InvalidArgument if DLPack lacks the dtype.
dlpack::ManagedTensor* to_dlpack(const Tensor& tensor);

}  // namespace tensorferry
