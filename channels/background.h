/// A thread for what must not delay a message: taking fresh pages, giving memory back.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "channels/function.h"

namespace tensorferry {

/// Runs jobs one after another, each at its time. The thread starts with the first job and ends when none has been
/// waiting for a second; it sleeps between. Thread-safe. Jobs hold what they work on weakly where it may end first.
class Background final {
 public:
  using Clock = std::chrono::steady_clock;
  using Job = UniqueFunction<void()>;

  Background();
  /// Drops the jobs that have not begun, and waits for the one that has. Not from a job.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Never waits for a job. Where the system gives no thread, and in a forked child, jobs wait for ever.
  void submit(Job job, Clock::time_point at = Clock::time_point::min());

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::multimap<Clock::time_point, Job> jobs;
    bool alive = false;
    bool ended = false;
    std::thread thread;

    void live();
  };

  const std::uint32_t born_in_;
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
