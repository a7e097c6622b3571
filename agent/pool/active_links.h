/// The links of an agent that have something under way, which the reactor ticks.
///
/// Threads: any.
#pragma once

#include <list>
#include <memory>
#include <mutex>

#include "agent/pool/pace.h"
#include "base/clock.h"

namespace tensorferry {

/// A link, as the reactor ticks it.
class TickedLink {
 public:
  /// Does what is due, and returns how soon the link wants the next tick. Pace::rest: nothing is under way.
  virtual Pace tick(Clock::time_point now) = 0;
  /// Marks the link as active after a tick. False: another thread has activated it since.
  virtual bool stay_active() noexcept = 0;

 protected:
  ~TickedLink() = default;
};

class ActiveLinks final {
 public:
  /// Makes tick() tick this link, from now until it has nothing under way.
  void add(std::weak_ptr<TickedLink> link);
  /// Ticks the links, on the reactor thread, and returns the fastest pace that one of them wants.
  Pace tick(Clock::time_point now);

 private:
  std::mutex mutex_;  // guards the next one
  std::list<std::weak_ptr<TickedLink>> links_;
};

}  // namespace tensorferry
