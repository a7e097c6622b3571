// Two processes of one host that see different GPUs, and GPUs without access to each other's memory.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "tests/agent/agents.h"
#include "tests/agent/folder_store.h"
#include "tests/agent/patience.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

constexpr std::size_t megabyte = 1 << 20;

class GpuMemory final : public Memory {
 public:
  explicit GpuMemory(int device) : memory(conformance::cuda_memory(device)) {}
  Buffer allocate(std::size_t bytes, Device) override { return memory->allocate(bytes); }
  const std::unique_ptr<conformance::DeviceMemory> memory;
};

std::shared_ptr<RawAgent> join_on(Device gpu, const std::shared_ptr<Store>& store, const std::string& name,
                                  const std::shared_ptr<GpuMemory>& memory) {
  return join(store, name, {}, [&](RawAgentOptions& options) {
    options.channels = "cuda_ipc,cuda_basic,basic";
    options.devices = {Device{}, gpu};
    options.memory.emplace(DeviceType::cuda, memory);
  });
}

/// The parent sees both GPUs, and so that they have no access to each other's memory, if they have none. The child sees
/// the second GPU alone, as its first one.
TEST(GpuVisibility, TheFirstTensorBetweenProcessesThatSeeDifferentGpusArrives) {
  ::setenv("EMULATED_GPU_PEER_ACCESS", "0", 1);
  std::string folder = "/tmp/tensorferry-visibility-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const auto child = ::fork();
  if (child == 0) {
    ::setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    constexpr Device gpu{DeviceType::cuda, 0};
    const auto store = std::make_shared<FolderStore>(folder);
    const auto agent = join_on(gpu, store, "b", std::make_shared<GpuMemory>(gpu.index));
    if (!agent) ::_exit(1);
    serve_echo(*agent);
    (void)store->get("over", seconds(60));
    agent->leave();
    ::_exit(0);
  }
  if (const auto why = conformance::why_no_cuda(2); !why.empty()) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    std::filesystem::remove_all(folder);
    GTEST_SKIP() << why;
  }
  constexpr Device gpu{DeviceType::cuda, 0};
  const auto store = std::make_shared<FolderStore>(folder);
  const auto memory = std::make_shared<GpuMemory>(gpu.index);
  const auto a = join_on(gpu, store, "a", memory);
  ASSERT_TRUE(a);
  for (std::uint32_t seed = 1; seed <= 3; ++seed) {
    auto message = message_of("m");
    message.buffers = {memory->memory->filled(megabyte, seed)};
    message.destinations = {{gpu}};
    auto reply = Result<Received>(Status(Code::not_found, ""));
    eventually([&] {  // until the child has joined
      reply = call_sync(*a, "b", "echo", message, within(long_enough));
      return reply.status().code() != Code::not_found;
    });
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_TRUE(memory->memory->holds(reply->buffers.at(0), seed));
  }
  (void)store->set("over", view_of("yes"));
  a->leave();
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tensorferry
