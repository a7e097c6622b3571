#include "base/per_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace tensorferry {
namespace {

/// Returns the exit status of a forked child that runs `life`, or minus the signal that ended it.
template <class Life>
int in_child(const Life& life) {
  const auto child = ::fork();
  if (child == 0) {
    ::alarm(30);  // ends a child that waits for ever
    ::_exit(life() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(PerProcess, IsOneObjectInAProcessAndAnotherInItsChild) {
  PerProcess<int> number;
  number.get() = 5;
  EXPECT_EQ(in_child([&] { return std::exchange(number.get(), 7) == 0 && number.get() == 7; }), 0);
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
  EXPECT_EQ(in_child([&] { return mutex.get().try_lock(); }), 0);
  EXPECT_FALSE(mutex.get().try_lock());
  forked.set_value();
  holder.join();
}

}  // namespace
}  // namespace tensorferry
