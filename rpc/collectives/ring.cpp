// Blocks go around the ring of the ranks, in chunks: while one chunk travels, the rank works on the one before it. Each
// link carries about as many bytes as the result has. (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms
// for clusters of workstations", 2009.)
#include "rpc/collectives/ring.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "rpc/collectives/raw_group.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {

Status RawGroup::pass_around(const Fingerprint& called, const RingPass& pass, const WaitLimits& limits) {
  const auto next = (rank() + 1) % size();
  const auto before = (rank() + size() - 1) % size();
  const auto chunks = (pass.most_bytes + RingPass::chunk_bytes - 1) / RingPass::chunk_bytes;
  const auto first_letter = passed_;
  passed_ += pass.most_sent * chunks;
  const auto key_of = [&](std::size_t block, std::size_t chunk) {
    return LetterKey{false, ring_letters + first_letter + block * chunks + chunk};
  };
  const auto range_of = [](std::size_t bytes, std::size_t chunk) {
    const auto begin = std::min(bytes, chunk * RingPass::chunk_bytes);
    return std::pair(begin, std::min(bytes, begin + RingPass::chunk_bytes));
  };

  std::vector<std::shared_ptr<Delivery>> posts, receives(chunks);
  std::size_t sent = 0;  // blocks
  const auto send = [&](std::span<const std::byte> block, std::size_t chunk) {
    const auto [begin, end] = range_of(block.size(), chunk);
    if (begin != end)
      posts.push_back(mailbox_->post(next, key_of(sent, chunk), block.subspan(begin, end - begin), called));
  };
  const auto receive = [&](std::size_t block, std::size_t chunk) {
    receives[chunk] = nullptr;
    if (block == pass.arriving) return;
    const auto into = pass.arrives(block);
    const auto [begin, end] = range_of(into.size(), chunk);
    if (begin != end) {
      receives[chunk] = mailbox_->receive(before, key_of(block, chunk), into.data() + begin, end - begin);
    }
  };

  for (std::size_t chunk = 0; chunk < chunks; ++chunk) receive(0, chunk);
  if (pass.first) {
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) send(*pass.first, chunk);
    ++sent;
  }
  Status status;
  for (std::size_t block = 0; block < pass.arriving && status.ok(); ++block) {
    const bool sends_on = block + 1 < pass.arriving || pass.sends_last;
    for (std::size_t chunk = 0; chunk < chunks && status.ok(); ++chunk) {
      if (receives[chunk]) {
        status = receives[chunk]->wait(limits);
        if (!status.ok()) break;
        const auto [begin, end] = range_of(pass.arrives(block).size(), chunk);
        if (receives[chunk]->letter().bytes != end - begin) {
          status = Status(Code::protocol_error, named(before) + " sent another number of bytes around the ring");
          break;
        }
        if (pass.arrived) pass.arrived(block, begin, end);
      }
      if (sends_on) send(pass.leaves(block), chunk);
      receive(block + 1, chunk);
    }
    if (sends_on) ++sent;
  }
  if (time_is_over(status)) status = late(called, {before});
  for (const auto& each : receives) {
    if (each && !status.ok()) mailbox_->withdraw(each, status);
  }
  return settle(posts, std::move(status), called, {next}, limits);
}

Status RawGroup::scatter_around(const Fingerprint& called, const std::vector<InBytes>& inputs,
                                const std::vector<std::byte*>& sums, const ReduceOp& op, const WaitLimits& limits) {
  const auto dtype = static_cast<DType>(called.dtype);
  const auto item = size_of(dtype);
  RingPass pass;
  for (const auto& input : inputs) pass.most_bytes = std::max(pass.most_bytes, input.size());
  const auto memory = working_memory(pass.most_bytes);
  if (!memory.ok()) return memory.status();
  const std::span partial(memory->data, pass.most_bytes);
  // The block of share j begins behind rank j, and takes in the input of each rank on its way there.
  const auto share_at = [this](std::size_t block) { return (rank() + 2 * size() - 2 - block) % size(); };
  pass.most_sent = size() - 1;
  pass.first = inputs[(rank() + size() - 1) % size()];
  pass.arriving = size() - 1;
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
  return pass_around(called, pass, limits);
}

Status RawGroup::gather_around(const Fingerprint& called, const std::vector<OutBytes>& blocks,
                               const WaitLimits& limits) {
  RingPass pass;
  for (const auto& block : blocks) pass.most_bytes = std::max(pass.most_bytes, block.size());
  const auto block_at = [this](std::size_t block) { return (rank() + 2 * size() - 1 - block) % size(); };
  pass.most_sent = size() - 1;
  pass.first = blocks[rank()];
  pass.arriving = size() - 1;
  pass.arrives = [&](std::size_t block) { return blocks[block_at(block)]; };
  pass.leaves = [&](std::size_t block) { return InBytes(blocks[block_at(block)]); };
  return pass_around(called, pass, limits);
}

Status RawGroup::reduce_by_ring(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                                std::size_t root, const WaitLimits& limits) {
  if (auto status = exchange(called, ExchangeStep(size()), limits); !status.ok()) return status;
  const auto item = size_of(static_cast<DType>(called.dtype));
  const bool whole = root == Mailbox::any_rank || root == rank();
  const auto scratch = working_memory(whole ? 0 : input.size());
  if (!scratch.ok()) return scratch.status();
  const auto sums_in = whole ? output : OutBytes(scratch->data, input.size());
  std::vector<InBytes> inputs;
  std::vector<OutBytes> shares;
  std::vector<std::byte*> sums;
  for (std::size_t of = 0; of < size(); ++of) {
    const auto [begin, end] = share_of(of, size(), called.elements);
    inputs.push_back(input.subspan(begin * item, (end - begin) * item));
    shares.push_back(sums_in.subspan(begin * item, (end - begin) * item));
    sums.push_back(shares.back().data());
  }
  if (auto status = scatter_around(called, inputs, sums, op, limits); !status.ok()) return status;
  if (root == Mailbox::any_rank) return gather_around(called, shares, limits);
  return collect_shares(called, shares[rank()], output, root, limits);
}

Status RawGroup::reduce_scatter_by_ring(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                                        const ReduceOp& op, const WaitLimits& limits) {
  if (auto status = exchange(called, ExchangeStep(size()), limits); !status.ok()) return status;
  // The sums on their way to other ranks need memory of their own.
  const auto scratch = working_memory(output.size() * size());
  if (!scratch.ok()) return scratch.status();
  std::vector<std::byte*> sums;
  for (std::size_t of = 0; of < size(); ++of) sums.push_back(scratch->data + of * output.size());
  if (auto status = scatter_around(called, inputs, sums, op, limits); !status.ok()) return status;
  if (!output.empty()) std::memcpy(output.data(), sums[rank()], output.size());
  return {};
}

Status RawGroup::all_gather_by_ring(const Fingerprint& called, InBytes input, const std::vector<OutBytes>& outputs,
                                    const WaitLimits& limits) {
  if (auto status = exchange(called, ExchangeStep(size()), limits); !status.ok()) return status;
  const auto own = outputs[rank()];
  if (!own.empty() && own.data() != input.data()) std::memmove(own.data(), input.data(), own.size());
  return gather_around(called, outputs, limits);
}

Status RawGroup::broadcast_by_ring(const Fingerprint& called, OutBytes data, std::size_t root,
                                   const WaitLimits& limits) {
  if (auto status = exchange(called, ExchangeStep(size()), limits); !status.ok()) return status;
  RingPass pass;
  pass.most_bytes = data.size();
  pass.most_sent = 1;
  if (rank() == root) {
    pass.first = data;
  } else {
    pass.arriving = 1;
    pass.sends_last = (rank() + 1) % size() != root;
    pass.arrives = [&](std::size_t) { return data; };
    pass.leaves = [&](std::size_t) { return InBytes(data); };
  }
  return pass_around(called, pass, limits);
}

}  // namespace tensorferry::collectives
