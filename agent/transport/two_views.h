/// Tells ThreadSanitizer about synchronisation through a ring that one process maps twice.
///
/// ThreadSanitizer knows memory by its address. If both agents of a test live in one process, it does not see that one
/// mapping publishes the bytes that a thread reads by the other. In all other builds these functions do nothing.
#pragma once

#include <array>
#include <cstdint>

#ifdef TENSORFERRY_UNDER_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace tensorferry {

/// `ring` and `slot` identify the memory that one thread publishes and another takes, in either mapping.
class TwoViews {
 public:
#ifdef TENSORFERRY_UNDER_TSAN
  static void publishes(std::uint64_t ring, std::uint32_t slot) { __tsan_release(&place(ring, slot)); }
  static void has_taken(std::uint64_t ring, std::uint32_t slot) { __tsan_acquire(&place(ring, slot)); }

 private:
  static char& place(std::uint64_t ring, std::uint32_t slot) {
    static std::array<char, 4096> places;
    return places[(ring + slot) % places.size()];
  }
#else
  static void publishes(std::uint64_t /*ring*/, std::uint32_t /*slot*/) {}
  static void has_taken(std::uint64_t /*ring*/, std::uint32_t /*slot*/) {}
#endif
};

}  // namespace tensorferry
