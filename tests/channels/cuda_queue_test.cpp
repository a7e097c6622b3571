/// A process whose streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as programs with Megatron set it):
/// what waits in the queue holds up all work behind it, of other streams too.
#include <gtest/gtest.h>

#include <cstdlib>
#include <future>
#include <thread>

#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "tests/agent/patience.h"
#include "tests/conformance/child.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {
namespace {

using cuda::api;
using cuda::DeviceGuard;
using tensorferry::testing::eventually;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

/// Loops until the word at `word` is not 0. It is the half of a collective that waits for the other process.
constexpr auto spinning_kernel = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 word) {
  .reg .u64 %address;
  .reg .u32 %value;
  .reg .pred %zero;
  ld.param.u64 %address, [word];
again:
  ld.volatile.global.u32 %value, [%address];
  setp.eq.u32 %zero, %value, 0;
  @%zero bra again;
  ret;
}
)";

/// Enqueues the spinning kernel on a real GPU. The emulated one has no kernels; there the stream waits for the word.
void enqueue_kernel_until(cuda::Word word, CUstream stream) {
  const auto load = driver_function<decltype(&::cuModuleLoadData)>("cuModuleLoadData");
  if (load == nullptr) {
    ASSERT_EQ(word.wait_on(stream, 1), CUDA_SUCCESS);
    return;
  }
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  ASSERT_EQ(load(&module, spinning_kernel), CUDA_SUCCESS);
  ASSERT_EQ(driver_function<decltype(&::cuModuleGetFunction)>("cuModuleGetFunction")(&function, module, "spin"),
            CUDA_SUCCESS);
  void* arguments[] = {&word.device};
  ASSERT_EQ(driver_function<decltype(&::cuLaunchKernel)>("cuLaunchKernel")(function, 1, 1, 1, 1, 1, 1, 0, stream,
                                                                           arguments, nullptr),
            CUDA_SUCCESS);
}

/// Receives by a stream that waits for the sender's, also if the environment says otherwise.
struct WaitingStream {
  static std::unique_ptr<Driver> make() {
    return std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.wait = cuda_ipc::CudaIpcOptions::Wait::by_stream});
  }
  static constexpr bool holds_up = true;
};
struct Ipc {
  static std::unique_ptr<Driver> make() { return std::make_unique<CudaIpcDriver>(); }
  static constexpr bool holds_up = false;
};
struct Basic {
  static std::unique_ptr<Driver> make() { return std::make_unique<CudaBasicDriver>(); }
  static constexpr bool holds_up = false;
};

template <class DriverOf>
class CudaQueue : public ::testing::Test {};
using QueueDrivers = ::testing::Types<Ipc, Basic, WaitingStream>;
TYPED_TEST_SUITE(CudaQueue, QueueDrivers);

/// The sender's kernel waits for the receiver's part of a collective, which the receiver enqueues after it has begun to
/// receive. If a stream of the receiver waits for the sender, that part stays behind it in the one queue, and both
/// processes wait for each other for good; so cuda_ipc waits on the host there. The third case shows the reason.
TYPED_TEST(CudaQueue, ABufferBehindACollectiveDoesNotHoldUpTheReceiversPartOfIt) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  auto collective = SharedMemory::create(4096);
  ASSERT_TRUE(collective.ok());
  auto for_child = collective->share();
  ASSERT_TRUE(for_child.ok());
  auto [mine, theirs] = connected_sockets();
  Child child(std::move(theirs), mine, [&](WireEnd::Sockets sockets) {
    auto page = cuda::Pinned::lock(*SharedMemory::map(std::move(*for_child), 4096), 0);
    const auto memory = cuda_memory(0);
    const auto driver = TypeParam::make();
    WireEnd end("parent", *driver, {gpu, gpu}, *memory, std::move(sockets));
    end.start();
    (void)end.wait_ready();
    auto source = memory->filled(megabyte, 1);
    CUstream stream = nullptr;
    {
      const DeviceGuard here(0);
      api()->stream_create(&stream, CU_STREAM_NON_BLOCKING);
      enqueue_kernel_until(cuda::word_at(*page, 0), stream);
      api()->memset_async(cuda::address_of(source.data), 0x5a, megabyte, stream);
    }
    source.stream = stream;
    const auto released = end.send(source);
    const bool sent = released.wait_name() == "Ok";
    return eventually([&] { return cuda::word_at(*page, sizeof(std::uint32_t)).reached(1); }, patience) && sent
               ? 0
               : 1;  // the receiver has it
  });
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  auto page = cuda::Pinned::lock(std::move(*collective), 0);
  ASSERT_TRUE(page.ok());
  const auto word = cuda::word_at(*page, 0);
  const auto memory = cuda_memory(0);
  const auto driver = TypeParam::make();
  WireEnd end("child", *driver, {gpu, gpu}, *memory, std::move(mine));
  std::shared_ptr<Arrival> arrival;
  std::promise<void> pulled;
  end.behave({.on_message = [&](Arrivals& arrivals) {
    arrival = arrivals.front();
    end.pull(arrival);
    pulled.set_value();
  }});
  end.start();
  ASSERT_TRUE(end.wait_ready().has_value());
  pulled.get_future().wait();
  if (TypeParam::holds_up) {  // a buffer lands in its stream's order, so its stream waits now
    ASSERT_EQ(arrival->landed.wait_name(), "Ok");
  }
  CUstream stream = nullptr;
  {
    const DeviceGuard here(0);
    ASSERT_EQ(api()->stream_create(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    ASSERT_EQ(word.write_on(stream, 1), CUDA_SUCCESS);
  }
  const auto limit = TypeParam::holds_up ? std::chrono::seconds(1) : patience;
  EXPECT_EQ(eventually([&] { return word.reached(1); }, limit), !TypeParam::holds_up)
      << "whether the receiver's part waits behind the buffer";
  word.set(1);  // ends the sender's kernel if it still waits
  EXPECT_EQ(arrival->landed.wait_name(), "Ok");
  std::vector<std::byte> found(megabyte);
  const DeviceGuard here(0);
  auto* const landed_on = static_cast<CUstream>(arrival->buffer.stream);
  ASSERT_EQ(
      api()->memcpy_async(cuda::address_of(found.data()), cuda::address_of(arrival->buffer.data), megabyte, landed_on),
      CUDA_SUCCESS);
  while (api()->stream_query(landed_on) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
  EXPECT_EQ(found, std::vector<std::byte>(megabyte, std::byte{0x5a}));
  cuda::word_at(*page, sizeof(std::uint32_t)).set(1);
  EXPECT_EQ(child.wait(), 0);
  end.finish();
}

}  // namespace
}  // namespace tensorferry::conformance
