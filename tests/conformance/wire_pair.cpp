#include "tests/conformance/wire_pair.h"

#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "channels/completion.h"

namespace tensorferry::conformance {

namespace {

enum class Kind : std::uint8_t { message, acknowledgement };

/// Bounds allocations: a peer may send a corrupt size.
constexpr std::size_t largest_buffer = std::size_t{8} << 30;

void put(Writer& out, const Ticket& ticket) {
  out.varint(ticket.bytes);
  out.sized(ticket.opaque);
  out.varint(ticket.after);
  out.put(static_cast<std::uint8_t>(ticket.acknowledge));
}

Ticket get_ticket(Reader& in) {
  Ticket ticket;
  ticket.bytes = in.varint();
  const auto opaque = in.sized();
  ticket.opaque.assign(opaque.begin(), opaque.end());
  ticket.after = in.varint();
  ticket.acknowledge = in.get<std::uint8_t>() != 0;
  return ticket;
}

std::pair<FileDescriptor, FileDescriptor> connected_pair() {
  std::array<int, 2> fds{-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) != 0) {
    std::perror("socketpair");
    std::abort();
  }
  return {FileDescriptor(fds[0]), FileDescriptor(fds[1])};
}

}  // namespace

std::pair<WireEnd::Sockets, WireEnd::Sockets> connected_sockets() {
  auto messages = connected_pair();
  auto bulk = connected_pair();
  auto control = connected_pair();
  return {WireEnd::Sockets{std::move(messages.first), std::move(bulk.first), std::move(control.first)},
          WireEnd::Sockets{std::move(messages.second), std::move(bulk.second), std::move(control.second)}};
}

std::optional<Buffer> Arrival::reserve(std::size_t bytes) {
  if (on_reserve) on_reserve();
  if (!has_memory || bytes > largest_buffer) return std::nullopt;
  ++filled;
  buffer = memory.allocate(bytes);
  return buffer;
}

bool Arrival::adopt(Buffer lent) {
  if (!may_adopt) return false;
  ++filled;
  buffer = std::move(lent);
  return true;
}

Letter::~Letter() { drop(); }

void Letter::append(Buffer buffer, Completion written) { appended_.push_back({std::move(buffer), std::move(written)}); }

bool Letter::offer(Buffer buffer, Completion then, Sharing sharing) {
  Outcome outcome;
  auto release = [completion = outcome.completion(std::move(then)), held = end_.hold()](Status status) mutable {
    completion(std::move(status));
  };
  auto offer = end_.channel().offer(buffer, sharing, *this, std::move(release));
  if (auto* refused = std::get_if<Refusal>(&offer)) {
    refusal = refused->reason;
    return false;
  }
  tickets.push_back(std::get<Ticket>(offer));
  offered_.push_back(tickets.back());
  released.push_back(outcome);
  return true;
}

void Letter::send() {
  gone_ = true;
  end_.send_message(tickets, offered_, std::move(appended_));
}

void Letter::drop() {
  if (std::exchange(gone_, true)) return;
  for (auto& part : appended_) complete(std::move(part.written), Status(Code::cancelled, "the message was dropped"));
  for (const auto& ticket : offered_) end_.channel().withdraw(ticket);
}

WireEnd::WireEnd(std::string peer, Driver& driver, DevicePair pair, DeviceMemory& memory, Sockets sockets,
                 SharedState* shared)
    : peer_(std::move(peer)),
      shared_(shared),
      memory_(memory),
      messages_(std::move(sockets.messages)),
      bulk_(std::move(sockets.bulk)),
      control_(std::move(sockets.control)) {
  channel_ = driver.open(*this, pair);
}

WireEnd::~WireEnd() {
  finish();
  channel_.reset();
}

void WireEnd::start() {
  const auto ended = [this] { close(Status(Code::connection_lost, peer_ + " has gone")); };
  messages_.start([this] { return read_message(); }, ended);
  bulk_.start([this] { return read_bulk(); }, ended);
  control_.start([this] { return read_control(); }, ended);
}

void WireEnd::ready(Status probed) {
  std::lock_guard lock(mutex_);
  probed_ = std::move(probed);
  changed_.notify_all();
}

std::optional<Status> WireEnd::wait_ready() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return probed_.has_value(); });
  return probed_;
}

void WireEnd::behave(Behaviour behaviour) {
  std::lock_guard lock(mutex_);
  behaviour_ = std::make_shared<const Behaviour>(std::move(behaviour));
}

ControlId WireEnd::control(Bytes message, Descriptors descriptors) {
  std::lock_guard lock(control_mutex_);
  control_.send({std::move(message), std::move(descriptors)});
  return ++controls_sent_;
}

bool WireEnd::read_control() {
  auto message = control_.read_head();
  if (!message) return false;
  channel_->control(message->first, std::move(message->second));
  std::lock_guard lock(mutex_);
  ++controls_seen_;
  changed_.notify_all();
  return true;
}

void WireEnd::send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) {
  Lane::Record record;
  Writer out(record.head);
  out.varint(sequence);
  out.varint(buffer.bytes);
  record.parts.push_back({std::move(buffer), std::move(written)});
  bulk_.send(std::move(record));
}

void WireEnd::receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) {
  Status error;
  {
    std::lock_guard lock(mutex_);
    if (closed_) {
      error = *closed_;
    } else if (!received_.insert(sequence).second) {
      error = Status(Code::protocol_error, "bulk data was asked for before");
    } else {
      expected_.emplace(sequence, Receive{std::move(destination), std::move(landed)});
      changed_.notify_all();
      return;
    }
  }
  complete(std::move(landed), std::move(error));
}

std::size_t WireEnd::unacknowledged() {
  const std::lock_guard lock(mutex_);
  return unacknowledged_.size();
}

std::size_t WireEnd::expected_bulk() {
  std::lock_guard lock(mutex_);
  return expected_.size();
}

bool WireEnd::read_bulk() {
  const auto head = bulk_.read_head();
  if (!head) return false;
  Reader in(head->first);
  const auto sequence = in.varint();
  const auto bytes = in.varint();
  Receive receive;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || expected_.contains(sequence); });
    if (closed_) return false;
    receive = std::move(expected_.extract(sequence).mapped());
  }
  const bool fits = receive.destination.bytes == bytes;
  const bool whole = fits && bulk_.read(receive.destination.data, bytes);
  receive.destination = {};
  if (!fits) {
    complete(std::move(receive.landed), Status(Code::protocol_error, "bulk data of another size"));
  } else {
    complete(std::move(receive.landed), whole ? Status() : Status(Code::connection_lost, peer_ + " has gone"));
  }
  return whole;
}

void WireEnd::read(Buffer destination, Completion landed) {
  behind_.push_back({std::move(destination), std::move(landed)});
}

bool WireEnd::read_message() {
  const auto head = messages_.read_head();
  if (!head) return false;
  Reader in(head->first);
  switch (static_cast<Kind>(in.get<std::uint8_t>())) {
    case Kind::acknowledgement: {
      const auto message = in.varint();
      acknowledged({message, in.varint()});
      return true;
    }
    case Kind::message:
      return take_message(in);
  }
  return false;
}

bool WireEnd::take_message(Reader& in) {
  const auto number = in.varint();
  Arrivals arrivals;
  ControlId after = 0;
  for (auto count = in.count(), index = std::uint64_t{0}; index < count; ++index) {
    auto ticket = get_ticket(in);
    after = std::max(after, ticket.after);
    arrivals.push_back(std::make_shared<Arrival>(std::move(ticket), Arrival::Number{number, index}, memory_));
  }
  const auto trailing = in.varint();
  std::shared_ptr<const Behaviour> behaviour;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || controls_seen_ >= after; });
    behaviour = behaviour_;
    arrived_.push_back(arrivals);
    changed_.notify_all();
  }
  if (behaviour->on_message) {
    behaviour->on_message(arrivals);
  } else {
    for (const auto& arrival : arrivals) pull(arrival);
  }
  return take_behind(trailing);
}

/// Reads the bytes behind the message into the destinations that were handed to read(), and drops the rest.
bool WireEnd::take_behind(std::uint64_t bytes) {
  bool alive = true;
  for (auto& each : std::exchange(behind_, {})) {
    const bool fits = each.destination.bytes <= bytes;
    const auto broken = fits ? Status(Code::connection_lost, peer_ + " has gone")
                             : Status(Code::protocol_error, "fewer bytes behind the message than its tickets say");
    alive = alive && fits && messages_.read(each.destination.data, each.destination.bytes);
    if (alive) bytes -= each.destination.bytes;
    each.destination = {};
    complete(std::move(each.landed), alive ? Status() : broken);
  }
  return alive && messages_.read(nullptr, bytes);
}

void WireEnd::pull(const std::shared_ptr<Arrival>& arrival) {
  std::shared_ptr<const Behaviour> behaviour;
  {
    std::lock_guard lock(mutex_);
    behaviour = behaviour_;
  }
  if (behaviour->before_pull) behaviour->before_pull(*arrival);
  auto landed = arrival->landed.completion([behaviour, arrival, held = hold()](Status) {
    if (behaviour->on_landed) behaviour->on_landed(*arrival);
  });
  auto consumed = arrival->consumed.completion([this, behaviour, arrival, held = hold()](Status) {
    if (behaviour->acknowledges) acknowledge(*arrival);
  });
  channel_->pull(arrival->ticket, *arrival, std::move(landed), std::move(consumed));
}

void WireEnd::discard(const std::shared_ptr<Arrival>& arrival) {
  channel_->discard(arrival->ticket);
  acknowledge(*arrival);
}

void WireEnd::acknowledge(const Arrival& arrival) {
  if (!arrival.ticket.acknowledge) return;
  Lane::Record record;
  Writer out(record.head);
  out.put(Kind::acknowledgement);
  out.varint(arrival.number.message);
  out.varint(arrival.number.index);
  messages_.send(std::move(record));
}

void WireEnd::acknowledged(Arrival::Number number) {
  Ticket ticket;
  {
    std::lock_guard lock(mutex_);
    auto found = unacknowledged_.extract(number);
    if (found.empty()) return;
    ticket = std::move(found.mapped());
  }
  channel_->acknowledged(ticket);
}

void WireEnd::send_message(const std::vector<Ticket>& tickets, const std::vector<Ticket>& offered,
                           std::vector<Lane::Part> parts) {
  std::uint64_t number;
  {
    std::lock_guard lock(mutex_);
    number = ++messages_sent_;
    for (std::size_t index = 0; index < offered.size(); ++index) {
      if (offered[index].acknowledge) unacknowledged_.emplace(Arrival::Number{number, index}, offered[index]);
    }
  }
  Lane::Record record;
  Writer out(record.head);
  out.put(Kind::message);
  out.varint(number);
  out.varint(tickets.size());
  for (const auto& ticket : tickets) put(out, ticket);
  std::uint64_t trailing = 0;
  for (const auto& part : parts) trailing += part.buffer.bytes;
  out.varint(trailing);
  record.parts = std::move(parts);
  messages_.send(std::move(record));
}

Outcome WireEnd::send(const Buffer& buffer, Completion then) {
  Letter letter(*this);
  if (!letter.offer(buffer, std::move(then))) return {};
  letter.send();
  return letter.released.front();
}

Arrivals WireEnd::receive(std::chrono::milliseconds limit) {
  Arrivals arrivals;
  {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, limit, [&] { return !arrived_.empty(); })) return {};
    arrivals = std::move(arrived_.front());
    arrived_.pop_front();
  }
  for (const auto& arrival : arrivals) {
    if (!arrival->landed.wait(limit) || !arrival->consumed.wait(limit)) return {};
  }
  return arrivals;
}

std::shared_ptr<Arrival> sole_owner(Arrivals arrivals) {
  if (arrivals.size() != 1) return nullptr;
  const auto until = std::chrono::steady_clock::now() + patience;
  while (arrivals.front().use_count() != 1) {
    if (std::chrono::steady_clock::now() >= until) return nullptr;
    std::this_thread::yield();
  }
  return std::move(arrivals.front());
}

void WireEnd::close(Status status) {
  std::map<std::uint64_t, Receive> expected;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = status;
    expected.swap(expected_);
    changed_.notify_all();
  }
  for (auto* lane : {&messages_, &bulk_, &control_}) lane->end();
  for (auto& [sequence, receive] : expected) complete(std::move(receive.landed), status);
  channel_->close(status);
}

void WireEnd::finish() {
  close(Status(Code::agent_closed, "this end was closed"));
  for (auto* lane : {&messages_, &bulk_, &control_}) lane->join();
  std::unique_lock lock(held_->mutex);
  if (!held_->changed.wait_for(lock, patience, [&] { return held_->completions == 0; })) {
    std::fprintf(stderr, "WireEnd::finish(): %d completions were neither run nor dropped\n", held_->completions);
    std::abort();
  }
}

std::shared_ptr<void> WireEnd::hold() {
  const std::lock_guard lock(held_->mutex);
  ++held_->completions;
  return {nullptr, [held = held_](void*) {
            const std::lock_guard released(held->mutex);
            --held->completions;
            held->changed.notify_all();
          }};
}

WirePair::WirePair(Driver& a_driver, Driver& b_driver, DevicePair devices, DeviceMemory& a_memory,
                   DeviceMemory& b_memory) {
  auto [a_sockets, b_sockets] = connected_sockets();
  a = std::make_unique<WireEnd>("b", a_driver, devices, a_memory, std::move(a_sockets));
  b = std::make_unique<WireEnd>("a", b_driver, DevicePair{devices.remote, devices.local}, b_memory,
                                std::move(b_sockets));
  a->start();
  b->start();
}

WirePair::~WirePair() {
  a->finish();
  b->finish();
}

}  // namespace tensorferry::conformance
