/// Tells a forked child from its parent, cheaply enough to ask in a deleter.
#pragma once

#include <cstdint>

namespace tensorferry {

/// How many forks lie between this process and the one that first asked. An object that remembers the number it was
/// made under knows by another number that it is the copy in a forked child: locks may be held there by threads that do
/// not exist, and what the object owns belongs to the parent.
std::uint32_t forks() noexcept;

/// A number that changes with each fork() of this process itself (and may where fork() failed). Memory that was held
/// under another number may still be read by a child: where it is shared, it must not be written for somebody else.
std::uint32_t children() noexcept;

}  // namespace tensorferry
