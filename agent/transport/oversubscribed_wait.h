/// Lets threads poll in turns for replies of one peer when more threads wait than there are CPUs.
///
/// The callee must wake each sleeping waiter: one system call, and often an interrupt, per reply. A waiter that polls
/// and calls sched_yield between two polls is switched out too, but costs the callee nothing. It finds its reply when
/// its turn comes again. With 64 threads on two CPUs this gave several times as many calls per second.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace tensorferry {

/// Adapts how long the waiting threads of one link poll before they sleep. Thread-safe.
///
/// The limit doubles when a poll succeeds. It shrinks by an eighth when the time passes without success: many threads
/// poll at once, and some replies are always late. When the limit has come down to 0, one wait in 64 tries again with
/// the longest limit. Each wait polls at least `least_polls` times, because the time may pass while other threads have
/// the CPU.
class OversubscribedWait final {
 public:
  static constexpr std::int64_t most_ns = 256'000;
  static constexpr std::int64_t least_ns = 16'000;
  static constexpr int least_polls = 4;

  /// Counts its thread as a waiting one from construction to destruction.
  class Member final {
   public:
    explicit Member(OversubscribedWait& wait) : wait_(wait) { wait_.waiting_.fetch_add(1, std::memory_order_relaxed); }
    ~Member() { wait_.waiting_.fetch_sub(1, std::memory_order_relaxed); }
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

    /// Polls until `found` returns true or the time has passed. Polls once if no more threads wait than there are CPUs,
    /// or if the limit is 0. Returns whether `found` returned true.
    template <class Found>
    bool until(const Found& found) {
      const auto limit = wait_.limit();
      if (limit == 0) return found();
      const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit);
      for (int polls = 1; !found(); ++polls) {
        if (polls >= least_polls && std::chrono::steady_clock::now() >= end) {
          const auto less = limit - limit / 8;
          wait_.limit_ns_.store(less < least_ns ? 0 : less, std::memory_order_relaxed);
          return false;
        }
        ::sched_yield();
      }
      wait_.limit_ns_.store(limit * 2 < most_ns ? limit * 2 : most_ns, std::memory_order_relaxed);
      return true;
    }

   private:
    OversubscribedWait& wait_;
  };

 private:
  /// Returns how long to poll, in nanoseconds; 0 if polling does not pay.
  std::int64_t limit() {
    static const int cpus = static_cast<int>(std::thread::hardware_concurrency());
    if (waiting_.load(std::memory_order_relaxed) <= cpus) return 0;
    const auto limit = limit_ns_.load(std::memory_order_relaxed);
    if (limit != 0) return limit;
    return (skipped_.fetch_add(1, std::memory_order_relaxed) & 63U) == 63U ? most_ns : 0;
  }

  std::atomic<int> waiting_{0};
  std::atomic<std::int64_t> limit_ns_{most_ns};
  std::atomic<std::uint32_t> skipped_{0};
};

}  // namespace tensorferry
