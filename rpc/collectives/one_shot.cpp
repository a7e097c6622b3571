// Each rank takes all bytes of all ranks, and reduces them itself: one step.
#include <utility>

#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {

Status RawGroup::reduce_one_shot(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                                 std::size_t root, const WaitLimits& limits) {
  const bool takes = root == Mailbox::any_rank || root == rank();
  ExchangeStep step(size());
  for (std::size_t to = 0; to < size(); ++to) {
    if (to == rank() || root == Mailbox::any_rank || root == to) step.give[to] = input;
    if (takes || to == rank()) step.take[to] = input.size();
  }
  step.dtype = static_cast<DType>(called.dtype);
  if (takes) {
    step.reduction = &op;
    step.out = output.data();
    step.count = called.elements;
  } else {
    step.into.assign(size(), const_cast<std::byte*>(input.data()));  // its own bytes stay where they are
  }
  return exchange(called, std::move(step), limits);
}

}  // namespace tensorferry::collectives
