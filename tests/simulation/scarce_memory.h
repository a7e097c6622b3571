/// Memory that runs out: this program's operator new throws std::bad_alloc now and then, as a seed decides.
///
/// Threads: each has its own state.
#pragma once

#include <cstdint>

namespace tensorferry::testing {

/// While it lives, about one allocation of `one_in` fails on the calling thread. If `until_released`, all fail after it
/// until the agents have given back their reserve (base/out_of_memory.h). The next 64 succeed, as they do then. The
/// same `state`, the same failures.
class ScarceMemory final {
 public:
  ScarceMemory(std::uint64_t& state, std::uint32_t one_in, bool until_released) noexcept;
  ~ScarceMemory();
  ScarceMemory(const ScarceMemory&) = delete;
  ScarceMemory& operator=(const ScarceMemory&) = delete;

#ifdef TENSORFERRY_UNDER_TSAN
  static constexpr bool runs_out = false;  // ThreadSanitizer has an operator new of its own
#else
  static constexpr bool runs_out = true;
#endif

  /// Forgets what earlier ones of the thread have left: the next allocation may fail.
  static void begin() noexcept;
  /// Returns how many allocations have failed on the calling thread.
  [[nodiscard]] static std::uint64_t failures() noexcept;
};

/// While it lives, no allocation fails on the calling thread: for what belongs to the test.
class PlentyOfMemory final {
 public:
  PlentyOfMemory() noexcept;
  ~PlentyOfMemory();
  PlentyOfMemory(const PlentyOfMemory&) = delete;
  PlentyOfMemory& operator=(const PlentyOfMemory&) = delete;

 private:
  std::uint64_t* const state_;
};

}  // namespace tensorferry::testing
