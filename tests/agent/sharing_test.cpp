// Memory that calls share instead of copying. The caller asks for it per buffer, and only some channels can do it.
#include <gmock/gmock.h>

#include <mutex>

#include "channels/region.h"
#include "tests/agent/agents.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

Buffer region_of(std::size_t bytes, std::byte value) {
  auto buffer = *Regions::of_this_process().make(bytes);
  std::memset(buffer.data, static_cast<int>(value), bytes);
  return buffer;
}

Message sharing(std::vector<Buffer> buffers) {
  auto message = message_of("m");
  message.sharing.assign(buffers.size(), Sharing::shared);
  message.buffers = std::move(buffers);
  return message;
}

/// Two agents in one process. The channel "shm" maps the memory twice all the same.
class SharingCalls : public ::testing::TestWithParam<Ways> {
 protected:
  void SetUp() override {
    a = join(store, "a", GetParam());
    b = join(store, "b", GetParam());
    // Writes 9 into the first byte of each argument, and keeps them.
    b->serve("write", [this](Request request, Reply reply) {
      {
        const std::lock_guard lock(mutex);  // several calls may share the same memory
        for (const auto& buffer : request.arguments.buffers) buffer.data[0] = std::byte{9};
        held = std::move(request.arguments.buffers);
      }
      reply.send({});
    });
    b->serve("lend", [this](Request, Reply reply) { reply.send(sharing({theirs})); });
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::mutex mutex;
  std::vector<Buffer> held;  // the buffers of the last call
  Buffer theirs = region_of(5000, std::byte{3});
  std::shared_ptr<RawAgent> a, b;
};

TEST_P(SharingCalls, TheFirstCallOfALinkMayShare) {
  const auto mine = region_of(100, std::byte{1});
  const auto reply = call_sync(*a, "b", "write", sharing({mine}));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(mine.data[0], std::byte{9});
}

TEST_P(SharingCalls, TheFirstReplyOfALinkMayShare) {
  const auto reply = call_sync(*a, "b", "lend", message_of("m"));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  reply->buffers.at(0).data[4999] = std::byte{7};
  EXPECT_EQ(theirs.data[4999], std::byte{7});
}

TEST_P(SharingCalls, ManyFirstCallsAtOnceMayShare) {
  std::vector<Buffer> mine;
  std::vector<Call> calls;
  for (int i = 0; i < 50; ++i) {
    mine.push_back(region_of(5000, std::byte{1}));
    calls.push_back(a->call("b", "write", sharing({mine.back()})));
    calls.push_back(a->call("b", "lend", message_of("m")));
  }
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok());
  }
  for (const auto& each : mine) EXPECT_EQ(each.data[0], std::byte{9});
}

TEST_P(SharingCalls, ValuesBesideSharedBuffersStayValues) {
  const auto shared = region_of(6000, std::byte{1}), by_value = region_of(6000, std::byte{1});
  auto message = sharing({shared, by_value, patterned(6000)});
  message.sharing = {Sharing::shared};
  EXPECT_EQ(message.bytes(), 12000u);
  ASSERT_TRUE(call_sync(*a, "b", "write", std::move(message)).ok());
  EXPECT_EQ(shared.data[0], std::byte{9});
  EXPECT_EQ(by_value.data[0], std::byte{1});
}

TEST_P(SharingCalls, MemoryThatIsDroppedAtOnceArrives) {
  for (int i = 0; i < 500; ++i) {
    std::vector<Call> calls;
    for (int j = 0; j < 4; ++j) calls.push_back(a->call("b", "write", sharing({region_of(5000, std::byte{1})})));
    for (auto& call : calls) {
      ASSERT_TRUE(call.wait());
      const auto reply = call.take();
      ASSERT_TRUE(reply.ok()) << i << " " << reply.status().text();
    }
  }
}

TEST_P(SharingCalls, MemoryOutlivesTheAgents) {
  const auto mine = region_of(5000, std::byte{1});
  ASSERT_TRUE(call_sync(*a, "b", "write", sharing({mine})).ok());
  a->leave();
  b->leave();
  held.at(0).data[1] = std::byte{8};
  EXPECT_EQ(mine.data[1], std::byte{8});
}

TEST_P(SharingCalls, OtherMemoryIsRefusedWithTheReasonAndTheLinkStaysUp) {
  const auto reply = call_sync(*a, "b", "write", sharing({patterned(5000)}));
  ASSERT_EQ(reply.status().code(), Code::channel_unavailable);
  EXPECT_THAT(std::string(reply.status().what()), HasSubstr("made to be shared"));
  EXPECT_TRUE(call_sync(*a, "b", "write", sharing({region_of(1, std::byte{1})})).ok());
}

TEST_P(SharingCalls, SharedBuffersDoNotCountAsInFlight) {
  a->leave();
  a = join(store, "a2", GetParam(), [](RawAgentOptions& options) { options.max_bytes_in_flight = 1000; });
  std::vector<Call> calls;
  const auto mine = region_of(1 << 20, std::byte{1});
  for (int i = 0; i < 20; ++i) calls.push_back(a->call("b", "write", sharing({mine}), within(long_enough)));
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok());
  }
}

INSTANTIATE_TEST_SUITE_P(, SharingCalls, ::testing::Values(Ways{"ring", "shm,basic"}, Ways{"ring", ""}),
                         [](const auto& test) { return test.param.channels.empty() ? "xth" : "shm"; });

TEST(Sharing, FailsIfNoChannelShares) {
  auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {"tcp", "shm,basic"}), b = join(store, "b", {"tcp", "shm,basic"});
  serve_echo(*b);
  for (int i = 0; i < 2; ++i) {
    const auto reply = call_sync(*a, "b", "echo", sharing({region_of(100, std::byte{1})}), within(long_enough));
    ASSERT_EQ(reply.status().code(), Code::channel_unavailable) << reply.status().text();
    const std::string what(reply.status().what());
    EXPECT_THAT(what, HasSubstr("shares memory without a copy, cpu -> b cpu"));
    EXPECT_THAT(what, HasSubstr("the link has no unix socket"));
    EXPECT_THAT(what, HasSubstr("basic copies bytes"));
  }
}

/// The driver of a user's channel that announces shared memory, and whose probe never ends.
class Hesitant final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "mail"; }
  [[nodiscard]] bool shares_memory() const override { return true; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return Bytes(); }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return std::nullopt; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair) override {
    return std::make_unique<MailChannel>(wire, MailBehaviour{.asked = [](const auto&) {}});
  }
};

TEST(Sharing, ACallThatWaitsForAProbeEndsAtItsDeadlineOrWithTheLink) {
  auto store = std::make_shared<MemoryStore>();
  const auto hesitate = [](RawAgentOptions& options) {
    options.registry.add("mail", 500, [] { return std::make_unique<Hesitant>(); });
  };
  const auto a = join(store, "a", {"ring", "mail,basic"}, hesitate),
             b = join(store, "b", {"ring", "mail,basic"}, hesitate);
  serve_echo(*b);
  const auto late = call_sync(*a, "b", "echo", sharing({region_of(100, std::byte{1})}), within(milliseconds(100)));
  EXPECT_EQ(late.status().code(), Code::deadline_exceeded);
  auto waiting = a->call("b", "echo", sharing({region_of(100, std::byte{1})}), within(seconds(60)));
  ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("values go on")).ok());
  b->leave();
  ASSERT_TRUE(waiting.wait(Clock().now() + long_enough));
  EXPECT_EQ(waiting.take().status().code(), Code::connection_lost);
}

}  // namespace
}  // namespace tensorferry
