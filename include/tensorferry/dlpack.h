/// DLPack: tensors in and out without a copy, as torch, numpy, JAX and others have them. The structs have the layout
/// that DLPack's ABI fixes; a program that includes another dlpack.h may cast between the two.
#pragma once

#include <cstdint>

#include "tensorferry/tensor.h"

namespace tensorferry::dlpack {

/// kDLCPU, kDLCUDA, kDLCUDAHost of DLPack.
inline constexpr std::int32_t cpu = 1, cuda = 2, cuda_host = 3;
/// kDLInt, kDLUInt, kDLFloat, kDLBfloat, kDLComplex, kDLBool.
inline constexpr std::uint8_t signed_integer = 0, unsigned_integer = 1, floating = 2, bfloat = 4, complex = 5,
                              boolean = 6;

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Array {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: row-major
  std::uint64_t byte_offset;
};
/// DLManagedTensor. Whoever consumes it calls `deleter(self)` once.
struct ManagedTensor {
  Array dl_tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
};
static_assert(sizeof(void*) != 8 || (sizeof(Array) == 48 && sizeof(ManagedTensor) == 64));

}  // namespace tensorferry::dlpack

namespace tensorferry {

/// Takes over `managed`: its deleter runs with the last tensor that shares the memory, on any thread; at once where an
/// error is thrown. The stream in whose order CUDA memory may be read is the caller's business. InvalidArgument: a
/// device, dtype, number of lanes or stride that has no counterpart here.
Tensor from_dlpack(dlpack::ManagedTensor* managed);

/// Shares the tensor's memory until the consumer calls the deleter. InvalidArgument: a dtype that DLPack has not.
dlpack::ManagedTensor* to_dlpack(const Tensor& tensor);

}  // namespace tensorferry
