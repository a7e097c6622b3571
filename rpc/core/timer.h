/// A timer that runs functions after a delay, on one thread of its own. The thread starts at the first use.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "base/function.h"

namespace tensorferry {

/// For rare events: to repeat a message that failed, or to expire a wait. Thread-safe. Functions run one after another,
/// and not under a lock, so a slow one delays the next.
class Timer {
 public:
  Timer();
  /// Drops the functions that have not run, and waits for the one that is running, unless that one destroys the timer.
  /// In a forked child, which does not have the thread, it drops nothing and waits for nothing.
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Runs `what` once, not before `delay` has passed. `what` may call after(). Does nothing in a forked child.
  void after(std::chrono::milliseconds delay, UniqueFunction<void()> what);

 private:
  struct Queue;
  static void run(const std::shared_ptr<Queue>& queue);

  const std::uint32_t forks_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;  // started under the queue's lock
};

}  // namespace tensorferry
