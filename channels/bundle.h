/// Layout of a bundle: several small buffers of host memory that travel as one. A buffer sent alone costs some
/// microseconds at both ends, also if it is small, and the copy of a few KB costs less.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "channels/buffer.h"

namespace tensorferry {

/// Computes how parts lie in a bundle: in order, each at the next multiple of `alignment`. The bundle ends with its
/// last part. The bytes between parts mean nothing.
struct Bundle {
  static constexpr std::size_t alignment = 64;

  /// Returns the offset of the part that follows a part ending at `end`.
  static constexpr std::uint64_t next_part(std::uint64_t end) { return (end + alignment - 1) / alignment * alignment; }

  /// Returns the size of a bundle of `parts`.
  static std::size_t bytes(std::span<const Buffer* const> parts) {
    std::uint64_t end = 0;
    for (const auto* part : parts) end = next_part(end) + part->bytes;
    return static_cast<std::size_t>(end);
  }
};

}  // namespace tensorferry
