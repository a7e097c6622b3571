/// How the threads of a pool use its executor.
///
/// A thread enters before it takes work that needs the executor, and one thread at a time is on its way in. So a
/// handler that releases the executor hands over by itself, and a thread that is stuck on its way in has taken no job
/// that another thread could run.
///
/// Threads: any; a Hold belongs to one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "agent/executor.h"

namespace tensorferry {

class ExecutorUse final {
 public:
  /// What one thread has of the executor.
  struct Hold {
    void* runtime = nullptr;  // Executor::attach's
    bool attached = false;
    bool entered = false;
  };

  /// `executor` null: no job may need one.
  explicit ExecutorUse(std::shared_ptr<Executor> executor) : executor_(std::move(executor)) {}
  [[nodiscard]] bool exists() const noexcept { return executor_ != nullptr; }

  /// Tries to become the thread that is on its way in, until end_entering(). False: another thread is.
  bool begin_entering() noexcept { return !entering_.exchange(true); }
  void end_entering() noexcept { entering_ = false; }
  /// Returns whether a thread is on its way in. It will take work that needs the executor.
  [[nodiscard]] bool entering() const noexcept { return entering_; }

  void enter(Hold& hold) {
    if (!hold.attached) {
      hold.runtime = executor_->attach();
      hold.attached = true;
    }
    const auto begin = std::chrono::steady_clock::now();
    executor_->enter(hold.runtime);
    is_expensive_.store(std::chrono::steady_clock::now() - begin > executor_is_dear_from, std::memory_order_relaxed);
    hold.entered = true;
  }
  /// Leaves the executor, if the thread is inside.
  void leave(Hold& hold) {
    if (std::exchange(hold.entered, false)) executor_->leave(hold.runtime);
  }
  /// The thread ends; it has left the executor.
  void detach(Hold& hold) {
    if (std::exchange(hold.attached, false)) executor_->detach(hold.runtime);
  }
  /// Returns whether the last enter() took longer than executor_is_dear_from.
  [[nodiscard]] bool is_expensive() const noexcept { return is_expensive_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<Executor> executor_;
  std::atomic<bool> entering_{false};
  std::atomic<bool> is_expensive_{false};
};

}  // namespace tensorferry
