/// The network of these tests keeps the rates, delays, losses and cuts that it was given. Plain sockets only.
#include "tests/network/emulated_network.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tests/agent/patience.h"

namespace tensorferry::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint16_t port = 7000;

sockaddr_in address_of(const std::string& host) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  ::inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}
const sockaddr* plain(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

bool readable(int fd, std::chrono::milliseconds within) {
  pollfd wanted{fd, POLLIN, 0};
  return ::poll(&wanted, 1, static_cast<int>(within.count())) == 1;
}

class Emulated : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = cannot_emulate(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

/// A UDP socket on a host, bound to the port.
FileDescriptor udp_on(const EmulatedNetwork& network, const std::string& host) {
  const NetworkNamespace::Inside inside(network.host(host));
  FileDescriptor fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto mine = address_of(network.address(host));
  EXPECT_EQ(::bind(fd.get(), plain(mine), sizeof mine), 0);
  return fd;
}

void send_to(const FileDescriptor& fd, const std::string& address, std::size_t bytes = 8) {
  const std::string text(bytes, 'x');
  const auto peer = address_of(address);
  EXPECT_EQ(::sendto(fd.get(), text.data(), text.size(), 0, plain(peer), sizeof peer), static_cast<ssize_t>(bytes));
}

/// Waits for the first packet, unless `silence` is 0, and counts packets until none comes for `silence`.
std::size_t count_received(const FileDescriptor& fd, std::chrono::milliseconds silence) {
  char text[2048];
  std::size_t count = 0;
  EXPECT_TRUE(silence.count() == 0 || readable(fd.get(), 5s));
  while (readable(fd.get(), silence)) count += ::recv(fd.get(), text, sizeof text, 0) > 0 ? 1 : 0;
  return count;
}

FileDescriptor listener_on(const EmulatedNetwork& network, const std::string& host) {
  const NetworkNamespace::Inside inside(network.host(host));
  FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const auto mine = address_of(network.address(host));
  EXPECT_EQ(::bind(fd.get(), plain(mine), sizeof mine), 0);
  EXPECT_EQ(::listen(fd.get(), 8), 0);
  return fd;
}

/// Dials `address` from a host. An empty descriptor: not connected in time.
FileDescriptor dial_from(const EmulatedNetwork& network, const std::string& host, const std::string& address,
                         std::chrono::milliseconds within = 5s) {
  const NetworkNamespace::Inside inside(network.host(host));
  FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto peer = address_of(address);
  (void)::connect(fd.get(), plain(peer), sizeof peer);  // goes on: poll() tells when it is there
  pollfd wanted{fd.get(), POLLOUT, 0};
  int error = 0;
  socklen_t size = sizeof error;
  if (::poll(&wanted, 1, static_cast<int>(within.count())) != 1) return {};
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0 ? std::move(fd) : FileDescriptor();
}

/// A TCP connection from host a to host b.
struct Connection {
  explicit Connection(const EmulatedNetwork& network) {
    const auto listener = listener_on(network, "b");
    a = dial_from(network, "a", network.address("b"));
    EXPECT_TRUE(a);
    EXPECT_TRUE(readable(listener.get(), 5s));
    if (!a) return;
    b = FileDescriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  /// Sends as fast as the connection takes it, and returns the bits per second that arrive after `skip`.
  double measure(std::chrono::milliseconds skip, std::chrono::milliseconds how_long) const {
    std::thread sender([&] {
      const std::string block(1 << 18, 'x');
      pollfd wanted{a.get(), POLLOUT, 0};
      while (::poll(&wanted, 1, 5000) == 1)
        if (::send(a.get(), block.data(), block.size(), MSG_NOSIGNAL) < 0 && errno != EAGAIN) return;
    });
    std::string block(1 << 20, 0);
    std::size_t bytes = 0;
    auto begin = Clock::now() + skip;
    bool begun = false;
    while (Clock::now() < begin + how_long && readable(b.get(), 5s)) {
      const auto got = ::recv(b.get(), block.data(), block.size(), 0);
      if (got <= 0) break;
      if (begun) {
        bytes += static_cast<std::size_t>(got);
      } else if (Clock::now() >= begin) {  // what has piled up until now is not counted
        begin = Clock::now();
        begun = true;
      }
    }
    const double seconds = seconds_since(begin);
    ::shutdown(a.get(), SHUT_RDWR);
    sender.join();
    return static_cast<double>(bytes) * 8 / seconds;
  }
  FileDescriptor a, b;
};

TEST_F(Emulated, APacketTakesTheDelayOfItsPath) {
  EmulatedNetwork network({"a", "b"});
  network.set_path("a", "b", {.delay = 30ms});
  network.set_path("b", "a", {.delay = 10ms});
  const auto a = udp_on(network, "a"), b = udp_on(network, "b");
  const auto begin = Clock::now();
  send_to(a, network.address("b"));
  ASSERT_TRUE(readable(b.get(), 10s));
  EXPECT_GE(seconds_since(begin), 0.030);
  send_to(b, network.address("a"));
  ASSERT_TRUE(readable(a.get(), 10s));
  EXPECT_GE(seconds_since(begin), 0.040);
  EXPECT_LT(seconds_since(begin), 10) << "40 ms, and what a busy machine adds";
}

TEST_F(Emulated, APathCarriesItsRate) {
  EmulatedNetwork network({"a", "b"});
  network.set_between("a", "b", {.bits_per_second = 20e6, .delay = 5ms});
  // A stalled machine can keep TCP's congestion control from the rate for long. Another connection begins anew.
  double rate = 0;
  int too_fast = 0;
  EXPECT_TRUE(eventually([&] {
    rate = Connection(network).measure(200ms, 1500ms);
    too_fast += rate < 21e6 ? 0 : 1;
    return rate > 14e6 && rate < 21e6;
  })) << rate;
  EXPECT_LE(too_fast, 1);
}

TEST_F(Emulated, AGigabitWithTenMillisecondsEachWayIsReached) {
  EmulatedNetwork network({"a", "b"});
  const auto alone = Connection(network).measure(200ms, 500ms);
  network.set_between("a", "b", {.bits_per_second = 1e9, .delay = 10ms});
  double rate = 0;
  EXPECT_TRUE(eventually([&] {
    rate = Connection(network).measure(500ms, 1500ms);
    EXPECT_LT(rate, 1.05e9);
    return rate > (under_sanitizer ? 0.02e9 : 0.4e9);
  })) << rate
      << "; 0.9e9 and more on a machine that is not busy";
  std::printf("without limits %.2f Gbit/s, at 1 Gbit/s with 10 ms each way %.2f\n", alone / 1e9, rate / 1e9);
}

TEST_F(Emulated, LossesFollowTheSeedAndTheProbability) {
  constexpr std::size_t packets = 2000;
  const auto lost = [&](unsigned seed) {
    EmulatedNetwork network({"a", "b"}, seed);
    network.set_path("a", "b", {.loss = 0.1});
    const auto a = udp_on(network, "a");
    for (std::size_t i = 0; i < packets; ++i) send_to(a, network.address("b"));
    const auto seen = [&] { return network.traffic("a", "b").packets + network.traffic("a", "b").lost; };
    EXPECT_TRUE(eventually([&] { return seen() == packets; })) << seen();
    return network.traffic("a", "b").lost;
  };
  const auto count = lost(1);
  EXPECT_GT(count, packets * 5 / 100);
  EXPECT_LT(count, packets * 15 / 100);
  EXPECT_EQ(lost(1), count);
  EXPECT_NE(lost(2), count) << "two seeds may agree on a number, but these do not";
}

TEST_F(Emulated, ACutIsOneWayAndCanBeMended) {
  EmulatedNetwork network({"a", "b"});
  network.cut("a", "b");
  const auto a = udp_on(network, "a"), b = udp_on(network, "b");
  send_to(a, network.address("b"));
  send_to(b, network.address("a"));
  EXPECT_EQ(count_received(a, 100ms), 1U);
  EXPECT_EQ(count_received(b, 0ms), 0U);
  EXPECT_EQ(network.traffic("a", "b").lost, 1U);
  network.cut("a", "b", false);
  send_to(a, network.address("b"));
  EXPECT_EQ(count_received(b, 100ms), 1U);
}

TEST_F(Emulated, LargePacketsCanBeLostAlone) {
  EmulatedNetwork network({"a", "b"});
  network.set_path("a", "b", {.largest = 1000});
  const auto a = udp_on(network, "a"), b = udp_on(network, "b");
  send_to(a, network.address("b"), 500);
  send_to(a, network.address("b"), 1200);
  EXPECT_EQ(count_received(b, 100ms), 1U);
}

TEST_F(Emulated, AResetReachesBothEndsOfAConnection) {
  EmulatedNetwork network({"a", "b", "c"});
  const Connection connection(network);
  EXPECT_EQ(network.reset_connections(port), 0U) << "this port is spared";
  EXPECT_GE(network.reset_connections(), 1U);
  char byte;
  for (const auto* end : {&connection.a, &connection.b}) {
    ASSERT_TRUE(readable(end->get(), 5s));
    EXPECT_EQ(::recv(end->get(), &byte, 1, 0), -1);
    EXPECT_TRUE(errno == ECONNRESET || errno == ECONNABORTED) << std::strerror(errno);
  }
}

TEST_F(Emulated, AForgottenConnectionIsSilentAndANewOneWorks) {
  EmulatedNetwork network({"a", "b"});
  const Connection connection(network);
  network.forget_connections(port);
  ASSERT_EQ(::send(connection.a.get(), "hello", 5, 0), 5);
  EXPECT_TRUE(readable(connection.b.get(), 5s)) << "this port is spared";
  char text[8];
  EXPECT_EQ(::recv(connection.b.get(), text, sizeof text, 0), 5);
  network.forget_connections();
  ASSERT_EQ(::send(connection.a.get(), "hello", 5, 0), 5);
  EXPECT_FALSE(readable(connection.b.get(), 300ms));
  const Connection another(network);
  ASSERT_EQ(::send(another.a.get(), "hello", 5, 0), 5);
  EXPECT_TRUE(readable(another.b.get(), 5s));
}

TEST_F(Emulated, AFirewallLetsOpenPortsThrough) {
  EmulatedNetwork network({"a", "b"});
  const auto listener = listener_on(network, "b");
  network.open_ports("b", {{port + 1, port + 10}});
  EXPECT_FALSE(dial_from(network, "a", network.address("b"), 300ms));
  network.open_ports("b", {{29500, 29500}, {port, port}});
  EXPECT_TRUE(dial_from(network, "a", network.address("b")));
}

TEST_F(Emulated, AHostBehindNatDialsAndIsNotDialled) {
  EmulatedNetwork network({"a", {"b", true}});
  const auto listener = listener_on(network, "a");
  const auto out = dial_from(network, "b", network.address("a"));
  ASSERT_TRUE(out);
  sockaddr_in seen{};
  socklen_t size = sizeof seen;
  const FileDescriptor in(::accept4(listener.get(), reinterpret_cast<sockaddr*>(&seen), &size, SOCK_CLOEXEC));
  EXPECT_STREQ(::inet_ntoa(seen.sin_addr), "10.99.0.2");
  for (const auto* end : {&out, &in}) {
    const auto* other = end == &out ? &in : &out;
    ASSERT_EQ(::send(end->get(), "hello", 5, 0), 5);
    char text[8];
    ASSERT_TRUE(readable(other->get(), 5s));
    EXPECT_EQ(::recv(other->get(), text, sizeof text, 0), 5);
  }
  const auto unreachable = listener_on(network, "b");
  for (const auto* address : {"10.99.0.2", "192.168.2.2"})
    EXPECT_FALSE(dial_from(network, "a", address, 300ms)) << address;
}

}  // namespace
}  // namespace tensorferry::testing
