/// Several small buffers of host memory that travel as one: each buffer for itself costs some microseconds at both
/// ends, whatever its size, which is more than the copy of a few KB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "channels/buffer.h"

namespace tensorferry {

/// How a bundle's parts lie in it: in order, each at the next multiple of `alignment`; it ends with the last. What
/// stands between parts means nothing.
struct Bundle {
  static constexpr std::size_t alignment = 64;

  /// Where the part behind one that ends at `end` begins.
  static constexpr std::uint64_t next_part(std::uint64_t end) { return (end + alignment - 1) / alignment * alignment; }

  static std::size_t bytes(std::span<const Buffer* const> parts) {
    std::uint64_t end = 0;
    for (const auto* part : parts) end = next_part(end) + part->bytes;
    return static_cast<std::size_t>(end);
  }
};

}  // namespace tensorferry
