#include "channels/host_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/agent/forked.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using tensorferry::testing::in_child;
using tensorferry::testing::under_sanitizer;

constexpr Device cpu{};
constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

bool aligned(const Buffer& buffer, std::size_t to) { return reinterpret_cast<std::uintptr_t>(buffer.data) % to == 0; }

TEST(HostMemory, GivesWritableAlignedMemoryOfEverySize) {
  HostMemory memory;
  for (std::size_t size : {0ul, 1ul, 63ul, 64ul, 4095ul, 4096ul, 4097ul, 65535ul, 65536ul, 65537ul, 3 * megabyte + 1}) {
    const auto buffer = memory.allocate(size, cpu);
    ASSERT_NE(buffer.data, nullptr) << size;
    EXPECT_EQ(buffer.bytes, size);
    EXPECT_TRUE(aligned(buffer, size < 65536 ? 64 : 4096)) << size;
    if (size > 0) std::memset(buffer.data, 0x5a, size);
  }
}

TEST(HostMemory, LargeBlocksBeginAtAHugePage) {
  HostMemory memory;
  for (std::size_t size : {2 * megabyte, 5 * megabyte + 3, 64 * megabyte}) {
    EXPECT_TRUE(aligned(memory.allocate(size, cpu), 2 * megabyte)) << size;
  }
}

TEST(HostMemory, NoBlockIsMoreThanAQuarterLargerThanAskedFor) {
  HostMemory memory;
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    const auto power = std::uniform_int_distribution<int>(12, 30)(random);
    const auto size = (std::size_t{1} << power) + random() % (std::size_t{1} << power);
    const auto buffer = memory.allocate(size, cpu);  // never touched, so it costs address space only
    ASSERT_NE(buffer.data, nullptr);
    const auto held = memory.usage().held_bytes;
    EXPECT_GE(held, size);
    EXPECT_LE(held, size + size / 4);
  }
}

TEST(HostMemory, ManySmallBuffersCostLittleMoreThanTheirBytes) {
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    std::size_t size = 0, pages = 0;
    statm >> size >> pages;
    return pages * 4096;
  };
  constexpr std::size_t count = 20'000, bytes = 5000;
  HostMemory memory;
  std::vector<Buffer> held;
  held.reserve(count);
  const auto before = resident();
  for (std::size_t i = 0; i < count; ++i) {
    held.push_back(memory.allocate(bytes, cpu));
    std::memset(held.back().data, 1, bytes);
  }
  const auto grown = resident() - before;
  if (under_sanitizer) GTEST_SKIP() << "a sanitizer's own memory counts as the process's";
  EXPECT_LE(grown, count * bytes * 13 / 10);
}

TEST(HostMemory, TheMostRecentlyFreedBlockIsReusedFirst) {
  HostMemory memory;
  for (std::size_t size : {8 * kilobyte, 128 * kilobyte, 4 * megabyte}) {
    auto first = memory.allocate(size, cpu);
    auto second = memory.allocate(size, cpu);
    const auto *const first_at = first.data, *const second_at = second.data;
    EXPECT_NE(first_at, second_at);
    first = {};
    second = {};
    auto again = memory.allocate(size - 1, cpu);  // of the same size class
    auto then = memory.allocate(size, cpu);
    EXPECT_EQ(again.data, second_at);
    EXPECT_EQ(then.data, first_at);
  }
}

TEST(HostMemory, ABlockIsKeptUntilItsLastHolderReleasesIt) {
  HostMemory memory;
  auto buffer = memory.allocate(megabyte, cpu);
  Owner second = buffer.owner;
  buffer = {};
  EXPECT_EQ(memory.usage().held_bytes, megabyte);
  second.reset();
  EXPECT_EQ(memory.usage().held_bytes, 0u);
  EXPECT_EQ(memory.usage().idle_bytes, megabyte);
}

TEST(HostMemory, IdleBytesAreBounded) {
  HostMemory memory({.idle_bytes = 4 * megabyte, .floor_bytes = 0, .idle_for = std::chrono::seconds(0)});
  std::vector<Buffer> buffers;
  for (int i = 0; i < 16; ++i) buffers.push_back(memory.allocate(megabyte, cpu));
  EXPECT_EQ(memory.usage().held_bytes, 16 * megabyte);
  buffers.clear();
  EXPECT_EQ(memory.usage().held_bytes, 0u);
  EXPECT_EQ(memory.usage().idle_bytes, 4 * megabyte);
}

TEST(HostMemory, TrimKeepsTheFloorAndRecentlyUsedBlocks) {
  HostMemory expires({.idle_bytes = 64 * megabyte, .floor_bytes = 3 * megabyte, .idle_for = std::chrono::seconds(0)});
  HostMemory keeps({.idle_bytes = 64 * megabyte, .floor_bytes = 3 * megabyte, .idle_for = std::chrono::hours(1)});
  for (auto* memory : {&expires, &keeps}) {
    std::vector<Buffer> buffers;
    for (int i = 0; i < 8; ++i) buffers.push_back(memory->allocate(megabyte, cpu));
    buffers.clear();
    memory->trim();
  }
  EXPECT_EQ(expires.usage().idle_bytes, 3 * megabyte);
  EXPECT_EQ(keeps.usage().idle_bytes, 8 * megabyte);
}

TEST(HostMemory, ABlockOutlivesItsPool) {
  std::optional<HostMemory> memory(std::in_place);
  auto idle = memory->allocate(megabyte, cpu);
  auto buffer = memory->allocate(megabyte, cpu);
  auto small = memory->allocate(100, cpu);
  idle = {};
  memory.reset();
  std::memset(buffer.data, 1, buffer.bytes);
  std::memset(small.data, 1, small.bytes);
  buffer = {};  // the sanitizers check that this frees correctly
}

TEST(HostMemory, RefusesImpossibleSizesAndOtherDevices) {
  HostMemory memory;
  EXPECT_EQ(memory.allocate(std::size_t{1} << 63, cpu).data, nullptr);
  EXPECT_EQ(memory.allocate(~std::size_t{0}, cpu).data, nullptr);
  EXPECT_EQ(memory.allocate(std::size_t{1} << 48, cpu).data, nullptr);
  EXPECT_EQ(memory.allocate(100, Device{DeviceType::cuda, 0}).data, nullptr);
  EXPECT_EQ(memory.usage().held_bytes, 0u);
}

TEST(HostMemory, ManyThreadsShareOnePool) {
  HostMemory memory({.idle_bytes = 8 * megabyte, .floor_bytes = megabyte, .idle_for = std::chrono::seconds(0)});
  std::atomic<bool> mixed{false};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<Buffer> held;
      for (int i = 0; i < 5000; ++i) {
        auto buffer = memory.allocate(1 + random() % (256 * kilobyte), cpu);
        std::memset(buffer.data, static_cast<int>(seed), std::min<std::size_t>(buffer.bytes, 64));
        held.push_back(std::move(buffer));
        if (held.size() < 8) continue;
        const auto at = random() % held.size();
        const auto marked = std::min<std::size_t>(held[at].bytes, 64);
        for (std::size_t b = 0; b < marked; ++b) mixed = mixed || held[at].data[b] != std::byte(seed);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
        if (i % 500 == 0) memory.trim();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(mixed);
  EXPECT_EQ(memory.usage().held_bytes, 0u);
  EXPECT_LE(memory.usage().idle_bytes, 8 * megabyte);
}

TEST(HostMemory, AForkedChildReleasesABlockWithoutHarm) {
  auto memory = std::make_unique<HostMemory>();
  // Another thread is inside the pool most of the time, so the child inherits the pool's locks in any state.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) (void)memory->allocate(8 * kilobyte, cpu);
  });
  for (int round = 0; round < 20; ++round) {
    auto buffer = memory->allocate(8 * kilobyte, cpu);
    std::memset(buffer.data, 42, buffer.bytes);
    EXPECT_EQ(in_child([&] {
                const bool readable = buffer.data[100] == std::byte{42};
                buffer = {};
                const auto own = memory->allocate(8 * kilobyte, cpu);
                std::memset(own.data, 7, own.bytes);
                memory->trim();
                memory.reset();
                return readable ? 0 : 1;
              }),
              0);
    EXPECT_EQ(buffer.data[100], std::byte{42});
  }
  stop = true;
  busy.join();
  EXPECT_EQ(memory->usage().held_bytes, 0u);
}

}  // namespace
}  // namespace tensorferry
