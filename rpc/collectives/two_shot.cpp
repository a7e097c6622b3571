// Each rank reduces its share of the bytes of all ranks, then takes the shares of the others: two steps.
#include <utility>

#include "rpc/collectives/algorithms.h"

namespace tensorferry::collectives {

Status reduce_two_shot(const Performing& now, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root) {
  const auto item = size_of(now.dtype());
  const auto range = [&](std::size_t of) {
    const auto [begin, end] = share_of(of, now.size(), now.called.elements);
    return std::pair(begin * item, (end - begin) * item);
  };
  const bool everywhere = root == Mailbox::any_rank;
  const auto [begin, bytes] = range(now.rank());
  const bool keeps = everywhere || now.rank() == root;
  const auto temporary = now.working_memory(keeps ? 0 : bytes);
  if (!temporary.ok()) return temporary.status();
  auto* const share = keeps ? output.data() + begin : temporary->data;

  ExchangeStep scattered(now.size());
  for (std::size_t other = 0; other < now.size(); ++other) {
    scattered.give[other] = input.subspan(range(other).first, range(other).second);
    scattered.take[other] = bytes;
  }
  scattered.dtype = now.dtype();
  scattered.reduction = &op;
  scattered.out = share;
  scattered.count = bytes / item;
  if (auto status = now.step(std::move(scattered)); !status.ok()) return status;

  return collect_shares(now, {share, bytes}, output, root);
}

Status collect_shares(const Performing& now, InBytes share, OutBytes output, std::size_t root) {
  const auto item = size_of(now.dtype());
  const bool everywhere = root == Mailbox::any_rank;
  ExchangeStep gathered(now.size());
  gathered.agreed = true;
  // Its own share stays where it is, unless it is taken elsewhere.
  gathered.into.assign(now.size(), const_cast<std::byte*>(share.data()));
  for (std::size_t other = 0; other < now.size(); ++other) {
    if (everywhere || other == root || other == now.rank()) gathered.give[other] = share;
    if (!everywhere && now.rank() != root) continue;
    const auto [begin, end] = share_of(other, now.size(), now.called.elements);
    gathered.take[other] = (end - begin) * item;
    gathered.into[other] = output.data() + begin * item;
  }
  gathered.take[now.rank()] = share.size();
  return now.step(std::move(gathered));
}

}  // namespace tensorferry::collectives
