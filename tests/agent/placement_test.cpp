// The device of the peer on which a tensor lands. The GPUs are pretended: host memory with a GPU's label.
#include "agent/buffers/placement.h"

#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <string>

#include "tests/agent/agents.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using ::testing::HasSubstr;

constexpr Device cpu;
constexpr Device gpu(unsigned index) { return {DeviceType::cuda, static_cast<std::uint8_t>(index)}; }

Device lands(Device from, std::vector<Device> theirs, const Placement& placement = {}) {
  const auto device = arrival(from, placement, theirs, "b");
  EXPECT_TRUE(device.ok()) << device.status().text();
  return device.ok() ? *device : Device{DeviceType::cuda, 255};
}

TEST(Arrival, IsTheSameIndexElseTheFirstGpuElseTheCpu) {
  EXPECT_EQ(lands(gpu(1), {cpu, gpu(0), gpu(1)}), gpu(1));
  EXPECT_EQ(lands(gpu(1), {cpu, gpu(0)}), gpu(0));
  EXPECT_EQ(lands(gpu(0), {cpu, gpu(2), gpu(3)}), gpu(2));
  EXPECT_EQ(lands(gpu(1), {cpu}), cpu);
  EXPECT_EQ(lands(gpu(1), {}), cpu);
  EXPECT_EQ(lands(cpu, {cpu, gpu(0)}), cpu);
}

TEST(Arrival, OfAGpuTensorOnTheCpuIsReportedUnlessItWasRequested) {
  bool elsewhere = false;
  const std::array theirs{cpu};
  (void)arrival(gpu(0), {.all = cpu, .map = {}}, theirs, "b", &elsewhere);
  EXPECT_FALSE(elsewhere);
  (void)arrival(gpu(0), {}, theirs, "b", &elsewhere);
  EXPECT_TRUE(elsewhere);
}

TEST(Arrival, FollowsOnlyTheRequestedPlacement) {
  const Placement map{.all = std::nullopt, .map = {{gpu(0), gpu(1)}, {cpu, gpu(0)}}};
  const std::vector<Device> two{cpu, gpu(0), gpu(1)};
  EXPECT_EQ(lands(gpu(0), two, map), gpu(1));
  EXPECT_EQ(lands(cpu, two, map), gpu(0));
  EXPECT_EQ(lands(gpu(1), two, map), gpu(1));
  EXPECT_EQ(lands(gpu(1), two, {.all = cpu, .map = {}}), cpu);
  const auto missing = arrival(gpu(0), map, std::array{cpu, gpu(0)}, "b");
  EXPECT_EQ(missing.status().code(), Code::invalid_argument);
  EXPECT_THAT(std::string(missing.status().what()), HasSubstr("cuda:1 of \"b\", which has cpu, cuda:0"));
}

TEST(Arrival, PlacementsRoundTrip) {
  for (const auto& placement : {Placement{}, Placement{.all = gpu(3), .map = {}},
                                Placement{.all = std::nullopt, .map = {{gpu(0), cpu}, {cpu, gpu(1)}}}}) {
    EXPECT_EQ(placement_of(on_wire(placement)), placement);
  }
}

/// Receive memory on the host that has a GPU's label.
class PretendedMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    auto buffer = patterned(bytes, 0);
    buffer.device = device;
    return buffer;
  }
};

class Placing : public ::testing::Test {
 protected:
  std::shared_ptr<RawAgent> join_with(const std::string& name, std::vector<Device> devices) {
    auto agent = join(store, name, {}, [&](RawAgentOptions& options) {
      options.devices = std::move(devices);
      options.memory[DeviceType::cuda] = std::make_shared<PretendedMemory>();
      options.registry.add("mail", 90, [] { return std::make_unique<MailDriver>(MailBehaviour{.any_device = true}); });
    });
    agent->serve("there_and_back", [](Request request, Reply reply) {
      std::string where;
      for (const auto& buffer : request.arguments.buffers) where += text_of(buffer.device) + " ";
      auto message = message_of(where);
      for (auto& buffer : request.arguments.buffers) message.destinations.push_back({buffer.device, true});
      message.buffers = std::move(request.arguments.buffers);
      reply.send(std::move(message));
    });
    return agent;
  }
  /// Sends a tensor on each device of `from`. Returns "devices where they landed there | devices where the results
  /// landed here".
  std::string trip(const std::vector<Device>& from, const RawCallOptions& options = {}) {
    auto message = message_of("");
    for (const auto device : from) {
      message.buffers.push_back(patterned(9000, 5));
      message.buffers.back().device = device;
      message.destinations.push_back({device, true});
    }
    const auto reply = call_sync(*a, "b", "there_and_back", message, options);
    if (!reply.ok()) return std::string(reply.status().what());
    auto text = std::string(text_of(ByteView(reply->payload))) + "|";
    for (const auto& buffer : reply->buffers) {
      text += " " + text_of(buffer.device);
      EXPECT_TRUE(same_bytes(buffer, message.buffers[0]));
    }
    return text;
  }
  void meet(const std::vector<Device>& mine, const std::vector<Device>& theirs) {
    a = join_with("a", mine);
    b = join_with("b", theirs);
    // Channels with a probe carry nothing before it has ended.
    for (const auto device : mine) {
      EXPECT_TRUE(eventually([&] { return !a->explain("b", device)->channel.empty(); })) << text_of(device);
    }
    for (const auto device : theirs) {
      EXPECT_TRUE(eventually([&] { return !b->explain("a", device)->channel.empty(); })) << text_of(device);
    }
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a, b;
};

TEST_F(Placing, ATensorKeepsItsDeviceIndexInBothDirections) {
  meet({cpu, gpu(0), gpu(1)}, {cpu, gpu(0), gpu(1)});
  EXPECT_EQ(trip({gpu(0), cpu}), "cuda:0 cpu | cuda:0 cpu");
}

TEST_F(Placing, APeerWithoutTheGpuGetsTheTensorOnItsCpu) {
  meet({cpu, gpu(0)}, {cpu});
  EXPECT_EQ(trip({gpu(0)}), "cpu | cpu");
}

TEST_F(Placing, TheRequestPlacesTheResults) {
  meet({cpu, gpu(0)}, {cpu, gpu(0)});
  RawCallOptions options;
  options.arguments.map = {{cpu, gpu(0)}, {gpu(0), cpu}};
  options.results.map = {{gpu(0), cpu}, {cpu, gpu(0)}};
  std::string first;
  EXPECT_TRUE(eventually([&] { return (first = trip({cpu, gpu(0)}, options)).find("under way") == first.npos; }));
  EXPECT_EQ(trip({cpu, gpu(0)}, options), "cuda:0 cpu | cpu cuda:0");
}

TEST_F(Placing, ADeviceThatThePeerLacksFailsTheCallWithThePeersDevices) {
  meet({cpu, gpu(0)}, {cpu, gpu(0)});
  RawCallOptions options;
  options.arguments.all = gpu(7);
  EXPECT_THAT(trip({gpu(0)}, options), HasSubstr("cuda:7 of \"b\", which has cpu, cuda:0"));
  RawCallOptions back;
  back.results.all = gpu(7);
  EXPECT_THAT(trip({gpu(0)}, back), HasSubstr("cuda:7 of \"a\", which has cpu, cuda:0"));
  EXPECT_EQ(trip({gpu(0)}), "cuda:0 | cuda:0");
}

}  // namespace
}  // namespace tensorferry
