/// The operations of a group on torch tensors of the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "rpc/collectives/tensor_operations.h"

namespace tensorferry::collectives {

/// Access to torch tensors, for TensorOperations.
struct TorchAccess {
  using Tensor = at::Tensor;
  /// Ok; or why a group cannot take the tensor: it is sparse, not on the CPU, or quantised.
  static Status check(const at::Tensor& tensor);
  static DType dtype(const at::Tensor& tensor);
  static std::size_t elements(const at::Tensor& tensor);
  static bool is_dense(const at::Tensor& tensor);
  static at::Tensor dense(const at::Tensor& tensor);
  static at::Tensor empty_like(const at::Tensor& tensor);
  static void copy(const at::Tensor& to, const at::Tensor& from);
  static std::span<std::byte> bytes(const at::Tensor& tensor);
  static bool is_same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }
};

extern template class TensorOperations<TorchAccess>;

class TensorGroup final : public TensorOperations<TorchAccess> {
 public:
  using TensorOperations::TensorOperations;
  /// Sums sparse COO tensors of one shape into `tensor` at every rank. Blocks until it has ended.
  Status all_reduce_sparse(at::Tensor& tensor, StartOptions options = {}) const;
};

/// Returns the rows of `tensor` along its first dimension, for one rank each: `counts` of them, or as many for each of
/// `ranks` if it is empty. InvalidArgument if they do not add up.
Result<std::vector<at::Tensor>> rows_of(const at::Tensor& tensor, std::size_t ranks,
                                        const std::vector<std::int64_t>& counts = {});

}  // namespace tensorferry::collectives
