/// The links of an agent that have something under way, which the reactor ticks.
///
/// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "agent/reactor.h"
#include "base/clock.h"

namespace tensorferry {

class Link;

class ActiveLinks final {
 public:
  /// Makes tick() tick this link, from now until it has nothing under way.
  void add(std::weak_ptr<Link> link);
  /// Ticks the links, on the reactor thread, and returns the fastest pace that one of them wants.
  Pace tick(Clock::time_point now);

 private:
  std::mutex mutex_;  // guards the next one
  std::vector<std::weak_ptr<Link>> links_;
};

}  // namespace tensorferry
