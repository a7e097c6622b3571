#include "agent/handshake/strangers.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tensorferry {
namespace {

/// Strangers at a listener with few places, and the numbers of those that were pushed out, in order.
class StrangersAtAListener : public ::testing::Test {
 protected:
  Strangers::Held come(const std::string& from, int number) {
    return strangers.admit(from, [this, number] { pushed_out.push_back(number); });
  }
  Strangers strangers{4};
  std::vector<int> pushed_out;
};

TEST_F(StrangersAtAListener, KeepTheirPlacesWhileThereAreEnough) {
  for (int i = 0; i < 4; ++i) come("a", i);
  EXPECT_TRUE(pushed_out.empty());
  EXPECT_EQ(strangers.size(), 4U);
}

TEST_F(StrangersAtAListener, OfOneAddressPushOutTheirOwnOldestOnes) {
  for (int i = 0; i < 6; ++i) come("a", i);
  EXPECT_EQ(pushed_out, (std::vector{0, 1}));
  EXPECT_EQ(strangers.size(), 4U);
}

TEST_F(StrangersAtAListener, OfTheAddressWithMostPlacesMakeRoomForOthers) {
  come("b", 1000);
  for (int i = 0; i < 100; ++i) come("a", i);
  come("c", 1001);
  come("d", 1002);
  EXPECT_EQ(strangers.size(), 4U);
  for (const int each : pushed_out) EXPECT_LT(each, 100) << "one of a's";
  EXPECT_EQ(pushed_out.size(), 99U);
}

TEST_F(StrangersAtAListener, ThatHaveProvedThemselvesHoldNoPlace) {
  const auto peer = come("a", 0);
  strangers.release(peer);
  EXPECT_EQ(strangers.size(), 0U);
  for (int i = 1; i < 6; ++i) come("a", i);
  EXPECT_EQ(pushed_out, (std::vector{1}));
  strangers.release(peer);
  EXPECT_EQ(strangers.size(), 4U) << "a second release changes nothing";
}

TEST_F(StrangersAtAListener, GiveUpADescriptorWhenTheProcessHasNone) {
  come("a", 0);
  come("b", 1);
  come("b", 2);
  EXPECT_TRUE(strangers.shed());
  EXPECT_EQ(pushed_out, (std::vector{1}));
  EXPECT_TRUE(strangers.shed());
  EXPECT_TRUE(strangers.shed());
  EXPECT_FALSE(strangers.shed());
}

TEST_F(StrangersAtAListener, AreAllClosedAtTheEnd) {
  for (int i = 0; i < 3; ++i) come("a" + std::to_string(i), i);
  strangers.close_all();
  EXPECT_EQ(pushed_out.size(), 3U);
  EXPECT_EQ(strangers.size(), 0U);
}

}  // namespace
}  // namespace tensorferry
