/// Tests of what the cuda channels take of a device's memory and of page-locked memory, and that they give it back.
/// Nothing else may use the device meanwhile.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_basic/ring.h"
#include "channels/cuda_basic/slots.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/pinned_bytes.h"
#include "tests/agent/patience.h"
#include "tests/channels/blocked_stream.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using cuda::api;
using cuda::DeviceGuard;
using std::chrono::seconds;
using tensorferry::testing::eventually;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

/// All memory of the GPU but less than 2 MiB.
class FullGpu {
 public:
  FullGpu() {
    const DeviceGuard here(0);
    for (auto bytes = free_bytes(); bytes >= megabyte;) {
      CUdeviceptr at = 0;
      if (api()->mem_alloc(&at, bytes) == CUDA_SUCCESS)
        blocks_.push_back(at);
      else
        bytes /= 2;
    }
  }
  ~FullGpu() { empty(); }
  FullGpu(const FullGpu&) = delete;
  FullGpu& operator=(const FullGpu&) = delete;

  void empty() {
    const DeviceGuard here(0);
    for (const auto each : blocks_) api()->mem_free(each);
    blocks_.clear();
  }

 private:
  std::vector<CUdeviceptr> blocks_;
};

TEST(CudaIpc, APairThatAFullGpuKeptFromItsProbeIsProbedAgain) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  const auto memory_a = cuda_memory(0, CudaKind::chunks), memory_b = cuda_memory(0, CudaKind::chunks);
  const auto source = memory_a->filled(megabyte, 1);
  memory_b->filled(megabyte, 0);  // ahead of time: there will be no more memory
  CudaIpcDriver driver_a({.within_process = true}), driver_b({.within_process = true});
  FullGpu full;
  WirePair pair(driver_a, driver_b, DevicePair{gpu, gpu}, *memory_a, *memory_b);
  ASSERT_EQ(pair.a->wait_ready().value_or(Status()).code(), Code::resource_exhausted);
  ASSERT_EQ(pair.b->wait_ready().value_or(Status()).code(), Code::resource_exhausted);
  full.empty();
  for (auto* end : {pair.a.get(), pair.b.get()})
    EXPECT_TRUE(eventually([&] { return end->wait_ready().value_or(Status(Code::internal, "")).ok(); }, seconds(30)));
  const auto released = pair.a->send(source);
  const auto arrivals = pair.b->receive();
  ASSERT_EQ(arrivals.size(), 1U);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
  EXPECT_TRUE(memory_b->holds(arrivals.front()->buffer, 1));
  EXPECT_EQ(released.wait_name(), "Ok");
}

/// A message of a pair whose faster channel is still being probed.
class Interim final : public Outgoing {
 public:
  explicit Interim(bool for_now) : for_now_(for_now) {}
  [[nodiscard]] bool appends() const override { return false; }
  void append(Buffer, Completion) override {}
  [[nodiscard]] bool last_resort() const override { return true; }
  [[nodiscard]] bool for_now() const override { return for_now_; }

 private:
  const bool for_now_;
};

class CudaPinnedMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
    memory = cuda_memory(0);
    pair = std::make_unique<WirePair>(driver, driver, DevicePair{gpu, gpu}, *memory, *memory);
  }
  void send(std::size_t bytes, std::uint32_t seed) {
    const auto released = pair->a->send(memory->filled(bytes, seed));
    const auto arrivals = pair->b->receive();
    ASSERT_EQ(arrivals.size(), 1U);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrivals.front()->buffer, seed));
    EXPECT_EQ(released.wait_name(), "Ok");
  }
  static constexpr auto of_slots = cuda_basic::Slots::made_at_once * cuda_basic::most_chunk_bytes;
  static constexpr auto of_ring = cuda_basic::Ring::bytes;

  std::unique_ptr<DeviceMemory> memory;
  CudaBasicDriver driver{cuda_basic::CudaBasicOptions{.ring_idle = seconds(2)}};
  std::unique_ptr<WirePair> pair;
};

TEST_F(CudaPinnedMemory, IsMadeAtFirstUseSharedByAllLinksAndGivenBackWhenIdle) {
  EXPECT_EQ(pinned_bytes(), 0U) << "nothing was sent";
  {
    Interim interim(true);
    const auto offer = pair->a->channel().offer(memory->filled(megabyte, 1), Sharing::by_value, interim, {});
    ASSERT_TRUE(std::holds_alternative<Ticket>(offer));
    pair->a->channel().withdraw(std::get<Ticket>(offer));
  }
  await_background();
  EXPECT_LE(pinned_bytes(), 2 * of_slots) << "no ring, because a faster channel will carry";
  send(megabyte, 2);
  EXPECT_TRUE(eventually([&] { return pinned_bytes() >= 2 * of_ring; }, seconds(60))) << "a ring, at both ends";
  send(20 * megabyte, 3);
  auto with_ring = pinned_bytes().load();
  EXPECT_TRUE(eventually([&] {  // a background thread may still lock more
    const auto before = with_ring;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    with_ring = pinned_bytes();
    return with_ring == before;
  }));
  WirePair other(driver, driver, DevicePair{gpu, gpu}, *memory, *memory);
  Interim interim(true);
  const auto offer = other.a->channel().offer(memory->filled(megabyte, 4), Sharing::by_value, interim, {});
  ASSERT_TRUE(std::holds_alternative<Ticket>(offer));
  other.a->channel().withdraw(std::get<Ticket>(offer));
  await_background();
  EXPECT_LE(pinned_bytes(), with_ring) << "another link uses the same slots";
  EXPECT_TRUE(eventually([&] { return pinned_bytes() == 0; }, seconds(120))) << pinned_bytes() << " bytes are left";
  send(20 * megabyte, 5);  // it works again, with a ring that begins in the middle of the count
  EXPECT_TRUE(eventually([&] { return pinned_bytes() >= 2 * of_ring; }, seconds(60)));
  for (std::uint32_t seed = 6; seed < 12; ++seed) send(20 * megabyte, seed);
}

TEST_F(CudaPinnedMemory, IsBoundedAndBuffersArriveWithoutIt) {
  std::vector<cuda::Pinned> all;
  while (true) {
    auto more = cuda::Pinned::lock(*SharedMemory::create(64 * megabyte), 0);
    if (!more.ok()) {
      EXPECT_EQ(more.status().code(), Code::resource_exhausted);
      break;
    }
    all.push_back(std::move(*more));
    ASSERT_LE(pinned_bytes(), cuda::Pinned::most_bytes);
  }
  EXPECT_GE(pinned_bytes() + 64 * megabyte, cuda::Pinned::most_bytes);
  for (std::uint32_t seed = 1; seed < 4; ++seed) send(20 * megabyte, seed);  // without a ring
  EXPECT_LE(pinned_bytes(), cuda::Pinned::most_bytes + 2 * cuda_basic::Slots::most * cuda_basic::most_chunk_bytes);
}

}  // namespace
}  // namespace tensorferry::conformance
