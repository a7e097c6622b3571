/// Guards a channel's wire for use on threads of the channel's own.
#pragma once

#include <atomic>
#include <thread>

#include "channels/channel.h"

namespace tensorferry {

/// Lends the wire until the channel's destructor calls `end`, which waits for the uses under way. That wait is never
/// long, because a wire only queues. Uses may nest.
class WireUse final {
 public:
  explicit WireUse(Wire& wire) : wire_(wire) {}

  /// Calls `use(wire)` and returns true. After `end` it calls nothing and returns false.
  template <class Use>
  bool with(Use&& use) {
    const User here(users_);
    const bool there = !ended_.load();
    if (there) use(wire_);
    return there;
  }
  /// Returns whether this thread is inside a use of any wire.
  [[nodiscard]] static bool inside() noexcept { return nesting > 0; }
  /// Ends the lending and waits for the uses under way. Must not be called inside a use.
  void end() {
    ended_.store(true);
    while (users_.load() != 0) std::this_thread::yield();
  }

 private:
  static inline thread_local int nesting = 0;

  /// Counts a use while it lives, also one that throws because there is no memory.
  class User final {
   public:
    explicit User(std::atomic<int>& users) : users_(users) {
      users_.fetch_add(1);
      ++nesting;
    }
    ~User() {
      --nesting;
      users_.fetch_sub(1);
    }
    User(const User&) = delete;
    User& operator=(const User&) = delete;

   private:
    std::atomic<int>& users_;
  };

  Wire& wire_;
  std::atomic<int> users_{0};
  std::atomic<bool> ended_{false};
};

}  // namespace tensorferry
