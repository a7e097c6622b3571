/// A transfer of one buffer of 4 GiB + 1, a size that no 32-bit number holds. Source and destination are both in
/// memory, so the test is skipped on machines with too little of it.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <string>

#include "channels/basic/basic_channel.h"
#include "channels/host_memory.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

constexpr std::size_t gibibyte = std::size_t{1} << 30;

std::size_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name; meminfo >> name;) {
    std::size_t kilobytes = 0;
    if (name == "MemAvailable:" && meminfo >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

/// Pooled memory with a cheap pattern: one value everywhere, and a few marked bytes, so that few pages are touched
/// twice.
class PooledMemory final : public DeviceMemory {
 public:
  Buffer allocate(std::size_t bytes) override { return pool_.allocate(bytes, Device{}); }
  void fill(const Buffer& buffer, std::uint32_t seed) override {
    std::memset(buffer.data, static_cast<int>(seed), buffer.bytes);
    for (std::size_t at = 0; at < buffer.bytes; at += gibibyte / 16) buffer.data[at] = pattern(seed, at);
    buffer.data[buffer.bytes - 1] = std::byte{0xa5};
  }
  bool holds(const Buffer&, std::uint32_t) override { return false; }

 private:
  HostMemory pool_{{.idle_bytes = 0, .floor_bytes = 0, .idle_for = std::chrono::seconds(0)}};
};

TEST(BasicLarge, CarriesMoreThanFourGibibytes) {
  if (available_bytes() < 14 * gibibyte) GTEST_SKIP() << "less than 14 GiB of memory are available";
  constexpr std::size_t bytes = 4 * gibibyte + 1;
  BasicDriver driver;
  PooledMemory memory;
  WirePair pair(driver, driver, {}, memory, memory);
  const auto source = memory.filled(bytes, 3);
  const auto released = pair.a->send(source);
  const auto arrivals = pair.b->receive(std::chrono::minutes(4));  // a virtual machine may be slow to get its pages
  ASSERT_EQ(arrivals.size(), 1u);
  ASSERT_EQ(arrivals.front()->landed.wait_name(), "Ok");
  EXPECT_EQ(released.wait_name(), "Ok");
  ASSERT_EQ(arrivals.front()->buffer.bytes, bytes);
  EXPECT_EQ(std::memcmp(arrivals.front()->buffer.data, source.data, bytes), 0);
}

}  // namespace
}  // namespace tensorferry::conformance
