/// Torch's thread-local state for callbacks of operations.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <future>

namespace tensorferry::collectives {

/// Returns torch's thread-local state (grad mode, inference mode, autocast, ...) of a thread that has not changed it.
///
/// Whoever completes a future of an operation sets it by an at::ThreadLocalStateGuard. A program's thread completes it
/// if it waits for the operation, and callbacks must not depend on that. Those of Gloo find the same state.
inline const at::ThreadLocalState& state_of_unused_thread() {
  static const auto state = std::async(std::launch::async, [] { return at::ThreadLocalState(); }).get();
  return state;
}

}  // namespace tensorferry::collectives
