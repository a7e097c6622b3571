#include "tests/conformance/device_memory.h"

#include <cstring>

namespace tensorferry::conformance {

namespace {

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

  void fill(const Buffer& buffer, std::uint32_t seed) override {
    for (std::size_t at = 0; at < buffer.bytes; ++at) buffer.data[at] = pattern(seed, at);
  }

  bool holds(const Buffer& buffer, std::uint32_t seed) override {
    for (std::size_t at = 0; at < buffer.bytes; ++at) {
      if (buffer.data[at] != pattern(seed, at)) return false;
    }
    return true;
  }
};

}  // namespace

std::unique_ptr<DeviceMemory> cpu_memory() { return std::make_unique<CpuMemory>(); }

}  // namespace tensorferry::conformance
