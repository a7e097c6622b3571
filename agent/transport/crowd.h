/// Threads of one process that wait for answers of one peer, more of them than there are CPUs. Whoever sleeps has to be
/// woken by the callee, a system call and often an interrupt for each answer. Whoever looks, and gives its CPU to the
/// next one between two looks, is switched out all the same, but costs the callee nothing, and finds its answer when
/// its turn comes again. (With 64 threads on two CPUs that made several times as many calls a second.)
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace tensorferry {

/// Thread-safe. How long to look is learned: doubled when it found something, an eighth less when it did not (many look
/// at once, and some are always late), tried once in 64 times when it has come down to nothing. A few looks are taken
/// in any case: the time may pass while others have the CPU.
class Crowd final {
 public:
  static constexpr std::int64_t most_ns = 256'000;
  static constexpr std::int64_t least_ns = 16'000;
  static constexpr int least_looks = 4;

  /// One that waits, as long as this is there.
  class Member final {
   public:
    explicit Member(Crowd& crowd) : crowd_(crowd) { crowd_.waiting_.fetch_add(1, std::memory_order_relaxed); }
    ~Member() { crowd_.waiting_.fetch_sub(1, std::memory_order_relaxed); }
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

    /// Looks until `found` says true or the time is over; once where there is no crowd.
    template <class Found>
    bool until(const Found& found) {
      const auto limit = crowd_.limit();
      if (limit == 0) return found();
      const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit);
      for (int looks = 1; !found(); ++looks) {
        if (looks >= least_looks && std::chrono::steady_clock::now() >= end) {
          const auto less = limit - limit / 8;
          crowd_.limit_ns_.store(less < least_ns ? 0 : less, std::memory_order_relaxed);
          return false;
        }
        ::sched_yield();
      }
      crowd_.limit_ns_.store(limit * 2 < most_ns ? limit * 2 : most_ns, std::memory_order_relaxed);
      return true;
    }

   private:
    Crowd& crowd_;
  };

 private:
  /// In nanoseconds; 0: it does not pay.
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
