// Agents with tensors on GPUs, without torch; on emulated GPUs too. Agents leave right after their first calls, or
// while calls are in flight.
#include <gtest/gtest.h>

#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

/// Receive memory on a GPU, from the conformance suite's device memory.
class GpuMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device) override { return memory->allocate(bytes); }
  const std::unique_ptr<conformance::DeviceMemory> memory =
      conformance::cuda_memory(gpu.index, conformance::CudaKind::chunks);
};

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = conformance::why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
    memory = std::make_shared<GpuMemory>();
  }
  std::shared_ptr<RawAgent> join_store(const std::shared_ptr<Store>& store, const std::string& name) {
    return join(store, name, {}, [&](RawAgentOptions& options) {
      // One process has both ends, so cuda_ipc must map memory of its own process.
      options.registry.add("cuda_ipc", 80, [] {
        return std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.within_process = true});
      });
      options.channels = "cuda_ipc,cuda_basic,basic";
      options.devices = {Device{}, gpu};
      options.memory.emplace(DeviceType::cuda, memory);
    });
  }
  Message filled(std::size_t bytes, std::uint32_t seed) {
    auto message = message_of("m");
    message.buffers = {memory->memory->filled(bytes, seed)};
    message.destinations = {{gpu}};
    return message;
  }
  std::shared_ptr<GpuMemory> memory;
};

TEST_F(OnGpu, TheFirstCallByEachChannelIsCorrectAndAnAgentMayLeaveRightAfterIt) {
  for (int i = 0; i < rounds(5'000); ++i) {
    const auto store = std::make_shared<MemoryStore>();
    const auto a = join_store(store, "a"), b = join_store(store, "b");
    serve_echo(*b);
    auto options = within(seconds(60));
    options.require = i % 2 == 0 ? "cuda_basic" : "cuda_ipc";
    const auto seed = static_cast<std::uint32_t>(i);
    const auto reply = call_sync(*a, "b", "echo", filled(megabyte + seed, seed), options);
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_TRUE(memory->memory->holds(reply->buffers.at(0), seed));
    EXPECT_GT(a->counters().bytes_sent[options.require], 0U);
    if (i % 3 == 0) b->leave();
    a->leave();
    b->leave();
  }
}

TEST_F(OnGpu, CallsUnderWayEndWithTheAgentAndReleaseTheirMemory) {
  for (int i = 0; i < rounds(1'000); ++i) {
    const auto store = std::make_shared<MemoryStore>();
    const auto a = join_store(store, "a"), b = join_store(store, "b");
    serve_echo(*b);
    std::vector<std::weak_ptr<void>> sources;
    std::vector<Call> calls;
    for (std::uint32_t k = 0; k < 8; ++k) {
      auto message = filled(megabyte, k);
      sources.push_back(message.buffers[0].owner);
      calls.push_back(a->call("b", "echo", std::move(message), within(seconds(60))));
    }
    if (i % 2 == 0) (void)calls[0].wait();
    (i % 4 < 2 ? a : b)->leave();
    for (auto& call : calls) EXPECT_TRUE(call.wait(Clock().now() + long_enough));
    a->leave();
    b->leave();
    calls.clear();
    for (const auto& source : sources) EXPECT_TRUE(eventually([&] { return source.expired(); }));
  }
}

}  // namespace
}  // namespace tensorferry
