// Operations with several tensors a rank. One tensor, or list, of the rank takes part in the operation of the group,
// and the others get its result.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "rpc/collectives/torch/process_group.h"

namespace tensorferry::collectives {
namespace {

void check_alike(at::TensorList tensors) {  // of which there are two or more
  const auto layout = tensors[0].layout();
  for (const auto& each : tensors) {
    TORCH_CHECK_VALUE(each.device().is_cpu() && (layout == at::kStrided || layout == at::kSparse),
                      "the backend tensorferry takes one tensor a rank, not ", tensors.size(),
                      ", unless they are on the CPU, and dense or sparse (COO)");
    TORCH_CHECK_VALUE(
        each.layout() == layout && each.scalar_type() == tensors[0].scalar_type() && each.sizes() == tensors[0].sizes(),
        "the tensors of a rank have one layout, dtype and shape: here are ", layout, " ", tensors[0].scalar_type(), " ",
        tensors[0].sizes(), " and ", each.layout(), " ", each.scalar_type(), " ", each.sizes());
  }
}

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, Reduction kind) {
  switch (kind) {
    case Reduction::sum:
      return at::add(a, b);
    case Reduction::product:
      return at::mul(a, b);
    case Reduction::min:
      return at::minimum(a, b);
    case Reduction::max:
      return at::maximum(a, b);
    case Reduction::band:
      return at::bitwise_and(a, b);
    case Reduction::bor:
      return at::bitwise_or(a, b);
    case Reduction::bxor:
      return at::bitwise_xor(a, b);
    default:
      C10_THROW_ERROR(ValueError, "the backend tensorferry takes one tensor a rank with this reduction");
  }
}

/// Adds the copies from each tensor of `from` to the tensor at the same place in each list of `to`, at the end.
StartOptions copied(StartOptions options, std::vector<at::Tensor> from, std::vector<std::vector<at::Tensor>> to) {
  options.finish = [from = std::move(from), to = std::move(to)] {
    for (const auto& list : to) {
      for (std::size_t i = 0; i < list.size(); ++i) TorchAccess().copy(list[i], from[i]);
    }
  };
  return options;
}

/// Returns a list for each tensor but the one at `index`.
std::vector<std::vector<at::Tensor>> all_but(const std::vector<at::Tensor>& tensors, std::size_t index) {
  std::vector<std::vector<at::Tensor>> out;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (i != index) out.push_back({tensors[i]});
  }
  return out;
}

}  // namespace

TorchProcessGroup::WorkPointer TorchProcessGroup::broadcast_several(Tensors& tensors, std::size_t root,
                                                                    const c10d::BroadcastOptions& opts) {
  check_alike(tensors);
  TORCH_CHECK_VALUE(opts.rootTensor >= 0 && static_cast<std::size_t>(opts.rootTensor) < tensors.size(),
                    "there is no tensor ", opts.rootTensor, " among ", tensors.size());
  const auto sent = static_cast<std::size_t>(opts.rootTensor);
  const auto options = start_options(opts.timeout, opts.asyncOp);
  const auto on = group_on("broadcast", {tensors}, options);
  return work_of(on, on.broadcast(tensors[sent], root, copied(options, {tensors[sent]}, all_but(tensors, sent))),
                 c10d::OpType::BROADCAST, "tensorferry:broadcast", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce_several(Tensors& tensors, ReduceOp op,
                                                                    const c10d::AllreduceOptions& opts) {
  check_alike(tensors);
  const auto options = start_options(opts.timeout, opts.asyncOp);
  auto mine = tensors[0];
  const bool sparse = mine.is_sparse();
  TORCH_CHECK_VALUE(!sparse || op.kind == Reduction::sum, "sparse tensors can only be summed");
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 1; i < tensors.size(); ++i) mine = combined(mine, tensors[i], op.kind);
  }
  if (sparse) {
    const auto on = staged_group_on("all_reduce_sparse", {tensors});
    return work_of(on, on.all_reduce_sparse(mine, copied(options, {mine}, all_but(tensors, tensors.size()))),
                   c10d::OpType::_ALLREDUCE_SPARSE, "tensorferry:all_reduce_sparse", {tensors}, {}, opts.timeout);
  }
  const auto on = group_on("all_reduce", {tensors}, options);
  return work_of(on, on.all_reduce(mine, tensors[0], std::move(op), copied(options, {tensors[0]}, all_but(tensors, 0))),
                 c10d::OpType::ALLREDUCE, "tensorferry:all_reduce", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather_several(TensorLists& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  check_alike(inputs);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "there are ", outputs.size(), " lists for ", inputs.size(),
                    " tensors of a rank");
  const auto count = inputs.size();
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == count * ranks(), "a list has ", list.size(), " tensors for ", count,
                      " of each of ", ranks(), " ranks");
    check_alike(list);
  }
  const auto options = start_options(opts.timeout, opts.asyncOp);
  const auto on = group_on("all_gather", {inputs, outputs[0]}, options);
  const TensorLists others(outputs.begin() + 1, outputs.end());
  StartOptions each = options;
  TensorGroup::Started last(Status(Code::internal, "no operation"));
  for (std::size_t i = 0; i < count; ++i) {
    Tensors of_ranks;
    for (std::size_t rank = 0; rank < ranks(); ++rank) of_ranks.push_back(outputs[0][rank * count + i]);
    last = on.all_gather(inputs[i], of_ranks, i + 1 < count ? each : copied(each, outputs[0], others));
    if (!last.ok()) break;
    each.earlier = *last;
  }
  return work_of(on, std::move(last), c10d::OpType::ALLGATHER, "tensorferry:all_gather", outputs, inputs, opts.timeout);
}

}  // namespace tensorferry::collectives
