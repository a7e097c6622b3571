#include "rpc/collectives/arguments.h"

#include "base/text.h"

namespace tensorferry::collectives {
namespace {

Status check_alike(const std::vector<Given>& tensors, DType dtype) {
  for (const auto& tensor : tensors) {
    if (tensor.dtype != dtype) return {Code::invalid_argument, "the tensors have several dtypes"};
  }
  return {};
}

Status check_count(const std::vector<Given>& tensors, const RawGroup& group) {
  if (tensors.size() == group.size()) return {};
  return {Code::invalid_argument, formatted("there are {} tensors for {} ranks", tensors.size(), group.size())};
}

/// Checks what a rank gives to itself and takes from itself.
Status check_own(Given given, Given taken) {
  if (given.elements == taken.elements) return {};
  return {Code::invalid_argument, formatted("this rank gives {} elements to itself, and its output for them has {}",
                                            given.elements, taken.elements)};
}

}  // namespace

Status first_error(std::initializer_list<Status> checks) {
  for (const auto& status : checks) {
    if (!status.ok()) return status;
  }
  return {};
}

Status check_rank(const RawGroup& group, std::size_t rank) {
  if (rank < group.size()) return {};
  return {Code::invalid_argument,
          formatted("a group of {} ranks has no rank {}", group.size(), static_cast<std::int64_t>(rank))};
}

Status check_reduced(Given input, Given output, const ReduceOp& op) {
  if (input.elements != output.elements || input.dtype != output.dtype) {
    return {Code::invalid_argument, "the tensors have several sizes or dtypes"};
  }
  return check_reduction(op, input.dtype);
}

Status check_coalesced(const std::vector<Given>& tensors, const ReduceOp& op) {
  return first_error({check_alike(tensors, tensors[0].dtype), check_reduction(op, tensors[0].dtype)});
}

Status check_gathered(const RawGroup& group, Given input, const std::vector<Given>& outputs) {
  if (auto status = check_count(outputs, group); !status.ok()) return status;
  return first_error({check_alike(outputs, input.dtype), check_own(input, outputs[group.rank()])});
}

Status check_scattered(const RawGroup& group, const std::vector<Given>& inputs, Given output) {
  if (auto status = check_count(inputs, group); !status.ok()) return status;
  return first_error({check_alike(inputs, output.dtype), check_own(inputs[group.rank()], output)});
}

Status check_exchanged(const RawGroup& group, const std::vector<Given>& inputs, const std::vector<Given>& outputs) {
  if (auto status = first_error({check_count(inputs, group), check_count(outputs, group)}); !status.ok()) return status;
  const auto dtype = inputs[0].dtype;
  return first_error({check_alike(inputs, dtype), check_alike(outputs, dtype),
                      check_own(inputs[group.rank()], outputs[group.rank()])});
}

}  // namespace tensorferry::collectives
