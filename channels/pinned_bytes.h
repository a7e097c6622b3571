/// Counts the page-locked memory of this process. It stands apart from channels/cuda so that a build without CUDA has
/// it.
#pragma once

#include <atomic>
#include <cstdint>

namespace tensorferry {

/// Returns the bytes of host memory that the channels of this process hold page-locked to copy tensors of GPUs through,
/// unused ones included, and of memory that is registered with network cards.
inline std::atomic<std::uint64_t>& pinned_bytes() noexcept {
  static std::atomic<std::uint64_t> bytes{0};
  return bytes;
}

}  // namespace tensorferry
