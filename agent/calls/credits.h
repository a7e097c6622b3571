/// What bounds the bytes that one link has under way: the credit of the messages sent to the peer, and the replies that
/// the peer has not taken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "base/clock.h"
#include "base/mutex.h"

namespace tensorferry {

/// The caller's bound on the bytes of buffers that the peer has not read yet (`RawAgentOptions::max_bytes_in_flight`).
///
/// Credit is given in the order of asking, so a large message is not overtaken by small ones for ever. A message larger
/// than the bound goes when nothing else is in flight. The peer returns credit by acknowledging buffers, which it does
/// without running a handler; so waiting for credit always ends unless the peer stops. Thread-safe.
class Credits final {
 public:
  explicit Credits(std::size_t most, Clock clock = {}) : most_(most), clock_(std::move(clock)) {}
  /// Takes credit if it is there and no thread waits for some. False: the caller must use wait().
  bool try_acquire(std::size_t bytes);
  /// Takes credit, and blocks until there is enough. False: `until` has passed. After close(), returns true at once.
  bool wait(std::size_t bytes, std::optional<Clock::time_point> until);
  /// Gives credit back, and wakes the threads whose turn has come.
  void release(std::size_t bytes);
  /// Returns how many bytes of credit are taken.
  [[nodiscard]] std::size_t taken() const;
  /// Gives credit to all waiting threads, and to all later ones: their calls fail by themselves.
  void close();

 private:
  struct Waiter {
    std::size_t bytes;
    std::atomic<std::uint32_t> granted{0};
  };
  [[nodiscard]] bool fits(std::size_t bytes) const {
    return closed_ || in_flight_ == 0 || (bytes <= most_ && in_flight_ <= most_ - bytes);
  }
  void grant();

  const std::size_t most_;
  const Clock clock_;
  mutable Mutex mutex_;
  std::deque<Waiter*> waiters_;  // in the order of asking
  std::size_t in_flight_ = 0;
  bool closed_ = false;
};

/// The callee's bound on the bytes of buffers in replies that the peer has not taken. `pause(true)` runs when they
/// exceed the bound, `pause(false)` when they have come down to half of it. It runs under the lock here, so that its
/// calls are in order, and must not call back. Thread-safe.
class UntakenReplies final {
 public:
  UntakenReplies(std::size_t most, std::function<void(bool)> pause) : most_(most), pause_(std::move(pause)) {}
  void add(std::size_t bytes);
  void remove(std::size_t bytes);
  /// Ends a pause; no other begins.
  void close();

 private:
  const std::size_t most_;
  const std::function<void(bool)> pause_;
  Mutex mutex_;
  std::size_t bytes_ = 0;
  bool paused_ = false;
  bool closed_ = false;
};

}  // namespace tensorferry
