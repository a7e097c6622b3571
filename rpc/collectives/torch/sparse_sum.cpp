// The sum of sparse COO tensors: the ranks tell one another their shapes and how many elements they have, and then
// gather the indices and the values of all. It is one operation of the group.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/torch/tensor_group.h"
#include "rpc/tensor.h"

namespace tensorferry::collectives {
namespace {

/// What a rank tells of its tensor.
struct Description {
  static constexpr std::size_t most_dimensions = 64;  // torch's limit
  std::int64_t dimensions = 0, sparse_dimensions = 0, elements = 0;
  std::array<std::int64_t, most_dimensions> sizes{};

  [[nodiscard]] bool has_the_shape_of(const Description& other) const {
    return dimensions == other.dimensions && sparse_dimensions == other.sparse_dimensions && sizes == other.sizes;
  }
  [[nodiscard]] std::string shape() const {
    std::string out;
    for (std::size_t i = 0; i < most_dimensions && static_cast<std::int64_t>(i) < dimensions; ++i) {
      out += (out.empty() ? "" : ", ") + std::to_string(sizes[i]);
    }
    return formatted("({}) with {} sparse dimensions", out, sparse_dimensions);
  }
};

std::span<std::byte> bytes_of(const at::Tensor& tensor) { return TorchAccess::bytes(tensor); }

/// One sum: this rank's elements, and those of all ranks.
class SparseSum final {
 public:
  explicit SparseSum(const at::Tensor& tensor) : own_(tensor.detach().cpu().coalesce()) {
    indices_ = own_._indices().contiguous();
    values_ = own_._values().resolve_conj().resolve_neg().contiguous();
    description_.dimensions = own_.dim();
    description_.sparse_dimensions = own_.sparse_dim();
    description_.elements = own_._nnz();
    std::copy(own_.sizes().begin(), own_.sizes().end(), description_.sizes.begin());
  }

  /// Gathers the elements of all ranks.
  Status exchange(RawGroup& group, const WaitLimits& limits) {
    Fingerprint called;
    called.operation = static_cast<std::uint8_t>(Operation::all_reduce);
    called.dtype = static_cast<std::uint8_t>(*dtype_of(values_.scalar_type()));
    called.reduction = static_cast<std::uint8_t>(Reduction::sum);
    called.elements = ~std::uint64_t{0};
    std::vector<Description> all(group.size());
    const std::span own(&description_, 1);
    auto status = group.tell_each_other(called, std::as_bytes(own), std::as_writable_bytes(std::span(all)), limits);
    if (!status.ok()) return status;
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank].has_the_shape_of(all[0])) continue;
      return group.disagree(
          {Code::invalid_argument,
           formatted("the sparse tensors have several shapes: that of {} has {}, and that of {} has {}", group.named(0),
                     all[0].shape(), group.named(rank), all[rank].shape())});
    }
    try {
      make_room(all);
    } catch (const std::exception& error) {
      return {Code::resource_exhausted, formatted("no memory for the elements of all ranks: {}", error.what())};
    }
    status = group.give_to_all(called, bytes_of(indices_), outputs(all_indices_), limits);
    if (!status.ok()) return status;
    return group.give_to_all(called, bytes_of(values_), outputs(all_values_), limits);
  }

  /// Returns the sum, in host memory.
  [[nodiscard]] at::Tensor sum() const {
    return at::sparse_coo_tensor(at::cat(all_indices_, 1), at::cat(all_values_, 0), own_.sizes(), own_.options())
        .coalesce();
  }

 private:
  void make_room(const std::vector<Description>& all) {
    const at::NoGradGuard no_grad;
    for (const auto& each : all) {
      TORCH_CHECK(each.elements >= 0, "a rank told ", each.elements, " elements");
      all_indices_.push_back(at::empty({own_.sparse_dim(), each.elements}, at::kLong));
      auto shape = values_.sizes().vec();
      shape[0] = each.elements;
      all_values_.push_back(at::empty(shape, values_.options()));
    }
  }
  static std::vector<std::span<std::byte>> outputs(const std::vector<at::Tensor>& tensors) {
    std::vector<std::span<std::byte>> out;
    for (const auto& tensor : tensors) out.push_back(bytes_of(tensor));
    return out;
  }

  const at::Tensor own_;
  at::Tensor indices_, values_;
  Description description_;
  std::vector<at::Tensor> all_indices_, all_values_;
};

/// Writes `sum`, in host memory, to a tensor of a device, in `order`. The tensor gets new memory, which the caller uses
/// on `callers_stream`.
void write_on_device(const DeviceOrder& order, const c10::Stream& callers_stream, const at::Tensor& tensor,
                     const at::Tensor& sum) {
  order.on_stream([&] {
    tensor.copy_(sum.to(tensor.device()));
    tensor._indices().record_stream(callers_stream);
    tensor._values().record_stream(callers_stream);
  });
}

}  // namespace

TensorGroup::Started TensorGroup::all_reduce_sparse(const at::Tensor& tensor, StartOptions options) const {
  if (!tensor.is_sparse()) return Status(Code::invalid_argument, "the tensor is not a sparse COO tensor");
  if (auto status = check_reduction(Reduction::sum, TorchAccess::dtype(tensor)); !status.ok()) return status;
  const at::NoGradGuard no_grad;
  const auto sum = std::make_shared<SparseSum>(tensor);
  const auto order = access().order();
  std::optional<c10::Stream> callers_stream;
  if (order) {
    callers_stream = c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  }
  options.finish = [sum, order, callers_stream, tensor, then = std::move(options.finish)] {
    const c10::InferenceMode mode(tensor.is_inference());
    const at::NoGradGuard without_grad;
    if (order) {
      write_on_device(*order, *callers_stream, tensor, sum->sum());
    } else {
      tensor.copy_(sum->sum());
    }
    if (then) then();
  };
  return raw().perform(std::move(options),
                       [sum, &group = raw()](const WaitLimits& limits) { return sum->exchange(group, limits); });
}

}  // namespace tensorferry::collectives
