// Blocks go around the ring of the ranks, in chunks: while one chunk travels, the rank works on the one before it. Each
// link carries about as many bytes as the result has. (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms
// for clusters of workstations", 2009.)
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "rpc/collectives/algorithms.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {

namespace {

Status scatter_around(const Performing& now, const std::vector<InBytes>& inputs, const std::vector<std::byte*>& sums,
                      const ReduceOp& op) {
  const auto dtype = now.dtype();
  const auto item = size_of(dtype);
  RingPass pass;
  for (const auto& input : inputs) pass.most_bytes = std::max(pass.most_bytes, input.size());
  const auto memory = now.working_memory(pass.most_bytes);
  if (!memory.ok()) return memory.status();
  const std::span partial(memory->data, pass.most_bytes);
  // The block of share j begins behind rank j, and takes in the input of each rank on its way there.
  const auto share_at = [&now](std::size_t block) { return (now.rank() + 2 * now.size() - 2 - block) % now.size(); };
  pass.most_sent = now.size() - 1;
  pass.first = inputs[(now.rank() + now.size() - 1) % now.size()];
  pass.arriving = now.size() - 1;
  pass.arrives = [&](std::size_t block) { return partial.first(inputs[share_at(block)].size()); };
  pass.arrived = [&](std::size_t block, std::size_t begin, std::size_t end) {
    const auto share = share_at(block);
    const std::array<const std::byte*, 2> both{partial.data() + begin, inputs[share].data() + begin};
    collectives::reduce(op, dtype, both, sums[share] + begin, (end - begin) / item);
  };
  pass.leaves = [&](std::size_t block) {
    const auto share = share_at(block);
    return InBytes(sums[share], inputs[share].size());
  };
  return now.pass_around(pass);
}

Status gather_around(const Performing& now, const std::vector<OutBytes>& blocks) {
  RingPass pass;
  for (const auto& block : blocks) pass.most_bytes = std::max(pass.most_bytes, block.size());
  const auto block_at = [&now](std::size_t block) { return (now.rank() + 2 * now.size() - 1 - block) % now.size(); };
  pass.most_sent = now.size() - 1;
  pass.first = blocks[now.rank()];
  pass.arriving = now.size() - 1;
  pass.arrives = [&](std::size_t block) { return blocks[block_at(block)]; };
  pass.leaves = [&](std::size_t block) { return InBytes(blocks[block_at(block)]); };
  return now.pass_around(pass);
}

}  // namespace

Status reduce_by_ring(const Performing& now, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root) {
  if (auto status = now.meet(); !status.ok()) return status;
  const auto item = size_of(now.dtype());
  const bool whole = root == Mailbox::any_rank || root == now.rank();
  const auto scratch = now.working_memory(whole ? 0 : input.size());
  if (!scratch.ok()) return scratch.status();
  const auto sums_in = whole ? output : OutBytes(scratch->data, input.size());
  std::vector<InBytes> inputs;
  std::vector<OutBytes> shares;
  std::vector<std::byte*> sums;
  for (std::size_t of = 0; of < now.size(); ++of) {
    const auto [begin, end] = share_of(of, now.size(), now.called.elements);
    inputs.push_back(input.subspan(begin * item, (end - begin) * item));
    shares.push_back(sums_in.subspan(begin * item, (end - begin) * item));
    sums.push_back(shares.back().data());
  }
  if (auto status = scatter_around(now, inputs, sums, op); !status.ok()) return status;
  if (root == Mailbox::any_rank) return gather_around(now, shares);
  return collect_shares(now, shares[now.rank()], output, root);
}

Status reduce_scatter_by_ring(const Performing& now, const std::vector<InBytes>& inputs, OutBytes output,
                              const ReduceOp& op) {
  if (auto status = now.meet(); !status.ok()) return status;
  // The sums on their way to other ranks need memory of their own.
  const auto scratch = now.working_memory(output.size() * now.size());
  if (!scratch.ok()) return scratch.status();
  std::vector<std::byte*> sums;
  for (std::size_t of = 0; of < now.size(); ++of) sums.push_back(scratch->data + of * output.size());
  if (auto status = scatter_around(now, inputs, sums, op); !status.ok()) return status;
  if (!output.empty()) std::memcpy(output.data(), sums[now.rank()], output.size());
  return {};
}

Status all_gather_by_ring(const Performing& now, InBytes input, const std::vector<OutBytes>& outputs) {
  if (auto status = now.meet(); !status.ok()) return status;
  const auto own = outputs[now.rank()];
  if (!own.empty() && own.data() != input.data()) std::memmove(own.data(), input.data(), own.size());
  return gather_around(now, outputs);
}

Status broadcast_by_ring(const Performing& now, OutBytes data, std::size_t root) {
  if (auto status = now.meet(); !status.ok()) return status;
  RingPass pass;
  pass.most_bytes = data.size();
  pass.most_sent = 1;
  if (now.rank() == root) {
    pass.first = data;
  } else {
    pass.arriving = 1;
    pass.sends_last = (now.rank() + 1) % now.size() != root;
    pass.arrives = [&](std::size_t) { return data; };
    pass.leaves = [&](std::size_t) { return InBytes(data); };
  }
  return now.pass_around(pass);
}

}  // namespace tensorferry::collectives
