/// Tells threads that wait for each call at once from threads that have many calls in flight.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>

namespace tensorferry::torch_rpc {

/// The recent calls of one thread. torch's agents only start calls, and torch's futures wait on a condition variable,
/// so an agent must guess whether its caller is about to wait. Used by one thread.
class CallPattern final {
 public:
  /// Returns whether the thread probably waits for the call that it makes now. It does if its last calls had completed
  /// before the next one was made.
  bool expects_wait() {
    if (last_._unsafe_get_target() != nullptr) {
      const auto last = last_.lock();
      completed_ = !last || last->completed() ? std::min(completed_ + 1, enough) : 0;
      last_.reset();
    }
    if (completed_ < enough) return false;
    // Sometimes leaves a call alone, to see whether the next one is made before it has completed.
    if (++waited_ < probe_every) return true;
    waited_ = 0;
    return false;
  }
  /// Notes a call for which the agent did not wait.
  void leave(const c10::intrusive_ptr<c10::ivalue::Future>& call) { last_ = call; }
  /// Notes that the agent waited in vain: waiting saves nothing for calls that take long.
  void slow() { completed_ = 0; }

 private:
  static constexpr int enough = 2;
  static constexpr int probe_every = 32;
  c10::weak_intrusive_ptr<c10::ivalue::Future> last_{c10::intrusive_ptr<c10::ivalue::Future>()};
  int completed_ = 0;
  int waited_ = 0;
};

}  // namespace tensorferry::torch_rpc
