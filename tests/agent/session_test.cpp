// Sessions: what outlives a lost connection, and what ends with the peer.
#include "agent/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <iostream>
#include <optional>
#include <thread>
#include <vector>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"
#include "tests/agent/sockets.h"

namespace tensorferry::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

/// A store that can fail.
class FailingStore final : public Store {
 public:
  Status set(std::string_view key, ByteView value) override { return broken ? gone() : store_.set(key, value); }
  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override {
    return broken ? Result<Bytes>(gone()) : store_.get(key, timeout);
  }
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    return broken ? Result<std::int64_t>(gone()) : store_.add(key, amount);
  }
  [[nodiscard]] bool loopback() const override { return true; }
  std::atomic<bool> broken{false};

 private:
  static Status gone() { return {Code::connection_lost, "the store is gone"}; }
  MemoryStore store_;
};

class Sessions : public ::testing::TestWithParam<Ways> {
 protected:
  std::shared_ptr<RawAgent> member(const std::string& name, const Ways& ways) {
    auto agent = join(store, name, ways);
    serve_echo(*agent);
    agent->serve("hang", [](const Request&, Reply reply) { eventually([&] { return reply.cancelled(); }); });
    agent->on_peer_lost([this](const PeerInfo& peer, const Status& why) {
      ++deaths;
      std::cerr << "dead: " << peer.name << ": " << why.text() << '\n';
    });
    return agent;
  }

  Status echo(RawAgent& from, const char* to, std::size_t bytes = 0, RawCallOptions options = within(long_enough)) {
    auto message = message_of("m");
    if (bytes != 0) message.buffers = {patterned(bytes)};
    const auto sent = message.buffers;
    const auto reply = call_sync(from, to, "echo", std::move(message), std::move(options));
    if (!reply.ok()) return reply.status();
    const bool same = sent.empty() || (reply->buffers.size() == 1 && same_bytes(reply->buffers[0], sent[0]));
    return same ? Status() : Status(Code::internal, "other bytes came back");
  }

  std::shared_ptr<FailingStore> store = std::make_shared<FailingStore>();
  std::atomic<int> deaths{0};
};

TEST_P(Sessions, OutliveALostConnection) {
  const auto a = member("a", GetParam()), b = member("b", GetParam());
  for (int round = 0; round < 20; ++round) {
    // Calls fail that go over the lost connection before their side has noticed.
    EXPECT_TRUE(eventually([&] {
      return echo(*a, "b").ok() && echo(*b, "a").ok() && echo(*a, "b", 1'000'000).ok() && echo(*b, "a", 1'000'000).ok();
    }));
    sever_connections();
  }
  EXPECT_EQ(deaths, 0);
}

TEST_P(Sessions, ACallUnderWayFailsWithItsConnection) {
  const auto a = member("a", GetParam()), b = member("b", GetParam());
  auto call = a->call("b", "hang", {}, within(long_enough));
  ASSERT_TRUE(eventually([&] { return b->in_flight().second == 1; }));
  sever_connections();
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  EXPECT_EQ(call.take().status().code(), Code::connection_lost);
  EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0; })) << "the handler is told";
  EXPECT_EQ(deaths, 0);
}

TEST_P(Sessions, CallsWhileConnectionsEndAtRandomAnswerOrFailWithConnectionLost) {
  const auto a = member("a", GetParam()), b = member("b", GetParam());
  std::atomic<bool> enough{false};
  std::atomic<int> answered{0}, failed{0}, wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      auto& from = caller % 2 == 0 ? *a : *b;
      for (unsigned i = 0; !enough; ++i) {
        const auto status = echo(from, caller % 2 == 0 ? "b" : "a", i % 5 == 0 ? 300'000 : 0);
        ++(status.ok() ? answered : status.code() == Code::connection_lost ? failed : wrong);
        if (!status.ok() && status.code() != Code::connection_lost) ADD_FAILURE() << status.text();
      }
    });
  }
  for (int cut = 0; cut < 30; ++cut) {
    const int before = answered;
    sever_connections();
    EXPECT_TRUE(eventually([&] { return answered > before; })) << "after cut " << cut;
    std::this_thread::sleep_for(Milliseconds(cut % 7));
  }
  enough = true;
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(deaths, 0);
}

TEST_P(Sessions, EndWhenTheProcessEnds) {
  const auto a = member("a", GetParam());
  auto b = member("b", GetParam());
  ASSERT_TRUE(echo(*a, "b").ok());
  b->leave();
  EXPECT_TRUE(eventually([&] { return deaths == 1; }));
  b = member("b", GetParam());
  EXPECT_TRUE(echo(*a, "b").ok()) << "the next incarnation takes the calls";
  EXPECT_EQ(deaths, 1);
}

TEST(SessionsWithAHandMadePeer, GoOnInTheLinkThatReplacesAnOldOne) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {"unix", "basic"});
  RawPeer peer(store, "peer");
  auto hello = peer.hello();
  hello.link = 1;
  const auto first = raw_dial(store, "a", hello);
  ASSERT_TRUE(eventually([&] { return a->linked("peer").has_value(); }));
  // The peer's next link names one of this agent's that has ended: the connection is refused, and the link that was
  // made for it has none.
  hello.link = 2;
  hello.other_link = 99;
  auto second = raw_dial(store, "a", hello);
  EXPECT_TRUE(second.ended());
  peer.stop_listening();
  auto call = a->call("peer", "f", message_of("m"), within(long_enough));
  EXPECT_FALSE(call.wait(Clock().now() + Milliseconds(500))) << "a call that was not sent waits for the session";
}

/// A peer whose link 5 has taken the connection on which "a" calls it, and which then dials "a" for its link 6.
class TwoLinksOfAPeer : public ::testing::Test {
 protected:
  static wire::Hello hello_of(std::uint64_t link) {
    auto hello = raw_hello("peer", 0);
    hello.features = wire::feature::link;
    hello.link = link;
    return hello;
  }
  void say_link() { ASSERT_TRUE(called->connection.write(plain_frame(wire::Kind::link, 5)).ok()); }
  RawConnection dial_for_link_6() {
    auto hello = hello_of(6);
    hello.incarnation = peer.hello().incarnation;
    return raw_dial(store, "a", hello);
  }
  void SetUp() override {
    called.emplace(peer.accept());
    ASSERT_TRUE(called->connection.read(wire::Kind::request).ok());
  }
  const std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  const std::shared_ptr<RawAgent> a = join(store, "a", {"unix", "basic"});
  RawPeer peer{store, "peer", hello_of(0)};
  Call call = a->call("peer", "f", message_of("m"), within(long_enough));
  std::optional<RawPeer::Accepted> called;
};

TEST_F(TwoLinksOfAPeer, TheNewOneEndsTheOther) {
  say_link();
  ASSERT_TRUE(called->connection.write(plain_frame(wire::Kind::ping)).ok());
  ASSERT_TRUE(called->connection.read(wire::Kind::pong).ok());  // so the link frame before it has been read
  auto dialled = dial_for_link_6();
  EXPECT_TRUE(called->connection.ended());
  ASSERT_TRUE(dialled.write(request_frame(1, "nothing")).ok());
  EXPECT_TRUE(dialled.read(wire::Kind::reply).ok()) << "the new link lives";
}

TEST_F(TwoLinksOfAPeer, DoNotJoinOneOfThisAgent) {
  auto dialled = dial_for_link_6();
  ASSERT_TRUE(dialled.write(request_frame(1, "nothing")).ok());
  ASSERT_TRUE(dialled.read(wire::Kind::reply).ok()) << "which link of the peer was called is not known yet";
  say_link();
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto status = call.take().status();
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()), HasSubstr("of two links"));
  EXPECT_TRUE(dialled.ended());
}

INSTANTIATE_TEST_SUITE_P(Over, Sessions,
                         ::testing::Values(Ways{}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}, Ways{"tls", "basic"}),
                         [](const auto& one) { return name_of(one.param); });

class SessionsOverTcp : public Sessions {};

TEST_P(SessionsOverTcp, NeedOnlyOneSideThatCanDial) {
  const auto a = member("a", GetParam()), b = member("b", GetParam());
  stop_listening(record_of(store, "a").tcp_addresses.at(0));
  ASSERT_TRUE(echo(*a, "b").ok());
  EXPECT_TRUE(echo(*a, "b", 1'000'000).ok()) << "the reply needs a connection that b cannot dial";
  EXPECT_TRUE(echo(*b, "a").ok()) << "so does a call back";
  EXPECT_TRUE(echo(*b, "a", 1'000'000).ok());
  EXPECT_EQ(deaths, 0);
}

TEST_P(SessionsOverTcp, NeedNoStoreWhileTheyLast) {
  const auto a = member("a", GetParam()), b = member("b", GetParam());
  ASSERT_TRUE(echo(*a, "b").ok());
  store->broken = true;
  EXPECT_TRUE(echo(*a, "b", 1'000'000).ok());
  EXPECT_TRUE(echo(*b, "a", 1'000'000).ok()) << "b has never looked a up";
  sever_connections();
  EXPECT_TRUE(eventually([&] { return echo(*a, "b").ok(); }));
  EXPECT_EQ(deaths, 0);
  store->broken = false;
}

TEST_P(SessionsOverTcp, EndWhenNoProcessListensAnyMore) {
  const auto a = member("a", GetParam()), b = member("b", GetParam());
  ASSERT_TRUE(echo(*a, "b").ok());
  stop_listening(record_of(store, "a").tcp_addresses.at(0));
  stop_listening(record_of(store, "b").tcp_addresses.at(0));
  sever_connections();
  EXPECT_TRUE(eventually([&] { return deaths == 2; }));
  const auto status = echo(*a, "b");
  EXPECT_EQ(status.code(), Code::connection_lost) << status.text();
  EXPECT_THAT(std::string(status.what()), HasSubstr("\"b\""));
}

INSTANTIATE_TEST_SUITE_P(Over, SessionsOverTcp, ::testing::Values(Ways{"tcp", "basic"}),
                         [](const auto& one) { return name_of(one.param); });

}  // namespace
}  // namespace tensorferry::testing
