/// Tests of `ibv` over several ports, of which one fails. Emulated cards only.
#include <algorithm>

#include "tests/channels/ibv_fixture.h"

namespace tensorferry::conformance {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class IbvPorts : public Ibv {
 protected:
  void SetUp() override {
    Ibv::SetUp();
    if (IsSkipped()) return;
    if (cards.set_port == nullptr) GTEST_SKIP() << "the cards are not emulated";
    all = lanes();
    if (all < 2) GTEST_SKIP() << "there is one port";
  }
  void TearDown() override {
    if (cards.set_port != nullptr) (void)cards.set_port("emu1", 1, 1);
    Ibv::TearDown();
  }
  void expect_carries_by_cards(std::uint32_t seed) {
    EXPECT_EQ(a().expected_bulk() + b().expected_bulk(), 0U);
    expect_carries(5 * megabyte, seed);
    expect_carries(kilobyte, seed);
  }
  std::size_t all = 0;
};

TEST_F(IbvPorts, TheOthersGoOnWhenOneGoesDownAndItsLaneIsMadeAnewWhenItIsUp) {
  for (std::uint32_t round = 0; round < 2; ++round) {
    ASSERT_EQ(cards.set_port("emu1", 1, 0), 0);
    ASSERT_TRUE(eventually([&] {
      EXPECT_TRUE(usable()) << "the pair failed with one lane";
      return lanes_of(a()) == all - 1 && lanes_of(b()) == all - 1;
    }));
    EXPECT_THAT(a().channel().describe(), Not(HasSubstr("emu1")));
    const auto asked = cards.asked_while_down();
    ASSERT_TRUE(eventually([&] { return cards.asked_while_down() >= asked + 3; })) << "no end tries again";
    EXPECT_EQ(lanes(), all - 1) << "attempts that fail end no lane";
    for (std::uint32_t i = 0; i < 5; ++i) expect_carries_by_cards(i);
    EXPECT_TRUE(usable());
    ASSERT_EQ(cards.set_port("emu1", 1, 1), 0);
    ASSERT_TRUE(eventually([&] { return lanes() == all; }));
    EXPECT_THAT(a().channel().describe(), HasSubstr("emu1"));
    for (std::uint32_t i = 0; i < 5; ++i) expect_carries_by_cards(i);
  }
}

TEST_F(IbvPorts, WhatIsUnderWayOnAPortThatGoesDownArrives) {
  cards.stall(1);
  const auto released = a().send(memory->filled(8 * megabyte, 6));
  ASSERT_TRUE(eventually([&] { return cards.stalled() > 0; }));
  ASSERT_EQ(cards.set_port("emu1", 1, 0), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  cards.stall(0);
  expect_arrives(8 * megabyte, 6);
  EXPECT_EQ(released.wait_name(), "Ok");
  EXPECT_TRUE(usable());
  EXPECT_GT(lanes(), 0U);
}

TEST_F(IbvPorts, AQueuePairThatFailsIsReplacedAlone) {
  for (int round = 0; round < 3; ++round) {
    const auto made = cards.queue_pairs_made();
    fail_a_queue_pair();
    ASSERT_TRUE(eventually([&] {
      EXPECT_GT(lanes(), 0U) << "all lanes failed with one";
      EXPECT_TRUE(usable());
      return cards.queue_pairs_made() >= made + 2 && lanes() == all;
    }));
    EXPECT_TRUE(eventually([&] { return cards.queue_pairs() == 2 * all; })) << "the old one is destroyed";
    expect_carries_by_cards(1);
  }
}

TEST_F(IbvPorts, AllThatFailTogetherAreReplaced) {
  const auto made = cards.queue_pairs_made();
  EXPECT_GT(cards.fail_queue_pairs(4096), 0U);
  ASSERT_TRUE(eventually([&] { return cards.queue_pairs_made() >= made + 2 * all && usable() && lanes() == all; }));
  expect_carries_by_cards(1);
}

}  // namespace
}  // namespace tensorferry::conformance
