// A process of another user on this host meets agents and a store that have no key, or has the key and lies about its
// user. What holds against it is the kernel's word. Each test becomes another user in a child, and needs root for that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "agent/buffers/channel_binding.h"
#include "agent/rendezvous/store_protocol.h"
#include "agent/rendezvous/tcp_store.h"
#include "base/host.h"
#include "base/text.h"
#include "channels/shm/layout.h"
#include "tests/agent/agents.h"
#include "tests/agent/forked.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr uid_t stranger = 12345;
const std::string shared_key = "the key that both users know";

/// Runs `life` in a child of the user `stranger`, and returns what it returns.
template <class Life>
int as_stranger(Life life) {
  return in_child([&] { return ::setresuid(stranger, stranger, stranger) == 0 ? life() : not_allowed; });
}

/// Accepts one connection as the user `stranger`, and performs the handshake without a key. 0: it failed; 1: it did
/// not. Adds one to the eventfd `begun` when the child runs.
int accept_as_stranger(const TcpListener& listener, const std::string& purpose, int begun = -1) {
  return as_stranger([&] {
    if (begun >= 0 && ::eventfd_write(begun, 1) != 0) return 2;
    if (!wait_for_socket(listener.socket.get(), POLLIN, deadline_after(long_enough)).ok()) return 2;
    const FileDescriptor socket(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const Terms terms{.demands_proof = false, .purpose = purpose};
    return handshake_as_acceptor(socket.get(), terms, deadline_after(long_enough)).ok() ? 1 : 0;
  });
}

class OtherUsers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
};

FileDescriptor connected_to(std::uint16_t port) {
  auto socket = start_connect_tcp("127.0.0.1", port);
  if (!socket.ok() || !wait_for_socket(socket->get(), POLLOUT, deadline_after(long_enough)).ok()) return {};
  return std::move(*socket);
}

TEST_F(OtherUsers, GetInNeitherByTcpNorByAUnixSocketIfAnAgentHasNoKey) {
  const auto agent = join(store, "agent");
  const auto record = record_of(store, "agent");
  const auto port = split_host_port(record.tcp_addresses.at(0))->port;
  for (const bool by_unix : {true, false}) {
    EXPECT_EQ(as_stranger([&] {
                auto socket = by_unix ? std::move(*connect_unix(record.unix_address)) : connected_to(port);
                if (!socket) return 2;
                const Terms terms{.demands_proof = false, .purpose = "link"};
                return handshake_as_dialler(socket.get(), terms, deadline_after(long_enough)).ok() ? 1 : 0;
              }),
              0)
        << (by_unix ? "unix" : "tcp");
  }
}

TEST_F(OtherUsers, ThatTakeAnAgentsPlaceAreNotCalled) {
  const auto caller = join(store, "caller", {"tcp", "basic"});
  auto listener = listen_tcp("127.0.0.1", {});
  ASSERT_TRUE(listener.ok());
  auto record = describe_this_process();
  record.name = "taken";
  record.tcp_addresses = {join_host_port("127.0.0.1", listener->port)};
  Directory directory(store, "tensorferry", {});
  ASSERT_TRUE(directory.join(record, [](const Record&) { return false; }).ok());
  auto call = caller->call("taken", "f", {}, within(long_enough));
  EXPECT_EQ(accept_as_stranger(*listener, "link"), 0);
  ASSERT_TRUE(call.wait());
  const auto reply = call.take();
  EXPECT_THAT(reply.status().text(), HasSubstr("a process of uid 12345 is at the other end"));
}

TEST_F(OtherUsers, AreNotServedByAStoreWithoutAKey) {
  const auto server = *TcpStoreServer::listen("127.0.0.1", 0, "");
  EXPECT_EQ(as_stranger([&] {
              const auto socket = connected_to(server->port());
              const Terms terms{.demands_proof = false, .purpose = "store"};
              return handshake_as_dialler(socket.get(), terms, deadline_after(long_enough)).ok() ? 1 : 0;
            }),
            0);
}

// The kernel prints uid 0 for a socket that its process has closed.
TEST_F(OtherUsers, WriteNothingToAStoreWithoutAKeyByClosingAtOnce) {
  const auto server = *TcpStoreServer::listen("127.0.0.1", 0, "");
  const auto honest = *connect_tcp_store("127.0.0.1", server->port(), "", long_enough);
  EXPECT_EQ(as_stranger([&] {
              const Terms terms{.demands_proof = false, .purpose = "store"};
              const auto request =
                  *encode(store_protocol::StoreRequest{.op = store_protocol::Op::set, .key = "k", .value = {}});
              for (int i = 0; i < 50; ++i) {
                const auto socket = connected_to(server->port());
                const DiallerHandshake handshake(terms);
                Bytes all(handshake.hello().begin(), handshake.hello().end());
                all.resize(all.size() + sizeof(Digest));
                all.insert(all.end(), request.begin(), request.end());
                all.resize(70'000, std::byte{0xff});  // more than a segment, so the kernel acknowledges the end at once
                (void)write_all(socket.get(), all, deadline_after(long_enough));
              }
              return 0;
            }),
            0);
  for (int i = 0; i < 100; ++i)
    ASSERT_EQ(honest->get("k", std::chrono::milliseconds(0)).status().code(), Code::deadline_exceeded);
}

TEST_F(OtherUsers, ThatServeTheStoreAtTheMeetingPointAreNotUsed) {
  const auto listener = listen_tcp("127.0.0.1", {});
  ASSERT_TRUE(listener.ok());
  const FileDescriptor forked(::eventfd(0, EFD_CLOEXEC));  // the child exists: it began without a lock of the client
  std::thread client([&] {
    std::uint64_t once = 0;
    EXPECT_EQ(::read(forked.get(), &once, sizeof once), static_cast<ssize_t>(sizeof once));
    const auto found = connect_tcp_store("127.0.0.1", listener->port, "", long_enough);
    EXPECT_EQ(found.status().code(), Code::unauthenticated);
    EXPECT_THAT(found.status().text(), HasSubstr("a process of uid 12345 is at the other end"));
  });
  EXPECT_EQ(accept_as_stranger(*listener, "store", forked.get()), 0);
  client.join();
}

/// Dials with the cluster key, and says `hello`.
Result<RawConnection> dial_with_the_key(const std::string& address, const wire::Hello& hello) {
  RawConnection connection(std::move(*connect_unix(address)));
  const auto key = *Key::from_text(shared_key);
  const auto agreed = handshake_as_dialler(connection.fd(), raw_terms(key, true), deadline_after(long_enough));
  if (!agreed) return agreed.status();
  if (const auto theirs = connection.read(wire::Kind::hello); !theirs) return theirs.status();
  if (auto status = connection.write(hello_frame(hello)); !status) return status;
  if (hello.purpose != wire::Hello::Purpose::calls) return connection;
  if (auto status = connection.write(go_frame(hello.connection)); !status) return status;  // its incarnation is low
  return connection;
}

wire::Hello hello_for(const std::string& name, wire::Hello::Purpose purpose) {
  auto hello = raw_hello(name);
  hello.purpose = purpose;
  hello.connection = 7;
  return hello;
}

/// The same, and says that shm of this test's user is at this end.
Result<RawConnection> dial_with_a_lie(const std::string& address, wire::Hello::Purpose purpose) {
  auto hello = hello_for("liar", purpose);
  hello.drivers.insert(hello.drivers.begin(), {"shm", {{Device{}, encode(shm::ShmDescriptor{0, boot_id()})}}});
  return dial_with_the_key(address, hello);
}

void with_the_key(RawAgentOptions& options) { options.key = shared_key; }

std::string address_of(const std::shared_ptr<Store>& store, const std::string& name) {
  return Directory(store, "tensorferry", *Key::from_text(shared_key)).find(name, seconds(5))->unix_address;
}

TEST_F(OtherUsers, WithTheKeyGetNoSharedMemoryBySayingThatTheyAreTheAgentsUser) {
  const auto agent = join(store, "agent", {}, with_the_key);
  const auto address = address_of(store, "agent");
  EXPECT_EQ(as_stranger([&] {
              auto calls = dial_with_a_lie(address, wire::Hello::Purpose::calls);
              if (!calls) return 2;
              Bytes open;
              Writer payload(open);
              payload.put(static_cast<std::uint8_t>(ChannelBinding::Control::open));
              payload.put(std::uint32_t{0});  // the liar's first driver, between the CPUs
              wire::Header header;
              header.kind = wire::Kind::control;
              header.call = 1;
              if (!calls->write(wire::assemble(header, {}, {}, open)).ok()) return 3;
              for (;;) {
                const auto answer = calls->read(wire::Kind::control);
                if (!answer) return 4;
                if (text_of(answer->body).find("another user: uid 12345") != std::string_view::npos) return 0;
              }
            }),
            0);
}

// The agent would send on such a connection what it has for the peer alone, or end the peer's link for it.
TEST_F(OtherUsers, WithTheKeyNeitherAddToNorReplaceTheLinkOfAPeerWhoseNameTheyState) {
  const auto agent = join(store, "agent", {}, with_the_key);
  const auto address = address_of(store, "agent");
  auto honest = dial_with_the_key(address, hello_for("peer", wire::Hello::Purpose::calls));
  ASSERT_TRUE(honest.ok()) << honest.status().text();
  ASSERT_TRUE(eventually([&] { return agent->check_process("peer").ok(); }));
  auto newer = hello_for("peer", wire::Hello::Purpose::calls);
  newer.connection = 8;
  auto restarted = newer;
  ++restarted.incarnation;
  for (const auto& hello : {hello_for("peer", wire::Hello::Purpose::bulk_back),
                            hello_for("peer", wire::Hello::Purpose::bulk), newer, restarted}) {
    EXPECT_EQ(as_stranger([&] {
                auto added = dial_with_the_key(address, hello);
                return !added ? 2 : added->ended(seconds(10)) ? 0 : 1;
              }),
              0)
        << static_cast<int>(hello.purpose) << " " << hello.connection << " " << hello.incarnation;
  }
  EXPECT_TRUE(agent->check_process("peer").ok());
  auto own = dial_with_the_key(address, newer);
  ASSERT_TRUE(own.ok());
  EXPECT_TRUE(honest->ended()) << "the peer's user replaces it";
  auto call = agent->call("peer", "f", {});
  const auto request = own->read(wire::Kind::request);
  EXPECT_TRUE(request.ok()) << request.status().text();
  call.cancel();
}

TEST_F(OtherUsers, WithTheKeyAreNotTakenForAProcessOfTheAgentsUserWhosePidTheyName) {
  const auto agent = join(store, "agent", {}, with_the_key);
  const auto address = address_of(store, "agent");
  const auto own = ::getpid();
  const auto same_user = join(store, "same user", {}, with_the_key);
  agent->serve("f", [](Request, Reply reply) { reply.send({}); });
  EXPECT_EQ(agent->check_process("same user", own).code(), Code::connection_lost) << "no link yet";
  ASSERT_TRUE(call_sync(*same_user, "agent", "f", {}).ok());
  EXPECT_TRUE(agent->check_process("same user", own).ok());
  EXPECT_TRUE(agent->check_process("same user").ok());
  const auto another = agent->check_process("same user", own + 1);
  EXPECT_EQ(another.code(), Code::permission_denied);
  EXPECT_THAT(another.text(), HasSubstr(formatted("names process {} as its own, but it is process {}", own + 1, own)));

  std::array<int, 2> asked{};
  ASSERT_EQ(::pipe(asked.data()), 0);
  Status seen;
  std::thread asks([&] {
    EXPECT_TRUE(eventually([&] {
      seen = agent->check_process("liar", own);
      return seen.code() != Code::connection_lost;
    }));
    EXPECT_EQ(::write(asked[1], "", 1), 1);
  });
  EXPECT_EQ(as_stranger([&] {
              const auto connection = dial_with_the_key(address, hello_for("liar", wire::Hello::Purpose::calls));
              char byte = 0;
              return connection && ::read(asked[0], &byte, 1) == 1 ? 0 : 2;
            }),
            0);
  asks.join();
  for (const int end : asked) ::close(end);
  EXPECT_EQ(seen.code(), Code::permission_denied);
  EXPECT_THAT(seen.text(), HasSubstr(formatted("is a process of uid {}, here is uid 0", stranger)));
}

}  // namespace
}  // namespace tensorferry
