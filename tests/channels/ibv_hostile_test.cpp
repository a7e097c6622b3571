/// Tests of `ibv` against a peer that sends what no honest peer sends. One end on emulated cards; the test is the
/// other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "channels/completion.h"
#include "channels/ibv/ibv_channel.h"
#include "channels/ibv/messages.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/shared_cards.h"
#include "tests/channels/card_link.h"
#include "tests/conformance/device_memory.h"
#include "tests/conformance/outcome.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using rdma::ConnectPorts;
using rdma::PortsConnected;
using ::testing::HasSubstr;

constexpr std::size_t kilobyte = 1 << 10;

/// Records the channel's calls to its wire. Thread-safe, because the channel calls it on threads of its own.
class RecordingWire final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors) override {
    const auto parsed = decode<ibv::Control>(message);
    EXPECT_TRUE(parsed.has_value());
    const std::lock_guard lock(mutex_);
    if (parsed) sent_.push_back(*parsed);
    return sent_.size();
  }
  void read(Buffer, Completion) override { ADD_FAILURE(); }
  void send_bulk(std::uint64_t sequence, Buffer, Completion written) override {
    {
      const std::lock_guard lock(mutex_);
      bulk_.push_back(sequence);
    }
    complete(std::move(written), {});
  }
  void receive_bulk(std::uint64_t, Buffer, Completion landed) override {
    const std::lock_guard lock(mutex_);
    expected_.push_back(std::move(landed));
  }
  void ready(Status status) override {
    const std::lock_guard lock(mutex_);
    probed_.push_back(std::move(status));
  }
  [[nodiscard]] std::string_view peer() const override { return "mallory"; }

  template <class Kind>
  [[nodiscard]] std::optional<Kind> last() const {
    const std::lock_guard lock(mutex_);
    for (auto at = sent_.rbegin(); at != sent_.rend(); ++at) {
      if (const auto* kind = std::get_if<Kind>(&*at)) return *kind;
    }
    return std::nullopt;
  }
  [[nodiscard]] std::vector<Status> probed() const {
    const std::lock_guard lock(mutex_);
    return probed_;
  }
  [[nodiscard]] std::vector<std::uint64_t> bulk() const {
    const std::lock_guard lock(mutex_);
    return bulk_;
  }
  /// Ends the link: completes what is expected of it.
  std::size_t end() {
    std::vector<Completion> expected;
    {
      const std::lock_guard lock(mutex_);
      expected.swap(expected_);
    }
    for (auto& landed : expected) complete(std::move(landed), Status(Code::connection_lost, "the end"));
    return expected.size();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<ibv::Control> sent_;
  std::vector<std::uint64_t> bulk_;
  std::vector<Completion> expected_;
  std::vector<Status> probed_;
};

class Letterhead final : public Outgoing {
 public:
  [[nodiscard]] bool appends() const override { return true; }
  void append(Buffer, Completion) override { ADD_FAILURE(); }
  [[nodiscard]] bool last_resort() const override { return true; }
};

class IbvHostile : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto made = driver.descriptor({});
    if (const auto* refusal = std::get_if<Refusal>(&made)) GTEST_SKIP() << refusal->reason;
    channel = driver.open(wire, {});
    ASSERT_TRUE(eventually([&] { return wire.last<ConnectPorts>().has_value(); }));
  }
  void TearDown() override {
    if (channel == nullptr) return;
    channel->close(Status(Code::connection_lost, "end of the test"));
    wire.end();
    channel.reset();
  }

  void tell(const ibv::Control& control) { channel->control(encode(control), {}); }
  /// Waits until the thread that handles messages has handled all that were told so far.
  void await_handled() {
    std::promise<void> so_far;
    shared->connecting().submit([&] { so_far.set_value(); });
    so_far.get_future().wait();
  }
  /// Returns an offer of queue pairs that looks like the channel's own, with other numbers.
  ConnectPorts forged(std::uint32_t attempt = 1) {
    auto offer = wire.last<ConnectPorts>().value();
    offer.attempt = attempt;
    offer.challenge ^= 1;
    for (auto& port : offer.ports) port.queue_pair ^= 0xabc;
    return offer;
  }
  Status pull(Ticket ticket) {
    const auto arrival = std::make_shared<Arrival>(ticket, Arrival::Number{1, 0}, *memory);
    channel->pull(ticket, *arrival, arrival->landed.completion(), arrival->consumed.completion());
    pulled.push_back(arrival);
    const auto status = arrival->landed.wait(std::chrono::milliseconds(0));
    return status.value_or(Status(Code::internal, "under way"));
  }
  static Ticket ticket_of(std::uint64_t address, std::uint64_t bytes, std::vector<rdma::PortKey> keys = {{0, 7}}) {
    return {.bytes = bytes, .opaque = encode(ibv::IbvTicket(ibv::KeyedSource{1, address, std::move(keys)}))};
  }

  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  std::vector<std::shared_ptr<Arrival>> pulled;
  RecordingWire wire;
  std::shared_ptr<rdma::SharedCards> shared = std::make_shared<rdma::SharedCards>();
  IbvDriver driver{{}, shared};
  std::unique_ptr<Channel> channel;
};

TEST_F(IbvHostile, APeerWithoutQueuePairsFailsTheProbe) {
  tell(forged());
  ASSERT_TRUE(eventually([&] { return wire.last<PortsConnected>().has_value(); }));
  const auto answer = wire.last<PortsConnected>().value();
  tell(PortsConnected{1, answer.address, answer.keys});
  ASSERT_TRUE(eventually([&] { return !wire.probed().empty(); }));
  EXPECT_EQ(wire.probed().front().code(), Code::channel_unavailable);
}

TEST_F(IbvHostile, AnOfferWithoutPortsOrWithUnreachableOnesIsAReason) {
  auto offer = forged();
  for (auto& port : offer.ports) port.port.kind = port.port.kind == 0 ? 1 : 0;
  tell(offer);
  ASSERT_TRUE(eventually([&] { return !wire.probed().empty(); }));
  EXPECT_THAT(std::string(wire.probed().front().what()), HasSubstr("no active port"));
  tell(ConnectPorts{7, 1, {}});
  ASSERT_TRUE(eventually([&] { return wire.probed().size() >= 2; }));
  EXPECT_FALSE(wire.probed().back().ok());
}

TEST_F(IbvHostile, MessagesOutOfOrderChangeNothing) {
  tell(PortsConnected{1, 4096, {{0, 1}}});  // before the queue pairs are connected
  await_handled();                          // of several ones it would handle the last
  tell(PortsConnected{9, 4096, {{0, 1}}});
  tell(ConnectPorts{0, 1, {}});
  await_handled();
  for (std::uint8_t port = 0; port < rdma::most_ports; ++port) {
    tell(rdma::PortLost{0, port});
    tell(rdma::PortLost{1, port});
    tell(rdma::PortLost{~std::uint32_t{0}, port});
  }
  channel->control(Bytes(100, std::byte{0xee}), {});
  channel->control({}, {});
  await_handled();
  EXPECT_TRUE(wire.probed().empty());
  EXPECT_FALSE(wire.last<PortsConnected>().has_value());
}

TEST_F(IbvHostile, ManyAttemptsAreFollowedOneAtATime) {
  for (std::uint32_t attempt = 2; attempt < 200; ++attempt) tell(forged(attempt));
  ASSERT_TRUE(eventually([&] { return wire.last<ConnectPorts>()->attempt == 199; }));
}

TEST_F(IbvHostile, ALastAttemptLeavesNoneBehindIt) {
  tell(forged(~std::uint32_t{0}));
  ASSERT_TRUE(eventually([&] { return wire.last<ConnectPorts>()->attempt == ~std::uint32_t{0}; }));
}

TEST_F(IbvHostile, TicketsThatDoNotParseOrWrapAreProtocolErrors) {
  EXPECT_EQ(pull(ticket_of(~std::uint64_t{0} - 4094, 4096)).code(), Code::protocol_error);
  EXPECT_EQ(pull(ticket_of(4096, 0)).code(), Code::protocol_error);
  EXPECT_EQ(pull({.bytes = 8, .opaque = encode(ibv::IbvTicket(EmptyBuffer{}))}).code(), Code::protocol_error);
  EXPECT_EQ(pull({.bytes = 8, .opaque = Bytes(3, std::byte{1})}).code(), Code::protocol_error);
  EXPECT_EQ(pull(ticket_of(4096, 8, std::vector<rdma::PortKey>(rdma::most_ports + 1))).code(), Code::protocol_error);
}

TEST_F(IbvHostile, ATicketBeforeTheQueuePairsAreConnectedIsRequestedByTheSocket) {
  EXPECT_THAT(std::string(pull(ticket_of(4096, 5000)).what()), HasSubstr("under way"));
  const auto asked = wire.last<Resend>();
  ASSERT_TRUE(asked.has_value());
  EXPECT_EQ(asked->offer, 1U);
  EXPECT_EQ(asked->bytes, 5000U);
}

TEST_F(IbvHostile, WithoutAnOfferNothingIsSentAgain) {
  tell(Resend{1, 1, kilobyte});
  tell(Resend{1, ~std::uint64_t{0}, ~std::uint64_t{0}});
  EXPECT_TRUE(wire.bulk().empty());
  Letterhead message;
  const auto offer = channel->offer(memory->filled(kilobyte, 1), Sharing::by_value, message, {});
  EXPECT_TRUE(std::holds_alternative<Refusal>(offer)) << "the probe is under way";
}

}  // namespace
}  // namespace tensorferry::conformance
