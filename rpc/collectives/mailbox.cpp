#include "rpc/collectives/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace tensorferry::collectives {

Status Delivery::wait(const WaitLimits& limits) {
  std::unique_lock lock(mutex_);
  while (!done_) {
    const auto until = std::min(limits.until, limits.clock.now() + longest_sleep);
    if (limits.clock.wait_until(changed_, lock, until, [&] { return done_; })) break;
    lock.unlock();
    auto ended = why_ended(limits);
    lock.lock();
    if (!done_ && !ended.ok()) return ended;
  }
  return status_;
}

void Delivery::wait_for_end() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Delivery::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

Status Delivery::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

Letter Delivery::letter() const {
  const std::lock_guard lock(mutex_);
  return letter_;
}

void Delivery::complete(Status status, Letter letter) {
  UniqueFunction<void(Status)> told;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(done_, true)) return;
    status_ = status;
    letter_ = letter;
    told = std::move(told_);
    changed_.notify_all();
  }
  if (told) told(std::move(status));
}

Mailbox::Mailbox(RawAgent& agent, std::uint64_t group, std::size_t rank, std::vector<std::string> names)
    : agent_(agent),
      group_(group),
      rank_(rank),
      names_(std::move(names)),
      unreceived_(std::make_shared<std::vector<std::atomic<std::size_t>>>(names_.size())),
      asked_(names_.size()) {}

std::string Mailbox::named(std::size_t rank) const {
  return formatted("rank {} (\"{}\")", shown_.empty() ? rank : shown_[rank], names_[rank]);
}

Status Mailbox::error_of_rank(const Status& status, std::size_t rank) const {
  if (status.code() != Code::connection_lost && status.code() != Code::not_found) return status;
  return {Code::connection_lost, formatted("{} has died or left: {}", named(rank), status.what())};
}

Status Mailbox::ended(std::size_t rank, const LetterKey& key) const {
  if (!endings_.all.ok()) return endings_.all;
  if (!key.by_tag) return endings_.steps;
  if (rank == any_rank)
    return !endings_.with_rank.empty() && endings_.with_rank.size() + 1 >= names_.size()
               ? endings_.with_rank.begin()->second
               : Status();
  const auto it = endings_.with_rank.find(rank);
  return it == endings_.with_rank.end() ? Status() : it->second;
}

Status Mailbox::withdrawn(const Status& why) const {
  return {Code::cancelled, named(rank_) + " has withdrawn the data" + (why.ok() ? "" : ": " + std::string(why.what()))};
}

void Mailbox::Over::complete(const Status& why) const {
  for (const auto& delivery : failed) delivery->complete(why);
  for (const auto& delivery : given) delivery->complete({});
}

template <class Wanted>
void Mailbox::take_unread(const Wanted& wanted, Over& out) {
  std::erase_if(offers_, [&](auto& each) {
    auto& [address, offer] = each;
    if ((offer.reading && !offer.read) || !wanted(address)) return false;
    if (offer.delivery) (offer.read ? out.given : out.failed).push_back(std::move(offer.delivery));
    return true;  // without a delivery: it was withdrawn
  });
}

std::shared_ptr<Delivery> Mailbox::post(std::size_t to, LetterKey key, std::span<const std::byte> data,
                                        const Fingerprint& fingerprint, UniqueFunction<void(Status)> told) {
  auto delivery = std::make_shared<Delivery>(std::move(told));
  const bool fetched = data.size() > most_eager;
  Posted posted{group_, static_cast<std::uint32_t>(rank_), key.by_tag, key.number, 0, fingerprint, data.size()};
  std::vector<Reply> asked;
  Status failed;
  bool left = false;
  {
    const std::lock_guard lock(mutex_);
    failed = ended(to, key);
    if (key.by_tag) posted.sequence = sent_[{to, key}].next_sent++;
    left = fetched && !key.by_tag && endings_.gone.contains(to);
    if (failed.ok() && fetched && !left) {
      const Address address{to, key, posted.sequence};
      offers_.emplace(address, Offer{data, delivery});
      if (!key.by_tag) asked_.take(to, {key.number, address.sequence}, asked);
    }
  }
  if (left || !failed.ok()) {
    delivery->complete(std::move(failed));
    return delivery;
  }
  for (auto& reply : asked) serve(to, {group_, key.by_tag, key.number, posted.sequence}, std::move(reply));
  if (fetched && !key.by_tag) return delivery;  // the receiver has asked, or will
  Buffer copied;
  if (!fetched && !data.empty()) {
    auto owner = std::make_shared<Bytes>(data.begin(), data.end());
    copied = {{}, owner->data(), owner->size(), nullptr, owner};
  }
  Message message;
  message.payload = encode(GroupMessage(posted));
  if (copied.bytes != 0) message.buffers.push_back(std::move(copied));
  RawCallOptions options;
  options.timeout = Milliseconds(0);
  options.label = "a message of a group";
  auto call = agent_.call(names_[to], group_function, std::move(message), std::move(options));
  call.on_done(
      [delivery, weak = weak_from_this(), key, fetched, sequence = posted.sequence, to](Result<Received> reply) {
        if (reply.ok() && fetched) return;  // ends when the receiver has read the data
        const auto self = reply.ok() ? nullptr : weak.lock();
        if (!self) return delivery->complete(reply.status());
        if (!key.by_tag && self->has_left(to)) return delivery->complete({});
        if (fetched) {
          const std::lock_guard lock(self->mutex_);
          const auto it = self->offers_.find({to, key, sequence});
          if (it != self->offers_.end() && it->second.reading) return;
          if (it != self->offers_.end()) self->offers_.erase(it);
        }
        delivery->complete(self->error_of_rank(reply.status(), to));
      });
  return delivery;
}

std::size_t Mailbox::asked_by(std::size_t rank) const {
  const std::lock_guard lock(mutex_);
  return asked_.count(rank);
}

void Mailbox::serve(std::size_t to, const FetchData& fetch, Reply reply) {
  const Address address{to, {fetch.by_tag, fetch.number}, fetch.sequence};
  const AskedData::Which which{fetch.number, fetch.sequence};
  if (!fetch.by_tag) {
    reply.on_cancelled([weak = weak_from_this(), to, which] {
      std::vector<Reply> given_up;  // destroyed after the lock is released
      const auto self = weak.lock();
      if (!self) return;
      const std::lock_guard lock(self->mutex_);
      self->asked_.take_given_up(to, which, given_up);
    });
  }
  std::shared_ptr<Delivery> delivery;
  std::span<const std::byte> data;
  std::vector<Reply> before;  // a receiver asks once
  Status why;
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    why = ended(to, address.key);
    const auto it = offers_.find(address);
    if (it == offers_.end() && !fetch.by_tag && why.ok() && fetch.number > forgotten_) {
      full = asked_.full(to);
      if (!full) {
        asked_.add(to, which, std::move(reply), before);
        asked_.take_given_up(to, which, before);  // it may have been given up before it was there
        return;
      }
    }
    if (it != offers_.end() && !it->second.withdrawn.ok()) {
      why = it->second.withdrawn;
      offers_.erase(it);
    } else if (it != offers_.end() && !it->second.reading) {
      it->second.reading = true;
      if (!fetch.by_tag) it->second.taken = true;  // no rank leaves before all have the data of a step
      delivery = it->second.delivery;
      data = it->second.data;
    }
  }
  if (full) {
    return reply.fail({Code::resource_exhausted, formatted("{} keeps {} requests of {} for data that it has not sent",
                                                           named(rank_), AskedData::most, named(to))});
  }
  if (!delivery) return reply.fail(withdrawn(why));
  // The agent drops the owner when nothing reads the bytes any more.
  const std::shared_ptr<void> reading(nullptr, [delivery, address, weak = weak_from_this()](void*) {
    const auto self = weak.lock();
    if (!self) return delivery->complete({});
    self->note(address, &Offer::read);
  });
  Message message;
  message.buffers.push_back({{}, const_cast<std::byte*>(data.data()), data.size(), nullptr, reading});
  reply.send(std::move(message));
}

void Mailbox::note(const Address& address, bool Offer::*what) {
  std::shared_ptr<Delivery> over;
  {
    const std::lock_guard lock(mutex_);
    const auto it = offers_.find(address);
    if (it == offers_.end() || !it->second.reading) return;
    it->second.*what = true;
    if (!it->second.read || !it->second.taken) return;
    over = std::move(it->second.delivery);
    offers_.erase(it);
  }
  over->complete({});
}

void Mailbox::taken(std::size_t to, const TakenData& taken) {
  note({to, {true, taken.number}, taken.sequence}, &Offer::taken);
}

// Also after a failed fetch: the sender need not wait any longer.
void Mailbox::tell_taken(std::size_t from, const LetterKey& key, std::uint64_t sequence) {
  if (!key.by_tag) return;
  Message message;
  message.payload = encode(GroupMessage(TakenData{group_, key.number, sequence}));
  RawCallOptions options;
  options.idempotent = true;  // a lost connection must not make the sender wait
  agent_.call(names_[from], group_function, std::move(message), std::move(options));
}

std::shared_ptr<Delivery> Mailbox::receive(std::size_t from, LetterKey key, std::byte* destination, std::uint64_t most,
                                           UniqueFunction<void(Status)> told, std::optional<DType> dtype) {
  auto delivery = std::make_shared<Delivery>(std::move(told));
  Status why;
  {
    const std::lock_guard lock(mutex_);
    why = ended(from, key);
    if (why.ok() || key.by_tag) {  // a send that has arrived is received after the end, too
      Receiver receiver{from, key, 0, destination, most, delivery, dtype};
      if (from != any_rank) receiver.sequence = lines_[{from, key}].next_claimed++;
      receives_.waiting.push_back(std::move(receiver));
    }
  }
  run_matches();
  if (!why.ok()) withdraw(delivery, why);
  return delivery;
}

std::shared_ptr<Delivery> Mailbox::receive_exactly(std::size_t from, std::uint64_t step, std::byte* destination,
                                                   std::uint64_t bytes) {
  if (bytes <= most_eager) return receive(from, {false, step}, destination, bytes);
  Receiver receiver{from, {false, step}, 0, destination, bytes, std::make_shared<Delivery>()};
  Status failed;
  {
    const std::lock_guard lock(mutex_);
    failed = ended(from, receiver.key);
    if (failed.ok()) receives_.writing.emplace(receiver.delivery.get(), receiver.delivery);
  }
  if (failed.ok()) {
    fetch(receiver, {from, {}, bytes, true});
  } else {
    receiver.delivery->complete(std::move(failed));
  }
  return receiver.delivery;
}

Status Mailbox::deliver(const Posted& posted, Buffer data) {
  const auto bytes = std::max(data.bytes, least_counted);
  auto& all = (*unreceived_)[posted.from];
  if (all.fetch_add(bytes) >= most_unreceived) {
    all -= bytes;
    return {Code::resource_exhausted, formatted("{} keeps {} MiB of messages of {} that it has not received",
                                                named(rank_), most_unreceived >> 20, named(posted.from))};
  }
  std::shared_ptr<void> counted(nullptr,
                                [of = unreceived_, from = posted.from, bytes](void*) { (*of)[from] -= bytes; });
  {
    const std::lock_guard lock(mutex_);
    if (posted.by_tag ? !endings_.all.ok() && !endings_.keeps_arrived
                      : !ended(posted.from, {false, posted.number}).ok() || posted.number <= forgotten_) {
      return {};
    }
    auto& line = lines_[{posted.from, {posted.by_tag, posted.number}}];
    const Letter letter{posted.from, posted.fingerprint, posted.bytes, true};
    line.arrived.emplace(posted.sequence, Arrived{letter, std::move(data), std::move(counted)});
  }
  run_matches();
  return {};
}

std::optional<std::pair<Mailbox::Receiver, Mailbox::Arrived>> Mailbox::match() {
  const std::lock_guard lock(mutex_);
  for (auto it = receives_.waiting.begin(); it != receives_.waiting.end(); ++it) {
    for (std::size_t from = 0; from < names_.size(); ++from) {
      if (it->from != any_rank && it->from != from) continue;
      const auto line = lines_.find({from, it->key});
      if (line == lines_.end()) continue;
      const auto sequence = it->from == any_rank ? line->second.next_claimed : it->sequence;
      const auto found = line->second.arrived.find(sequence);
      if (found == line->second.arrived.end()) continue;
      if (found->second.letter.bytes > most_eager && !ended(from, it->key).ok()) continue;  // its data never comes
      if (it->from == any_rank) ++line->second.next_claimed;
      std::pair<Receiver, Arrived> out(*it, std::move(found->second));
      out.first.sequence = sequence;
      line->second.arrived.erase(found);
      if (!it->key.by_tag) lines_.erase(line);  // a step comes once
      receives_.writing.emplace(it->delivery.get(), it->delivery);
      receives_.waiting.erase(it);
      return out;
    }
  }
  return std::nullopt;
}

void Mailbox::run_matches() {
  while (auto found = match()) take(found->first, std::move(found->second));
}

void Mailbox::take(const Receiver& receiver, Arrived arrived) {
  const auto& letter = arrived.letter;
  const auto end = [&](Status status) {
    {
      const std::lock_guard lock(mutex_);
      receives_.writing.erase(receiver.delivery.get());
    }
    receiver.delivery->complete(std::move(status), letter);
  };
  if (auto refused = refusal(receiver, letter); !refused.ok()) {
    if (letter.bytes > most_eager) tell_refused(receiver, letter, refused);
    return end(std::move(refused));
  }
  if (letter.bytes > most_eager) return fetch(receiver, letter);
  if (arrived.data.bytes != letter.bytes || arrived.data.device != Device()) {
    return end({Code::protocol_error, "a message of a group has other bytes"});
  }
  if (letter.bytes != 0) std::memcpy(receiver.destination, arrived.data.data, letter.bytes);
  end({});
}

Status Mailbox::refusal(const Receiver& receiver, const Letter& letter) const {
  if (!receiver.dtype) {
    if (letter.bytes <= receiver.most) return {};
    return {Code::invalid_argument, formatted("\"{}\" sent {} bytes, and the receiver has room for {}",
                                              names_[letter.from], letter.bytes, receiver.most)};
  }
  const auto sent = static_cast<DType>(letter.fingerprint.dtype);
  if (sent == *receiver.dtype && letter.bytes == receiver.most) return {};
  const bool known = size_of(sent) != 0;
  const auto counted = [](DType dtype, std::uint64_t bytes) {
    return formatted("{} {} elements", bytes / size_of(dtype), name_of(dtype));
  };
  return {
      Code::invalid_argument,
      formatted("{} sent {} with tag {}, and the receive of {} takes {}: send and receive the same dtype and number "
                "of elements",
                named(letter.from), known ? counted(sent, letter.bytes) : formatted("{} bytes", letter.bytes),
                receiver.key.number, named(rank_), counted(*receiver.dtype, receiver.most))};
}

void Mailbox::tell_refused(const Receiver& receiver, const Letter& letter, const Status& why) {
  if (!receiver.key.by_tag) return;  // the operation fails, and with it the group
  Message message;
  message.payload =
      encode(GroupMessage(RefuseData{group_, receiver.key.number, receiver.sequence, std::string(why.what())}));
  RawCallOptions options;
  options.timeout = Milliseconds(10000);
  agent_.call(names_[letter.from], group_function, std::move(message), std::move(options));
}

void Mailbox::refuse(std::size_t to, const RefuseData& refused) {
  Over over;
  {
    const std::lock_guard lock(mutex_);
    const Address address{to, {true, refused.number}, refused.sequence};
    take_unread([&](const Address& each) { return each == address; }, over);
  }
  over.complete({Code::invalid_argument, refused.text});
}

void Mailbox::fetch(const Receiver& receiver, const Letter& letter) {
  Message message;
  const auto& [by_tag, number] = receiver.key;
  message.payload = encode(GroupMessage(FetchData{group_, by_tag, number, receiver.sequence}));
  RawCallOptions options;
  options.timeout = Milliseconds(0);
  options.label = "the data of a message of a group";
  options.into.push_back({{}, receiver.destination, letter.bytes, nullptr, nullptr});
  auto call = agent_.call(names_[letter.from], group_function, std::move(message), std::move(options));
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    failed = !ended(letter.from, receiver.key).ok();
    receives_.fetching.emplace(receiver.delivery.get(), Fetch{call, by_tag});
  }
  if (failed) call.cancel();  // fail() or leave() has not seen the call
  call.on_done([self = shared_from_this(), delivery = receiver.delivery, destination = receiver.destination,
                key = receiver.key, sequence = receiver.sequence, letter](Result<Received> reply) {
    auto status = self->error_of_rank(reply.status(), letter.from);
    if (status.ok() && (reply->buffers.size() != 1 || reply->buffers[0].bytes != letter.bytes ||
                        reply->buffers[0].device != Device())) {
      status = Status(Code::protocol_error, "the data of a message of a group has other bytes");
    }
    if (status.ok() && reply->buffers[0].data != destination) {
      std::memcpy(destination, reply->buffers[0].data, letter.bytes);
    }
    self->tell_taken(letter.from, key, sequence);
    {
      const std::lock_guard lock(self->mutex_);
      self->receives_.fetching.erase(delivery.get());
      self->receives_.writing.erase(delivery.get());
    }
    delivery->complete(std::move(status), letter);
  });
}

void Mailbox::forget_steps(std::uint64_t number) {
  std::vector<Reply> asked;
  {
    const std::lock_guard lock(mutex_);
    forgotten_ = number;
    std::erase_if(lines_, [number](const auto& line) {
      const auto& key = line.first.second;
      return !key.by_tag && key.number <= number;
    });
    asked_.take_up_to(number, asked);
  }
  for (auto& reply : asked) reply.fail(withdrawn({}));
}

void Mailbox::withdraw(const std::shared_ptr<Delivery>& delivery, const Status& why) {
  Call call;
  bool touched = false;
  {
    const std::lock_guard lock(mutex_);
    const auto waiting = std::find_if(receives_.waiting.begin(), receives_.waiting.end(),
                                      [&](const auto& each) { return each.delivery == delivery; });
    if (waiting != receives_.waiting.end()) {
      if (waiting->from != any_rank) {  // later receives take what this one would have taken
        --lines_[{waiting->from, waiting->key}].next_claimed;
        for (auto it = std::next(waiting); it != receives_.waiting.end(); ++it) {
          if (it->from == waiting->from && it->key == waiting->key) --it->sequence;
        }
      }
      receives_.waiting.erase(waiting);
    }
    const auto offered = std::find_if(offers_.begin(), offers_.end(),
                                      [&](const auto& each) { return each.second.delivery == delivery; });
    if (offered != offers_.end()) {
      auto& offer = offered->second;
      if (offer.read) {
        offers_.erase(offered);
      } else if (offer.reading) {
        offer.taken = touched = true;
      } else {
        offer = {.data = {}, .delivery = nullptr, .withdrawn = why};
      }
    }
    touched = touched || receives_.writing.contains(delivery.get());
    if (const auto it = receives_.fetching.find(delivery.get()); it != receives_.fetching.end()) call = it->second.call;
  }
  if (call) call.cancel();
  if (touched) return delivery->wait_for_end();
  delivery->complete(why);
  run_matches();
}

void Mailbox::let_go(std::size_t rank) {
  Over sent;
  {
    const std::lock_guard lock(mutex_);
    endings_.gone.insert(rank);
    take_unread([rank](const Address& address) { return address.to == rank && !address.key.by_tag; }, sent);
  }
  sent.complete({});
}

bool Mailbox::has_left(std::size_t rank) const {
  const std::lock_guard lock(mutex_);
  return endings_.gone.contains(rank);
}

void Mailbox::take_ended(Over& out) {
  std::erase_if(receives_.waiting, [&](Receiver& receiver) {
    if (ended(receiver.from, receiver.key).ok()) return false;
    // Later receives take what these would have taken.
    if (receiver.from != any_rank) --lines_[{receiver.from, receiver.key}].next_claimed;
    out.failed.push_back(std::move(receiver.delivery));
    return true;
  });
}

void Mailbox::leave(std::size_t rank, const Status& why) {
  Over over;
  std::vector<Call> calls;
  std::vector<Reply> asked;
  {
    const std::lock_guard lock(mutex_);
    endings_.gone.insert(rank);
    if (!endings_.with_rank.emplace(rank, why).second || !endings_.all.ok()) return;
    if (endings_.steps.ok()) endings_.steps = why;
    asked_.take_all(asked);
    take_ended(over);
    take_unread([rank](const Address& address) { return address.to == rank || !address.key.by_tag; }, over);
    for (const auto& [delivery, fetch] : receives_.fetching) {
      if (!fetch.by_tag) calls.push_back(fetch.call);
    }
    std::erase_if(lines_, [](const auto& line) { return !line.first.second.by_tag; });
  }
  for (auto& call : calls) call.cancel();
  for (auto& reply : asked) reply.fail(withdrawn(why));
  over.complete(why);
}

void Mailbox::fail(const Status& why, bool keep_arrived) {
  Over over;
  std::vector<Call> calls;
  std::vector<Reply> asked;
  {
    const std::lock_guard lock(mutex_);
    endings_.keeps_arrived = endings_.keeps_arrived && keep_arrived;
    if (endings_.all.ok()) {
      endings_.all = why;
      asked_.take_all(asked);
      take_ended(over);
      take_unread([](const Address&) { return true; }, over);
      for (const auto& [delivery, fetch] : receives_.fetching) calls.push_back(fetch.call);
    }
    std::erase_if(lines_, [this](const auto& line) { return !endings_.keeps_arrived || !line.first.second.by_tag; });
  }
  for (auto& call : calls) call.cancel();
  for (auto& reply : asked) reply.fail(withdrawn(why));
  over.complete(why);
}

}  // namespace tensorferry::collectives
