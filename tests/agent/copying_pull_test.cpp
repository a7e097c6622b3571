// Channels that copy inside pull(): a large buffer is copied on a thread that nothing else waits for.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "channels/cma/cma_channel.h"
#include "channels/host_memory.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

thread_local bool inside_executor = false;

class MarkingExecutor final : public Executor {
 public:
  void* attach() override { return nullptr; }
  void enter(void*) override { inside_executor = true; }
  void leave(void*) override { inside_executor = false; }
  void detach(void*) override {}
};

/// Receive memory whose large allocations last until release(). A channel that copies allocates on the thread that
/// copies, so a pull lasts as long.
class SlowMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    if (bytes >= large) {
      std::unique_lock lock(mutex_);
      ++waiting;
      inside = inside_executor;
      changed_.wait_for(lock, 3 * long_enough, [&] { return released_; });
    }
    return pool_.allocate(bytes, device);
  }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

  static constexpr std::size_t large = std::size_t{64} << 10;
  std::atomic<int> waiting{0};
  std::atomic<bool> inside{false};

 private:
  HostMemory pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool released_ = false;
};

class CopyingPulls : public ::testing::TestWithParam<Ways> {
 protected:
  CopyingPulls() {
    serve_echo(*b);
    const auto nothing = [](Request, Reply reply) { reply.send({}); };
    b->serve("plain", nothing);
    b->serve("in executor", nothing, {.executor = true});
    b->serve("take in executor", nothing, {.executor = true});
  }
  static void allow_cma_here(RawAgentOptions& options) {
    options.registry.add("cma", 60,
                         [] { return std::make_unique<CmaDriver>(cma::CmaOptions{.within_process = true}); });
  }
  bool opens() {
    return eventually([&] {
      const auto route = a->explain("b");
      return route.ok() && route->channel == GetParam().channels;
    });
  }

  std::shared_ptr<SlowMemory> memory = std::make_shared<SlowMemory>();
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam(), allow_cma_here);
  std::shared_ptr<RawAgent> b = join(store, "b", GetParam(), [this](RawAgentOptions& options) {
    allow_cma_here(options);
    options.memory[DeviceType::cpu] = memory;
    options.executor = std::make_shared<MarkingExecutor>();
  });
};
INSTANTIATE_TEST_SUITE_P(Over, CopyingPulls,
                         ::testing::Values(Ways{"ring", "xth"}, Ways{"unix", "xth"}, Ways{"tcp", "xth"},
                                           Ways{"ring", "cma"}, Ways{"tcp", "cma"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(CopyingPulls, LeaveTheThreadThatReadsAndTheExecutor) {
  ASSERT_TRUE(opens());
  const auto large = [] {
    auto message = message_of("m");
    message.buffers = {patterned(SlowMemory::large + 1)};
    return message;
  };
  ASSERT_TRUE(call_sync(*a, "b", "take in executor", {}).ok());
  auto slow = a->call("b", "take in executor", large());
  ASSERT_TRUE(eventually([&] { return memory->waiting == 1; }));
  EXPECT_FALSE(memory->inside) << "the copy holds the executor";
  for (const auto* function : {"plain", "in executor"}) {
    const auto answered = call_sync(*a, "b", function, {}, within(long_enough));
    EXPECT_TRUE(answered.ok()) << function << ": " << answered.status().text();
  }
  EXPECT_EQ(memory->waiting, 1);
  memory->release();
  ASSERT_TRUE(slow.wait());
  EXPECT_TRUE(slow.take().ok());
  const auto echoed = call_sync(*a, "b", "echo", large());
  ASSERT_TRUE(echoed.ok()) << echoed.status().text();
  EXPECT_TRUE(same_bytes(echoed->buffers.at(0), large().buffers[0]));
}

}  // namespace
}  // namespace tensorferry
