/// A device type that TensorFerry does not know, for tests: torch's PrivateUse1, whose memory is the host's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <memory>

namespace tensorferry::testing {

/// Copies a contiguous CPU tensor to the device of this index.
inline at::Tensor to_toy(const at::Tensor& host, c10::DeviceIndex index) {
  auto* const memory = new at::Tensor(host.clone());
  const at::Device device(at::kPrivateUse1, index);
  at::DataPtr data(
      memory->data_ptr(), memory, [](void* held) { delete static_cast<at::Tensor*>(held); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory->nbytes(), std::move(data), nullptr, false);
  auto tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(host.sizes());
  return tensor;
}

/// Copies a contiguous tensor of the device to host memory.
inline at::Tensor from_toy(const at::Tensor& tensor) {
  auto* const memory = const_cast<void*>(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  return at::from_blob(memory, tensor.sizes(), at::TensorOptions().dtype(tensor.dtype())).clone();
}

}  // namespace tensorferry::testing
