/// An object that each process has for itself.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/fork.h"

namespace tensorferry {

/// One T of each process: a forked child makes another one. So the child finds a mutex free that a thread of its parent
/// holds, and a Background that works. What such a mutex guards may have been in the middle of a change at the fork,
/// so the child must not believe what it finds there. Thread-safe.
template <class T>
class PerProcess final {
 public:
  PerProcess() = default;
  ~PerProcess() {
    const auto* const made = made_.load();
    if (made->after == forks()) delete made;  // else it is the parent's, with the parent's threads
  }
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;

  T& get() {
    auto* made = made_.load();
    if (made->after == forks()) return made->object;
    auto* const fresh = new Made;  // the parent's is leaked
    if (made_.compare_exchange_strong(made, fresh)) return fresh->object;
    delete fresh;
    return made->object;
  }

 private:
  struct Made {
    const std::uint32_t after = forks();
    T object = T();
  };
  std::atomic<Made*> made_ = new Made;
};

}  // namespace tensorferry
