// Regions on GPUs: by the owner's agent, and mapped, here within one process.
#include <gtest/gtest.h>

#include "agent/rendezvous/memory_store.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/device.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/rpc/regions/region_agents.h"

namespace tensorferry::testing {
namespace {

using regions::Reach;
using regions::Runs;

constexpr std::size_t bytes = std::size_t{1} << 20;

class GpuRegions : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(1);
    if (!missing.empty()) GTEST_SKIP() << missing;
    const cuda::DeviceGuard here(0);
    ASSERT_EQ(cuda::api()->mem_alloc(&address, bytes), CUDA_SUCCESS);
    auto* const data = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    memory = {{DeviceType::cuda, 0}, data, bytes, nullptr, {}};
    copy(cuda::address_of(data), cuda::address_of(pattern.data), bytes);
  }
  void TearDown() override {
    if (address == 0) return;
    const cuda::DeviceGuard here(0);
    cuda::api()->mem_free(address);
  }
  static void copy(CUdeviceptr to, CUdeviceptr from, std::size_t size) {
    const cuda::DeviceGuard here(0);
    cuda::CopyTimer timer;
    timer.copy(to, from, size);
    EXPECT_TRUE(timer.wait("a test's copy").ok());
  }
  /// Opens a region of `memory` at the reader.
  std::shared_ptr<regions::RemoteRegion> open(Reach most) {
    const auto id = owner.owned->add(memory, {true, true, {}});
    EXPECT_TRUE(id.ok()) << id.status().text();
    reader.remote->reach_at_most(most);
    auto region = reader.remote->open(owner.key_of(*id));
    EXPECT_TRUE(region.ok()) << region.status().text();
    return region.ok() ? *region : nullptr;
  }

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  RegionAgent owner{store, "owner", {"ring", ""}};
  RegionAgent reader{store, "reader", {"ring", ""}};
  const Buffer pattern = patterned(bytes);
  CUdeviceptr address = 0;
  Buffer memory;
};

TEST_F(GpuRegions, AreReadAndWrittenByTheOwnersAgent) {
  const auto region = open(Reach::served);
  ASSERT_NE(region, nullptr);
  EXPECT_TRUE(region->on_gpu());
  EXPECT_EQ(region->reach(), Reach::served);
  EXPECT_EQ(region->map_on(0, false).status().code(), Code::channel_unavailable);
  const Runs runs{100, {7, 500'000, 3}};
  const auto into = patterned(runs.bytes(), 9);
  const auto read = region->read(runs, into);
  ASSERT_TRUE(read.ok()) << read.text();
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(same_bytes(part_of(into, 100 * i, 100), part_of(pattern, runs.offsets[i], 100))) << i;
  const auto from = patterned(64, 5);
  ASSERT_TRUE(region->write(Runs::one(1000, 64), from, 3).ok());
  const auto back = patterned(64, 6);
  ASSERT_TRUE(region->read(Runs::one(1000, 64), back).ok());
  EXPECT_TRUE(same_bytes(back, from));
  EXPECT_EQ(region->read(Runs::one(bytes - 10, 64), back).code(), Code::invalid_argument);
}

TEST_F(GpuRegions, MemoryOfAGpuTakesServedBytesByWayOfTheHost) {
  const auto on_gpu = open(Reach::served);
  const auto in_host = patterned(bytes);
  const auto id = owner.owned->add(in_host, {true, true, {}});
  const auto on_host = reader.remote->open(owner.key_of(*id));
  ASSERT_TRUE(on_gpu != nullptr && on_host.ok());
  const Buffer here{memory.device, memory.data + 500'000, 300, nullptr, {}};  // beside what is read and written
  for (const auto& region : {on_gpu, *on_host}) {
    const auto read = region->read({100, {7, 400'000, 3}}, here);
    ASSERT_TRUE(read.ok()) << read.text();
    const auto written = region->write(Runs::one(200'000, 300), here);
    ASSERT_TRUE(written.ok()) << written.text();
    const auto back = patterned(300, 9);
    ASSERT_TRUE(region->read(Runs::one(200'000, 300), back).ok());
    std::size_t at = 0;
    for (const std::size_t offset : {7, 400'000, 3}) {
      EXPECT_TRUE(same_bytes(part_of(back, at, 100), part_of(pattern, offset, 100))) << offset;
      at += 100;
    }
    EXPECT_EQ(region->read(Runs::one(0, 100), here).code(), Code::invalid_argument);
  }
}

TEST_F(GpuRegions, AreMappedAndTheirEndIsSeen) {
  const auto region = open(Reach::mapped);
  ASSERT_NE(region, nullptr);
  ASSERT_EQ(region->reach(), Reach::mapped);
  const auto mapped = region->map_on(0, true);
  ASSERT_TRUE(mapped.ok()) << mapped.status().text();
  EXPECT_EQ(mapped->bytes, bytes);
  const auto into = patterned(bytes, 9);
  copy(cuda::address_of(into.data), cuda::address_of(mapped->data), bytes);
  EXPECT_TRUE(region->alive().ok());
  EXPECT_TRUE(same_bytes(into, pattern));
  ASSERT_TRUE(owner.owned->drop(region->id()).ok());
  EXPECT_EQ(region->alive().code(), Code::not_found);
  EXPECT_EQ(region->map_on(0, false).status().code(), Code::not_found);
}

TEST_F(GpuRegions, AreMappedWithinTheRightsOfTheGrant) {
  const auto id = owner.owned->add(memory, {});
  const auto region = reader.remote->open(owner.key_of(*id));
  ASSERT_TRUE(region.ok());
  EXPECT_EQ((*region)->map_on(0, true).status().code(), Code::permission_denied);
  EXPECT_TRUE((*region)->map_on(0, false).ok());
}

TEST_F(GpuRegions, AreMappedByOneGpuIfAnotherCannot) {
  const auto region = open(Reach::mapped);
  ASSERT_NE(region, nullptr);
  ASSERT_TRUE(region->map_on(0, false).ok());
  EXPECT_FALSE(region->map_on(77, false).ok()) << "there is no such GPU";
  EXPECT_EQ(region->reach(), Reach::mapped);
  EXPECT_TRUE(region->map_on(0, false).ok());
  EXPECT_EQ(region->map_on(77, false).status().code(), Code::channel_unavailable);
}

// In a process of its own, in which no other test has used the first GPU.
TEST(SecondGpu, IsTheOnlyOneThatAReadByItUses) {
  const auto missing = conformance::why_no_cuda(2);
  if (!missing.empty()) GTEST_SKIP() << missing;
  if (cuda::device_in_use()) GTEST_SKIP() << "this process has used a GPU before";
  const auto store = std::make_shared<MemoryStore>();
  RegionAgent owner(store, "owner", {"ring", ""}), reader(store, "reader", {"ring", ""});
  CUdeviceptr address = 0;
  {
    const cuda::DeviceGuard here(1);
    ASSERT_EQ(cuda::api()->mem_alloc(&address, bytes), CUDA_SUCCESS);
  }
  auto* const data = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  const auto id = owner.owned->add({{DeviceType::cuda, 1}, data, bytes, nullptr, {}}, {});
  ASSERT_TRUE(id.ok()) << id.status().text();
  {
    const auto region = *reader.remote->open(owner.key_of(*id));
    const auto mapped = region->map_on(1, false);
    ASSERT_TRUE(mapped.ok()) << mapped.status().text();
    EXPECT_EQ(mapped->device.index, 1);
    const auto word = region->word_on(1);
    ASSERT_TRUE(word.ok()) << word.status().text();
    EXPECT_EQ(cuda::device_in_use(), 1);
  }
  const cuda::DeviceGuard here(1);
  EXPECT_EQ(cuda::api()->mem_free(address), CUDA_SUCCESS);
}

}  // namespace
}  // namespace tensorferry::testing
