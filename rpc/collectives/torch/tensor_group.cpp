#include "rpc/collectives/torch/tensor_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/reduce.h"
#include "rpc/tensor.h"

namespace tensorferry::collectives {
namespace {

/// Collects the tensors of one operation, and their copies.
class Staged final {
 public:
  std::span<const std::byte> input(const at::Tensor& tensor) {
    return bytes_of_tensor(tensor.resolve_conj().resolve_neg().contiguous());
  }
  std::span<std::byte> output(const at::Tensor& tensor) {
    if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return bytes_of_tensor(tensor);
    auto dense = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
    copies_.emplace_back(tensor, dense);
    return bytes_of_tensor(dense);
  }
  /// The same for a tensor that is both.
  std::span<std::byte> both(const at::Tensor& tensor) {
    const auto out = output(tensor);
    if (!copies_.empty() && copies_.back().first.is_same(tensor)) copies_.back().second.copy_(tensor);
    return out;
  }
  /// Keeps the tensors, and adds the copies back to their outputs.
  static StartOptions with(StartOptions options, Staged staged) {
    const auto kept = std::make_shared<Staged>(std::move(staged));
    if (!kept->copies_.empty()) {
      options.finish = [kept, then = std::move(options.finish)] {
        const at::NoGradGuard no_grad;
        for (auto& [to, from] : kept->copies_) to.copy_(from);
        if (then) then();
      };
    }
    options.keep = std::make_shared<std::pair<std::shared_ptr<Staged>, Owner>>(kept, std::move(options.keep));
    return options;
  }

 private:
  std::span<std::byte> bytes_of_tensor(const at::Tensor& tensor) {
    kept_.push_back(tensor);
    if (tensor.numel() == 0) return {};
    return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
  }
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

Status check_tensor(const at::Tensor& tensor) {
  const auto refused = [](std::string_view why) { return Status(Code::invalid_argument, std::string(why)); };
  if (!tensor.defined()) return refused("a group takes no undefined tensor");
  if (tensor.layout() != at::kStrided) return refused("a group takes dense tensors: this one is sparse");
  if (!tensor.device().is_cpu()) {
    return refused(formatted("a group takes tensors of the CPU, not of {}", tensor.device().str()));
  }
  if (!dtype_of(tensor.scalar_type())) return refused("a group takes no quantised tensor");
  return {};
}

DType type_of(const at::Tensor& tensor) { return *dtype_of(tensor.scalar_type()); }

Status check_alike(const std::vector<at::Tensor>& tensors, at::ScalarType type) {
  for (const auto& tensor : tensors) {
    if (auto status = check_tensor(tensor); !status.ok()) return status;
    if (tensor.scalar_type() != type) return {Code::invalid_argument, "the tensors have several dtypes"};
  }
  return {};
}

Status check_count(const std::vector<at::Tensor>& tensors, std::size_t ranks) {
  if (tensors.size() == ranks) return {};
  return {Code::invalid_argument, formatted("there are {} tensors for {} ranks", tensors.size(), ranks)};
}

Status check_same_size(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == b.numel() && a.scalar_type() == b.scalar_type()) return {};
  return {Code::invalid_argument, "the tensors have several sizes or dtypes"};
}

/// Returns the first error.
Status all_of(std::initializer_list<Status> checks) {
  for (const auto& status : checks) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status TensorGroup::check_rank(std::size_t rank) const {
  if (rank < group_->size()) return {};
  return {Code::invalid_argument, formatted("a group of {} ranks has no rank {}", group_->size(), rank)};
}

TensorGroup::Started TensorGroup::broadcast(const at::Tensor& tensor, std::size_t root, StartOptions options) const {
  if (auto status = all_of({check_tensor(tensor), check_rank(root)}); !status.ok()) return status;
  Staged staged;
  const auto bytes = group_->rank() == root ? staged.both(tensor) : staged.output(tensor);
  return group_->broadcast(bytes, type_of(tensor), root, Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::all_reduce(const at::Tensor& input, const at::Tensor& output, ReduceOp op,
                                             StartOptions options) const {
  if (auto status = all_of({check_tensor(input), check_tensor(output)}); !status.ok()) return status;
  if (auto status = all_of({check_same_size(input, output), check_reduction(op, type_of(input))}); !status.ok()) {
    return status;
  }
  Staged staged;
  const bool in_place = input.is_same(output);
  const auto out = in_place ? staged.both(output) : staged.output(output);
  const auto in = in_place ? std::span<const std::byte>(out) : staged.input(input);
  return group_->all_reduce(in, out, type_of(input), std::move(op),
                            Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::all_reduce_coalesced(const Tensors& tensors, ReduceOp op,
                                                       StartOptions options) const {
  if (tensors.empty()) return Status(Code::invalid_argument, "there is no tensor to reduce");
  if (auto status = check_alike(tensors, tensors[0].scalar_type()); !status.ok()) return status;
  if (tensors.size() == 1) return all_reduce(tensors[0], tensors[0], std::move(op), std::move(options));
  const at::NoGradGuard no_grad;
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  auto joined_tensor = at::cat(flat);
  options.finish = [joined_tensor, tensors, then = std::move(options.finish)] {
    const at::NoGradGuard guard;
    std::int64_t at = 0;
    for (const auto& tensor : tensors) {
      tensor.copy_(joined_tensor.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
    if (then) then();
  };
  return all_reduce(joined_tensor, joined_tensor, std::move(op), std::move(options));
}

Status TensorGroup::all_reduce_sparse(at::Tensor& tensor, StartOptions options) const {
  if (!tensor.is_sparse()) return {Code::invalid_argument, "the tensor is not a sparse COO tensor"};
  const at::NoGradGuard no_grad;
  const auto wait = [](const Started& started) {
    if (!started.ok()) return started.status();
    (*started)->wait();
    return (*started)->status();
  };
  options.background = false;
  const auto own = tensor.coalesce();
  const auto ranks = static_cast<std::int64_t>(group_->size());
  // First the shape and the number of elements of each rank, then the elements.
  auto sizes = at::tensor(own.sizes(), at::kLong);
  const auto description = at::cat({at::tensor({own.sparse_dim(), own._nnz()}, at::kLong), sizes});
  auto all = at::empty({ranks, description.numel()}, at::kLong);
  const auto lines = all.unbind(0);
  if (auto status = wait(all_gather(description, {lines.begin(), lines.end()}, options)); !status.ok()) return status;
  Tensors indices, values;
  for (std::int64_t from = 0; from < ranks; ++from) {
    const auto count = all[from][1].item<std::int64_t>();
    if (!at::equal(all[from].slice(0, 2), sizes) || all[from][0].item<std::int64_t>() != own.sparse_dim()) {
      return {Code::invalid_argument, formatted("the sparse tensor of rank {} has another shape", from)};
    }
    indices.push_back(at::empty({own.sparse_dim(), count}, at::kLong));
    auto shape = own._values().sizes().vec();
    shape[0] = count;
    values.push_back(at::empty(shape, own._values().options()));
  }
  if (auto status = wait(all_gather(own._indices(), indices, options)); !status.ok()) return status;
  if (auto status = wait(all_gather(own._values(), values, options)); !status.ok()) return status;
  const auto sum =
      at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), own.sizes(), own.options()).coalesce();
  tensor.copy_(sum);
  return {};
}

TensorGroup::Started TensorGroup::reduce(const at::Tensor& input, const at::Tensor& output, ReduceOp op,
                                         std::size_t root, StartOptions options) const {
  if (auto status = all_of({check_tensor(input), check_rank(root)}); !status.ok()) return status;
  if (auto status = check_reduction(op, type_of(input)); !status.ok()) return status;
  Staged staged;
  std::span<std::byte> out;
  if (group_->rank() == root) {
    if (auto status = all_of({check_tensor(output)}); !status.ok()) return status;
    if (auto status = check_same_size(input, output); !status.ok()) return status;
    out = staged.output(output);
  }
  const auto in = staged.input(input);
  return group_->reduce(in, out, type_of(input), std::move(op), root,
                        Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::all_gather(const at::Tensor& input, const Tensors& outputs,
                                             StartOptions options) const {
  if (auto status = all_of({check_tensor(input), check_count(outputs, group_->size())}); !status.ok()) return status;
  if (auto status = check_alike(outputs, input.scalar_type()); !status.ok()) return status;
  Staged staged;
  std::vector<std::span<std::byte>> out;
  for (const auto& output : outputs) out.push_back(staged.output(output));
  const auto in = staged.input(input);
  const bool even = std::all_of(out.begin(), out.end(), [&](const auto& each) { return each.size() == in.size(); });
  return group_->all_gather(in, std::move(out), type_of(input), even,
                            Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::gather(const at::Tensor& input, const Tensors& outputs, std::size_t root,
                                         StartOptions options) const {
  if (auto status = all_of({check_tensor(input), check_rank(root)}); !status.ok()) return status;
  Staged staged;
  std::vector<std::span<std::byte>> out;
  if (group_->rank() == root) {
    if (auto status = check_count(outputs, group_->size()); !status.ok()) return status;
    if (auto status = check_alike(outputs, input.scalar_type()); !status.ok()) return status;
    for (const auto& output : outputs) out.push_back(staged.output(output));
  }
  const auto in = staged.input(input);
  return group_->gather(in, std::move(out), type_of(input), root, Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::scatter(const Tensors& inputs, const at::Tensor& output, std::size_t root,
                                          StartOptions options) const {
  if (auto status = all_of({check_tensor(output), check_rank(root)}); !status.ok()) return status;
  Staged staged;
  std::vector<std::span<const std::byte>> in;
  if (group_->rank() == root) {
    if (auto status = check_count(inputs, group_->size()); !status.ok()) return status;
    if (auto status = check_alike(inputs, output.scalar_type()); !status.ok()) return status;
    for (const auto& input : inputs) in.push_back(staged.input(input));
  }
  const auto out = staged.output(output);
  return group_->scatter(std::move(in), out, type_of(output), root,
                         Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::reduce_scatter(const Tensors& inputs, const at::Tensor& output, ReduceOp op,
                                                 StartOptions options) const {
  if (auto status = all_of({check_tensor(output), check_count(inputs, group_->size())}); !status.ok()) return status;
  if (auto status = all_of({check_alike(inputs, output.scalar_type()), check_reduction(op, type_of(output))});
      !status.ok()) {
    return status;
  }
  if (inputs[group_->rank()].numel() != output.numel()) {
    return Status(Code::invalid_argument, "the input at this rank's index has another size than the output");
  }
  Staged staged;
  std::vector<std::span<const std::byte>> in;
  for (const auto& input : inputs) in.push_back(staged.input(input));
  const auto out = staged.output(output);
  return group_->reduce_scatter(std::move(in), out, type_of(output), std::move(op),
                                Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::all_to_all(const Tensors& inputs, const Tensors& outputs, bool even,
                                             StartOptions options) const {
  if (auto status = all_of({check_count(inputs, group_->size()), check_count(outputs, group_->size())}); !status.ok()) {
    return status;
  }
  const auto type = inputs[0].scalar_type();
  if (auto status = all_of({check_alike(inputs, type), check_alike(outputs, type)}); !status.ok()) return status;
  Staged staged;
  std::vector<std::span<const std::byte>> in;
  std::vector<std::span<std::byte>> out;
  for (const auto& input : inputs) in.push_back(staged.input(input));
  for (const auto& output : outputs) out.push_back(staged.output(output));
  return group_->all_to_all(std::move(in), std::move(out), type_of(inputs[0]), even,
                            Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::send(const at::Tensor& tensor, std::size_t to, std::uint64_t tag,
                                       StartOptions options) const {
  if (auto status = all_of({check_tensor(tensor), check_rank(to)}); !status.ok()) return status;
  Staged staged;
  const auto bytes = staged.input(tensor);
  return group_->send(bytes, to, tag, Staged::with(std::move(options), std::move(staged)));
}

TensorGroup::Started TensorGroup::receive(const at::Tensor& tensor, std::size_t from, std::uint64_t tag,
                                          StartOptions options) const {
  if (auto status = check_tensor(tensor); !status.ok()) return status;
  if (from != Mailbox::any_rank) {
    if (auto status = check_rank(from); !status.ok()) return status;
  }
  Staged staged;
  const auto bytes = staged.output(tensor);
  return group_->receive(bytes, from, tag, Staged::with(std::move(options), std::move(staged)));
}

Result<std::vector<at::Tensor>> rows_of(const at::Tensor& tensor, std::size_t ranks,
                                        const std::vector<std::int64_t>& counts) {
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<at::Tensor> out;
  if (tensor.dim() == 0 && ranks == 1) return std::vector<at::Tensor>{tensor};
  std::int64_t at = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto count = counts.empty() ? rows / static_cast<std::int64_t>(ranks) : counts.at(rank);
    if (count < 0 || at + count > rows) break;
    out.push_back(tensor.narrow(0, at, count));
    at += count;
  }
  if (out.size() == ranks && at == rows) return out;
  return Status(Code::invalid_argument, formatted("{} rows do not divide among {} ranks", rows, ranks));
}

}  // namespace tensorferry::collectives
