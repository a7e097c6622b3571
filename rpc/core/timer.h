/// Runs things later, on one thread of its own, which exists from the first use on.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "channels/function.h"

namespace tensorferry {

/// Coarse: for what happens seldom (repeating a message that failed, a deadline of something that waits). Thread-safe.
class Timer {
 public:
  Timer();
  /// Drops what has not run, and waits for what is running (but when that is what destroys the timer). In a forked
  /// child, where the thread is not, does nothing.
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Runs `what` once, not before `delay` has passed. It may call in here.
  void after(std::chrono::milliseconds delay, UniqueFunction<void()> what);

 private:
  struct Queue;
  static void run(const std::shared_ptr<Queue>& queue);

  const std::uint32_t forks_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;  // made under the queue's lock
};

}  // namespace tensorferry
