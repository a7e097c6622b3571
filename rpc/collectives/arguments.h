/// Whether the arguments of a group's operations make sense at this rank. Each function returns InvalidArgument if not.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "base/status.h"
#include "rpc/collectives/raw_group.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {

/// A tensor that an operation reads or writes.
struct Given {
  DType dtype = DType::uint8;
  std::size_t elements = 0;
};

/// Returns the first of them that is not Ok.
Status first_error(std::initializer_list<Status> checks);

/// A rank that was negative before it became a std::size_t is named as it was.
Status check_rank(const RawGroup& group, std::size_t rank);
/// One tensor is reduced into another.
Status check_reduced(Given input, Given output, const ReduceOp& op);
/// Several tensors are reduced in place; there is at least one.
Status check_coalesced(const std::vector<Given>& tensors, const ReduceOp& op);
/// This rank gives `input`, and takes one of the `outputs` from each rank, itself too.
Status check_gathered(const RawGroup& group, Given input, const std::vector<Given>& outputs);
/// This rank gives one of the `inputs` to each rank, itself too, and takes `output`.
Status check_scattered(const RawGroup& group, const std::vector<Given>& inputs, Given output);
Status check_exchanged(const RawGroup& group, const std::vector<Given>& inputs, const std::vector<Given>& outputs);

}  // namespace tensorferry::collectives
