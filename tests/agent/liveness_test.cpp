// When a peer on another host counts as dead.
#include "agent/connections/liveness.h"

#include <gtest/gtest.h>

namespace tensorferry::testing {
namespace {

using std::chrono::seconds;
using Verdict = Liveness::Verdict;

class AliveOrDead : public ::testing::Test {
 protected:
  AliveOrDead() { look(0); }
  Verdict look(int after_seconds) { return liveness.look(start + seconds(after_seconds), moved, seconds(5)); }

  const Clock::time_point start = Clock().now();
  BytesMoved moved;
  Liveness liveness;
};

TEST_F(AliveOrDead, APeerIsAskedAfterOneSilentIntervalAndDeadAfterThree) {
  EXPECT_EQ(look(1), Verdict::ask);  // the first look of all counts as one silent interval
  EXPECT_EQ(look(5), Verdict::silent);
  EXPECT_EQ(look(7), Verdict::ask);
  EXPECT_EQ(look(9), Verdict::silent);
  EXPECT_EQ(look(11), Verdict::dead);
}

TEST_F(AliveOrDead, BytesThatArriveAreASignOfLife) {
  for (int second = 1; second < 100; second += 4) {
    ++moved.received;
    EXPECT_EQ(look(second), Verdict::heard);
  }
}

TEST_F(AliveOrDead, BytesThatThePeerTakesAreASignOfLifeIfTheyAreMoreThanPings) {
  moved.acknowledged += 100'000;
  EXPECT_EQ(look(4), Verdict::heard);
  moved.acknowledged += 80;
  EXPECT_NE(look(8), Verdict::heard);
}

TEST_F(AliveOrDead, ThePeerIsNotDeadBecauseThisProcessWasStopped) {
  ++moved.received;
  EXPECT_EQ(look(1), Verdict::heard);
  EXPECT_NE(look(1000), Verdict::dead);
  EXPECT_NE(look(2000), Verdict::dead);
}

}  // namespace
}  // namespace tensorferry::testing
