#include "agent/transport/address.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace tensorferry {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::vector<InterfaceAddress> host_interfaces = {
    {"lo", "127.0.0.1", true},      {"docker0", "172.17.0.1", false}, {"eth0", "10.0.0.5", false},
    {"eth1", "10.1.0.5", false},    {"ib0", "192.168.9.5", false},    {"lo", "::1", true},
    {"eth0", "2001:db8::5", false},
};

std::string chosen(std::string_view spec) {
  const auto found = match_interface(spec, host_interfaces);
  return found ? found->interface + "/" + found->address : "none";
}

// ---- Interfaces

TEST(Interface, IsChosenByPrefixInListOrder) {
  EXPECT_EQ(chosen("eth"), "eth0/10.0.0.5");
  EXPECT_EQ(chosen("eth1"), "eth1/10.1.0.5");
  EXPECT_EQ(chosen("ib,eth"), "ib0/192.168.9.5");
  EXPECT_EQ(chosen("wlan,,eth1,"), "eth1/10.1.0.5");
  EXPECT_EQ(chosen("wlan"), "none");
  EXPECT_EQ(chosen("lo"), "lo/127.0.0.1");
}

TEST(Interface, EqualsSignMatchesTheWholeName) {
  EXPECT_EQ(chosen("=eth"), "none");
  EXPECT_EQ(chosen("=eth,eth1"), "eth1/10.1.0.5");
}

TEST(Interface, CaretExcludesAndNeverLeavesLoopback) {
  EXPECT_EQ(chosen("^docker"), "eth0/10.0.0.5");
  EXPECT_EQ(chosen("^docker,eth"), "ib0/192.168.9.5");
  EXPECT_EQ(chosen("^=docker,eth0"), "docker0/172.17.0.1");
  EXPECT_EQ(chosen("^docker,eth,ib"), "none");
}

TEST(Interface, ListHoldsLoopback) {
  const auto ours = interface_addresses();
  EXPECT_TRUE(std::any_of(ours.begin(), ours.end(),
                          [](const auto& one) { return one.address == "127.0.0.1" && one.loopback; }));
}

TEST(ListeningAddress, IsLoopbackIfTheRendezvousIs) {
  for (const char* reaches : {"", "127.0.0.1", "localhost", "::1"}) {
    const auto address = listening_address("", reaches);
    ASSERT_TRUE(address.ok()) << address.status().text();
    EXPECT_TRUE(address->loopback);
    EXPECT_EQ(address->address, "127.0.0.1");
  }
}

TEST(ListeningAddress, IsTheSourceAddressTowardsTheRendezvous) {
  // A rendezvous at a non-loopback address of this host is reached from that address itself.
  for (const auto& one : interface_addresses()) {
    if (one.loopback) continue;
    const auto address = listening_address("", one.address);
    ASSERT_TRUE(address.ok()) << address.status().text();
    EXPECT_EQ(*address, one);
  }
}

TEST(ListeningAddress, ErrorsListTheInterfaces) {
  const auto none = listening_address("nosuchif", "");
  EXPECT_EQ(none.status().code(), Code::not_found);
  EXPECT_THAT(std::string(none.status().what()), HasSubstr("127.0.0.1"));
  EXPECT_EQ(listening_address("", "no-such-host.invalid").status().code(), Code::not_found);
}

TEST(ListeningAddress, VariableCountsIfTheOptionIsEmpty) {
  ::setenv("TENSORFERRY_SOCKET_IFNAME", "nosuchif", 1);
  EXPECT_FALSE(listening_address("", "").ok());
  EXPECT_TRUE(listening_address("lo", "").ok());
  ::unsetenv("TENSORFERRY_SOCKET_IFNAME");
}

TEST(ListeningAddress, MayBeGivenByNameOrNumber) {
  for (const char* spec : {"localhost", "127.0.0.1", "nosuchif,localhost", "localhost,127.0.0.1"}) {
    const auto found = listening_addresses(spec, "");
    ASSERT_TRUE(found.ok()) << spec;
    ASSERT_EQ(found->size(), 1U) << spec;
    EXPECT_EQ(found->front().interface, "lo");
  }
  for (const auto& one : interface_addresses()) {
    if (one.loopback) continue;
    const auto found = listening_addresses("localhost," + one.address, "");
    ASSERT_TRUE(found.ok());
    ASSERT_EQ(found->size(), 2U);
    EXPECT_EQ(found->back(), one);
  }
  EXPECT_FALSE(listening_addresses("nosuchif", "").ok());
}

TEST(Loopback, IsRecognisedByLiteralAndByName) {
  for (const char* host : {"127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "localhost"})
    EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"10.0.0.1", "::", "0.0.0.0", "::ffff:10.0.0.1", "128.0.0.1", "no-such-host.invalid"})
    EXPECT_FALSE(is_loopback(host)) << host;
}

// ---- Ports

TEST(Ports, AreOnePortARangeOrAny) {
  EXPECT_EQ(*parse_ports(""), (PortRange{0, 0}));
  EXPECT_EQ(*parse_ports("7000"), (PortRange{7000, 7000}));
  EXPECT_EQ(*parse_ports("7000-7099"), (PortRange{7000, 7099}));
  for (const char* bad : {"0", "x", "7000-", "-7000", "7099-7000", "70000", "7000 ", "7000-7001-7002", "+1"}) {
    EXPECT_EQ(parse_ports(bad).status().code(), Code::invalid_argument) << bad;
  }
}

TEST(Ports, HostAndPortSplitAndJoin) {
  EXPECT_EQ(join_host_port("10.0.0.5", 7000), "10.0.0.5:7000");
  EXPECT_EQ(join_host_port("::1", 7000), "[::1]:7000");
  for (const char* host : {"10.0.0.5", "::1", "somewhere"}) {
    const auto split = split_host_port(join_host_port(host, 7000));
    ASSERT_TRUE(split.ok());
    EXPECT_EQ(split->host, host);
    EXPECT_EQ(split->port, 7000);
  }
  for (const char* bad :
       {"", ":", "host", "host:", ":80", "host:0", "host:65536", "::1:80", "[::1:80", "[]:80", "a[b:80"}) {
    EXPECT_EQ(split_host_port(bad).status().code(), Code::invalid_argument) << bad;
  }
}

TEST(ListenTcp, TakesTheFirstFreePortOfTheRange) {
  auto any = listen_tcp("127.0.0.1", {});
  ASSERT_TRUE(any.ok()) << any.status().text();
  ASSERT_NE(any->port, 0);
  if (any->port == 65535) GTEST_SKIP() << "the kernel picked the last port";
  const auto next = static_cast<std::uint16_t>(any->port + 1);
  const auto second = listen_tcp("127.0.0.1", {any->port, next});
  if (!second.ok()) GTEST_SKIP() << "another process has port " << next;
  EXPECT_EQ(second->port, next);
  const auto third = listen_tcp("127.0.0.1", {any->port, next});
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.status().code(), Code::resource_exhausted);
  EXPECT_THAT(std::string(third.status().what()), HasSubstr(std::to_string(any->port) + "-" + std::to_string(next)));
}

TEST(ListenTcp, RefusesAnAddressOfAnotherHost) {
  EXPECT_EQ(listen_tcp("somewhere", {}).status().code(), Code::invalid_argument);
  EXPECT_EQ(listen_tcp("192.0.2.1", {}).status().code(), Code::invalid_argument);
}

TEST(ListenTcp, IsReachedByStartConnect) {
  const auto listener = listen_tcp("127.0.0.1", {});
  ASSERT_TRUE(listener.ok());
  const auto socket = start_connect_tcp("127.0.0.1", listener->port);
  ASSERT_TRUE(socket.ok());
  pollfd one{.fd = socket->get(), .events = POLLOUT, .revents = 0};
  ASSERT_EQ(::poll(&one, 1, 2000), 1);
  int error = -1;
  socklen_t size = sizeof error;
  ::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &size);
  EXPECT_EQ(error, 0);
}

// ---- Unix sockets

class UnixSockets : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("address_test-" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    ::unsetenv("TENSORFERRY_SOCKET_DIR");
  }
  void age(const std::string& path) {
    const timespec old[2] = {{1, 0}, {1, 0}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), old, AT_SYMLINK_NOFOLLOW), 0);
  }
  std::filesystem::path folder_;
};

TEST_F(UnixSockets, AreAbstractWithoutADirectory) {
  const auto listener = listen_unix("");
  ASSERT_TRUE(listener.ok()) << listener.status().text();
  EXPECT_THAT(listener->address, StartsWith("@tensorferry-"));
  EXPECT_TRUE(connect_unix(listener->address).ok());
}

TEST_F(UnixSockets, AreMadeInADirectoryThatOnlyThisUserCanEnter) {
  ::setenv("TENSORFERRY_SOCKET_DIR", folder_.c_str(), 1);
  const auto listener = listen_unix("");
  ASSERT_TRUE(listener.ok()) << listener.status().text();
  EXPECT_THAT(listener->address, StartsWith(folder_.string()));
  EXPECT_EQ(std::filesystem::status(folder_).permissions(), std::filesystem::perms::owner_all);
  EXPECT_TRUE(connect_unix(listener->address).ok());
  remove_unix_socket(listener->address);
  EXPECT_EQ(connect_unix(listener->address).status().code(), Code::connection_lost);
}

TEST_F(UnixSockets, RefuseADirectoryThatOthersCanEnter) {
  std::filesystem::create_directory(folder_);
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  const auto listener = listen_unix(folder_);
  EXPECT_EQ(listener.status().code(), Code::permission_denied);
  EXPECT_THAT(std::string(listener.status().what()), HasSubstr("chmod 700 " + folder_.string()));
  std::filesystem::remove(folder_);
  std::ofstream(folder_) << "a file";
  EXPECT_EQ(listen_unix(folder_).status().code(), Code::invalid_argument);
  EXPECT_EQ(listen_unix("/proc/no/such").status().code(), Code::permission_denied);
}

TEST_F(UnixSockets, RefuseADirectoryWhoseNameIsTooLong) {
  const auto listener = listen_unix(folder_.string() + std::string(100, 'x'));
  EXPECT_EQ(listener.status().code(), Code::invalid_argument);
  EXPECT_THAT(std::string(listener.status().what()), HasSubstr("TENSORFERRY_SOCKET_DIR"));
  std::filesystem::remove(folder_.string() + std::string(100, 'x'));
}

TEST_F(UnixSockets, OfDeadProcessesAreRemovedIfTheyAreOld) {
  const auto alive = listen_unix(folder_);
  ASSERT_TRUE(alive.ok());
  std::string dead, young;
  {
    auto a = listen_unix(folder_), b = listen_unix(folder_);
    ASSERT_TRUE(a.ok() && b.ok());
    dead = a->address, young = b->address;
  }
  const auto other = (folder_ / "tensorferry-notes.sock").string();  // a regular file
  std::ofstream(other) << "keep";
  for (const auto& path : {alive->address, dead, other}) age(path);
  ASSERT_TRUE(listen_unix(folder_).ok());
  EXPECT_FALSE(std::filesystem::exists(dead));
  for (const auto& path : {alive->address, young, other}) EXPECT_TRUE(std::filesystem::exists(path)) << path;
  EXPECT_TRUE(connect_unix(alive->address).ok());
}

}  // namespace
}  // namespace tensorferry
