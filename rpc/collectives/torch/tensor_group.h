/// The operations of a group on torch tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "rpc/collectives/tensor_operations.h"
#include "rpc/collectives/torch/device_copies.h"
#include "rpc/collectives/torch/direct_order.h"

namespace tensorferry::collectives {

/// Access to the torch tensors of one operation, for TensorOperations.
class TorchAccess final {
 public:
  using Tensor = at::Tensor;
  TorchAccess() = default;  // tensors of the CPU
  /// Tensors of a device, which are copied to host memory and back.
  explicit TorchAccess(std::shared_ptr<DeviceCopies> copies) : copies_(std::move(copies)) {}
  /// Tensors of a device, which stay there.
  explicit TorchAccess(std::shared_ptr<DirectOrder> direct) : direct_(std::move(direct)) {}
  /// Returns the order of the device's streams; null for tensors of the CPU.
  [[nodiscard]] std::shared_ptr<DeviceOrder> order() const {
    return direct_ ? std::shared_ptr<DeviceOrder>(direct_) : copies_;
  }
  /// Returns null unless the tensors stay on their device.
  [[nodiscard]] const std::shared_ptr<DirectOrder>& direct() const noexcept { return direct_; }

  /// Ok; or why a group cannot take the tensor: it is sparse, on another device, or quantised.
  [[nodiscard]] Status check(const at::Tensor& tensor) const;
  static DType dtype(const at::Tensor& tensor);
  static std::size_t elements(const at::Tensor& tensor);
  [[nodiscard]] bool is_dense(const at::Tensor& tensor) const;
  [[nodiscard]] at::Tensor dense(const at::Tensor& tensor) const;
  [[nodiscard]] at::Tensor empty_like(const at::Tensor& tensor) const;
  void copy(const at::Tensor& to, const at::Tensor& from) const;
  static std::span<std::byte> bytes(const at::Tensor& tensor);
  static bool is_same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }
  [[nodiscard]] StartOptions arrange(StartOptions options) const;
  [[nodiscard]] bool is_direct() const noexcept { return direct_ != nullptr; }
  /// Drops tensors of an operation, on the thread that ends it. After keep_tensors_from_now() it leaks them.
  static void release(std::vector<at::Tensor> tensors);

 private:
  std::shared_ptr<DeviceCopies> copies_;
  std::shared_ptr<DirectOrder> direct_;
};

extern template class TensorOperations<TorchAccess>;

/// Python's module calls this when the interpreter is about to end: a tensor that Python knows takes the GIL when it is
/// dropped, and CPython would unwind the thread out of its destructor.
void keep_tensors_from_now();
/// Returns whether it has: then no function of the program may be called on the library's threads.
bool tensors_are_kept() noexcept;

class TensorGroup final : public TensorOperations<TorchAccess> {
 public:
  using TensorOperations::TensorOperations;
  /// As for all kinds of tensors. Those of a device are joined there.
  Started all_reduce_coalesced(const Tensors& tensors, ReduceOp op, StartOptions options = {}) const;
  /// Sums sparse COO tensors of one shape into `tensor` at every rank: one operation. On a device the call waits until
  /// the tensor is in host memory.
  Started all_reduce_sparse(const at::Tensor& tensor, StartOptions options = {}) const;
};

/// Returns the rows of `tensor` along its first dimension, for one rank each: `counts` of them, or as many for each of
/// `ranks` if it is empty. InvalidArgument if they do not add up.
Result<std::vector<at::Tensor>> rows_of(const at::Tensor& tensor, std::size_t ranks,
                                        const std::vector<std::int64_t>& counts = {});

}  // namespace tensorferry::collectives
