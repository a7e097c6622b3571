/// Joins the ends of several works into one end.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "base/status.h"

namespace tensorferry {

/// Threads: any.
class JoinedEnds final {
 public:
  explicit JoinedEnds(std::size_t works = 0) : left_(works) {}

  /// Counts more works, before the last of the others has ended.
  void expect(std::size_t works) { left_.fetch_add(works, std::memory_order_relaxed); }
  /// One work has ended. Nullopt: others have not. For the last one: the first error, or Ok.
  std::optional<Status> one_ended(const Status& status) {
    if (!status.ok()) {
      const std::lock_guard lock(mutex_);
      if (first_error_.ok()) first_error_ = status;
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return std::nullopt;
    return std::move(first_error_);
  }

 private:
  std::atomic<std::size_t> left_;
  Mutex mutex_;
  Status first_error_;
};

}  // namespace tensorferry
