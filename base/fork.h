/// Tells a forked child from its parent, cheaply enough for a deleter.
#pragma once

#include <cstdint>

namespace tensorferry {

/// Returns how many forks lie between this process and the one that first called this. An object stores the number when
/// it is made. If the number differs later, the object is the copy in a forked child. There its locks may be held by
/// threads that do not exist, and its resources belong to the parent.
std::uint32_t forks() noexcept;

/// Returns a number that changes with each fork() of this process, and perhaps with a failed one. If memory was held
/// under another number, a child may still read it. If that memory is shared, it must not be reused for another holder.
std::uint32_t children() noexcept;

}  // namespace tensorferry
