#include "tests/conformance/device_memory.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tensorferry::conformance {

namespace {

constexpr std::size_t block = 256;

/// Returns the bytes of a block of the pattern. They are those of block 0, rotated: 43 * 131 is 1 modulo 256. A
/// sanitizer slows a loop over bytes down a lot, so there is none.
const std::byte* block_of_pattern(std::size_t at, std::uint32_t seed) {
  static const auto line = [] {
    std::array<std::byte, 2 * block> out{};
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i * 131);
    return out;
  }();
  return line.data() + (at / 256 * 17 + at / 65536 * 29 + std::size_t{seed} * 97) * 43 % block;
}

class CpuMemory final : public DeviceMemory {
 public:
  Buffer allocate(std::size_t bytes) override {
    auto* const data = new std::byte[bytes];
    Owner owner(data, [bytes](std::byte* freed) {
      std::memset(freed, 0xdd, bytes);
      delete[] freed;
    });
    return {Device{}, data, bytes, nullptr, std::move(owner)};
  }

  void fill(const Buffer& buffer, std::uint32_t seed) override { write_pattern({buffer.data, buffer.bytes}, seed); }
  bool holds(const Buffer& buffer, std::uint32_t seed) override {
    return has_pattern({buffer.data, buffer.bytes}, seed);
  }
};

}  // namespace

void write_pattern(std::span<std::byte> bytes, std::uint32_t seed) {
  for (std::size_t at = 0; at < bytes.size(); at += block)
    std::memcpy(bytes.data() + at, block_of_pattern(at, seed), std::min(block, bytes.size() - at));
}

bool has_pattern(std::span<const std::byte> bytes, std::uint32_t seed) {
  for (std::size_t at = 0; at < bytes.size(); at += block) {
    if (std::memcmp(bytes.data() + at, block_of_pattern(at, seed), std::min(block, bytes.size() - at)) != 0)
      return false;
  }
  return true;
}

std::unique_ptr<DeviceMemory> cpu_memory() { return std::make_unique<CpuMemory>(); }

}  // namespace tensorferry::conformance
