/// How the suite makes, fills and compares buffers on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "channels/buffer.h"

namespace tensorferry::conformance {

/// A fixture for other memory than the CPU's brings one of its own. Thread-safe.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// `bytes` bytes whose content is undefined; their memory is overwritten, and may be used again, when the last owner
  /// lets go, so that whoever reads later reads rubbish.
  virtual Buffer allocate(std::size_t bytes) = 0;
  /// Writes the pattern that `seed` stands for, in the order of the buffer's stream.
  virtual void fill(const Buffer& buffer, std::uint32_t seed) = 0;
  /// Waits for the buffer's stream, then says whether all bytes are those that `fill` wrote.
  virtual bool holds(const Buffer& buffer, std::uint32_t seed) = 0;

  Buffer filled(std::size_t bytes, std::uint32_t seed) {
    auto buffer = allocate(bytes);
    fill(buffer, seed);
    return buffer;
  }
};

/// The byte at `at` of the pattern that `seed` stands for: neighbours differ, and so do blocks of any power of two.
constexpr std::byte pattern(std::uint32_t seed, std::size_t at) {
  return static_cast<std::byte>((at * 131 + (at >> 8) * 17 + (at >> 16) * 29 + seed * 97) & 0xff);
}

std::unique_ptr<DeviceMemory> cpu_memory();

}  // namespace tensorferry::conformance
