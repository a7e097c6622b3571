/// Tests of `cuda_basic` whose chunks `ibv` carries, on emulated cards: from CPU to CPU without a GPU, and with a GPU,
/// emulated or real.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "channels/cuda_basic/carried_chunks.h"
#include "channels/cuda_basic/messages.h"
#include "channels/rdma/cards.h"
#include "tests/channels/host_driver.h"
#include "tests/channels/ibv_fixture.h"
#include "tests/channels/over_ibv.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

struct CudaBasicHostOverIbvFixture {
  static constexpr auto name = "cuda_basic";
  static Drivers drivers() {
    return {std::make_unique<OverIbvDriver<HostDriver>>(driver_of_end(0, {})),
            std::make_unique<OverIbvDriver<HostDriver>>(driver_of_end(1, {}))};
  }
  static Traits traits() { return {.forks = false, .missing = missing()}; }
};

struct CudaBasicOverIbvFixture {
  static constexpr auto name = "cuda_basic";
  static Drivers drivers() {
    return {std::make_unique<OverIbvDriver<CudaBasicDriver>>(driver_of_end(0, {})),
            std::make_unique<OverIbvDriver<CudaBasicDriver>>(driver_of_end(1, {}))};
  }
  static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, 0}}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
  static Traits traits() {
    const auto no_gpu = why_no_cuda(1);
    return {.forks = false, .missing = no_gpu.empty() ? missing() : no_gpu};
  }
};

namespace {

using cuda_basic::ChunkOffer;
using cuda_basic::ChunkRead;
using cuda_basic::CudaBasicTicket;
using cuda_basic::FlowKind;
using ::testing::HasSubstr;

class CudaBasicCarried : public CardLink {
 protected:
  void SetUp() override {
    if (const auto& reason = missing(); !reason.empty()) GTEST_SKIP() << reason;
    memory = cpu_memory();
    pair = std::make_unique<WirePair>(one, other, DevicePair{}, *memory, *memory);
    wait_until_usable();
  }
  void TearDown() override {
    pair.reset();
    if (cards.queue_pairs == nullptr) return;
    EXPECT_TRUE(eventually([&] { return cards.queue_pairs() == 0; })) << cards.queue_pairs();
  }
  static OverIbv& over_ibv(WireEnd& end) { return dynamic_cast<OverIbv&>(end.channel()); }
  bool both_carry() { return over_ibv(a()).carries() && over_ibv(b()).carries(); }
  static FlowKind kind(const Ticket& ticket) { return decode<CudaBasicTicket>(ticket.opaque)->kind; }
  /// Sends a message of the channel, as a hostile end `a` could.
  void tell(const cuda_basic::Control& message) {
    auto bytes = encode(message);
    bytes.insert(bytes.begin(), std::byte{0});
    a().control(std::move(bytes), {});
  }
  std::string_view name_of_pull(std::uint64_t first, std::uint64_t bytes) {
    const Ticket ticket{.bytes = bytes, .opaque = encode(CudaBasicTicket{FlowKind::carried, first})};
    Arrival arrival(ticket, {}, *memory);
    b().channel().pull(ticket, arrival, arrival.landed.completion(), arrival.consumed.completion());
    const auto name = arrival.landed.wait_name();
    EXPECT_EQ(arrival.consumed.wait_name(), name);
    return name;
  }

  OverIbvDriver<HostDriver> one{driver_of_end(0, {})}, other{driver_of_end(1, {})};
};

TEST_F(CudaBasicCarried, LargeBuffersGoByTheCardsAlone) {
  forbid_bulk();
  std::uint64_t all = 0;
  for (const std::size_t bytes : {std::size_t{64} << 10, megabyte, 9 * megabyte + 1, 70 * megabyte}) {
    expect_carries(memory->filled(bytes, static_cast<std::uint32_t>(bytes)), static_cast<std::uint32_t>(bytes));
    all += bytes;
  }
  EXPECT_EQ(over_ibv(a()).bytes_sent(), all);
  EXPECT_EQ(over_ibv(b()).bytes_received(), all);
  EXPECT_THAT(a().channel().describe(), HasSubstr("over ibv"));
}

TEST_F(CudaBasicCarried, SmallBuffersGoAsBulkData) {
  expect_carries(memory->filled(1000, 1), 1);
  EXPECT_EQ(over_ibv(a()).bytes_sent(), 0U);
}

TEST_F(CudaBasicCarried, BuffersInBothWaysKeepTheirOrderAndTheirBytes) {
  std::vector<Outcome> released;
  for (std::uint32_t i = 0; i < 12; ++i)
    released.push_back(a().send(memory->filled(i % 2 == 0 ? 1000 : 3 * megabyte, i)));
  for (std::uint32_t i = 0; i < 12; ++i) expect_arrives(i % 2 == 0 ? 1000 : 3 * megabyte, i);
  for (const auto& each : released) EXPECT_EQ(each.wait_name(), "Ok");
}

TEST_F(CudaBasicCarried, WithdrawnAndDiscardedBuffersAreSkipped) {
  forbid_bulk();
  {
    Letter letter(a());
    ASSERT_TRUE(letter.offer(memory->filled(50 * megabyte, 1)));
    ASSERT_TRUE(letter.offer(memory->filled(megabyte, 1)));
    letter.drop();
    for (const auto& released : letter.released) EXPECT_EQ(released.wait_name(), "Ok");
  }
  b().behave({.on_message = [&](Arrivals& arrivals) { b().discard(arrivals.at(0)); }});
  EXPECT_EQ(a().send(memory->filled(50 * megabyte, 2)).wait_name(), "Ok");
  b().behave({});
  (void)b().receive(std::chrono::milliseconds(1));  // the discarded one
  expect_carries(memory->filled(20 * megabyte, 3), 3);
}

TEST_F(CudaBasicCarried, QueuePairsThatFailInTheMiddleLoseNoBuffer) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  for (std::uint32_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(eventually([&] { return both_carry(); }));
    std::vector<Outcome> released;
    cards.stall(1);  // some chunks are half there
    for (std::uint32_t i = 0; i < 6; ++i) released.push_back(a().send(memory->filled(20 * megabyte, i)));
    EXPECT_GT(cards.fail_queue_pairs(4096), 0U);
    cards.stall(0);
    for (std::uint32_t i = 0; i < 6; ++i) expect_arrives(20 * megabyte, i);
    for (const auto& each : released) EXPECT_EQ(each.wait_name(), "Ok");
  }
}

TEST_F(CudaBasicCarried, WhenAllPortsAreDownTheRestGoesAsBulkDataAndLaterByTheCardsAgain) {
  if (cards.set_port == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto ports = std::get<std::vector<rdma::CardPort>>(rdma::usable_ports({}));
  const auto set_ports = [&](int up) {
    for (const auto& port : ports) ASSERT_EQ(cards.set_port(port.device.c_str(), port.number, up), 0);
  };
  cards.stall(1);
  const auto released = a().send(memory->filled(100 * megabyte, 6));
  set_ports(0);
  expect_arrives(100 * megabyte, 6);
  EXPECT_EQ(released.wait_name(), "Ok");
  cards.stall(0);
  ASSERT_TRUE(eventually([&] { return !over_ibv(a()).carries(); }));
  EXPECT_EQ(a().channel().describe(), "by way of the host");
  const auto by_cards = over_ibv(a()).bytes_sent();
  expect_carries(memory->filled(megabyte, 7), 7);
  EXPECT_EQ(over_ibv(a()).bytes_sent(), by_cards) << "chunks went as bulk data";

  set_ports(1);
  ASSERT_TRUE(eventually([&] { return both_carry(); }));
  const auto before = over_ibv(a()).bytes_sent();
  expect_carries(memory->filled(8 * megabyte, 8), 8);
  EXPECT_EQ(over_ibv(a()).bytes_sent(), before + 8 * megabyte);
}

TEST_F(CudaBasicCarried, AnEndOfTheLinkReleasesWhatThePeerDoesNotFetch) {
  b().behave({.on_message = [](Arrivals&) {}});
  const auto released = a().send(memory->filled(50 * megabyte, 1));
  a().close({Code::connection_lost, "gone"});
  EXPECT_EQ(released.wait_name(), "ConnectionLost");
}

TEST_F(CudaBasicCarried, AChunkByACarrierThatIsNotThereBreaksTheProtocol) {
  tell(ChunkOffer{1, "smoke", Bytes(8)});
  EXPECT_EQ(name_of_pull(1, 100), "ProtocolError");
}

TEST_F(CudaBasicCarried, ATicketThatTheCarrierCannotReadBreaksTheProtocol) {
  tell(ChunkOffer{1, "ibv", Bytes(8)});
  EXPECT_EQ(name_of_pull(1, 100), "ProtocolError");
}

TEST_F(CudaBasicCarried, AChunkThatIsOfferedTwiceBreaksTheProtocol) {
  for (int i = 0; i < 2; ++i) tell(ChunkOffer{2, "ibv", Bytes(8)});
  const auto released = a().send(memory->filled(megabyte, 1));
  EXPECT_EQ(b().receive().at(0)->landed.wait_name(), "ProtocolError");
}

TEST_F(CudaBasicCarried, TooManyOfferedChunksBreakTheProtocol) {
  for (std::uint64_t i = 0; i <= cuda_basic::CarriedChunks::most; ++i) tell(ChunkOffer{100 + i, "ibv", Bytes(8)});
  const auto released = a().send(memory->filled(megabyte, 1));
  EXPECT_EQ(b().receive().at(0)->landed.wait_name(), "ProtocolError");
}

TEST_F(CudaBasicCarried, AnswersForChunksThatWereNotSentChangeNothing) {
  for (std::uint64_t i = 0; i < 20; ++i) tell(ChunkRead{i});
  for (std::uint32_t i = 0; i < 3; ++i) expect_carries(memory->filled(20 * megabyte, i), i);
}

TEST_F(CudaBasicCarried, MemoryThatCannotBeRegisteredGoesThroughStagingMemoryOrAsBulkData) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  cards.limit_memory(cards.registered_bytes());
  expect_carries(memory->filled(20 * megabyte, 1), 1);
  cards.limit_memory(std::numeric_limits<std::uint64_t>::max());
}

}  // namespace
}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CudaBasicHostOverIbvFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicOverIbvFixture);
