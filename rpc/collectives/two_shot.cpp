// Each rank reduces its share of the bytes of all ranks, then takes the shares of the others: two steps.
#include <utility>

#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {

Status RawGroup::reduce_two_shot(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                                 std::size_t root, const WaitLimits& limits) {
  const auto item = size_of(static_cast<DType>(called.dtype));
  const auto range = [&](std::size_t of) {
    const auto [begin, end] = share_of(of, size(), called.elements);
    return std::pair(begin * item, (end - begin) * item);
  };
  const bool everywhere = root == Mailbox::any_rank;
  const auto [begin, bytes] = range(rank());
  const bool keeps = everywhere || rank() == root;
  const auto temporary = working_memory(keeps ? 0 : bytes);
  if (!temporary.ok()) return temporary.status();
  auto* const share = keeps ? output.data() + begin : temporary->data;

  ExchangeStep scattered(size());
  for (std::size_t other = 0; other < size(); ++other) {
    scattered.give[other] = input.subspan(range(other).first, range(other).second);
    scattered.take[other] = bytes;
  }
  scattered.dtype = static_cast<DType>(called.dtype);
  scattered.reduction = &op;
  scattered.out = share;
  scattered.count = bytes / item;
  if (auto status = exchange(called, std::move(scattered), limits); !status.ok()) return status;

  return collect_shares(called, {share, bytes}, output, root, limits);
}

Status RawGroup::collect_shares(const Fingerprint& called, InBytes share, OutBytes output, std::size_t root,
                                const WaitLimits& limits) {
  const auto item = size_of(static_cast<DType>(called.dtype));
  const bool everywhere = root == Mailbox::any_rank;
  ExchangeStep gathered(size());
  gathered.agreed = true;
  // Its own share stays where it is, unless it is taken elsewhere.
  gathered.into.assign(size(), const_cast<std::byte*>(share.data()));
  for (std::size_t other = 0; other < size(); ++other) {
    if (everywhere || other == root || other == rank()) gathered.give[other] = share;
    if (!everywhere && rank() != root) continue;
    const auto [begin, end] = share_of(other, size(), called.elements);
    gathered.take[other] = (end - begin) * item;
    gathered.into[other] = output.data() + begin * item;
  }
  gathered.take[rank()] = share.size();
  return exchange(called, std::move(gathered), limits);
}

}  // namespace tensorferry::collectives
