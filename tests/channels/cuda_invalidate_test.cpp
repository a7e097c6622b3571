/// Tests that memory which an allocator frees returns to the device, although a peer has mapped it. Compares the
/// device's free memory, so nothing else may use the device meanwhile.
#include <gtest/gtest.h>

#include <utility>

#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/cuda_ipc/messages.h"
#include "tests/agent/patience.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using tensorferry::testing::eventually;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

std::unique_ptr<Driver> driver() {
  return std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.within_process = true});
}

TEST(CudaIpc, InvalidatedMemoryIsUnmappedByThePeer) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  auto driver_a = driver(), driver_b = driver();
  const auto memory_b = cuda_memory(0, CudaKind::chunks);
  const auto memory_a = cuda_memory(0, CudaKind::chunks);
  WirePair pair(*driver_a, *driver_b, DevicePair{gpu, gpu}, *memory_a, *memory_b);
  ASSERT_TRUE(pair.a->wait_ready() && pair.b->wait_ready());
  const std::size_t large = 64 * megabyte;
  auto other = cuda_memory(0, CudaKind::chunks);
  memory_b->filled(large, 0);  // allocates the memory that will receive the buffer
  const auto before = free_bytes();
  auto buffer = other->filled(large, 3);
  const auto* const data = buffer.data;
  const auto released = pair.a->send(buffer);
  ASSERT_EQ(pair.b->receive().size(), 1u);
  ASSERT_EQ(released.wait_name(), "Ok");
  buffer = {};
  other.reset();
  EXPECT_LT(free_bytes() + large / 2, before) << "the peer has it mapped";
  invalidate_cuda_memory(data, large);
  EXPECT_TRUE(eventually([&] { return free_bytes() + large / 2 >= before; }));
}

/// As torch's expandable segments on machines with IMEX.
TEST(CudaIpc, MemoryThatOnlyAFabricHandleExportsIsRefusedWithTheTrueReason) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  auto driver_a = driver(), driver_b = driver();
  const auto memory = cuda_memory(0, CudaKind::chunks);
  WirePair pair(*driver_a, *driver_b, DevicePair{gpu, gpu}, *memory, *memory);
  ASSERT_TRUE(pair.a->wait_ready() && pair.b->wait_ready());
  const cuda::DeviceGuard here(0);
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  constexpr std::size_t bytes = 2 * megabyte;
  CUmemGenericAllocationHandle handle = 0;
  if (cuda::api()->mem_create(&handle, bytes, &wanted, 0) != CUDA_SUCCESS)
    GTEST_SKIP() << "this machine makes no memory with fabric handles";
  CUdeviceptr at = 0;
  ASSERT_EQ(cuda::api()->mem_address_reserve(&at, bytes, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuda::api()->mem_map(at, bytes, 0, handle, 0), CUDA_SUCCESS);
  Letter letter(*pair.a);
  EXPECT_FALSE(letter.offer({gpu, reinterpret_cast<std::byte*>(at), bytes, nullptr, {}}));
  EXPECT_NE(letter.refusal.find("fabric handle"), std::string::npos) << letter.refusal;
  cuda::api()->mem_unmap(at, bytes);
  cuda::api()->mem_address_free(at, bytes);
  cuda::api()->mem_release(handle);
}

/// Addresses of chunks of 2 MiB, the second of which begins at a window's edge. Makes the memory and frees it.
class AtTheEdge {
 public:
  AtTheEdge(std::size_t chunk, std::size_t chunks) : chunk_(chunk), bytes_(chunk * chunks) {
    for (CUdeviceptr number = 64; number < 400 && at_ == 0; ++number) {
      const auto wanted = (number << cuda_ipc::window_bits) - 2 * megabyte;
      if (cuda::api()->mem_address_reserve(&at_, bytes_, 0, wanted, 0) != CUDA_SUCCESS) at_ = 0;
      if (at_ == 0 || at_ == wanted) continue;
      cuda::api()->mem_address_free(std::exchange(at_, 0), bytes_);
    }
    if (at_ == 0) return;
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    const CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (std::size_t offset = 0; offset < bytes_; offset += chunk_) {
      CUmemGenericAllocationHandle handle = 0;
      EXPECT_EQ(cuda::api()->mem_create(&handle, chunk_, &wanted, 0), CUDA_SUCCESS);
      EXPECT_EQ(cuda::api()->mem_map(at_ + offset, chunk_, 0, handle, 0), CUDA_SUCCESS);
      EXPECT_EQ(cuda::api()->mem_release(handle), CUDA_SUCCESS);
      EXPECT_EQ(cuda::api()->mem_set_access(at_ + offset, chunk_, &access, 1), CUDA_SUCCESS);
    }
  }
  ~AtTheEdge() {
    if (at_ == 0) return;
    for (std::size_t offset = 0; offset < bytes_; offset += chunk_) cuda::api()->mem_unmap(at_ + offset, chunk_);
    cuda::api()->mem_address_free(at_, bytes_);
  }
  AtTheEdge(const AtTheEdge&) = delete;
  AtTheEdge& operator=(const AtTheEdge&) = delete;

  [[nodiscard]] bool made() const { return at_ != 0; }
  [[nodiscard]] Buffer buffer(std::size_t offset, std::size_t bytes) const {
    return {gpu, reinterpret_cast<std::byte*>(at_ + offset), bytes, nullptr, {}};
  }

 private:
  const std::size_t chunk_, bytes_;
  CUdeviceptr at_ = 0;
};

/// The receiver's windows need not be neighbours, so a buffer in two of them cannot be contiguous there.
TEST(CudaIpc, ABufferAcrossTheEdgeOfAWindowIsRefusedAndItsNeighboursTravel) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  auto driver_a = driver(), driver_b = driver();
  const auto memory = cuda_memory(0, CudaKind::chunks);
  WirePair pair(*driver_a, *driver_b, DevicePair{gpu, gpu}, *memory, *memory);
  ASSERT_TRUE(pair.a->wait_ready() && pair.b->wait_ready());
  const cuda::DeviceGuard here(0);
  for (const auto chunk : {2 * megabyte, 4 * megabyte}) {
    const AtTheEdge edge(chunk, 4 * megabyte / chunk);
    if (!edge.made()) GTEST_SKIP() << "the driver gives no such addresses";
    Letter across(*pair.a);
    EXPECT_FALSE(across.offer(edge.buffer(megabyte, 2 * megabyte)));
    EXPECT_NE(across.refusal.find("256 GiB"), std::string::npos) << across.refusal;
    if (chunk > 2 * megabyte) continue;  // one piece of physical memory lies across the edge
    for (const auto offset : {megabyte, 2 * megabyte}) {
      const auto source = edge.buffer(offset, megabyte);
      const auto seed = static_cast<std::uint32_t>(offset / megabyte);
      memory->fill(source, seed);
      const auto released = pair.a->send(source);
      const auto arrivals = pair.b->receive();
      ASSERT_EQ(arrivals.size(), 1U);
      EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
      EXPECT_TRUE(memory->holds(arrivals.front()->buffer, seed));
      EXPECT_EQ(released.wait_name(), "Ok");
    }
  }
}

/// With an allocator that has no trace tracker (torch's CUDAPluggableAllocator).
TEST(CudaIpc, MemoryOfAnAllocatorThatReportsNoFreesIsMappedForOneTransferAlone) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  leave_cuda_memory_untracked();
  auto driver_a = driver(), driver_b = driver();
  const auto memory_b = cuda_memory(0, CudaKind::chunks);
  const auto memory_a = cuda_memory(0, CudaKind::chunks);
  WirePair pair(*driver_a, *driver_b, DevicePair{gpu, gpu}, *memory_a, *memory_b);
  ASSERT_TRUE(pair.a->wait_ready() && pair.b->wait_ready());
  const std::size_t large = 64 * megabyte;
  {  // allocates the memory that will receive the buffers
    const auto first = memory_b->allocate(large), second = memory_b->allocate(large), third = memory_b->allocate(large);
  }
  const auto before = free_bytes();
  for (std::uint32_t seed = 3; seed < 6; ++seed) {
    auto other = cuda_memory(0, CudaKind::chunks);
    auto buffer = other->filled(large, seed);
    std::vector<Outcome> released;
    for (int i = 0; i < 3; ++i) {  // several uses of one export at a time
      Letter letter(*pair.a);
      letter.only_channel = i != 0;  // no export is made without a use that ends it
      ASSERT_TRUE(letter.offer(buffer)) << letter.refusal;
      letter.send();
      released.push_back(letter.released.front());
    }
    for (int i = 0; i < 3; ++i) {
      const auto arrivals = pair.b->receive();
      ASSERT_EQ(arrivals.size(), 1u);
      EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
      EXPECT_TRUE(memory_b->holds(arrivals.front()->buffer, seed));
    }
    for (const auto& each : released) ASSERT_EQ(each.wait_name(), "Ok");
    buffer = {};
    other.reset();
    EXPECT_TRUE(eventually([&] { return free_bytes() + large / 2 >= before; })) << "without a report of the free";
  }
}

}  // namespace
}  // namespace tensorferry::conformance
