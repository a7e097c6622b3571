// Keys, interfaces, ports and socket folders of agents: which peers an agent can call, and at which addresses it
// listens.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "agent/transport/address.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string what(const Status& status) { return std::string(status.what()); }

constexpr const char* our_key = "a cluster key of our own, long enough";
constexpr const char* another_key = "another cluster key, also long enough";

/// Returns an address of this host that other hosts may reach; "" if it has none.
std::string outer_interface() {
  for (const auto& address : interface_addresses()) {
    if (!address.loopback) return address.interface;
  }
  return "";
}

class Keys : public ::testing::Test {
 protected:
  Keys() { forget(); }
  ~Keys() override {
    forget();
    std::filesystem::remove_all(folder);
  }
  static void forget() {
    for (const char* name :
         {"TENSORFERRY_KEY", "TENSORFERRY_KEY_FILE", "TENSORFERRY_SOCKET_IFNAME", "TENSORFERRY_SOCKET_DIR"}) {
      ::unsetenv(name);
    }
  }
  std::shared_ptr<RawAgent> join_with(const std::string& name, const std::function<void(RawAgentOptions&)>& change) {
    return join(store, name, {"tcp", ""}, change);
  }
  Status refusal(const std::function<void(RawAgentOptions&)>& change) {
    RawAgentOptions options;
    options.name = "refused";
    options.store = store;
    change(options);
    return RawAgent::join(options).status();
  }
  static Status call(RawAgent& from, const std::string& to, bool patient = false) {
    auto options = within(long_enough);
    options.wait_for_ready = patient;
    return call_sync(from, to, "echo", message_of("x"), options).status();
  }

  std::string folder = ::testing::TempDir() + "tensorferry-keys-" + std::to_string(::getpid());
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
};

std::function<void(RawAgentOptions&)> key(const std::string& text) {
  return [text](RawAgentOptions& options) { options.key = text; };
}

TEST_F(Keys, AgentsOfOneKeyCallEachOtherOverTcp) {
  const auto a = join_with("a", key(our_key)), b = join_with("b", key(our_key));
  serve_echo(*b);
  EXPECT_TRUE(call(*a, "b").ok());
  EXPECT_EQ(a->explain("b")->transport, "tcp");
}

TEST_F(Keys, AgentsOfOneUserNeedNoKeyOnLoopback) {
  const auto a = join_with("a", {}), b = join_with("b", {});
  serve_echo(*b);
  EXPECT_TRUE(call(*a, "b").ok());
}

TEST_F(Keys, AnAgentWithAnotherKeyOrNoneIsNotReached) {
  for (const auto& other : {key(another_key), key("")}) {
    store = std::make_shared<MemoryStore>();
    const auto a = join_with("a", key(our_key)), b = join_with("b", other);
    serve_echo(*a);
    serve_echo(*b);
    for (const bool patient : {false, true}) {
      const auto status = call(*a, "b", patient);
      EXPECT_EQ(status.code(), Code::unauthenticated) << status.text();
    }
    const auto back = call(*b, "a");
    EXPECT_EQ(back.code(), Code::unauthenticated) << back.text();
    EXPECT_EQ(b->counters().calls_served + a->counters().calls_served, 0U);
  }
}

TEST_F(Keys, ACallWaitsForItsPeerWhileAnotherAgentHasItsPort) {
  const auto a = join_with("a", {});
  const std::shared_ptr<Store> elsewhere = std::make_shared<MemoryStore>();
  const auto stranger = join(elsewhere, "stranger", {"tcp", ""}, key(another_key));
  auto record = describe_this_process();
  record.name = "b";
  record.tcp_addresses = record_of(elsewhere, "stranger", *Key::from_text(another_key)).tcp_addresses;
  ASSERT_TRUE(Directory(store, "tensorferry", {}).join(record, [](const Record&) { return false; }).ok());

  auto options = within(long_enough);
  options.wait_for_ready = true;
  auto waits = a->call("b", "echo", message_of("x"), options);
  const auto status = call(*a, "b");
  EXPECT_EQ(status.code(), Code::unauthenticated) << status.text();
  EXPECT_FALSE(waits.done());
  const auto b = create(store, "b", {"tcp", ""});
  serve_echo(*b);
  ASSERT_TRUE(b->announce().ok());
  ASSERT_TRUE(waits.wait(Clock().now() + long_enough));
  const auto reply = waits.take();
  EXPECT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(stranger->counters().calls_served, 0U);
}

TEST_F(Keys, AnotherAgentAtThePortOfADepartedAgentIsRefused) {
  const auto caller = join(store, "caller");
  const std::shared_ptr<Store> elsewhere = std::make_shared<MemoryStore>();
  const auto victim = join(elsewhere, "victim"), stranger = join(elsewhere, "stranger", {"tcp", ""}, key(another_key));
  auto record = record_of(elsewhere, "victim");
  victim->leave();
  record.tcp_addresses = record_of(elsewhere, "stranger", *Key::from_text(another_key)).tcp_addresses;
  ASSERT_TRUE(Directory(store, "tensorferry", {}).join(record, [](const Record&) { return false; }).ok());
  const auto status = call(*caller, "victim");
  EXPECT_EQ(status.code(), Code::connection_lost) << status.text();
  EXPECT_THAT(what(status), HasSubstr("another process answers at " + record.tcp_addresses.at(0)));
}

TEST_F(Keys, AKeyAlsoGuardsTheRecordsInTheStore) {
  const auto a = join_with("a", key(our_key));
  // A peer that can write to the store, but does not have the key.
  RawPeer forged(store, "forged");
  const auto status = call(*a, "forged");
  EXPECT_EQ(status.code(), Code::unauthenticated) << status.text();
}

TEST_F(Keys, AKeyThatIsTooShortIsRefused) { EXPECT_EQ(refusal(key("short")).code(), Code::invalid_argument); }

TEST_F(Keys, AKeyIsReadFromTheEnvironmentOrAFile) {
  ::setenv("TENSORFERRY_KEY", our_key, 1);
  const auto by_variable = join_with("a", {});
  ::unsetenv("TENSORFERRY_KEY");
  std::filesystem::create_directory(folder);
  const auto path = folder + "/key";
  std::ofstream(path) << our_key << "\n";
  ::chmod(path.c_str(), 0600);
  ::setenv("TENSORFERRY_KEY_FILE", path.c_str(), 1);
  const auto by_file = join_with("b", {});
  serve_echo(*by_file);
  EXPECT_TRUE(call(*by_variable, "b").ok());
  ::chmod(path.c_str(), 0644);
  const auto readable = refusal([](RawAgentOptions&) {});
  EXPECT_EQ(readable.code(), Code::permission_denied);
  EXPECT_THAT(what(readable), HasSubstr("chmod 600 " + path));
}

TEST_F(Keys, TheSameUserOnOneHostNeedsNoKey) {
  const auto a = join(store, "a", {"ring", ""}, key(our_key));
  const auto record = Directory(store, "tensorferry", *Key::from_text(our_key)).find("a", std::chrono::seconds(5));
  ASSERT_TRUE(record.ok());
  auto stranger = raw_connect(*record, true);
  const Key none;
  EXPECT_TRUE(handshake_as_dialler(stranger.fd(), raw_terms(none, false), deadline_after(long_enough)).ok());
}

TEST_F(Keys, ListeningBeyondLoopbackNeedsAConfiguredKey) {
  const auto outer = outer_interface();
  if (outer.empty()) GTEST_SKIP() << "this machine has no interface but loopback";
  const auto refused = refusal([&](RawAgentOptions& options) { options.interface = outer; });
  EXPECT_EQ(refused.code(), Code::unauthenticated);
  EXPECT_THAT(what(refused),
              AllOf(HasSubstr("(" + outer + "), which other hosts can reach, needs a key of your own"),
                    HasSubstr("export TENSORFERRY_KEY_FILE=~/.tensorferry.key"), HasSubstr("head -c 32 /dev/urandom")));
  const auto on_outer = [&](RawAgentOptions& options) {
    options.interface = outer;
    options.key = our_key;
  };
  const auto a = join_with("a", on_outer), b = join_with("b", on_outer);
  ASSERT_TRUE(a && b);
  serve_echo(*b);
  EXPECT_TRUE(call(*a, "b").ok());
}

TEST_F(Keys, TheEnvironmentNamesTheInterface) {
  const auto outer = outer_interface();
  ::setenv("TENSORFERRY_SOCKET_IFNAME", "lo", 1);
  const auto a = join_with("a", {});
  EXPECT_THAT(record_of(store, "a").tcp_addresses.at(0), StartsWith("127.0.0.1:"));
  ::setenv("TENSORFERRY_SOCKET_IFNAME", "nosuch0", 1);
  const auto refused = refusal([](RawAgentOptions&) {});
  EXPECT_EQ(refused.code(), Code::not_found);
  EXPECT_THAT(what(refused), HasSubstr("nosuch0"));
  if (outer.empty()) return;
  ::setenv("TENSORFERRY_SOCKET_IFNAME", outer.c_str(), 1);
  const auto loopback = join_with("b", [](RawAgentOptions& options) { options.interface = "lo"; });
  EXPECT_TRUE(loopback) << "the option counts more";
}

TEST_F(Keys, PortsAreTakenFromTheConfiguredRange) {
  auto probe = listen_tcp("127.0.0.1", {});
  ASSERT_TRUE(probe.ok());
  const auto taken = probe->port;  // the range begins with a port in use
  const auto range = std::to_string(taken) + "-" + std::to_string(taken + 20);
  const auto a = join_with("a", [&](RawAgentOptions& options) { options.ports = range; });
  ASSERT_TRUE(a);
  const auto port = split_host_port(record_of(store, "a").tcp_addresses.at(0))->port;
  EXPECT_GT(port, taken);
  EXPECT_LE(port, taken + 20);
  const auto refused = refusal([&](RawAgentOptions& options) { options.ports = std::to_string(taken); });
  EXPECT_EQ(refused.code(), Code::resource_exhausted);
  EXPECT_THAT(what(refused), HasSubstr(std::to_string(taken)));
  EXPECT_EQ(refusal([](RawAgentOptions& options) { options.ports = "from here on"; }).code(), Code::invalid_argument);
}

TEST_F(Keys, TheSocketDirectoryIsUsedAndLeftClean) {
  ::setenv("TENSORFERRY_SOCKET_DIR", folder.c_str(), 1);
  {
    const auto a = join(store, "a"), b = join(store, "b");
    serve_echo(*b);
    EXPECT_THAT(record_of(store, "b").unix_address, StartsWith(folder + "/"));
    EXPECT_TRUE(call(*a, "b").ok());
    EXPECT_EQ(a->explain("b")->transport, "ring");
    ::chmod(folder.c_str(), 0777);
    const auto refused = refusal([](RawAgentOptions&) {});
    EXPECT_EQ(refused.code(), Code::permission_denied);
    EXPECT_THAT(what(refused), HasSubstr("chmod"));
    ::chmod(folder.c_str(), 0700);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST_F(Keys, AgentsOfOneHostConnectOverTcpWithoutUnixSockets) {
  const auto a = join(store, "a", {"ring", ""}), b = join(store, "b", {"tcp", ""});
  serve_echo(*a);
  serve_echo(*b);
  EXPECT_TRUE(call(*a, "b").ok());
  EXPECT_TRUE(call(*b, "a").ok());
  EXPECT_EQ(a->explain("b")->transport, "tcp");
}

}  // namespace
}  // namespace tensorferry
