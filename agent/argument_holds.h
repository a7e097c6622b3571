/// Counts the holders of the memory of a call's arguments, and completes the on_sent() of the call when the last one
/// releases it.
///
/// Threads: any.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "agent/message.h"
#include "base/mutex.h"

namespace tensorferry {

class ArgumentHolds final {
 public:
  void hold() {
    const std::lock_guard lock(mutex_);
    ++holds_;
  }
  /// The last holder's call runs the completions, under no lock.
  void release() {
    std::vector<Completion> sent;
    {
      const std::lock_guard lock(mutex_);
      if (--holds_ == 0) sent.swap(sent_);
    }
    for (const auto& completion : sent) completion({});
  }
  /// Keeps the completion that `make` returns until the memory is released. False: it has been released, and `make` has
  /// not run. `make` runs under the lock.
  template <class Make>
  [[nodiscard]] bool when_released(const Make& make) {
    const std::lock_guard lock(mutex_);
    if (holds_ == 0) return false;
    sent_.push_back(make());
    return true;
  }

 private:
  Mutex mutex_;
  std::vector<Completion> sent_;
  int holds_ = 1;  // the first is the call, until its link has taken the message
};

}  // namespace tensorferry
