// A step without a board. In the first step of an operation every rank tells all others its call, and its bytes if they
// are few, in ceil(log2 n) rounds: each round doubles what a rank knows. (J. Bruck et al., "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", 1997: the concatenation.)
#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/exchange.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {
namespace {

/// Returns what this rank tells: with the bytes that the others take from it, each once, in `memory`; unless there are
/// more than Told::most_bytes.
Told told_by(std::size_t rank, const ExchangeStep& step, Bytes& memory) {
  Told out;
  const auto same = step.give[rank == 0 ? step.give.size() - 1 : 0];
  bool all_same = true;
  std::size_t total = 0;
  for (std::size_t to = 0; to < step.give.size(); ++to) {
    const auto given = step.give[to];
    out.sizes.push_back(to == rank ? 0 : given.size());
    total += out.sizes.back();
    if (to != rank) all_same = all_same && given.data() == same.data() && given.size() == same.size();
  }
  if (total == 0) {
    out.sizes.clear();
    return out;
  }
  if (all_same) {
    out.sizes = {same.size()};
    total = same.size();
  }
  out.posted = total > Told::most_bytes;
  if (out.posted) return out;
  for (std::size_t to = 0; to < step.give.size(); ++to) {
    if (to == rank) continue;
    memory.insert(memory.end(), step.give[to].begin(), step.give[to].end());
    if (all_same) break;
  }
  out.bytes = memory;
  return out;
}

/// Returns where the bytes for `to` begin, and how many they are; nullopt if `told` contradicts itself.
std::optional<Part> part_for(const Told& told, std::size_t to, std::size_t ranks) {
  if (told.sizes.empty()) return Part{};
  if (told.sizes.size() != 1 && told.sizes.size() != ranks) return std::nullopt;
  Part out{0, told.sizes.size() == 1 ? told.sizes[0] : told.sizes[to]};
  for (std::size_t before = 0; told.sizes.size() != 1 && before < to; ++before) out.offset += told.sizes[before];
  const auto there = told.bytes.size();
  if (!told.posted && (out.offset > there || out.bytes > there - out.offset)) return std::nullopt;
  return out;
}

}  // namespace

Result<std::vector<Told>> Exchange::tell_all(const Fingerprint& called, const Told& own, std::deque<Bytes>& memory,
                                             const WaitLimits& limits) {
  const auto first = step_.load();
  std::vector<ByteView> known{memory.emplace_back(encode(own))};  // by how far the rank is from this one
  for (std::size_t distance = 1; distance < size(); distance *= 2) {
    const auto count = std::min(distance, size() - distance);
    const auto to = (rank() + size() - distance) % size();
    const auto from = (rank() + distance) % size();
    const LetterKey key{false, step_++};
    const auto& message =
        memory.emplace_back(encode(TellAll{{known.begin(), known.begin() + static_cast<std::ptrdiff_t>(count)}}));
    // A wait of this group notices a dead receiver anyway. So this rank waits for the receiver only if it reads the
    // message from here.
    const auto post = mailbox_->post(to, key, message, called);
    auto& arrived = memory.emplace_back(16 + count * (Told::most_bytes + 10 * (size() + 8)));
    const auto receive = mailbox_->receive(from, key, arrived.data(), arrived.size());
    auto status = receive->wait(limits);
    if (status.ok() && message.size() > Mailbox::most_eager) status = post->wait(limits);
    if (!status.ok()) {
      mailbox_->withdraw(receive, status);
      mailbox_->withdraw(post, status);
      if (time_is_over(status)) return late(called, behind(first));
      return status;
    }
    const auto all = decode<TellAll>(ByteView(arrived).first(receive->letter().bytes));
    if (!all || all->told.size() != count)
      return Status(Code::protocol_error, mailbox_->named(from) + " told the wrong ranks");
    known.insert(known.end(), all->told.begin(), all->told.end());
  }
  std::vector<Told> out(size());
  for (std::size_t distance = 0; distance < size(); ++distance) {
    const auto of = (rank() + distance) % size();
    auto told = decode<Told>(known[distance]);
    if (!told) return Status(Code::protocol_error, mailbox_->named(of) + " told something malformed");
    out[of] = std::move(*told);
  }
  return out;
}

std::vector<std::size_t> Exchange::behind(std::uint64_t step) {
  std::vector<std::pair<std::size_t, Call>> asked;
  for (std::size_t other = 0; other < size(); ++other) {
    if (other == rank() || mailbox_->has_left(other)) continue;
    Message message;
    message.payload = encode(GroupMessage(GetProgress{group_->id}));
    RawCallOptions options;
    options.timeout = Milliseconds(1000);
    options.label = "how far a rank is";
    asked.emplace_back(
        other, agent_->call(group_->members[other].name, group_function, std::move(message), std::move(options)));
  }
  std::vector<std::size_t> out;
  for (auto& [other, call] : asked) {
    (void)call.wait();
    const auto reply = call.take();
    const auto progress = reply.ok() ? decode<Progress>(reply->payload) : std::nullopt;
    if (!progress || progress->step < step) out.push_back(other);
  }
  return out;
}

Status Exchange::receive_into(const ExchangeStep& step, std::size_t from, std::uint64_t number, Arriving& arriving) {
  auto* to = step.reduction != nullptr ? nullptr : step.into[from];
  if (to == nullptr) {
    auto working = working_memory(step.take[from]);
    if (!working.ok()) return working.status();
    to = arriving.memory.emplace_back(*std::move(working)).data;
  }
  arriving.at[from] = to;
  arriving.receives[from] = mailbox_->receive_exactly(from, number, to, step.take[from]);
  return {};
}

Status Exchange::take_posted(const Fingerprint& called, const ExchangeStep& step, Arriving& arriving,
                             const WaitLimits& limits) {
  for (const auto other : arriving.posted) {
    if (arriving.receives[other]) continue;
    if (auto status = receive_into(step, other, step_, arriving); !status.ok()) return status;
  }
  Status status;
  std::vector<std::size_t> missing;
  for (const auto other : arriving.posted) {
    const auto ended = arriving.receives[other]->wait(limits);
    if (!arriving.receives[other]->done()) missing.push_back(other);
    if (!ended.ok() && status.ok()) status = ended;
  }
  return time_is_over(status) ? late(called, missing) : status;
}

Status Exchange::settle(const std::vector<std::shared_ptr<Delivery>>& posts, Status status, const Fingerprint& called,
                        const std::vector<std::size_t>& receivers, const WaitLimits& limits) {
  for (const auto& post : posts) {
    if (status.ok()) status = post->wait(limits);
    if (time_is_over(status)) status = late(called, receivers);
    if (!status.ok()) mailbox_->withdraw(post, status);
  }
  return status;
}

Status Exchange::learn(const Fingerprint& called, const ExchangeStep& step, const Told& own, std::uint64_t rounds,
                       Arriving& arriving, const WaitLimits& limits) {
  for (std::size_t i = 1; i < size(); ++i) {  // large data may come before the ranks have agreed
    const auto from = (rank() + i) % size();
    if (step.take[from] <= Mailbox::most_eager) continue;
    if (auto status = receive_into(step, from, step_ + rounds, arriving); !status.ok()) return status;
  }
  auto told = tell_all(called, own, arriving.told, limits);
  if (!told.ok()) return told.status();
  std::vector<Fingerprint> calls;
  for (const auto& each : *told) calls.push_back(each.fingerprint);
  if (auto status = agree(calls); !status.ok()) {
    mailbox_->forget_steps(step_);
    return status;
  }
  for (std::size_t from = 0; from < size(); ++from) {
    const auto& each = (*told)[from];
    const auto part = from == rank() ? std::optional(Part{0, step.give[from].size()}) : part_for(each, rank(), size());
    if (!part) return {Code::protocol_error, mailbox_->named(from) + " told of bytes that it did not send"};
    if (part->bytes != step.take[from]) {
      return {Code::invalid_argument, formatted("{} gives {} bytes to {}, which expects {}", mailbox_->named(from),
                                                part->bytes, mailbox_->named(rank()), step.take[from])};
    }
    if (part->bytes == 0 || from == rank()) continue;
    if (each.posted) {
      arriving.posted.push_back(from);
      continue;
    }
    const auto bytes = each.bytes.subspan(part->offset, part->bytes);
    arriving.at[from] = bytes.data();
    if (step.reduction != nullptr) {  // which reads whole elements, and a message does not align them
      arriving.at[from] = arriving.told.emplace_back(bytes.begin(), bytes.end()).data();
    }
  }
  return {};
}

Status Exchange::step_by_messages(const Fingerprint& called, ExchangeStep& step, const WaitLimits& limits) {
  Arriving arriving;
  arriving.receives.resize(size());
  arriving.at.resize(size());
  Bytes few, copy;
  Told own;
  own.posted = step.agreed;
  if (!step.agreed) own = told_by(rank(), step, few);
  own.fingerprint = called;
  const auto rounds = step.agreed ? 0 : static_cast<std::uint64_t>(std::bit_width(size() - 1));
  std::vector<std::shared_ptr<Delivery>> posts;
  if (own.posted) {
    if (overwrites_given(step, rank())) copy_given(step, rank(), copy);
    for (std::size_t i = 1; i < size(); ++i) {  // each rank begins with another one
      const auto to = (rank() + i) % size();
      if (step.give[to].empty()) continue;
      posts.push_back(mailbox_->post(to, {false, step_ + rounds}, step.give[to], called));
    }
  }

  // What arrives may go over this rank's own.
  const bool own_fits = step.give[rank()].size() == step.take[rank()];  // else learn() refuses the call
  if (step.reduction == nullptr && own_fits) take_own(step, rank());
  Status status;
  if (step.agreed) {
    for (std::size_t i = 1; i < size(); ++i) {
      if (step.take[(rank() + i) % size()] != 0) arriving.posted.push_back((rank() + i) % size());
    }
  } else {
    status = learn(called, step, own, rounds, arriving, limits);
  }
  if (status.ok()) status = take_posted(called, step, arriving, limits);
  for (const auto& receive : arriving.receives) {
    if (receive && !status.ok()) mailbox_->withdraw(receive, status);
  }
  status = settle(posts, std::move(status), called, {}, limits);
  if (!status.ok()) return status;
  auto& inputs = arriving.at;
  if (step.reduction != nullptr) {
    inputs[rank()] = step.give[rank()].data();
    collectives::reduce(*step.reduction, step.dtype, inputs, step.out, step.count);
    return {};
  }
  for (std::size_t from = 0; from < size(); ++from) {
    if (inputs[from] != nullptr && inputs[from] != step.into[from]) {
      std::memcpy(step.into[from], inputs[from], step.take[from]);
    }
  }
  return {};
}

}  // namespace tensorferry::collectives
