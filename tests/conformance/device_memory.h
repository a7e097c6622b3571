/// Makes, fills and compares the suite's buffers on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "channels/buffer.h"

namespace tensorferry::conformance {

/// The memory of one device. A fixture for memory other than the CPU's provides its own. Thread-safe.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// Returns `bytes` bytes of undefined content. When the last owner drops the buffer, its memory is overwritten and
  /// may be used again. So a late read finds wrong bytes.
  virtual Buffer allocate(std::size_t bytes) = 0;
  /// Writes the pattern of `seed`, in the order of the stream that `allocate` gave the buffer.
  virtual void fill(const Buffer& buffer, std::uint32_t seed) = 0;
  /// Waits for the buffer's stream. Returns whether all bytes are those that `fill` writes for `seed`.
  virtual bool holds(const Buffer& buffer, std::uint32_t seed) = 0;

  Buffer filled(std::size_t bytes, std::uint32_t seed) {
    auto buffer = allocate(bytes);
    fill(buffer, seed);
    return buffer;
  }
};

/// Returns the byte at offset `at` of the pattern of `seed`. Adjacent bytes differ, and so do adjacent blocks of any
/// power of two.
constexpr std::byte pattern(std::uint32_t seed, std::size_t at) {
  return static_cast<std::byte>((at * 131 + (at >> 8) * 17 + (at >> 16) * 29 + seed * 97) & 0xff);
}
void write_pattern(std::span<std::byte> bytes, std::uint32_t seed);
bool has_pattern(std::span<const std::byte> bytes, std::uint32_t seed);

std::unique_ptr<DeviceMemory> cpu_memory();

}  // namespace tensorferry::conformance
