/// Wakes threads out of poll(). An idle link has no eventfd: the first thread that polls makes it, and the link gives
/// it back.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/file_descriptor.h"

namespace tensorferry {

/// Threads: any.
class Nudge final {
 public:
  /// A thread holds one while it polls fd() for reading, and begins it before it checks whether it should sleep; then
  /// no wake() after that check is lost.
  class Sleeper {
   public:
    explicit Sleeper(Nudge& nudge) noexcept : nudge_(nudge) {
      const std::lock_guard lock(nudge_.mutex_);
      if (!nudge_.eventfd_) nudge_.eventfd_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      fd_ = nudge_.eventfd_.get();
      nudge_.sleepers_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() {
      const std::lock_guard lock(nudge_.mutex_);
      nudge_.sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

    /// Returns the descriptor; -1 if the system gives none: then the thread must not sleep for long.
    [[nodiscard]] int fd() const noexcept { return fd_; }
    /// Undoes wake().
    void drain() const noexcept {
      std::uint64_t count = 0;
      (void)!::read(fd_, &count, sizeof count);
    }

   private:
    Nudge& nudge_;
    int fd_ = -1;
  };

  /// Makes the descriptor readable if there are sleepers.
  void wake() noexcept {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    const std::lock_guard lock(mutex_);  // so that the number is not another file's by now
    const std::uint64_t one = 1;
    if (eventfd_) (void)!::write(eventfd_.get(), &one, sizeof one);
  }
  /// Closes the descriptor if there is no sleeper.
  void give_back_if_idle() noexcept {
    const std::lock_guard lock(mutex_);
    if (sleepers_.load(std::memory_order_relaxed) == 0) eventfd_.reset();
  }

 private:
  std::mutex mutex_;  // guards eventfd_ and the changes of sleepers_
  FileDescriptor eventfd_;
  std::atomic<int> sleepers_{0};
};

}  // namespace tensorferry
