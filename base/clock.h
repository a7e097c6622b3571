/// `Clock`: the time of an agent, which is the system's steady clock unless a test gives another one.
///
/// An agent has one clock (RawAgentOptions::surroundings). All that it decides by time reads this clock and sleeps
/// through it: deadlines, heartbeats, dials with their backoff, time-outs of handshakes, stores, groups
/// and shutdown. A test that moves the clock by hand (tests/base/manual_clock.h) therefore needs no real time for them.
///
/// These stay on real time, because they pace this machine's threads and decide nothing that a peer or a program sees:
///  - spins on words of shared memory (base/spin.h, OversubscribedWait), and sleeps at a doorbell;
///  - the interval of the reactor's tick: what a tick expires it compares with the clock;
///  - the 2 ms that a thread waits for more bytes of a buffer that is arriving (Connections::read_bulk), and the 50 ms
///    for another thread that takes a link's last replies;
///  - measurements: how long entering an executor takes (ExecutorUse), and the stages of a trace (CallTrace);
///  - threads of the channels and of devices: their waits are for hardware, and for memory to give back.
/// scripts/clocks.py keeps the list of files that may use the system's clock directly.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/futex.h"

namespace tensorferry {

/// Another time than the system's. Thread-safe.
class TimeSource {
 public:
  virtual ~TimeSource() = default;
  [[nodiscard]] virtual std::chrono::steady_clock::time_point now() const noexcept = 0;

  /// A ring that is due at a time. Its destructor cancels the ring, and waits for one that runs on another thread.
  class Alarm {
   public:
    virtual ~Alarm() = default;
  };
  /// Runs `ring` once, when now() has come to `at`, on the thread that moves the time and under no lock of the source.
  /// Null: that time has come already, and `ring` does not run.
  virtual std::unique_ptr<Alarm> set_alarm(std::chrono::steady_clock::time_point at, std::function<void()> ring) = 0;
};

/// A handle of a time source; without one, the steady clock. Copies are cheap and show the same time. Thread-safe.
class Clock final {
 public:
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using time_point = std::chrono::steady_clock::time_point;

  Clock() = default;
  explicit Clock(std::shared_ptr<TimeSource> source) : source_(std::move(source)) {}

  [[nodiscard]] time_point now() const noexcept {
    return source_ == nullptr ? std::chrono::steady_clock::now() : source_->now();
  }
  /// Returns whether this is the system's clock.
  [[nodiscard]] bool is_steady() const noexcept { return source_ == nullptr; }
  /// See TimeSource::set_alarm. Only if !is_steady(): timers of the system's clock need a thread
  /// (agent/transport/timer.h).
  [[nodiscard]] std::unique_ptr<TimeSource::Alarm> set_alarm(time_point at, std::function<void()> ring) const {
    return source_->set_alarm(at, std::move(ring));
  }

  /// Waits on a condition variable until it is notified or `until` has come. May return for no reason.
  template <class Changed, class Lock>
  void wait_until(Changed& changed, Lock& lock, time_point until) const {
    if (is_steady()) {
      changed.wait_until(lock, until);
      return;
    }
    auto alarm = set_alarm(until, [&changed, mutex = lock.mutex()] {
      { const std::lock_guard held(*mutex); }  // the waiting thread holds it until it sleeps
      changed.notify_all();
    });
    if (!alarm) return;
    changed.wait(lock);
    lock.unlock();  // an alarm that rings at this moment takes the mutex
    alarm.reset();
    lock.lock();
  }
  /// Waits until `done()`, or until `until` has come. Returns `done()`.
  template <class Changed, class Lock, class Done>
  bool wait_until(Changed& changed, Lock& lock, time_point until, Done done) const {
    if (is_steady()) return changed.wait_until(lock, until, std::move(done));
    while (!done()) {
      if (now() >= until) return false;
      wait_until(changed, lock, until);
    }
    return true;
  }
  template <class Changed, class Lock, class Done>
  bool wait_for(Changed& changed, Lock& lock, duration time, Done done) const {
    return wait_until(changed, lock, now() + time, std::move(done));
  }

  /// As futex_wait() and shared_futex_wait().
  bool wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::optional<time_point> until) const {
    if (is_steady()) return futex_wait(word, expected, until);
    const auto noted = note(until);
    return futex_wait(word, expected, short_sleep());
  }
  bool shared_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::optional<time_point> until) const {
    if (is_steady()) return shared_futex_wait(word, expected, until);
    const auto noted = note(until);
    return shared_futex_wait(word, expected, short_sleep());
  }
  /// As poll(2): waits for one of the descriptors until `until`. 0: that time has come; -1: errno is set.
  int poll(std::span<pollfd> descriptors, std::optional<time_point> until) const {
    const auto noted = is_steady() ? nullptr : note(until);
    for (;;) {
      const auto left = until ? std::max<duration>(*until - now(), duration::zero()) : duration::max();
      const bool over = left == duration::zero();
      const auto slice = std::min<duration>(left, is_steady() ? duration(longest_poll) : duration(longest_unnoticed));
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(slice);
      const timespec time{seconds.count(), std::chrono::nanoseconds(slice - seconds).count()};
      const int ready = ::ppoll(descriptors.data(), descriptors.size(), &time, nullptr);
      if (ready != 0 || over) return ready;
    }
  }
  void sleep_until(time_point until) const {
    if (is_steady()) return std::this_thread::sleep_until(until);
    while (now() < until) (void)poll({}, until);
  }
  void sleep_for(duration time) const { sleep_until(now() + time); }

 private:
  // A futex and poll(2) can miss the ring of an alarm, so a thread that sleeps there looks at another clock's time
  // itself, so often in real time.
  static constexpr std::chrono::milliseconds longest_unnoticed{1};
  static constexpr std::chrono::minutes longest_poll{1};

  static FutexDeadline short_sleep() { return std::chrono::steady_clock::now() + longest_unnoticed; }
  /// Tells the source of a thread that waits for `until`.
  [[nodiscard]] std::unique_ptr<TimeSource::Alarm> note(std::optional<time_point> until) const {
    return until ? set_alarm(*until, [] {}) : nullptr;
  }

  std::shared_ptr<TimeSource> source_;
};

}  // namespace tensorferry
