#include "tests/simulation/relay.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/record.h"
#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"

namespace tensorferry::testing {
namespace {

constexpr std::size_t most_held = std::size_t{1} << 18;  // bytes of one lane; then the relay reads no more

void no_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::size_t held(const auto& pieces) {
  std::size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.bytes.size();
  return bytes;
}

}  // namespace

Relay::Relay(std::uint64_t seed) : random_(seed), thread_([this] { run(); }) {}

Relay::~Relay() {
  stop_ = true;
  thread_.join();
}

std::string Relay::listen_for(const std::string& address) {
  auto listener = listen_tcp("127.0.0.1", {});
  if (!listener.ok()) return address;
  auto made = std::make_unique<Listener>(Listener{std::move(listener->socket), address});
  const std::lock_guard lock(mutex_);
  listeners_.push_back(std::move(made));
  return join_host_port("127.0.0.1", listener->port);
}

/// Most connections end at some time, because an agent dials few.
Faults Relay::draw() {
  const auto below = [&](std::uint64_t bound) { return random_() % bound; };
  Faults faults;
  constexpr std::array ends{Faults::End::none,     Faults::End::none,  Faults::End::none, Faults::End::close,
                            Faults::End::truncate, Faults::End::reset, Faults::End::reset};
  faults.end = ends.at(below(ends.size()));
  faults.end_after = 1 + below(std::uint64_t{1} << (6 + below(13)));  // up to 256 KiB, small numbers as likely as large
  faults.largest_piece = below(3) == 0 ? 1 + below(2000) : 65536;
  faults.delay = std::chrono::microseconds(below(2) == 0 ? 0 : below(4000));
  if (below(5) == 0) {
    faults.stall_after = 1 + below(20000);
    faults.stall = std::chrono::milliseconds(below(80));
  }
  return faults;
}

void Relay::accept(const Listener& listener) {
  FileDescriptor dialler(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!dialler) return;
  const auto first = draw(), second = draw();  // also for a refused connection, so that later ones draw the same
  const auto target = split_host_port(listener.target);
  if (!target.ok()) return;
  auto acceptor = start_connect_tcp(target->host, target->port);
  if (!acceptor.ok()) return;
  if (!wait_for_socket(acceptor->get(), POLLOUT, Clock::now() + std::chrono::seconds(1)).ok()) return;
  no_delay(dialler.get());
  no_delay(acceptor->get());
  auto made = std::make_unique<Carried>();
  made->dialler = std::move(dialler);
  made->acceptor = std::move(*acceptor);
  made->lanes[0] = {made->dialler.get(), made->acceptor.get(), first, 0, {}, false};
  made->lanes[1] = {made->acceptor.get(), made->dialler.get(), second, 0, {}, false};
  connections_.push_back(std::move(made));
  ++made_;
}

void Relay::read(Lane& lane) {
  Bytes bytes(65536);
  const auto got = ::recv(lane.from, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    lane.ended = true;
    return;
  }
  bytes.resize(static_cast<std::size_t>(got));
  auto due = Clock::now();
  if (!calm_) due += lane.faults.delay;
  if (!lane.pieces.empty()) due = std::max(due, lane.pieces.back().due);
  const auto largest = calm_ ? bytes.size() : lane.faults.largest_piece;
  for (std::size_t at = 0; at < bytes.size(); at += largest) {
    const auto end = std::min(bytes.size(), at + largest);
    const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    lane.pieces.push_back({due, Bytes(from, bytes.begin() + static_cast<std::ptrdiff_t>(end))});
  }
}

/// Carries on what is due. False: the connection is over.
bool Relay::write(Carried& connection, Lane& lane) {
  const auto now = Clock::now();
  auto& faults = lane.faults;
  while (!lane.pieces.empty() && (calm_ || lane.pieces.front().due <= now)) {
    auto& bytes = lane.pieces.front().bytes;
    if (!calm_ && faults.stall_after != 0 && lane.carried >= faults.stall_after) {
      faults.stall_after = 0;
      for (auto& piece : lane.pieces) piece.due += faults.stall;
      break;
    }
    auto take = bytes.size();
    const bool ends = !calm_ && faults.end != Faults::End::none && lane.carried + take >= faults.end_after;
    if (ends)
      take = faults.end == Faults::End::truncate ? faults.end_after - std::min(lane.carried, faults.end_after) : take;
    const auto put = ::send(lane.to, bytes.data(), take, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN || errno == EINTR;
    lane.carried += static_cast<std::size_t>(put);
    if (ends && static_cast<std::size_t>(put) == take) {
      if (faults.end == Faults::End::reset) reset(connection);
      return false;
    }
    bytes.erase(bytes.begin(), bytes.begin() + put);
    if (!bytes.empty()) break;
    lane.pieces.pop_front();
  }
  return !(lane.ended && lane.pieces.empty());
}

/// Makes both ends see "connection reset by peer", which drops what they have not read.
void Relay::reset(Carried& connection) {
  const linger at_once{1, 0};
  for (const int fd : {connection.dialler.get(), connection.acceptor.get()})
    ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

int Relay::milliseconds_to_wait() const {
  auto wait = Clock::now() + std::chrono::milliseconds(5);
  for (const auto& connection : connections_) {
    for (const auto& lane : connection->lanes) {
      if (!lane.pieces.empty()) wait = std::min(wait, lane.pieces.front().due);
    }
  }
  return static_cast<int>(
      std::max<std::int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(wait - Clock::now()).count()));
}

void Relay::run() {
  while (!stop_) {
    std::vector<pollfd> sources;
    std::vector<Listener*> listeners;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& listener : listeners_) listeners.push_back(listener.get());
    }
    for (const auto* listener : listeners) sources.push_back({listener->socket.get(), POLLIN, 0});
    for (const auto& connection : connections_) {
      for (const auto& lane : connection->lanes) {
        const bool reads = !lane.ended && held(lane.pieces) < most_held;
        sources.push_back({reads ? lane.from : -1, POLLIN, 0});
      }
    }
    ::poll(sources.data(), sources.size(), milliseconds_to_wait());
    const bool end_all = end_all_.exchange(false);
    std::size_t at = listeners.size();
    for (auto& connection : connections_) {
      for (auto& lane : connection->lanes) {
        if (sources[at++].revents != 0) read(lane);
      }
      for (auto& lane : connection->lanes) connection->over = !write(*connection, lane) || connection->over;
      connection->over = connection->over || end_all;
    }
    std::erase_if(connections_, [](const auto& connection) { return connection->over; });
    for (std::size_t i = 0; i < listeners.size(); ++i) {
      if (sources[i].revents != 0) accept(*listeners[i]);
    }
  }
}

RelayedStore::RelayedStore(Relay& relay) : relay_(relay), store_(std::make_unique<MemoryStore>()) {}
RelayedStore::~RelayedStore() = default;

Status RelayedStore::set(std::string_view key, ByteView value) {
  auto record = decode_record(value, {}, {});
  if (!record.ok() || record->left) return store_->set(key, value);
  for (auto& address : record->tcp_addresses) address = relay_.listen_for(address);
  return store_->set(key, encode_record(*record, {}, {}));
}

Result<Bytes> RelayedStore::get(std::string_view key, std::chrono::milliseconds timeout) {
  return store_->get(key, timeout);
}

Result<std::int64_t> RelayedStore::add(std::string_view key, std::int64_t amount) { return store_->add(key, amount); }

}  // namespace tensorferry::testing
