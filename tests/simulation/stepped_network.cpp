#include "tests/simulation/stepped_network.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "agent/transport/socket_port.h"

namespace tensorferry::testing {
namespace {

constexpr std::size_t first_port = 1000;  // a host is one port of an address
constexpr int pair_bytes = 4096;          // of a socket pair's buffer, so that senders meet a full one

std::array<FileDescriptor, 2> make_pair() {
  std::array<int, 2> ends{-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) != 0) std::abort();
  for (const int end : ends) ::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &pair_bytes, sizeof pair_bytes);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

}  // namespace

/// What one end of a connection has moved.
struct SteppedNetwork::Traffic {
  BytesMoved moved;
  int error = 0;  // of the attempt to connect
};

/// An agent's end of a connection.
class SteppedNetwork::SteppedPort final : public SocketPort {
 public:
  SteppedPort(FileDescriptor socket, std::shared_ptr<Traffic> traffic)
      : SocketPort(std::move(socket), false), traffic_(std::move(traffic)) {}
  [[nodiscard]] int connect_error() noexcept override { return traffic_->error; }
  [[nodiscard]] BytesMoved moved() const noexcept override { return traffic_->moved; }
  void set_low_water_mark(int) noexcept override {}

 private:
  const std::shared_ptr<Traffic> traffic_;
};

/// The network as one host sees it.
class SteppedNetwork::Endpoint final : public Network {
 public:
  Endpoint(SteppedNetwork& network, std::size_t host) : network_(network), host_(host) {}
  Result<std::vector<std::string>> listen(std::function<void(std::unique_ptr<StreamPort>)> accept) override {
    network_.hosts_[host_].accept = std::move(accept);
    return std::vector<std::string>{"127.0.0.1:" + std::to_string(first_port + host_)};
  }
  void stop_listening() override { network_.hosts_[host_].accept = {}; }
  Result<std::unique_ptr<StreamPort>> start_connect(const std::string& address) override {
    return network_.start_connect(host_, address);
  }

 private:
  SteppedNetwork& network_;
  const std::size_t host_;
};

std::shared_ptr<Network> SteppedNetwork::join(std::size_t host) {
  if (hosts_.size() <= host) hosts_.resize(host + 1);
  return std::make_shared<Endpoint>(*this, host);
}

/// Until the connection is made, the dialler's pair is full, so that its descriptor is not writable.
Result<std::unique_ptr<StreamPort>> SteppedNetwork::start_connect(std::size_t from, const std::string& address) {
  auto made = std::make_unique<Connection>();
  made->dialler = from;
  made->acceptor = std::strtoull(address.c_str() + address.find(':') + 1, nullptr, 10) - first_port;
  made->lanes[0].from = made->lanes[1].to = made->dialler;
  made->lanes[0].to = made->lanes[1].from = made->acceptor;
  for (auto& traffic : made->traffic) traffic = std::make_shared<Traffic>();
  auto pair = make_pair();
  const std::array<std::byte, 1024> filler{};
  while (::send(pair[0].get(), filler.data(), filler.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  made->far[0] = std::move(pair[1]);
  auto port = std::make_unique<SteppedPort>(std::move(pair[0]), made->traffic[0]);
  connections_.push_back(std::move(made));
  return std::unique_ptr<StreamPort>(std::move(port));
}

bool SteppedNetwork::parted(std::size_t a, std::size_t b) const {
  const std::pair<std::size_t, std::size_t> pair(std::min(a, b), std::max(a, b));
  return std::find(parted_.begin(), parted_.end(), pair) != parted_.end() || hosts_[a].silent || hosts_[b].silent;
}

/// Takes in what the agents have written since the last time.
void SteppedNetwork::take_in(Connection& connection) {
  for (std::size_t end = 0; end < 2; ++end) {
    auto& lane = connection.lanes[end];
    if (!connection.made || lane.ended || !connection.far[end]) continue;
    constexpr std::size_t most_under_way = std::size_t{64} << 10;
    std::array<std::byte, 4096> some{};
    while (lane.under_way.size() < most_under_way) {
      const auto got = ::recv(connection.far[end].get(), some.data(), some.size(), MSG_DONTWAIT);
      if (got > 0) {
        lane.under_way.insert(lane.under_way.end(), some.begin(), some.begin() + got);
        continue;
      }
      if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        lane.ended = true;
        connection.far[end].reset();
      }
      break;
    }
  }
}

bool SteppedNetwork::may_carry(const Connection& connection, std::size_t lane) const {
  const auto& of = connection.lanes[lane];
  if (!connection.made || of.cut || parted(of.from, of.to)) return false;
  return of.under_way.empty() ? of.ended && !of.told : has_room(connection, lane);
}

/// Returns whether the receiver takes bytes, if it did not take all before.
bool SteppedNetwork::has_room(const Connection& connection, std::size_t lane) {
  const auto& to = connection.far[1 - lane];
  if (!connection.lanes[lane].full || !to) return true;
  pollfd writable{to.get(), POLLOUT, 0};
  return ::poll(&writable, 1, 0) > 0;
}

std::size_t SteppedNetwork::ready() {
  drop_ended();
  ready_.clear();
  for (const auto& each : connections_) {
    take_in(*each);
    if (!each->made && !parted(each->dialler, each->acceptor)) ready_.emplace_back(each.get(), 2);
    for (std::size_t lane = 0; lane < 2; ++lane) {
      if (may_carry(*each, lane)) ready_.emplace_back(each.get(), lane);
    }
  }
  return ready_.size();
}

void SteppedNetwork::progress(std::size_t which, std::size_t bytes) {
  const auto [connection, number] = ready_[which];
  if (number == 2) return make(*connection);
  auto& lane = connection->lanes[number];
  auto& to = connection->far[1 - number];
  if (!lane.under_way.empty()) {
    const auto some = std::min(bytes, lane.under_way.size());
    const auto put = to ? ::send(to.get(), lane.under_way.data(), some, MSG_DONTWAIT | MSG_NOSIGNAL) : -1;
    lane.full = put < static_cast<std::ptrdiff_t>(some);
    if (put > 0) {
      lane.under_way.erase(lane.under_way.begin(), lane.under_way.begin() + put);
      connection->traffic[1 - number]->moved.received += static_cast<std::uint64_t>(put);
      connection->traffic[number]->moved.acknowledged += static_cast<std::uint64_t>(put);
    } else if (!to || (errno != EAGAIN && errno != EWOULDBLOCK)) {
      lane.under_way.clear();  // the receiver has closed its end
    }
    return;
  }
  lane.told = true;
  hang_up(*connection, 1 - number);
}

/// Lets the agent at one end see that the other one has ended.
void SteppedNetwork::hang_up(Connection& connection, std::size_t end) { connection.far[end].reset(); }

/// The acceptor's host takes the connection, or refuses it.
void SteppedNetwork::make(Connection& connection) {
  auto& host = hosts_[connection.acceptor];
  connection.made = true;
  std::array<std::byte, 4096> filler{};
  while (::recv(connection.far[0].get(), filler.data(), filler.size(), MSG_DONTWAIT) > 0) {
  }
  if (host.dead || !host.accept) {
    connection.traffic[0]->error = ECONNREFUSED;
    connection.lanes[0].told = connection.lanes[1].told = true;
    return connection.far[0].reset();
  }
  auto pair = make_pair();
  connection.far[1] = std::move(pair[1]);
  host.accept(std::make_unique<SteppedPort>(std::move(pair[0]), connection.traffic[1]));
}

void SteppedNetwork::end(std::size_t which, bool lossy, SeenBy seen_by) {
  auto& connection = *connections_.at(which);
  if (!connection.made) return;
  take_in(connection);
  for (std::size_t lane = 0; lane < 2; ++lane) {
    auto& of = connection.lanes[lane];
    const bool seen = seen_by == SeenBy::both || seen_by == (lane == 1 ? SeenBy::dialler : SeenBy::acceptor);
    of.ended = true;
    if (lossy) of.under_way.clear();
    if (!seen) of.cut = true;
  }
}

void SteppedNetwork::part(std::size_t a, std::size_t b, bool apart) {
  const std::pair<std::size_t, std::size_t> pair(std::min(a, b), std::max(a, b));
  std::erase(parted_, pair);
  if (apart) parted_.push_back(pair);
}

void SteppedNetwork::kill(std::size_t host, bool silent) {
  auto& dead = hosts_[host];
  dead.dead = true;
  dead.silent = silent;
  dead.accept = {};
  for (const auto& each : connections_) {
    if (each->dialler != host && each->acceptor != host) continue;
    take_in(*each);
    const std::size_t its_end = each->dialler == host ? 0 : 1;
    each->lanes[its_end].ended = true;
    each->lanes[1 - its_end].cut = true;
    if (each->made) each->far[its_end].reset();
  }
}

void SteppedNetwork::heal() {
  parted_.clear();
  for (const auto& each : connections_) {
    for (auto& lane : each->lanes) lane.cut = lane.cut && hosts_[lane.to].dead;
  }
}

/// Forgets connections of which both agents have heard, or have hung up themselves.
void SteppedNetwork::drop_ended() {
  std::erase_if(connections_, [](const auto& each) {
    const bool over = !each->far[0] && !each->far[1];
    return each->made && over;
  });
}

std::size_t SteppedNetwork::open_ends() {
  std::size_t open = 0;
  for (const auto& each : connections_) {
    for (const auto& end : each->far) {
      pollfd state{end.get(), POLLRDHUP, 0};
      const bool hung_up = ::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP)) != 0;
      if (end && !hung_up) ++open;
    }
  }
  return open;
}

}  // namespace tensorferry::testing
