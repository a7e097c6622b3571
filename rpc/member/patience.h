/// The time left of a time-out.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include "agent/agent.h"

namespace tensorferry {

/// The time left of a time-out that began when this was made. A time-out of 0 never passes.
class Patience final {
 public:
  explicit Patience(Milliseconds timeout, Clock clock = {}) : clock_(std::move(clock)) {
    if (timeout.count() > 0) until_ = clock_.now() + timeout;
  }
  [[nodiscard]] bool over() const { return until_ && clock_.now() >= *until_; }
  /// Returns the time left, at most 100 ms: after that, the waiting thread checks for dead peers and for signals.
  [[nodiscard]] Milliseconds slice() const {
    constexpr Milliseconds most{100};
    if (!until_) return most;
    return std::clamp(std::chrono::duration_cast<Milliseconds>(*until_ - clock_.now()), Milliseconds(0), most);
  }

 private:
  const Clock clock_;
  std::optional<Clock::time_point> until_;
};

}  // namespace tensorferry
