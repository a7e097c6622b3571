/// The operations of a group on torch tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "rpc/collectives/tensor_operations.h"
#include "rpc/collectives/torch/device_copies.h"

namespace tensorferry::collectives {

/// Access to the torch tensors of one operation, for TensorOperations.
class TorchAccess final {
 public:
  using Tensor = at::Tensor;
  TorchAccess() = default;  // tensors of the CPU
  /// Tensors of the device of `copies`; null: of the CPU.
  explicit TorchAccess(std::shared_ptr<DeviceCopies> copies) : copies_(std::move(copies)) {}
  [[nodiscard]] const std::shared_ptr<DeviceCopies>& copies() const noexcept { return copies_; }

  /// Ok; or why a group cannot take the tensor: it is sparse, on another device, or quantised.
  [[nodiscard]] Status check(const at::Tensor& tensor) const;
  static DType dtype(const at::Tensor& tensor);
  static std::size_t elements(const at::Tensor& tensor);
  static bool is_dense(const at::Tensor& tensor);
  [[nodiscard]] at::Tensor dense(const at::Tensor& tensor) const;
  static at::Tensor empty_like(const at::Tensor& tensor);
  void copy(const at::Tensor& to, const at::Tensor& from) const;
  static std::span<std::byte> bytes(const at::Tensor& tensor);
  static bool is_same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }
  [[nodiscard]] std::function<bool()> arrived() const;

 private:
  std::shared_ptr<DeviceCopies> copies_;
};

extern template class TensorOperations<TorchAccess>;

class TensorGroup final : public TensorOperations<TorchAccess> {
 public:
  using TensorOperations::TensorOperations;
  /// As for all kinds of tensors. Those of a device are joined there.
  Started all_reduce_coalesced(const Tensors& tensors, ReduceOp op, StartOptions options = {}) const;
  /// Sums sparse COO tensors of one shape into `tensor` at every rank. Blocks until it has ended.
  Status all_reduce_sparse(at::Tensor& tensor, StartOptions options = {}) const;
};

/// Returns the rows of `tensor` along its first dimension, for one rank each: `counts` of them, or as many for each of
/// `ranks` if it is empty. InvalidArgument if they do not add up.
Result<std::vector<at::Tensor>> rows_of(const at::Tensor& tensor, std::size_t ranks,
                                        const std::vector<std::int64_t>& counts = {});

}  // namespace tensorferry::collectives
