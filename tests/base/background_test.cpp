#include "base/background.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tensorferry {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(Background, RunsJobsInOrderOfTimeAndDropsTheRest) {
  std::mutex mutex;
  std::vector<int> ran;
  const auto kept = std::make_shared<int>(1);
  {
    Background background;
    std::condition_variable changed;
    std::promise<void> submitted;
    background.submit([&] { submitted.get_future().wait(); });
    const auto begin = Clock().now();
    for (const int ms : {60, 1, 30}) {
      const auto job = [&, ms] {
        const std::lock_guard lock(mutex);
        ran.push_back(ms);
        changed.notify_all();
      };
      background.submit(job, begin + milliseconds(ms));
    }
    background.submit([kept] {}, begin + hours(24 * 36500));
    submitted.set_value();
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return ran.size() == 3; }));
    EXPECT_EQ(kept.use_count(), 2);
  }
  EXPECT_EQ(ran, (std::vector<int>{1, 30, 60}));
  EXPECT_EQ(kept.use_count(), 1);
}

TEST(Background, MayBeDestroyedByItsOwnJob) {
  std::atomic<bool> ran{false};
  auto background = std::make_shared<Background>();
  auto* raw = background.get();
  auto job = [&ran, background = std::move(background)]() mutable {
    background.reset();
    ran = true;
  };
  raw->submit(std::move(job), Clock().now() + milliseconds(5));
  for (int i = 0; i < 3000 && !ran; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace tensorferry
