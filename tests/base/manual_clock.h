/// A time that moves only when a test moves it.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace tensorferry::testing {

/// Thread-safe. Alarms that are due at one advance() ring in the order of their times, each at its time.
class ManualClock final : public TimeSource, public std::enable_shared_from_this<ManualClock> {
 public:
  using time_point = Clock::time_point;

  /// Returns a clock at some fixed time.
  static std::shared_ptr<ManualClock> make() { return std::shared_ptr<ManualClock>(new ManualClock); }
  /// Returns the handle that agents take.
  [[nodiscard]] Clock clock() { return Clock(shared_from_this()); }

  [[nodiscard]] time_point now() const noexcept override {
    const std::lock_guard lock(mutex_);
    return now_;
  }

  std::unique_ptr<Alarm> set_alarm(time_point at, std::function<void()> ring) override {
    const std::lock_guard lock(mutex_);
    if (at <= now_) return nullptr;
    const auto entry = alarms_.emplace(at, std::make_shared<Entry>(Entry{std::move(ring)}));
    set_.notify_all();
    return std::make_unique<Cancellation>(shared_from_this(), entry);
  }

  /// Moves the time on, and rings all alarms whose time comes. Those who waited for it have been woken on return.
  void advance(Clock::duration by) { advance_to(now() + by); }
  void advance_to(time_point to) {
    std::unique_lock lock(mutex_);
    while (!alarms_.empty() && alarms_.begin()->first <= to) {
      now_ = std::max(now_, alarms_.begin()->first);
      const auto due = alarms_.extract(alarms_.begin()).mapped();
      due->state = Entry::State::ringing;
      due->by = std::this_thread::get_id();
      lock.unlock();
      due->ring();
      lock.lock();
      due->state = Entry::State::over;
      rung_.notify_all();
    }
    now_ = std::max(now_, to);
  }
  /// Moves the time to the next alarm and rings it. False: nothing waits for a time.
  bool advance_to_next() {
    const auto waits = waiting();
    if (waits.empty()) return false;
    advance_to(waits.front());
    return true;
  }

  /// Returns the times for which threads, timers and other alarms wait, the earliest first.
  [[nodiscard]] std::vector<time_point> waiting() const {
    const std::lock_guard lock(mutex_);
    std::vector<time_point> times;
    for (const auto& [at, entry] : alarms_) times.push_back(at);
    return times;
  }
  /// Blocks (in real time) until something waits for a time in [from, to]. The test may then advance past it.
  void await_alarm(time_point from, time_point to) const {
    std::unique_lock lock(mutex_);
    set_.wait(lock, [&] {
      const auto first = alarms_.lower_bound(from);
      return first != alarms_.end() && first->first <= to;
    });
  }

 private:
  struct Entry {
    std::function<void()> ring;
    enum class State : std::uint8_t { set, ringing, over } state = State::set;
    std::thread::id by{};  // that rings it
  };
  using Alarms = std::multimap<time_point, std::shared_ptr<Entry>>;

  class Cancellation final : public Alarm {
   public:
    Cancellation(std::shared_ptr<ManualClock> of, Alarms::iterator at)
        : of_(std::move(of)), at_(at), entry_(at->second) {}
    ~Cancellation() override {
      std::unique_lock lock(of_->mutex_);
      if (entry_->state == Entry::State::set) {
        of_->alarms_.erase(at_);
      } else if (entry_->by != std::this_thread::get_id()) {
        of_->rung_.wait(lock, [&] { return entry_->state == Entry::State::over; });
      }
    }

   private:
    const std::shared_ptr<ManualClock> of_;
    const Alarms::iterator at_;  // valid until it rings
    const std::shared_ptr<Entry> entry_;
  };

  ManualClock() = default;

  mutable std::mutex mutex_;  // guards the others
  time_point now_{std::chrono::hours(1000)};
  Alarms alarms_;
  mutable std::condition_variable set_, rung_;
};

}  // namespace tensorferry::testing
