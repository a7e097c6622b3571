/// How long it pays to look before sleeping: at most 16 us, and 64 us where there are CPUs to spare (a call that has a
/// GPU copy something takes 35 us, and waking its caller on an idle CPU 10 more). Doubled when the look found
/// something, halved when it did not. When it has come down to nothing (as where both sides share a CPU) it is tried
/// once in 64 times, for the whole time: where the other side sleeps too, its answer takes as long as its waking. Where
/// the other side was seen on this very CPU it does not pay, whatever the look found.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tensorferry {

inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// One for each place that waits; at most one thread spins there at a time.
class Spin final {
 public:
  static inline const bool cpus_to_spare = std::thread::hardware_concurrency() >= 8;
  static inline const std::int64_t most_ns = cpus_to_spare ? 64'000 : 16'000;
  static constexpr std::int64_t least_ns = 1'000;
  /// How long a GPU's copy may be looked for, as whoever synchronises with a GPU does without end.
  static std::chrono::nanoseconds most_for_devices() { return std::chrono::milliseconds(cpus_to_spare ? 4 : 0); }

  /// What was found came from `cpu` (-1: not known).
  void met(int cpu) {
    if (cpu >= 0 && cpu == ::sched_getcpu()) limit_ns_.store(0, std::memory_order_relaxed);
  }

  /// Looks until `found` says true or the time is over; for `at_least` in any case, where not finding it costs more
  /// than the look. False at once where another thread spins already.
  template <class Found>
  bool until(const Found& found, std::chrono::nanoseconds at_least = {}) {
    if (busy_.exchange(true, std::memory_order_acquire)) return found();
    const bool result = look(found, at_least.count());
    busy_.store(false, std::memory_order_release);
    return result;
  }

 private:
  template <class Found>
  bool look(const Found& found, std::int64_t at_least) {
    auto limit = limit_ns_.load(std::memory_order_relaxed);
    if (limit == 0) {
      if (at_least == 0 && (++skipped_ & 63U) != 0) return found();
      limit = most_ns;
    }
    if (limit < at_least) limit = at_least;
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      for (int i = 0; i < 16; ++i) {
        if (found()) {
          limit_ns_.store(limit * 2 < most_ns ? limit * 2 : most_ns, std::memory_order_relaxed);
          return true;
        }
        cpu_relax();
      }
      if ((std::chrono::steady_clock::now() - begin).count() > limit) break;
    }
    if (limit > most_ns) limit = most_ns;
    limit_ns_.store(limit / 2 < least_ns ? 0 : limit / 2, std::memory_order_relaxed);
    return false;
  }

  std::atomic<bool> busy_{false};
  std::atomic<std::int64_t> limit_ns_{most_ns};
  std::uint32_t skipped_ = 0;  // guarded by busy_
};

}  // namespace tensorferry
