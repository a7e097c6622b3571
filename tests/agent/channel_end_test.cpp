// The end of a channel. Until its destructor returns it may use the wire that its link lends it, even if the link has
// ended.
#include <gmock/gmock.h>

#include <atomic>
#include <future>

#include "channels/completion.h"
#include "channels/wire_use.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

/// State that the test and its channel share. The test may use the channel's wire until the channel is destroyed. The
/// channel keeps one buffer, as a channel does while a GPU reads the buffer.
struct Common {
  std::shared_ptr<WireUse> use;
  Completion released;
  std::function<void(Wire&)> last;  // runs in the channel's destructor
};

class Lasting final : public Channel {
 public:
  Lasting(Wire& wire, std::shared_ptr<Common> common)
      : wire_(wire), common_(std::move(common)), use_(std::make_shared<WireUse>(wire)) {
    if (common_) common_->use = use_;
  }
  ~Lasting() override {
    if (common_ && common_->last) common_->last(wire_);
    use_->end();
  }
  Offer offer(const Buffer& buffer, Sharing, Outgoing&, Completion released) override {
    if (!common_) return Refusal{"it only sends"};
    common_->released = std::move(released);
    return Ticket{.bytes = buffer.bytes, .opaque = {}, .acknowledge = true};
  }
  void pull(const Ticket&, Sink&, Completion landed, Completion consumed) override {
    complete(std::move(landed), {Code::internal, "nothing arrives"});
    complete(std::move(consumed), {});
  }
  void withdraw(const Ticket&) override {}
  void close(Status) noexcept override {}

 private:
  Wire& wire_;
  const std::shared_ptr<Common> common_;
  const std::shared_ptr<WireUse> use_;
};

class LastingDriver final : public Driver {
 public:
  explicit LastingDriver(std::shared_ptr<Common> common) : common_(std::move(common)) {}
  [[nodiscard]] std::string_view name() const override { return "lasting"; }
  [[nodiscard]] bool immediate() const override { return true; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return Bytes(); }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return std::nullopt; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair) override {
    auto channel = std::make_unique<Lasting>(wire, common_);
    wire.ready({});
    return channel;
  }

 private:
  const std::shared_ptr<Common> common_;
};

class ChannelEnd : public ::testing::Test {
 protected:
  /// Makes two agents; one sends a buffer by the channel, which keeps the buffer. Then both agents leave.
  void send_and_leave() {
    const auto store = std::make_shared<MemoryStore>();
    const auto with = [](const std::shared_ptr<Common>& with_them) {
      return [with_them](RawAgentOptions& options) {
        options.registry.add("lasting", 1000, [with_them] { return std::make_unique<LastingDriver>(with_them); });
      };
    };
    const auto a = join(store, "a", {}, with(common)), b = join(store, "b", {}, with(nullptr));
    serve_echo(*b);
    auto message = message_of("m");
    message.buffers = {patterned(10'000)};
    source = message.buffers[0].owner;
    EXPECT_EQ(call_sync(*a, "b", "echo", std::move(message)).status().code(), Code::internal);
    EXPECT_TRUE(common->released);
    a->leave();
    b->leave();
  }
  std::shared_ptr<Common> common = std::make_shared<Common>();
  std::weak_ptr<void> source;
};

TEST_F(ChannelEnd, MayUseItsWireWhileTheLinkIsDestroyed) {
  bool used = false;
  common->last = [&](Wire& wire) {
    for (int i = 0; i < 1000; ++i) wire.control(Bytes(100), {});
    wire.ready({});
    wire.send_bulk(1, patterned(100), [](const Status&) {});
    wire.receive_bulk(1, patterned(100), [](const Status& status) { EXPECT_FALSE(status.ok()); });
    EXPECT_EQ(wire.peer(), "b");
    used = true;
  };
  send_and_leave();
  std::exchange(common->released, {})({});
  EXPECT_TRUE(eventually([&] { return used; }));
}

TEST_F(ChannelEnd, ALinkDestroyedInsideAWireCallDoesNotWaitForThatCall) {
  send_and_leave();
  auto over = std::make_shared<std::promise<void>>();
  std::thread([over, common = common] {  // not joined: if the test fails, it waits for ever
    common->use->with([&](Wire&) { std::exchange(common->released, {})({}); });
    over->set_value();
  })
      .detach();
  EXPECT_EQ(over->get_future().wait_for(seconds(20)), std::future_status::ready);
  EXPECT_TRUE(eventually([&] { return source.expired() && common.use_count() == 1; }));
}

/// Counts what it is asked about GPUs, which neither agent has.
class AskedDriver final : public Driver {
 public:
  explicit AskedDriver(std::atomic<int>& asked) : asked_(asked) {}
  [[nodiscard]] std::string_view name() const override { return "asked"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override {
    if (device == Device()) return Bytes();
    ++asked_;
    return Refusal{"no such device"};
  }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return Refusal{"no channel"}; }
  std::unique_ptr<Channel> open(Wire&, DevicePair) override { return nullptr; }

 private:
  std::atomic<int>& asked_;
};

TEST(OneSidedPairs, OfDevicesThatThePeerHasNotAnnouncedAreNotKept) {
  std::atomic<int> asked = 0;
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {}, [&](RawAgentOptions& options) {
    options.registry.add("asked", 1000, [&] { return std::make_unique<AskedDriver>(asked); });
  });
  const auto b = join(store, "b");
  serve_echo(*b);
  ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("m")).ok());
  const auto before = asked.load();
  for (unsigned index = 0; index < 256; ++index) {
    const Device theirs{DeviceType::cuda, static_cast<std::uint8_t>(index)};
    EXPECT_EQ(a->one_sided("b", {DeviceType::cuda, 5}, theirs), nullptr);
  }
  EXPECT_EQ(asked, before);
  a->leave();
  b->leave();
}

}  // namespace
}  // namespace tensorferry
