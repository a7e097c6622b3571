// The clock of an agent: the steady one, and one that a test moves.
#include "base/clock.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "base/background.h"
#include "tests/base/manual_clock.h"

namespace tensorferry::testing {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(SteadyClock, ShowsTheTimeOfTheSystem) {
  const auto before = std::chrono::steady_clock::now();
  const auto shown = Clock().now();
  EXPECT_LE(before, shown);
  EXPECT_LE(shown, std::chrono::steady_clock::now());
  EXPECT_TRUE(Clock().is_steady());
}

class AManualClock : public ::testing::Test {
 protected:
  /// Runs `wait` on another thread until the time that it waits for has come.
  template <class Wait>
  auto run(Wait wait) {
    auto result = std::async(std::launch::async, std::move(wait));
    time->await_alarm(start + hours(1), start + hours(1));
    time->advance(milliseconds(3'599'999));
    EXPECT_EQ(result.wait_for(seconds(0)), std::future_status::timeout);
    time->advance(milliseconds(1));
    return result.get();
  }

  const std::shared_ptr<ManualClock> time = ManualClock::make();
  const Clock clock = time->clock();
  const Clock::time_point start = clock.now();
};

TEST_F(AManualClock, StandsUntilItIsMoved) {
  EXPECT_EQ(clock.now(), start);
  time->advance(seconds(2));
  EXPECT_EQ(clock.now(), start + seconds(2));
}

TEST_F(AManualClock, EndsAWaitOnAConditionVariableAtItsTime) {
  std::mutex mutex;
  std::condition_variable changed;
  EXPECT_FALSE(run([&] {
    std::unique_lock lock(mutex);
    return clock.wait_for(changed, lock, hours(1), [] { return false; });
  }));
}

TEST_F(AManualClock, EndsAWaitOnAWordAtItsTime) {
  std::atomic<std::uint32_t> word{7};
  run([&] {
    while (clock.now() < start + hours(1)) clock.wait(word, 7, start + hours(1));
    return 0;
  });
}

TEST_F(AManualClock, EndsASleepAtItsTime) {
  run([&] {
    clock.sleep_for(hours(1));
    return 0;
  });
}

TEST_F(AManualClock, ANotificationEndsAWaitBeforeItsTime) {
  std::mutex mutex;
  std::condition_variable changed;
  bool notified = false;
  auto waiting = std::async(std::launch::async, [&] {
    std::unique_lock lock(mutex);
    return clock.wait_for(changed, lock, hours(1), [&] { return notified; });
  });
  time->await_alarm(start + hours(1), start + hours(1));
  {
    const std::lock_guard lock(mutex);
    notified = true;
  }
  changed.notify_all();
  EXPECT_TRUE(waiting.get());
  EXPECT_TRUE(time->waiting().empty());
}

TEST_F(AManualClock, RingsAlarmsInTheOrderOfTheirTimesAndTellsWhatWaits) {
  std::vector<Clock::time_point> rung;
  const auto ring = [&] { rung.push_back(clock.now()); };
  const auto second = clock.set_alarm(start + seconds(2), ring);
  const auto first = clock.set_alarm(start + seconds(1), ring);
  auto cancelled = clock.set_alarm(start + seconds(1), ring);
  const auto later = clock.set_alarm(start + seconds(9), ring);
  cancelled.reset();
  time->advance(seconds(5));
  EXPECT_EQ(rung, (std::vector{start + seconds(1), start + seconds(2)}));
  EXPECT_EQ(time->waiting(), std::vector{start + seconds(9)});
  EXPECT_EQ(clock.set_alarm(start + seconds(5), ring), nullptr);  // that time has come
}

TEST_F(AManualClock, RunsBackgroundJobsAtTheirTimes) {
  std::promise<Clock::time_point> ran;
  Background background(clock);
  background.submit([&] { ran.set_value(clock.now()); }, start + hours(1));
  time->await_alarm(start + hours(1), start + hours(1));
  time->advance(hours(2));
  EXPECT_GE(ran.get_future().get(), start + hours(1));
}

}  // namespace
}  // namespace tensorferry::testing
