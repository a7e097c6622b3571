#include "base/per_process.h"

#include <gtest/gtest.h>

#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/agent/forked.h"

namespace tensorferry {
namespace {

using tensorferry::testing::in_child;

TEST(PerProcess, IsOneObjectInAProcessAndAnotherInItsChild) {
  PerProcess<int> number;
  number.get() = 5;
  EXPECT_EQ(in_child([&] { return std::exchange(number.get(), 7) == 0 && number.get() == 7 ? 0 : 1; }), 0);
  EXPECT_EQ(number.get(), 5);
}

TEST(PerProcess, HasAMutexThatIsFreeInAChildWhenAThreadOfTheParentHoldsIt) {
  PerProcess<std::mutex> mutex;
  std::promise<void> held, forked;
  std::thread holder([&] {
    const std::lock_guard lock(mutex.get());
    held.set_value();
    forked.get_future().wait();
  });
  held.get_future().wait();
  EXPECT_EQ(in_child([&] { return mutex.get().try_lock() ? 0 : 1; }), 0);
  EXPECT_FALSE(mutex.get().try_lock());
  forked.set_value();
  holder.join();
}

}  // namespace
}  // namespace tensorferry
