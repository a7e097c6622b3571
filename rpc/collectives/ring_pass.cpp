#include "rpc/collectives/ring_pass.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "rpc/collectives/exchange.h"

namespace tensorferry::collectives {

Status Exchange::pass_around(const Fingerprint& called, const RingPass& pass, const WaitLimits& limits) {
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
      receives[chunk] =
          mailbox_->receive_exactly(before, key_of(block, chunk).number, into.data() + begin, end - begin);
    }
  };

  for (std::size_t chunk = 0; chunk < chunks; ++chunk) receive(0, chunk);
  for (std::size_t chunk = 0; pass.first && chunk < chunks; ++chunk) send(*pass.first, chunk);
  if (pass.first) ++sent;
  Status status;
  for (std::size_t block = 0; block < pass.arriving && status.ok(); ++block) {
    const bool sends_on = block + 1 < pass.arriving || pass.sends_last;
    for (std::size_t chunk = 0; chunk < chunks && status.ok(); ++chunk) {
      if (receives[chunk]) {
        status = receives[chunk]->wait(limits);
        if (!status.ok()) break;
        const auto [begin, end] = range_of(pass.arrives(block).size(), chunk);
        if (receives[chunk]->letter().bytes != end - begin) {
          status = {Code::protocol_error, mailbox_->named(before) + " sent another number of bytes around the ring"};
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

}  // namespace tensorferry::collectives
