/// Runs slow jobs, such as taking fresh pages and giving memory back, on a thread that delays no message.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/function.h"

namespace tensorferry {

/// Runs jobs one after another, each at its time on a clock, on one thread. The thread starts with the first job,
/// sleeps between jobs, and ends after a second without a waiting job. Thread-safe. If the object that a job works on
/// may end before the job, the job holds it weakly.
class Background final {
 public:
  using Job = UniqueFunction<void()>;

  explicit Background(Clock clock = {});
  /// Drops the jobs that have not begun, and waits for a running one, unless that one destroys the object. In a forked
  /// child it does neither.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Queues `job` to run at `at`, and never waits for a job. If the system gives no thread, the job waits until a later
  /// submit() gets one. In a forked child the job is dropped.
  void submit(Job job, Clock::time_point at = Clock::time_point::min());

 private:
  struct State {
    Clock clock;
    std::mutex mutex;
    std::condition_variable changed;
    std::multimap<Clock::time_point, Job> jobs;
    bool alive = false;
    bool ended = false;
    std::thread thread;

    static void run(const std::shared_ptr<State>& state);
  };

  const std::uint32_t born_in_;
  std::shared_ptr<State> state_;
};

}  // namespace tensorferry
