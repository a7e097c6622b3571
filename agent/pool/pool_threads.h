/// Counts the threads of a pool, and decides when it may have one more and when one of them may end.
///
/// A thread is *starting* until it looks for work, *parked* while it waits for work at the doorbell or on its way
/// there, and *ending* when it looks for work no more. A wake-up is *under way* until a parked thread has left the
/// doorbell.
///
/// Threads: the pool's mutex guards all functions.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace tensorferry {

struct PoolLimits {
  bool threads = true;  // false: there are none, and Pool::run_one() does the work
  int least = 2;
  int most = 1024;  // handlers that run and do not wait for a peer; other threads read, dial and complete calls
  std::chrono::milliseconds idle{5000};  // threads beyond `least` end after they were not needed for this long
};

class PoolThreads final {
 public:
  /// Threads beyond those for handlers, so that a full pool still reads, dials and completes calls.
  static constexpr int own = 16;

  explicit PoolThreads(const PoolLimits& limits) : limits_(limits) {}
  [[nodiscard]] const PoolLimits& limits() const noexcept { return limits_; }
  /// Returns the number of threads; ending ones count.
  [[nodiscard]] int count() const noexcept { return threads_; }
  /// Returns the number of threads that wake-ups and starts bring.
  [[nodiscard]] int coming() const noexcept { return wakes_ + starting_; }

  // --- the life of a thread ------------------------------------------------------------------------------------------
  /// Counts a thread that the caller starts. False: there are as many as there may be.
  bool start() {
    if (threads_ >= limits_.most + own + blocked_) return false;
    ++threads_;
    ++starting_;
    return true;
  }
  /// The system gives no thread.
  void start_failed() {
    --threads_;
    --starting_;
  }
  void started() { --starting_; }
  void ending() { ++ending_; }
  void ended() {
    --threads_;
    --ending_;
  }

  // --- waiting for work ----------------------------------------------------------------------------------------------
  void park() { ++parked_; }
  void unpark() {
    spare_ = std::min(spare_, --parked_);
    if (wakes_ > 0) --wakes_;
  }
  /// Returns whether a thread is parked to which no wake-up is under way.
  [[nodiscard]] bool any_parked() const noexcept { return parked_ > wakes_; }
  /// Counts a wake-up that the caller sends. False: no such thread is parked.
  bool wake() {
    if (!any_parked()) return false;
    ++wakes_;
    return true;
  }

  // --- more threads --------------------------------------------------------------------------------------------------
  /// A thread waits for a peer, and no more: the pool may have one thread more meanwhile.
  void block() { ++blocked_; }
  void unblock() { --blocked_; }
  /// Returns whether all threads have work, and so few are there that one more may be added for speed alone.
  [[nodiscard]] bool may_add_for_speed() const noexcept {
    return parked_ == 0 && starting_ == 0 && threads_ < limits_.least + most_added_for_speed;
  }

  // --- fewer threads -------------------------------------------------------------------------------------------------
  /// Returns whether no thread may end, unless the pool is stopped: beside those that are `running` handlers and those
  /// that wait for a peer, there are no more than an idle pool has.
  [[nodiscard]] bool at_minimum(int running) const noexcept {
    return threads_ - ending_ <= limits_.least + running + blocked_;
  }
  /// Returns whether the calling thread is to end, and takes it off the surplus then. Not at_minimum(). The surplus is
  /// the number of threads that were parked throughout the last `idle` period: so many were not needed. The time that
  /// one thread has slept does not tell: sleepers are woken in turn, so under a trickle of work none of them is idle
  /// for long.
  bool leave_as_surplus(Clock::time_point now) {
    if (now - spare_since_ >= limits_.idle) {
      surplus_ = std::exchange(spare_, parked_);
      spare_since_ = now;
    }
    surplus_ = std::min(surplus_, spare_);
    if (surplus_ == 0) return false;
    --surplus_;
    return true;
  }

 private:
  static inline const int most_added_for_speed = static_cast<int>(std::max(8U, std::thread::hardware_concurrency()));

  const PoolLimits limits_;
  int threads_ = 0;
  int starting_ = 0;
  int ending_ = 0;
  int blocked_ = 0;
  int parked_ = 0;
  int wakes_ = 0;  // under way
  int spare_ = 0;  // the fewest threads parked at a time since `spare_since_`
  Clock::time_point spare_since_;
  int surplus_ = 0;  // threads that may end
};

}  // namespace tensorferry
