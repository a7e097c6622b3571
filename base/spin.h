/// Spins for a while before a thread sleeps, and adapts how long that pays.
///
/// The limit is at most 200 us: as long as the wake-ups of both sides take, if both sleep (50 to 100 us each on an idle
/// virtual CPU, and the work of some Python between them). The limit doubles when a spin succeeds and halves when a
/// spin fails. When it has come down to 0, for example because both sides share a CPU, one wait in 64 spins for the
/// longest limit. So two sides that sleep find out that neither needs to; if the limit were shorter than what they wait
/// for while they sleep, they would not. Once the other side was seen on the waiting thread's own CPU, the limit is 0,
/// even if the spin succeeded.
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

/// The spin limit of one place that waits. Thread-safe; at most one thread spins there at a time.
class Spin final {
 public:
  static inline const bool cpus_to_spare = std::thread::hardware_concurrency() >= 8;
  static constexpr std::int64_t most_ns = 200'000;
  static constexpr std::int64_t least_ns = 1'000;
  /// Returns how long a thread may spin for a GPU's copy. A thread that synchronises with a GPU spins without limit.
  static std::chrono::nanoseconds most_for_devices() { return std::chrono::milliseconds(cpus_to_spare ? 4 : 0); }

  /// Records that the answer came from `cpu` (-1: unknown). Sets the limit to 0 if the calling thread runs there too.
  void met(int cpu) {
    if (cpu >= 0 && cpu == ::sched_getcpu()) limit_ns_.store(0, std::memory_order_relaxed);
  }

  /// Spins until `found` returns true or the limit has passed, and returns whether `found` returned true. Polls once
  /// and returns if another thread spins here.
  ///   - `work`: how long the other side works before it can answer, for example because it copies; added to the limit.
  ///   - `at_least`: for waits in which a failure costs more than the spin; the limit is never below it.
  template <class Found>
  bool until(const Found& found, std::chrono::nanoseconds at_least = {}, std::chrono::nanoseconds work = {}) {
    if (busy_.exchange(true, std::memory_order_acquire)) return found();
    const bool result = spin(found, at_least.count(), work.count());
    busy_.store(false, std::memory_order_release);
    return result;
  }

 private:
  template <class Found>
  bool spin(const Found& found, std::int64_t at_least, std::int64_t work) {
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
      if ((std::chrono::steady_clock::now() - begin).count() > limit + work) break;
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
