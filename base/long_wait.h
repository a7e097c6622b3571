/// One line of the log about a wait that takes long.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace tensorferry {

/// Tells once what a wait is for: when it has taken 5 s. A shorter wait is not worth a line. Used by one thread.
class LongWait final {
 public:
  explicit LongWait(Clock clock) : clock_(std::move(clock)), tells_at_(clock_.now() + quiet) {}

  /// The wait calls this again and again, and before it gives up. `text` returns the line, which names what is awaited
  /// and from whom, or "" for none; it runs at most once.
  template <class Text>
  void tell(const Text& text) {
    if (clock_.now() < tells_at_) return;
    tells_at_ = Clock::time_point::max();
    if (const std::string line = text(); !line.empty()) log_warning(line);
  }

 private:
  static constexpr std::chrono::seconds quiet{5};

  const Clock clock_;
  Clock::time_point tells_at_;
};

}  // namespace tensorferry
