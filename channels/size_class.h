/// Block sizes of the memory pools: four per power of two, from 4 KB, so that at most a quarter is wasted.
#pragma once

#include <bit>
#include <cstddef>

namespace tensorferry::size_class {

inline constexpr std::size_t smallest = 4096;
inline constexpr std::size_t largest = std::size_t{1} << 46;

/// Returns the bytes of a block of class `index`: 4, 5, 6, 7, 8, 10, ... KB.
constexpr std::size_t bytes_of(std::size_t index) { return (4 + index % 4) << (10 + index / 4); }

/// Returns the smallest class of at least `bytes` bytes. `bytes` is at most `largest`.
constexpr std::size_t of(std::size_t bytes) {
  if (bytes <= smallest) return 0;
  const auto power = std::bit_width(bytes - 1) - 1;  // 2^power < bytes <= 2^(power + 1)
  const auto quarter = std::size_t{1} << (power - 2);
  const auto quarters = (bytes + quarter - 1) / quarter;  // 5 to 8
  return static_cast<std::size_t>(power - 12) * 4 + (quarters - 4);
}

inline constexpr std::size_t count = of(largest) + 1;

static_assert(bytes_of(0) == smallest && of(smallest + 1) == 1 && bytes_of(1) == 5 * 1024);
static_assert(bytes_of(of(64 << 20)) == 64 << 20 && bytes_of(of((64 << 20) + 1)) == 80 << 20);

}  // namespace tensorferry::size_class
