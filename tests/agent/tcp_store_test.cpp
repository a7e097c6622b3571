#include "agent/rendezvous/tcp_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <thread>

#include "agent/handshake/auth.h"
#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/store_protocol.h"
#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"
#include "agent/transport/tcp_owner.h"
#include "tests/agent/forked.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using tensorferry::testing::in_child;
using tensorferry::testing::long_enough;
using ::testing::HasSubstr;

const std::string store_key = "the key of the store's tests";

std::unique_ptr<TcpStoreServer> serve(const std::string& key = "", TcpStoreBounds bounds = {}) {
  auto server = TcpStoreServer::listen("127.0.0.1", 0, key, bounds);
  EXPECT_TRUE(server.ok()) << server.status().text();
  return std::move(*server);
}

std::shared_ptr<Store> client_of(const TcpStoreServer& server, const std::string& key = "") {
  auto store = connect_tcp_store("127.0.0.1", server.port(), key, long_enough);
  EXPECT_TRUE(store.ok()) << store.status().text();
  return store.ok() ? *store : nullptr;
}

std::string text(const Result<Bytes>& value) {
  return value.ok() ? std::string(text_of(*value)) : value.status().text();
}

// Makes a plain connection, for clients that break the protocol.
FileDescriptor dial(std::uint16_t port) {
  auto socket = start_connect_tcp("127.0.0.1", port);
  EXPECT_TRUE(socket.ok());
  EXPECT_TRUE(wait_for_socket(socket->get(), POLLOUT, deadline_after(long_enough)).ok());
  return std::move(*socket);
}

bool closed_by_peer(const FileDescriptor& socket, milliseconds within) {
  const auto deadline = deadline_after(within);
  while (wait_for_socket(socket.get(), POLLIN, deadline).ok()) {
    char bytes[4096];
    if (::recv(socket.get(), bytes, sizeof bytes, 0) <= 0) return true;
  }
  return false;
}

// ---- The contract of both stores

class AnyStore : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("memory")) {
      store_ = std::make_shared<MemoryStore>();
    } else {
      server_ = serve();
      store_ = client_of(*server_);
    }
    ASSERT_NE(store_, nullptr);
  }
  std::unique_ptr<TcpStoreServer> server_;
  std::shared_ptr<Store> store_;
};

TEST_P(AnyStore, ReturnsTheValueThatWasSet) {
  ASSERT_TRUE(store_->set("a", view_of("one")).ok());
  EXPECT_EQ(text(store_->get("a", milliseconds(0))), "one");
  ASSERT_TRUE(store_->set("a", view_of("")).ok());
  EXPECT_EQ(text(store_->get("a", milliseconds(0))), "");
  const Bytes large(1 << 20, std::byte{7});
  ASSERT_TRUE(store_->set("large", large).ok());
  EXPECT_EQ(*store_->get("large", milliseconds(0)), large);
}

TEST_P(AnyStore, AddCountsApartFromSet) {
  EXPECT_EQ(*store_->add("n", 0), 0);
  EXPECT_EQ(*store_->add("n", 5), 5);
  EXPECT_EQ(*store_->add("n", -7), -2);
  EXPECT_EQ(*store_->add("m", 1), 1);
}

TEST_P(AnyStore, ErasesValuesAndCounters) {
  ASSERT_TRUE(store_->set("a", view_of("one")).ok());
  EXPECT_EQ(*store_->add("n", 5), 5);
  for (const char* key : {"a", "n", "never set"}) EXPECT_TRUE(store_->erase(key).ok()) << key;
  EXPECT_EQ(store_->get("a", milliseconds(0)).status().code(), Code::deadline_exceeded);
  EXPECT_EQ(*store_->add("n", 1), 1);
}

TEST_P(AnyStore, GetOfAMissingKeyEndsAtItsTimeout) {
  const auto from = steady_clock::now();
  EXPECT_EQ(store_->get("none", milliseconds(0)).status().code(), Code::deadline_exceeded);
  EXPECT_LT(steady_clock::now() - from, seconds(20));
  const auto status = store_->get("none", milliseconds(50)).status();
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(std::string(status.what()), HasSubstr("\"none\""));
  EXPECT_GE(steady_clock::now() - from, milliseconds(50));
}

TEST_P(AnyStore, AWaitingGetWakesWhenTheKeyIsSetAndBlocksNoOtherCall) {
  std::vector<std::thread> waiting;
  std::atomic<int> woken = 0;
  for (int i = 0; i < 8; ++i) {
    waiting.emplace_back([&] { woken += text(store_->get("late", seconds(30))) == "now" ? 1 : 0; });
  }
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(store_->set("other" + std::to_string(i), view_of("x")).ok());
  EXPECT_EQ(woken, 0);
  ASSERT_TRUE(store_->set("late", view_of("now")).ok());
  for (auto& thread : waiting) thread.join();
  EXPECT_EQ(woken, 8);
}

TEST_P(AnyStore, AddsOfManyThreadsAreAllCounted) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 100; ++n) EXPECT_TRUE(store_->add("sum", 1).ok());
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(*store_->add("sum", 0), 800);
}

TEST_P(AnyStore, OfThisHostReportsLoopback) { EXPECT_TRUE(store_->loopback()); }

INSTANTIATE_TEST_SUITE_P(Stores, AnyStore, ::testing::Values("memory", "tcp"),
                         [](const auto& one) { return std::string(one.param); });

// ---- The TCP store

TEST(TcpStore, ManyClientsShareKeys) {
  const auto server = serve(store_key);
  constexpr int client_count = 32;
  std::vector<std::thread> clients;
  std::atomic<int> met = 0;
  for (int i = 0; i < client_count; ++i) {
    clients.emplace_back([&, i] {
      const auto store = client_of(*server, store_key);
      ASSERT_TRUE(store->set("client" + std::to_string(i), view_of("here")).ok());
      for (int other = 0; other < client_count; ++other) {
        if (store->get("client" + std::to_string(other), seconds(30)).ok()) ++met;
      }
    });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(met, client_count * client_count);
}

TEST(TcpStore, ClientWaitsForAServerThatStartsLater) {
  std::uint16_t port = 0;
  { port = serve()->port(); }
  std::promise<void> connected;
  std::thread late([port, over = connected.get_future()] {
    std::this_thread::sleep_for(milliseconds(100));
    const auto server = TcpStoreServer::listen("127.0.0.1", port, "");
    ASSERT_TRUE(server.ok()) << server.status().text();
    over.wait();
  });
  const auto store = connect_tcp_store("127.0.0.1", port, "", long_enough);
  connected.set_value();
  EXPECT_TRUE(store.ok()) << store.status().text();
  late.join();
}

TEST(TcpStore, ClientWithoutAServerFailsWithAdvice) {
  std::uint16_t port = 0;
  { port = serve()->port(); }
  const auto store = connect_tcp_store("127.0.0.1", port, "", milliseconds(100));
  EXPECT_EQ(store.status().code(), Code::deadline_exceeded);
  EXPECT_THAT(std::string(store.status().what()), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(std::string(store.status().what()), HasSubstr(std::to_string(port)));
}

TEST(TcpStore, ServerBeyondLoopbackNeedsAConfiguredKey) {
  const auto open = TcpStoreServer::listen("0.0.0.0", 0, "");
  EXPECT_EQ(open.status().code(), Code::unauthenticated);
  EXPECT_THAT(std::string(open.status().what()), HasSubstr("export TENSORFERRY_KEY_FILE="));
  EXPECT_TRUE(TcpStoreServer::listen("0.0.0.0", 0, store_key).ok());
}

TEST(TcpStore, ClientBeyondLoopbackNeedsAConfiguredKey) {
  // No host has 192.0.2.1. The call must fail before it dials.
  const auto from = steady_clock::now();
  EXPECT_EQ(connect_tcp_store("192.0.2.1", 1, "", seconds(30)).status().code(), Code::unauthenticated);
  EXPECT_LT(steady_clock::now() - from, seconds(5));
}

TEST(TcpStore, WrongOrMissingKeyIsRefusedAtOnceWithoutHarmToOthers) {
  const auto keyed = serve(store_key);
  const auto good = client_of(*keyed, store_key);
  for (const auto* wrong : {"another key of the same kind", ""}) {
    const auto store = connect_tcp_store("127.0.0.1", keyed->port(), wrong, long_enough);
    EXPECT_EQ(store.status().code(), Code::unauthenticated) << store.status().text();
    EXPECT_THAT(std::string(store.status().what()), HasSubstr("TENSORFERRY_KEY_FILE"));
  }
  EXPECT_TRUE(good->set("a", view_of("b")).ok());
  const auto open = serve();
  EXPECT_EQ(connect_tcp_store("127.0.0.1", open->port(), store_key, long_enough).status().code(),
            Code::unauthenticated);
}

TEST(TcpStore, TakesItsKeyFromTheEnvironment) {
  ::setenv("TENSORFERRY_KEY", store_key.c_str(), 1);
  const auto server = serve();
  EXPECT_TRUE(client_of(*server) != nullptr);
  ::unsetenv("TENSORFERRY_KEY");
  EXPECT_EQ(connect_tcp_store("127.0.0.1", server->port(), "", long_enough).status().code(), Code::unauthenticated);
}

TEST(TcpStore, WithoutAKeyServesOnlyItsOwnUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const auto server = serve();
  EXPECT_EQ(in_child([&] {
              if (::setuid(12345) != 0) return 2;
              const auto socket = start_connect_tcp("127.0.0.1", server->port());
              if (!socket.ok() || !wait_for_socket(socket->get(), POLLOUT, deadline_after(long_enough)).ok()) return 3;
              const auto greeted = handshake_as_dialler(socket->get(), {.demands_proof = false, .purpose = "store"},
                                                        deadline_after(long_enough));
              return greeted.ok() ? 1 : 0;
            }),
            0);
}

TEST(TcpStore, GarbageClosesItsOwnConnectionOnly) {
  const auto server = serve(store_key);
  const auto good = client_of(*server, store_key);
  const std::string http = "GET / HTTP/1.1\r\n\r\n";
  const auto first = dial(server->port());
  ASSERT_TRUE(write_all(first.get(), view_of(http), deadline_after(long_enough)).ok());
  EXPECT_TRUE(closed_by_peer(first, seconds(20)));

  // After a valid handshake: a length beyond the bound, and bodies that are no requests.
  for (const std::uint32_t length : {0xffffffffU, 3U, 0U}) {
    const auto socket = dial(server->port());
    const auto key = Key::from_text(store_key);
    ASSERT_TRUE(
        handshake_as_dialler(socket.get(), {.key = &*key, .purpose = "store"}, deadline_after(long_enough)).ok());
    Bytes bytes;
    Writer(bytes).put(length);
    bytes.resize(bytes.size() + 3, std::byte{0xee});
    ASSERT_TRUE(write_all(socket.get(), bytes, deadline_after(long_enough)).ok());
    EXPECT_TRUE(closed_by_peer(socket, seconds(20))) << length;
    EXPECT_TRUE(good->set("a", view_of("b")).ok());
  }
}

TEST(TcpStore, HalfARequestAndASlowClientEndAtTheHandshakeTimeout) {
  const auto server = serve(store_key, {.message = seconds(2)});
  const auto good = client_of(*server, store_key);
  const auto silent = dial(server->port());
  const auto half_hello = dial(server->port());
  ASSERT_TRUE(write_all(half_hello.get(), view_of("TFRY\1"), deadline_after(long_enough)).ok());
  const auto half_request = dial(server->port());
  const auto key = Key::from_text(store_key);
  ASSERT_TRUE(
      handshake_as_dialler(half_request.get(), {.key = &*key, .purpose = "store"}, deadline_after(long_enough)).ok());
  const auto request =
      encode(store_protocol::StoreRequest{.op = store_protocol::Op::set, .key = "k", .value = view_of("value")});
  ASSERT_TRUE(write_all(half_request.get(), ByteView(*request).first(7), deadline_after(long_enough)).ok());
  for (const auto* socket : {&silent, &half_hello, &half_request}) EXPECT_TRUE(closed_by_peer(*socket, seconds(20)));
  EXPECT_EQ(good->get("k", milliseconds(0)).status().code(), Code::deadline_exceeded);
  EXPECT_TRUE(good->set("k", view_of("whole")).ok());  // connected clients may idle longer than a handshake may take
}

TEST(TcpStore, RequestsBeyondTheBoundsAreRefused) {
  const auto server = serve("", {.keys = 3, .bytes = 1000, .connections = 8});
  const auto store = client_of(*server);
  EXPECT_TRUE(store->set("a", view_of("1")).ok());
  EXPECT_TRUE(store->set("b", view_of("1")).ok());
  EXPECT_TRUE(store->add("c", 1).ok());
  EXPECT_EQ(store->set("d", view_of("1")).code(), Code::resource_exhausted);
  EXPECT_EQ(store->add("e", 1).status().code(), Code::resource_exhausted);
  EXPECT_EQ(store->set("a", Bytes(1000)).code(), Code::resource_exhausted);
  EXPECT_TRUE(store->set("a", Bytes(900)).ok());
  EXPECT_EQ(store->set("b", Bytes(900)).code(), Code::resource_exhausted);
  EXPECT_TRUE(store->set("a", Bytes(1)).ok());
  EXPECT_TRUE(store->set("b", Bytes(900)).ok());
  EXPECT_EQ(store->set("", view_of("1")).code(), Code::invalid_argument);
  EXPECT_EQ(store->set(std::string(2000, 'k'), view_of("1")).code(), Code::invalid_argument);
  EXPECT_EQ(store->set("a", Bytes((1 << 20) + 1)).code(), Code::invalid_argument);

  std::vector<FileDescriptor> many;
  for (int i = 0; i < 7; ++i) many.push_back(dial(server->port()));
  const auto past = dial(server->port());
  EXPECT_TRUE(closed_by_peer(past, seconds(5)));
  EXPECT_TRUE(store->set("a", view_of("still")).ok());
}

TEST(TcpStore, ALostServerIsNamedAtOnceAndARestartedOneIsUsed) {
  auto server = serve();
  const auto port = server->port();
  const auto store = client_of(*server);
  std::thread waiting([&] {
    const auto value = store->get("never", seconds(60));
    EXPECT_EQ(value.status().code(), Code::connection_lost) << text(value);
  });
  std::this_thread::sleep_for(milliseconds(100));
  const auto from = steady_clock::now();
  server.reset();
  waiting.join();
  const auto status = store->set("a", view_of("b"));
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()), HasSubstr("127.0.0.1:" + std::to_string(port)));
  EXPECT_LT(steady_clock::now() - from, seconds(5));

  auto again = TcpStoreServer::listen("127.0.0.1", port, "");
  ASSERT_TRUE(again.ok()) << again.status().text();
  EXPECT_TRUE(store->set("a", view_of("b")).ok());
  EXPECT_EQ(*store->add("n", 2), 2);
}

TEST(TcpStore, StopsWhileClientsWaitAndRestartsAHundredTimes) {
  for (int i = 0; i < 100; ++i) {
    auto server = serve();
    const auto store = client_of(*server);
    std::thread waiting([&] { EXPECT_FALSE(store->get("never", seconds(60)).ok()); });
    ASSERT_TRUE(store->set("a", view_of("b")).ok());
    server.reset();
    waiting.join();
  }
}

TEST(TcpStore, ForkedChildOpensItsOwnConnectionsAndEndsWithoutTheServersThread) {
#ifdef TENSORFERRY_UNDER_TSAN
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that lets go of its parent's threads";
#endif
  auto server = serve();
  const auto store = client_of(*server);
  ASSERT_TRUE(store->set("a", view_of("parent")).ok());
  EXPECT_EQ(in_child([&] {
              const bool good = text(store->get("a", seconds(5))) == "parent" && store->set("b", view_of("child")).ok();
              server.reset();
              return good ? 0 : 1;
            }),
            0);
  EXPECT_EQ(text(store->get("b", seconds(10))), "child");
  EXPECT_EQ(text(store->get("a", seconds(5))), "parent");
}

// ---- Parsers

TEST(StoreProtocol, RequestsAndRepliesRoundTrip) {
  using namespace store_protocol;
  const auto bytes = encode(StoreRequest{.op = Op::add, .key = "k", .amount = -3});
  ASSERT_EQ(*parse_length(ByteView(*bytes).first(4)), bytes->size() - 4);
  const auto request = parse_request(ByteView(*bytes).subspan(4));
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->key, "k");
  EXPECT_EQ(request->amount, -3);
  const auto refusal = encode(StoreReply{.code = Code::resource_exhausted, .value = view_of("full")});
  const auto reply = parse_reply(ByteView(refusal).subspan(4));
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->code, Code::resource_exhausted);
  EXPECT_EQ(text_of(reply->value), "full");
}

TEST(StoreProtocol, TruncatedAndOverlongMessagesAreRefused) {
  using namespace store_protocol;
  for (const auto& request :
       {StoreRequest{.op = Op::set, .key = "key", .value = view_of("value")},
        StoreRequest{.op = Op::get, .key = "key", .milliseconds = 5},
        StoreRequest{.op = Op::add, .key = "key", .amount = 1}, StoreRequest{.op = Op::erase, .key = "key"}}) {
    auto bytes = *encode(request);
    bytes.erase(bytes.begin(), bytes.begin() + 4);
    ASSERT_TRUE(parse_request(bytes).ok());
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(parse_request(ByteView(bytes).first(size)).ok()) << size;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(parse_request(bytes).ok());
  }
}

TEST(TcpOwner, IsFoundInTheKernelsTable) {
  constexpr std::string_view table =
      "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
      "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1\n"
      "   1: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 2\n"
      "   2: 0100007F:1F90 0100007F:9C40 01";
  EXPECT_EQ(uid_in_proc_net_tcp(table, "0100007F:9C40", "0100007F:1F90"), 1000U);
  EXPECT_EQ(uid_in_proc_net_tcp(table, "0100007F:1F90", "0100007F:9C40"), std::nullopt);  // cut off
  EXPECT_EQ(uid_in_proc_net_tcp(table, "0100007F:9C41", "0100007F:1F90"), std::nullopt);
  EXPECT_EQ(uid_in_proc_net_tcp("", "a", "b"), std::nullopt);
}

// The kernel prints uid 0 for a socket that its process has closed, and for one that waits for accept(2).
TEST(TcpOwner, IsUnknownOfASocketThatNoProcessHolds) {
  constexpr std::string_view closed =
      "   1: 0100007F:9C40 0100007F:1F90 05 00000000:00000000 00:00000000 00000000     0        0 0\n";
  constexpr std::string_view queued =
      "   1: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 0\n";
  EXPECT_EQ(uid_in_proc_net_tcp(closed, "0100007F:9C40", "0100007F:1F90"), std::nullopt);
  EXPECT_EQ(uid_in_proc_net_tcp(queued, "0100007F:9C40", "0100007F:1F90"), std::nullopt);
}

TEST(TcpOwner, IsKnownFromTheAcceptToTheClose) {
  const auto listener = listen_tcp("127.0.0.1", {});
  ASSERT_TRUE(listener.ok());
  auto client = start_connect_tcp("127.0.0.1", listener->port);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE(wait_for_socket(listener->socket.get(), POLLIN, deadline_after(long_enough)).ok());
  EXPECT_EQ(tcp_peer_uid(client->get()), std::nullopt) << "it waits in the listener's queue";
  const FileDescriptor accepted(::accept4(listener->socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_EQ(tcp_peer_uid(client->get()), ::geteuid());
  client->reset();
  EXPECT_EQ(tcp_peer_uid(accepted.get()), std::nullopt) << "its process has closed it";
}

TEST(TcpOwner, OfALocalConnectionIsThisUser) {
  for (const auto* address : {"127.0.0.1", "::1"}) {
    const auto listener = listen_tcp(address, {});
    if (!listener.ok()) continue;  // this host has no IPv6
    const auto client = start_connect_tcp(address, listener->port);
    ASSERT_TRUE(client.ok());
    ASSERT_TRUE(wait_for_socket(listener->socket.get(), POLLIN, deadline_after(long_enough)).ok());
    const FileDescriptor accepted(::accept4(listener->socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_EQ(tcp_peer_uid(accepted.get()), ::geteuid()) << address;
  }
}

}  // namespace
}  // namespace tensorferry
