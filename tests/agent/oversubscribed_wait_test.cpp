#include "agent/transport/oversubscribed_wait.h"

#include <gtest/gtest.h>

#include <list>

namespace tensorferry {
namespace {

/// gather() adds one waiting member more than there are CPUs, and each test adds another one.
class OversubscribedWaits : public ::testing::Test {
 protected:
  void gather() {
    for (unsigned i = 0; i <= std::thread::hardware_concurrency(); ++i) others_.emplace_back(wait);
  }
  /// Returns how often a member polls if it finds nothing.
  int polls() {
    int polls = 0;
    OversubscribedWait::Member me(wait);
    EXPECT_FALSE(me.until([&] {
      ++polls;
      return false;
    }));
    return polls;
  }
  OversubscribedWait wait;

 private:
  std::list<OversubscribedWait::Member> others_;
};

TEST_F(OversubscribedWaits, ASingleWaiterPollsOnce) {
  EXPECT_EQ(polls(), 1);
  EXPECT_TRUE(OversubscribedWait::Member(wait).until([] { return true; }));
}

TEST_F(OversubscribedWaits, AnOversubscribedWaiterPollsUntilTheReplyIsThere) {
  gather();
  int polls = 0;
  EXPECT_TRUE(OversubscribedWait::Member(wait).until([&] { return ++polls == OversubscribedWait::least_polls; }));
}

TEST_F(OversubscribedWaits, AFruitlessLongPollIsTriedOnceIn64Times) {
  gather();
  for (int i = 0; i < 40; ++i) polls();
  int longer = 0;
  for (int i = 0; i < 128; ++i) longer += polls() > 1 ? 1 : 0;
  EXPECT_LE(longer, 60);  // two long polls, and some twenty shorter ones after each
  int finds = 0;
  for (int i = 0; i < 128; ++i) {
    OversubscribedWait::Member me(wait);
    int seen = 0;
    finds += me.until([&] { return ++seen == 2; }) ? 1 : 0;
  }
  EXPECT_GE(finds, 64) << "it pays again";
}

}  // namespace
}  // namespace tensorferry
