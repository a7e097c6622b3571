// Sessions: what outlives a lost connection, and what ends with the peer.
#include "agent/connections/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
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

/// An agent "a" and a hand-made peer, one of which decides which connection carries their calls.
class SessionsWithAHandMadePeer : public ::testing::Test {
 protected:
  void join_as(std::uint64_t incarnation) {
    a = join(store, "a", {"unix", "basic"},
             [&](RawAgentOptions& options) { options.surroundings.incarnation = incarnation; });
    peer.emplace(store, "peer");
  }
  static constexpr std::uint64_t lowest = 1, highest = ~std::uint64_t{0};

  RawConnection dial(std::uint64_t number, bool go = true) {
    auto hello = peer->hello();
    hello.connection = number;
    return raw_dial(store, "a", hello, true, go);
  }
  static bool answers(RawConnection& connection) {
    return connection.write(plain_frame(wire::Kind::ping)).ok() && connection.read(wire::Kind::pong).ok();
  }

  const std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a;
  std::optional<RawPeer> peer;
};

TEST_F(SessionsWithAHandMadePeer, GoOnOverTheConnectionThatThePeerTakesNext) {
  join_as(highest);
  auto first = dial(1);
  ASSERT_TRUE(answers(first));
  auto second = dial(2);
  EXPECT_TRUE(first.ended());
  EXPECT_TRUE(answers(second)) << "the peer decides";
}

TEST_F(SessionsWithAHandMadePeer, FollowNoConnectionThatThePeerHasGivenUp) {
  join_as(highest);
  auto second = dial(2);
  ASSERT_TRUE(answers(second));
  auto first = dial(1);
  EXPECT_TRUE(first.ended()) << "its `go` was late";
  EXPECT_TRUE(answers(second));
}

TEST_F(SessionsWithAHandMadePeer, TakeTheDialOfAPeerThatHasLostTheConnection) {
  join_as(lowest);
  auto first = dial(0);
  ASSERT_TRUE(answers(first));
  auto crossing = dial(0, false);  // it has not read `go` of the first one
  EXPECT_TRUE(crossing.ended());
  ASSERT_TRUE(answers(first));
  auto second = dial(1);
  EXPECT_TRUE(first.ended());
  EXPECT_TRUE(answers(second));
}

// The thread that waited had the pool watch the connection no longer.
TEST_F(SessionsWithAHandMadePeer, ReadItsRequestsAfterAThreadHasWaitedForItsReply) {
  join_as(highest);
  serve_echo(*a);
  auto connection = dial(1);
  for (std::uint64_t number = 1; number <= 20; ++number) {
    auto call = a->call("peer", "f", {}, within(long_enough));
    auto waits = std::async(std::launch::async, [&] { return call.wait(); });
    const auto request = connection.read(wire::Kind::request);
    ASSERT_TRUE(request.ok()) << request.status().text();
    ASSERT_TRUE(connection.write(reply_frame(request->header.call)).ok());
    ASSERT_TRUE(waits.get());
    ASSERT_TRUE(connection.write(request_frame(number, "echo")).ok());
    ASSERT_TRUE(connection.read(wire::Kind::reply).ok());
  }
}

TEST_F(SessionsWithAHandMadePeer, ReadItsRequestsWhileAThreadWaitsForItsReply) {
  join_as(highest);
  serve_echo(*a);
  auto connection = dial(1);
  auto call = a->call("peer", "f", {}, within(long_enough));
  auto waits = std::async(std::launch::async, [&] { return call.wait(); });
  const auto request = connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok()) << request.status().text();
  for (std::uint64_t number = 1; number <= 20; ++number) {
    ASSERT_TRUE(connection.write(request_frame(number, "echo")).ok());
    ASSERT_TRUE(connection.read(wire::Kind::reply).ok());
  }
  ASSERT_TRUE(connection.write(reply_frame(request->header.call)).ok());
  EXPECT_TRUE(waits.get());
}

TEST_F(SessionsWithAHandMadePeer, HaveBulkConnectionsOfTheirConnectionForCallsAlone) {
  join_as(highest);
  auto calls = dial(3);
  ASSERT_TRUE(answers(calls));
  auto bulk = peer->hello();
  bulk.purpose = wire::Hello::Purpose::bulk;
  bulk.connection = 2;
  EXPECT_TRUE(raw_dial(store, "a", bulk, true, false).ended());
  bulk.connection = 3;
  auto taken = raw_dial(store, "a", bulk);
  EXPECT_TRUE(answers(calls));
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
