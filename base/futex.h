/// Futex waits with a deadline, which std::atomic::wait does not have: on a 32-bit word of this process, or of memory
/// that several processes map ("shared").
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <optional>

namespace tensorferry {

using FutexDeadline = std::optional<std::chrono::steady_clock::time_point>;

namespace futex_detail {

inline bool wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, FutexDeadline until, int scope) {
  timespec absolute{};
  if (until) {
    const auto since = until->time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
    absolute.tv_sec = seconds.count();
    absolute.tv_nsec = std::chrono::duration_cast<std::chrono::nanoseconds>(since - seconds).count();
  }
  // FUTEX_WAIT_BITSET takes an absolute CLOCK_MONOTONIC time, which is steady_clock's.
  const auto rc = ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | scope, expected, until ? &absolute : nullptr, nullptr,
                            FUTEX_BITSET_MATCH_ANY);
  return !(rc != 0 && errno == EINTR);
}

inline void wake(std::atomic<std::uint32_t>& word, int threads, int scope) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE | scope, threads, nullptr, nullptr, 0);
}

}  // namespace futex_detail

/// Sleeps while `word` is `expected`: until a wake, `until` or a signal. May return for no reason, so the caller checks
/// the word again. False: a signal interrupted the sleep.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, FutexDeadline until) {
  return futex_detail::wait(word, expected, until, FUTEX_PRIVATE_FLAG);
}
/// Wakes all threads that sleep on `word`.
inline void futex_wake(std::atomic<std::uint32_t>& word) { futex_detail::wake(word, INT_MAX, FUTEX_PRIVATE_FLAG); }

/// The same on memory that other processes map too. The wake reaches up to `threads` threads.
inline bool shared_futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, FutexDeadline until) {
  return futex_detail::wait(word, expected, until, 0);
}
inline void shared_futex_wake(std::atomic<std::uint32_t>& word, int threads) { futex_detail::wake(word, threads, 0); }

}  // namespace tensorferry
