/// The lazy completions (Call::Notice::lazy) of a link's calls in flight, and the sentinel call among them: the one
/// that the callee must report at once. docs/architecture.md explains why.
///
/// Threads: any.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "agent/call_state.h"
#include "agent/calls/pending_calls.h"

namespace tensorferry {

class LazyCompletions final {
 public:
  explicit LazyCompletions(const PendingCalls& pending) : pending_(pending) {}

  /// Tries to make `call` the sentinel call. True: it is the sentinel call now. False: another call is; the caller
  /// activates the link, whose tick then makes the completion of `call` prompt.
  bool become_sentinel(const Call::State& call) {
    const Call::State* none = nullptr;
    if (sentinel_.compare_exchange_strong(none, &call)) return true;
    others_ = true;
    return false;
  }
  /// The completion of `call` has run (`completed`) or was claimed. If `call` is the sentinel call, another call may
  /// become it, and if `completed`, the other lazy completions are made prompt.
  void ended(const Call::State& call, bool completed) {
    const auto* sentinel = &call;
    if (sentinel_.load() != sentinel || !sentinel_.compare_exchange_strong(sentinel, nullptr)) return;
    if (completed) escalate(Clock::time_point::max());
  }
  /// Makes the lazy completions of calls made before `made_before` prompt: the pool takes their replies.
  void escalate(Clock::time_point made_before) {
    if (!others_.exchange(false)) return;
    std::vector<std::shared_ptr<Call::State>> calls;
    try {
      calls = pending_.all();
    } catch (const std::bad_alloc&) {
      others_ = true;
      throw;
    }
    for (const auto& call : calls) {
      if (!call->wait.lazy) continue;
      if (call->made < made_before)
        call->escalate();
      else
        others_ = true;
    }
  }
  /// Returns whether a tick has completions to make prompt.
  [[nodiscard]] bool any() const noexcept { return others_; }
  [[nodiscard]] bool is_sentinel(const Call::State& call) const noexcept { return sentinel_.load() == &call; }

 private:
  const PendingCalls& pending_;
  std::atomic<const Call::State*> sentinel_{nullptr};
  std::atomic<bool> others_{false};  // calls with lazy completions may be in flight besides the sentinel call
};

}  // namespace tensorferry
