// Many connections at once: strangers at the port, a mass start, and a dialler that is refused for now.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <future>
#include <thread>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"
#include "tests/base/manual_clock.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;

class Accepting : public ::testing::Test {
 protected:
  Accepting() {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    room_ = limit.rlim_cur >= 4096;
    serve_echo(*server);
  }
  void SetUp() override {
    if (!room_) GTEST_SKIP() << "this process may open fewer than 4096 files";
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> agent(const std::string& name) {
    return join(store, name, {"tcp", "basic"}, [this](RawAgentOptions& options) { options.key = key_text; });
  }
  const std::string key_text = "the key of the agents";
  const Key key = *Key::from_text(key_text);
  std::shared_ptr<RawAgent> server = agent("server");

 private:
  bool room_ = false;
};

TEST_F(Accepting, AThousandSilentStrangersDisturbNeitherOldPeersNorNewOnes) {
  const auto old_peer = agent("old"), new_peer = agent("new");
  ASSERT_TRUE(call_sync(*old_peer, "server", "echo", {}).ok());
  const auto record = record_of(store, "server", key);
  std::vector<RawConnection> strangers;
  for (int i = 0; i < 1000; ++i) strangers.push_back(raw_connect(record, false));
  EXPECT_TRUE(call_sync(*old_peer, "server", "echo", {}, within(long_enough)).ok());
  const auto reply = call_sync(*new_peer, "server", "echo", {}, within(seconds(60)));
  EXPECT_TRUE(reply.ok()) << reply.status().text();
}

TEST_F(Accepting, StrangersThatBeginAHandshakeMakeRoomToo) {
  const auto peer = agent("peer");
  const auto record = record_of(store, "server", key);
  const Key other = Key::random();
  std::vector<RawConnection> strangers;
  for (int i = 0; i < 400; ++i) {
    strangers.push_back(raw_connect(record, false));
    ASSERT_TRUE(strangers.back().write(DiallerHandshake(raw_terms(other, true)).hello()).ok());
  }
  const auto reply = call_sync(*peer, "server", "echo", {}, within(seconds(60)));
  EXPECT_TRUE(reply.ok()) << reply.status().text();
}

/// As many dials as a mass start has, over a network with a round trip of a second: nothing happens between a dialler's
/// first bytes and its proof.
TEST_F(Accepting, AMassStartOverASlowNetworkLosesNoDial) {
  const auto time = ManualClock::make();
  const auto slow = join(store, "slow", {"tcp", "basic"}, [&](RawAgentOptions& options) {
    options.key = key_text;
    options.surroundings.clock = time->clock();
  });
  const auto record = record_of(store, "slow", key);
  struct Dial {
    RawConnection connection;
    DiallerHandshake handshake;
  };
  std::vector<Dial> dials;
  for (int i = 0; i < 300; ++i) {
    dials.push_back({raw_connect(record, false), DiallerHandshake(raw_terms(key, true))});
    ASSERT_TRUE(dials.back().connection.write(dials.back().handshake.hello()).ok());
  }
  std::vector<Digest> proofs;
  for (auto& [connection, handshake] : dials) {
    std::array<std::byte, DiallerHandshake::answer_bytes> answer{};
    ASSERT_TRUE(read_exactly(connection.fd(), answer, deadline_after(long_enough)).ok());
    const auto proof = handshake.answer(answer);
    ASSERT_TRUE(proof.ok()) << proof.status().text();
    proofs.push_back(*proof);
  }
  time->advance(seconds(1));
  int lost = 0;
  for (std::size_t i = 0; i < dials.size(); ++i) {
    auto& connection = dials[i].connection;
    lost += connection.write(proofs[i]).ok() && connection.read(wire::Kind::hello).ok() ? 0 : 1;
  }
  EXPECT_EQ(lost, 0) << "of 300";
}

TEST_F(Accepting, AMassStartOfAgentsLosesNoCall) {
  const int agents = is_soak ? 500 : 40;
  std::vector<std::shared_ptr<RawAgent>> diallers;
  for (int i = 0; i < agents; ++i) diallers.push_back(agent("dialler" + std::to_string(i)));
  std::vector<Call> calls;
  for (const auto& dialler : diallers) calls.push_back(dialler->call("server", "echo", message_of("hello")));
  int lost = 0;
  for (auto& call : calls) lost += call.wait() && call.take().ok() ? 0 : 1;
  EXPECT_EQ(lost, 0) << "of " << agents;
}

TEST_F(Accepting, ADiallerThatIsRefusedForNowTriesAgainWithinItsDeadline) {
  const auto a = join(store, "a");
  RawPeer busy(store, "busy");
  auto call = a->call("busy", "f", {}, within(long_enough));
  for (int i = 0; i < 3; ++i) busy.refuse();
  auto peer = busy.accept();
  const auto request = peer.connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok()) << request.status().text();
  ASSERT_TRUE(peer.connection.write(reply_frame(request->header.call)).ok());
  EXPECT_TRUE(call.wait(Clock().now() + long_enough));
  EXPECT_TRUE(call.take().ok());
}

TEST_F(Accepting, AnExplanationGoesOnIfItsPeerRefusesForNow) {
  const auto time = ManualClock::make();
  const auto a = join(store, "a", {}, [&](RawAgentOptions& options) { options.surroundings.clock = time->clock(); });
  RawPeer busy(store, "busy");
  auto explained = std::async(std::launch::async, [&] { return a->explain("busy"); });
  auto accepted = std::async(std::launch::async, [&] {
    busy.refuse();
    return busy.accept();
  });
  EXPECT_TRUE(eventually([&] {
    time->advance(milliseconds(1));  // attempts to dial have pauses between them
    return explained.wait_for(seconds(0)) == std::future_status::ready;
  }));
  const auto peer = accepted.get();
  const auto route = explained.get();
  EXPECT_TRUE(route.ok()) << route.status().text();
}

// It has dialled before it saw that its peer has dialled too.
TEST_F(Accepting, AConnectionThatCrossesTheOneInUseIsDropped) {
  const auto b =
      join(store, "b", {"unix", "basic"}, [](RawAgentOptions& options) { options.surroundings.incarnation = 5; });
  RawPeer peer(store, "peer");
  auto call = b->call("peer", "f", {}, within(long_enough));
  auto calls = peer.accept();
  const auto request = calls.connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok()) << request.status().text();
  auto crossing = raw_hello("peer", peer.hello().incarnation);
  auto dialled = raw_dial(store, "b", crossing, true, false);
  EXPECT_TRUE(dialled.ended()) << "the number in its hello is 0";
  ASSERT_TRUE(calls.connection.write(reply_frame(request->header.call)).ok());
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto reply = call.take();
  EXPECT_TRUE(reply.ok()) << reply.status().text();
}

}  // namespace
}  // namespace tensorferry
