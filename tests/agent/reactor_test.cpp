// How often the reactor ticks.
#include "agent/pool/reactor.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <future>

#include "tests/agent/patience.h"

namespace tensorferry::testing {
namespace {

class Ticks : public ::testing::Test {
 protected:
  Ticks() { reactor.start(); }
  ~Ticks() override { reactor.stop(); }

  /// Waits until the thread has run what falls due within the next 50 ms: five ticks at the slow pace.
  void let_ticks_fall_due() {
    std::promise<void> due;
    boost::asio::steady_timer timer(reactor.context());
    boost::asio::post(reactor.context(), [&] {
      timer.expires_after(std::chrono::milliseconds(50));
      timer.async_wait([&](const boost::system::error_code&) { due.set_value(); });
    });
    due.get_future().wait();
  }

  std::atomic<Pace> pace{Pace::run};
  std::atomic<int> ticks{0};
  Reactor reactor{[this] {
    ++ticks;
    return pace.load();
  }};
};

TEST_F(Ticks, ComeSeldomWhileOnlyDeadlinesAreToBeWatched) {
  pace = Pace::walk;
  reactor.kick();
  ASSERT_TRUE(eventually([&] { return ticks > 210; }));
  const Since since;
  const int before = ticks;
  EXPECT_TRUE(eventually([&] { return ticks > before + 50; }));
  EXPECT_GT(since.passed(), std::chrono::milliseconds(250)) << "each comes 10 ms after the one before, not 1 ms";
}

TEST_F(Ticks, ComeTenTimesASecondIfNoneIsNeededSoon) {
  pace = Pace::stroll;
  reactor.kick();
  ASSERT_TRUE(eventually([&] { return ticks > 210; }));
  const Since since;
  const int before = ticks;
  EXPECT_TRUE(eventually([&] { return ticks > before + 5; }));
  EXPECT_GT(since.passed(), std::chrono::milliseconds(250)) << "each comes 100 ms after the one before";
}

TEST_F(Ticks, PreemptNoOtherThread) {
  int mine = -1;
  sched_param parameters{};
  ASSERT_EQ(::pthread_getschedparam(::pthread_self(), &mine, &parameters), 0);
  if (mine != SCHED_OTHER) GTEST_SKIP() << "this program was started with a scheduling policy";
  std::atomic<int> policy{-1};
  boost::asio::post(reactor.context(), [&] {
    int its = -1;
    sched_param ignored{};
    if (::pthread_getschedparam(::pthread_self(), &its, &ignored) == 0) policy = its;
  });
  ASSERT_TRUE(eventually([&] { return policy != -1; }));
  EXPECT_EQ(policy, SCHED_BATCH);
}

TEST_F(Ticks, StopWhileNothingIsUnderWayAndGoOnWithAKick) {
  pace = Pace::rest;
  reactor.kick();
  ASSERT_TRUE(eventually([&] { return ticks > 201; }));
  let_ticks_fall_due();
  const int before = ticks;
  let_ticks_fall_due();
  EXPECT_EQ(ticks, before);
  reactor.kick();
  EXPECT_TRUE(eventually([&] { return ticks > before; }));
}

TEST_F(Ticks, AreFastAgainAfterAKick) {
  const auto time_of_ticks = [this] {
    const int before = ticks;
    const Since since;
    EXPECT_TRUE(eventually([&] { return ticks > before + 200; }));
    return since.passed();
  };
  pace = Pace::walk;
  reactor.kick();
  ASSERT_TRUE(eventually([&] { return ticks > 210; }));
  const auto walk = time_of_ticks();
  pace = Pace::run;
  reactor.kick();
  EXPECT_LT(time_of_ticks(), walk) << "0.2 s and 2 s on a machine that is not busy";
}

}  // namespace
}  // namespace tensorferry::testing
