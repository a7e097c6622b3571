/// Tests that memory which an allocator frees returns to the device, although a peer has mapped it. Compares the
/// device's free memory, so nothing else may use the device meanwhile.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "tests/agent/patience.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using tensorferry::testing::eventually;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

std::size_t free_bytes() {
  const cuda::DeviceGuard here(0);
  std::size_t free = 0, total = 0;
  const auto ask =
      reinterpret_cast<decltype(&::cuMemGetInfo)>(::dlsym(::dlopen("libcuda.so.1", RTLD_NOW), "cuMemGetInfo_v2"));
  ask(&free, &total);
  return free;
}

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
  const std::size_t large = 400 * megabyte;
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

}  // namespace
}  // namespace tensorferry::conformance
