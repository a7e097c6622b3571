/// A channel's wire, for what runs on threads of the channel's own.
#pragma once

#include <atomic>
#include <thread>

#include "channels/channel.h"

namespace tensorferry {

/// Lends the wire as long as the channel is there: its destructor ends that, and waits for who is using it at that
/// moment (never long: a wire queues). Uses may nest.
class WireUse final {
 public:
  explicit WireUse(Wire& wire) : wire_(wire) {}

  /// Calls `use(wire)` and returns true; false where the channel has gone.
  template <class Use>
  bool with(Use&& use) {
    users_.fetch_add(1);
    ++nesting;
    const bool there = !ended_.load();
    if (there) use(wire_);
    --nesting;
    users_.fetch_sub(1);
    return there;
  }
  /// Whether this thread is in a use, of any wire.
  [[nodiscard]] static bool inside() noexcept { return nesting > 0; }
  /// Not inside a use.
  void end() {
    ended_.store(true);
    while (users_.load() != 0) std::this_thread::yield();
  }

 private:
  static inline thread_local int nesting = 0;

  Wire& wire_;
  std::atomic<int> users_{0};
  std::atomic<bool> ended_{false};
};

}  // namespace tensorferry
