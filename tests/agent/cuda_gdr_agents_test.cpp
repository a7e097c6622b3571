/// Two agents whose tensors on GPUs go by network cards (`cuda_gdr`), on emulated cards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "channels/cuda_gdr/cuda_gdr_channel.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/emulated_verbs/control.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using ::testing::HasSubstr;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

/// Receive memory on a GPU, from the conformance suite's device memory.
class GpuMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device) override { return memory->allocate(bytes); }
  const std::unique_ptr<conformance::DeviceMemory> memory = conformance::cuda_memory(gpu.index);
};

class CudaGdrAgents : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = conformance::why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
    const auto descriptor = CudaGdrDriver().descriptor(gpu);
    if (const auto* refusal = std::get_if<Refusal>(&descriptor)) GTEST_SKIP() << refusal->reason;
    memory = std::make_shared<GpuMemory>();
  }
  void join_by(const std::string& channels) {
    for (auto* agent : {&a, &b}) {
      if (*agent) (*agent)->leave();
      *agent = nullptr;
    }
    store = std::make_shared<MemoryStore>();
    const auto with_gpu = [&](RawAgentOptions& options) {
      options.devices = {Device{}, gpu};
      options.memory.emplace(DeviceType::cuda, memory);
    };
    a = join(store, "a", Ways{"tcp", channels}, with_gpu);
    b = join(store, "b", Ways{"tcp", channels}, with_gpu);
    b->serve("echo", [](Request request, Reply reply) {
      auto& buffers = request.arguments.buffers;
      std::vector<Destination> back(buffers.size(), {gpu});
      reply.send({std::move(request.arguments.payload), std::move(buffers), std::move(back), {}});
    });
  }
  std::string channel_of(Device device) {
    const auto route = a->explain("b", device);
    return route.ok() ? route->channel : std::string(route.status().what());
  }
  bool echoes(std::size_t bytes, std::uint32_t seed) {
    auto message = message_of("m");
    message.buffers = {memory->memory->filled(bytes, seed)};
    message.destinations = {{gpu}};
    const auto reply = call_sync(*a, "b", "echo", std::move(message));
    return reply.ok() && reply->buffers.size() == 1 && memory->memory->holds(reply->buffers[0], seed);
  }
  std::shared_ptr<GpuMemory> memory;
  std::shared_ptr<Store> store;
  std::shared_ptr<RawAgent> a, b;
};

TEST_F(CudaGdrAgents, TensorsOnGpusArriveByTheChannelThatExplainNames) {
  join_by("cuda_gdr,cuda_basic,ibv,basic");
  ASSERT_TRUE(eventually([&] { return channel_of(gpu) == "cuda_gdr"; })) << channel_of(gpu);
  for (std::uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(echoes(megabyte + i * 300'000, i));
  const auto counters = a->counters();
  EXPECT_GT(counters.bytes_sent.at("cuda_gdr"), megabyte);
  EXPECT_GT(counters.bytes_received.at("cuda_gdr"), megabyte);
  EXPECT_GT(counters.pinned_bytes, megabyte) << "the allocations stay registered";
}

TEST_F(CudaGdrAgents, TensorsOfCpusAndGpusShareTheQueuePairsOfTheLink) {
  const auto cards = emulated_verbs::controls();
  if (cards.queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  join_by("ibv,basic,cuda_basic");
  ASSERT_TRUE(eventually([&] { return channel_of({}) == "ibv"; }));
  const auto of_ibv = cards.queue_pairs();
  ASSERT_GT(of_ibv, 0U);
  join_by("ibv,basic,cuda_gdr,cuda_basic");
  ASSERT_TRUE(eventually([&] { return channel_of({}) == "ibv" && channel_of(gpu) == "cuda_gdr"; }));
  EXPECT_TRUE(echoes(3 * megabyte, 1));
  EXPECT_TRUE(eventually([&] { return cards.queue_pairs() == of_ibv; })) << cards.queue_pairs();
}

TEST_F(CudaGdrAgents, CallsGoOnByOtherChannelsWhileTheQueuePairsAreMadeAnew) {
  const auto cards = emulated_verbs::controls();
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  join_by("cuda_gdr,cuda_basic,basic");
  for (std::uint32_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(eventually([&] { return channel_of(gpu) == "cuda_gdr"; }));
    EXPECT_GT(cards.fail_queue_pairs(4096), 0U);
    for (std::uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(echoes(3 * megabyte, i));
  }
}

TEST_F(CudaGdrAgents, WithoutItTensorsOnGpusGoByTheCardsFromTheHostsMemory) {
  join_by("cuda_basic,ibv,basic");
  ASSERT_TRUE(eventually([&] { return channel_of({}) == "ibv"; })) << channel_of({});
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(echoes(12 * megabyte + i * 300'000, i));
  const auto route = a->explain("b", gpu);
  ASSERT_TRUE(route.ok());
  EXPECT_EQ(route->channel, "cuda_basic");
  EXPECT_THAT(route->candidates.front().reason, HasSubstr("by way of the host over ibv"));
  const auto counters = a->counters();
  EXPECT_GT(counters.bytes_sent.at("cuda_basic over ibv"), 60 * megabyte);
  EXPECT_GT(counters.bytes_received.at("cuda_basic over ibv"), 60 * megabyte);
  EXPECT_FALSE(counters.bytes_sent.contains("cuda_basic")) << "all chunks";
}

TEST_F(CudaGdrAgents, TensorsFromTheHostsMemoryArriveAlthoughTheQueuePairsFail) {
  const auto cards = emulated_verbs::controls();
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  join_by("cuda_basic,ibv,basic");
  for (std::uint32_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(eventually([&] { return channel_of({}) == "ibv"; }));
    EXPECT_GT(cards.fail_queue_pairs(4096), 0U);
    for (std::uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(echoes(9 * megabyte, i));
  }
}

TEST_F(CudaGdrAgents, TheChoiceOfChannelsRemovesIt) {
  join_by("-cuda_gdr,-cuda_ipc,-cuda_xth");
  ASSERT_TRUE(eventually([&] { return channel_of(gpu) == "cuda_basic"; })) << channel_of(gpu);
  EXPECT_TRUE(echoes(megabyte, 1));
}

TEST_F(CudaGdrAgents, ItComesBehindTheChannelsOfOneHostAndBeforeTheHostsMemory) {
  join_by("");
  const auto route = a->explain("b", gpu);
  ASSERT_TRUE(route.ok());
  std::vector<std::string> names;
  for (const auto& candidate : route->candidates) names.push_back(candidate.channel);
  const auto place = [&](const char* name) { return std::find(names.begin(), names.end(), name) - names.begin(); };
  EXPECT_LT(place("cuda_ipc"), place("cuda_gdr"));
  EXPECT_LT(place("cuda_gdr"), place("cuda_basic"));
}

TEST_F(CudaGdrAgents, ExplainSaysWhatIsMissingAndWhatToDo) {
  if (emulated_verbs::controls().revoke == nullptr) GTEST_SKIP() << "the cards are not emulated";
  ::setenv("EMULATED_VERBS_DMABUF", "0", 1);
  ::setenv("EMULATED_VERBS_PEERMEM", "0", 1);
  join_by("cuda_gdr,cuda_basic,basic");
  std::string reason;
  EXPECT_TRUE(eventually([&] {
    const auto route = a->explain("b", gpu);
    for (const auto& candidate : route->candidates) {
      if (candidate.channel == "cuda_gdr") reason = candidate.reason;
    }
    return reason.find("modprobe") != std::string::npos;
  })) << reason;
  EXPECT_TRUE(echoes(megabyte, 1)) << "by cuda_basic";
  ::unsetenv("EMULATED_VERBS_DMABUF");
  ::unsetenv("EMULATED_VERBS_PEERMEM");
}

}  // namespace
}  // namespace tensorferry
