/// Runs completions without unbounded recursion.
#pragma once

#include <utility>

#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

/// Runs `completion`; does nothing if it is empty. It runs now, on this thread, if this thread is inside fewer than
/// `max_nesting` completions run by this function. Otherwise it runs on this thread as soon as the outermost of them
/// has returned. So a chain of operations that each complete at once and start the next uses a bounded stack.
///
/// Call it with no lock held. A completion must not wait for another completion of the same thread.
void complete(Completion completion, Status status) noexcept;

inline constexpr int max_nesting = 8;

/// Runs the two completions of a pull in this way.
inline void complete(Completion landed, Completion consumed, const Status& status) noexcept {
  complete(std::move(landed), status);
  complete(std::move(consumed), status);
}

}  // namespace tensorferry
