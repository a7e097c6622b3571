/// The operations of a group on torch tensors of the CPU. Tensors may be strided: an input with gaps is copied first,
/// and an output with gaps gets its elements when the operation ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {

/// Starts the operations of a RawGroup. Thread-safe as that is. A tensor that the group cannot take is an
/// InvalidArgument here, at this rank alone: it is not dense, not on the CPU, of a dtype that the reduction does not
/// know, or of another size than the operation needs.
class TensorGroup final {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Started = Result<std::shared_ptr<GroupWork>>;

  explicit TensorGroup(std::shared_ptr<RawGroup> group) : group_(std::move(group)) {}
  [[nodiscard]] RawGroup& raw() const noexcept { return *group_; }

  Started broadcast(const at::Tensor& tensor, std::size_t root, StartOptions options = {}) const;
  Started all_reduce(const at::Tensor& input, const at::Tensor& output, ReduceOp op, StartOptions options = {}) const;
  /// Reduces all tensors, which have one dtype, as if they were one.
  Started all_reduce_coalesced(const Tensors& tensors, ReduceOp op, StartOptions options = {}) const;
  /// Sums sparse COO tensors of one shape into `tensor` at every rank. Blocks until it has ended.
  Status all_reduce_sparse(at::Tensor& tensor, StartOptions options = {}) const;
  Started reduce(const at::Tensor& input, const at::Tensor& output, ReduceOp op, std::size_t root,
                 StartOptions options = {}) const;
  /// `outputs` has a tensor for each rank. Their sizes may differ if each rank gives as much as the others expect.
  Started all_gather(const at::Tensor& input, const Tensors& outputs, StartOptions options = {}) const;
  Started gather(const at::Tensor& input, const Tensors& outputs, std::size_t root, StartOptions options = {}) const;
  Started scatter(const Tensors& inputs, const at::Tensor& output, std::size_t root, StartOptions options = {}) const;
  Started reduce_scatter(const Tensors& inputs, const at::Tensor& output, ReduceOp op, StartOptions options = {}) const;
  /// `even`: all tensors of all ranks have one size, which is then checked.
  Started all_to_all(const Tensors& inputs, const Tensors& outputs, bool even, StartOptions options = {}) const;
  Started send(const at::Tensor& tensor, std::size_t to, std::uint64_t tag, StartOptions options = {}) const;
  Started receive(const at::Tensor& tensor, std::size_t from, std::uint64_t tag, StartOptions options = {}) const;

 private:
  Status check_rank(std::size_t rank) const;

  const std::shared_ptr<RawGroup> group_;
};

/// Returns the rows of `tensor` along its first dimension, for one rank each: `counts` of them, or as many for each of
/// `ranks` if it is empty. InvalidArgument if they do not add up.
Result<std::vector<at::Tensor>> rows_of(const at::Tensor& tensor, std::size_t ranks,
                                        const std::vector<std::int64_t>& counts = {});

}  // namespace tensorferry::collectives
