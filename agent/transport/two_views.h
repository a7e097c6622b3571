/// For ThreadSanitizer alone: it knows memory by its address, so where one process maps a ring twice (both agents of a
/// test live in it) it does not see that what one view publishes the other reads. These tell it; elsewhere they do
/// nothing.
#pragma once

#include <array>
#include <cstdint>

#ifdef TENSORFERRY_UNDER_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace tensorferry {

/// `ring` and `slot` name what is handed over, whichever view of it the thread has.
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
