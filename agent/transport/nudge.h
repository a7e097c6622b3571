/// Wakes a thread out of poll(). Its eventfd is made when a thread first polls, so an idle link has none.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/file_descriptor.h"

namespace tensorferry {

/// Threads: any. A thread calls fd() before it checks whether it should sleep; then no wake() after that check is lost.
class Nudge final {
 public:
  /// Returns the descriptor to poll for reading; -1 if the system gives none: then the thread must not sleep for long.
  [[nodiscard]] int fd() noexcept {
    const std::lock_guard lock(mutex_);
    if (!eventfd_) {
      eventfd_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      number_.store(eventfd_.get(), std::memory_order_seq_cst);
    }
    return eventfd_.get();
  }
  /// Makes the descriptor readable, if a thread has asked for it.
  void wake() const noexcept {
    const int number = number_.load(std::memory_order_seq_cst);
    const std::uint64_t one = 1;
    if (number >= 0) (void)!::write(number, &one, sizeof one);
  }
  /// Undoes wake().
  void drain() const noexcept {
    std::uint64_t count = 0;
    (void)!::read(number_.load(std::memory_order_relaxed), &count, sizeof count);
  }

 private:
  std::mutex mutex_;  // guards the making of eventfd_
  FileDescriptor eventfd_;
  std::atomic<int> number_{-1};
};

}  // namespace tensorferry
