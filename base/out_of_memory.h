/// What this process does when memory runs out: the one error for it, which takes no memory to give, and a reserve of
/// memory with which calls and links end in order.
///
/// Code that catches std::bad_alloc calls release_reserve() first, because ending a call or a link allocates, too;
/// with_reserve() and run_or() do both.
/// The agents take the reserve again every second. Any thread may call these functions at any time.
#pragma once

#include <cstdint>
#include <new>

#include "base/status.h"

namespace tensorferry::out_of_memory {

/// Returns the ResourceExhausted of a call or a link that had no memory.
[[nodiscard]] const Status& status() noexcept;
/// Gives the reserve back to the system, so that the next small allocations succeed.
void release_reserve() noexcept;
/// Returns how often it has been given back, also when there was none.
[[nodiscard]] std::uint64_t releases() noexcept;
/// Takes the reserve, unless this process has it. If there is no memory, does nothing.
void take_reserve() noexcept;

/// Runs `work`, which throws nothing but std::bad_alloc and can run again after that. If it has no memory, gives the
/// reserve back and runs it once more. False: there was no memory then either.
template <class Work>
bool with_reserve(const Work& work) noexcept {
  for (int attempts = 2; attempts > 0; --attempts) {
    try {
      work();
      return true;
    } catch (const std::bad_alloc&) {
      release_reserve();
    }
  }
  return false;
}

/// Runs `work`. If it has no memory, gives the reserve back and runs `instead`: for work that cannot run again.
template <class Work, class Instead>
void run_or(const Work& work, const Instead& instead) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    release_reserve();
    instead();
  }
}

}  // namespace tensorferry::out_of_memory
