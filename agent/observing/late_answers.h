/// Counts the calls that this agent answered after their callers had given up, and logs them at most once a minute.
///
/// Threads: any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {

class LateAnswers final {
 public:
  static constexpr std::chrono::seconds log_interval{60};

  /// `peer`: the caller; `function`: for people.
  void add(std::string peer, std::string function) {
    const std::lock_guard lock(mutex_);
    count_.fetch_add(1, std::memory_order_relaxed);
    peer_ = std::move(peer);
    function_ = std::move(function);
  }
  [[nodiscard]] std::uint64_t count() const noexcept { return count_.load(std::memory_order_relaxed); }
  /// Logs the late answers since the last line, unless there are none or the last line is younger than a minute.
  void log_if_due(Clock::time_point now) {
    if (count() == logged_) return;
    std::string line;
    {
      const std::lock_guard lock(mutex_);
      if (logged_at_ && now - *logged_at_ < log_interval) return;
      line = formatted("peer={} call={} answered {} calls after their callers had given up; this was the last one",
                       peer_, function_, count() - logged_);
      logged_ = count();
      logged_at_ = now;
    }
    log_warning(line);
  }

 private:
  std::mutex mutex_;
  std::atomic<std::uint64_t> count_{0}, logged_{0};
  std::optional<Clock::time_point> logged_at_;
  std::string peer_, function_;  // of the last one
};

}  // namespace tensorferry
