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
  explicit Patience(Milliseconds timeout) {
    if (timeout.count() > 0) until_ = Clock::now() + timeout;
  }
  [[nodiscard]] bool over() const { return until_ && Clock::now() >= *until_; }
  /// Returns the time left, at most 500 ms: after that, the waiting thread checks for dead peers and for signals.
  [[nodiscard]] Milliseconds slice() const {
    constexpr Milliseconds most{500};
    if (!until_) return most;
    return std::clamp(std::chrono::duration_cast<Milliseconds>(*until_ - Clock::now()), Milliseconds(0), most);
  }

 private:
  std::optional<Clock::time_point> until_;
};

}  // namespace tensorferry
