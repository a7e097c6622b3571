/// Two agents whose tensors go by network cards (`ibv`): by emulated ones, or on real verbs (make test-rdma).
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>

#include "base/environment.h"
#include "channels/ibv/ibv_channel.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/channels/cards_of_ends.h"
#include "tests/emulated_verbs/control.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using ::testing::HasSubstr;

constexpr std::size_t megabyte = 1 << 20;

class IbvAgents : public ::testing::TestWithParam<Ways> {
 protected:
  void SetUp() override {
    const auto descriptor = IbvDriver().descriptor({});
    if (const auto* refusal = std::get_if<Refusal>(&descriptor)) GTEST_SKIP() << refusal->reason;
    a = join_with_card(0, "a");
    b = join_with_card(1, "b");
    serve_echo(*b);
    ASSERT_TRUE(eventually([&] { return a->explain("b")->channel == "ibv"; }));
  }
  /// Joins with the card of an end. An agent reads the variable while it joins.
  std::shared_ptr<RawAgent> join_with_card(std::size_t end, const std::string& name) {
    const auto card = rdma::card_of_end(end);
    if (card.empty()) return join(store, name, GetParam());
    ::setenv(environment::rdma_devices.name, card.c_str(), 1);
    auto agent = join(store, name, GetParam());
    ::unsetenv(environment::rdma_devices.name);
    return agent;
  }
  bool echoes(const Buffer& buffer) {
    auto message = message_of("m");
    message.buffers = {buffer};
    const auto reply = call_sync(*a, "b", "echo", message);
    return reply.ok() && reply->buffers.size() == 1 && same_bytes(reply->buffers[0], buffer);
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a, b;
};

INSTANTIATE_TEST_SUITE_P(Over, IbvAgents, ::testing::Values(Ways{"tcp", "ibv,basic"}, Ways{"ring", "ibv,basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(IbvAgents, ATensorArrivesByTheChannelThatExplainNames) {
  const auto route = a->explain("b");
  ASSERT_TRUE(route.ok());
  ASSERT_FALSE(route->candidates.empty());
  EXPECT_EQ(route->candidates.front().channel, "ibv");
  EXPECT_THAT(route->candidates.front().reason, HasSubstr("port 1"));
  const auto before = a->counters();
  EXPECT_TRUE(echoes(patterned(8 * megabyte)));
  const auto after = a->counters();
  EXPECT_EQ(after.bytes_sent.at("ibv") - (before.bytes_sent.contains("ibv") ? before.bytes_sent.at("ibv") : 0),
            8 * megabyte);
  EXPECT_EQ(
      after.bytes_received.at("ibv") - (before.bytes_received.contains("ibv") ? before.bytes_received.at("ibv") : 0),
      8 * megabyte);
  EXPECT_GT(after.pinned_bytes, 0U) << "the receive pool's blocks stay registered";
}

TEST_P(IbvAgents, SizesAroundEveryBoundArrive) {
  for (const std::size_t around : {4096UL, 16UL << 10, 64UL << 10, 1UL << 20, 2UL << 20, 5UL << 20}) {
    for (const std::size_t bytes : {around - 1, around, around + 1}) EXPECT_TRUE(echoes(patterned(bytes))) << bytes;
  }
}

TEST_P(IbvAgents, CallsGoOnByOtherChannelsWhileTheQueuePairsAreMadeAnew) {
  const auto cards = emulated_verbs::controls();
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  for (int round = 0; round < 3; ++round) {
    EXPECT_GT(cards.fail_queue_pairs(4096), 0U);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(echoes(patterned(3 * megabyte, static_cast<unsigned>(i))));
    ASSERT_TRUE(eventually([&] { return a->explain("b")->channel == "ibv"; }));
    EXPECT_TRUE(echoes(patterned(3 * megabyte)));
  }
}

TEST_P(IbvAgents, ManyCallsInBothDirectionsKeepNothing) {
  serve_echo(*a);
  for (int round = 0; round < 20; ++round) {
    auto message = message_of("m");
    for (unsigned i = 0; i < 8; ++i) message.buffers.push_back(patterned(300'000 + i, i));
    const auto there = call_sync(*a, "b", "echo", message), back = call_sync(*b, "a", "echo", message);
    ASSERT_TRUE(there.ok()) << there.status().text();
    ASSERT_TRUE(back.ok()) << back.status().text();
    for (unsigned i = 0; i < 8; ++i) {
      EXPECT_TRUE(same_bytes(there->buffers.at(i), message.buffers.at(i)));
      EXPECT_TRUE(same_bytes(back->buffers.at(i), message.buffers.at(i)));
    }
  }
  a->leave();
  b->leave();
  a.reset();
  b.reset();
  const auto cards = emulated_verbs::controls();
  if (cards.queue_pairs == nullptr) return;  // real cards do not count them
  EXPECT_TRUE(eventually([&] { return cards.queue_pairs() == 0; }));
}

}  // namespace
}  // namespace tensorferry
