/// Torch's thread-local state for callbacks of operations.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <future>

namespace tensorferry::collectives {

/// Returns torch's thread-local state (grad mode, inference mode, autocast, ...) of a thread that has not changed it.
///
/// The thread that completes a future of an operation takes this state by an at::ThreadLocalStateGuard. It is a thread
/// of the program if one waits for the operation, and callbacks must not depend on that. Those of Gloo find the same
/// state. The first call starts a thread, and throws std::system_error if there is none; so call it before the
/// operation can end.
inline const at::ThreadLocalState& state_of_unused_thread() {
  // Never destroyed: a thread of the pool may complete the last future while the process exits.
  static const auto& state =
      *new at::ThreadLocalState(std::async(std::launch::async, [] { return at::ThreadLocalState(); }).get());
  return state;
}

}  // namespace tensorferry::collectives
