// Each rank takes all bytes of all ranks, and reduces them itself: one step.
#include <utility>

#include "rpc/collectives/algorithms.h"

namespace tensorferry::collectives {

Status reduce_one_shot(const Performing& now, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root) {
  const bool takes = root == Mailbox::any_rank || root == now.rank();
  ExchangeStep step(now.size());
  for (std::size_t to = 0; to < now.size(); ++to) {
    if (to == now.rank() || root == Mailbox::any_rank || root == to) step.give[to] = input;
    if (takes || to == now.rank()) step.take[to] = input.size();
  }
  step.dtype = now.dtype();
  if (takes) {
    step.reduction = &op;
    step.out = output.data();
    step.count = now.called.elements;
  } else {
    step.into.assign(now.size(), const_cast<std::byte*>(input.data()));  // its own bytes stay where they are
  }
  return now.step(std::move(step));
}

}  // namespace tensorferry::collectives
