/// Tests of `ibv` on emulated cards (tests/emulated_verbs) or on real verbs (make test-rdma), both ends in one process.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "channels/host_memory.h"
#include "channels/ibv/fetch.h"
#include "channels/rdma/cards.h"
#include "channels/region.h"
#include "channels/shared_state.h"
#include "tests/channels/ibv_fixture.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

namespace {

Drivers drivers_with(const ibv::IbvOptions& options) { return {driver_of_end(0, options), driver_of_end(1, options)}; }

}  // namespace

struct IbvFixture {
  static constexpr auto name = "ibv";
  static Drivers drivers() { return drivers_with({}); }
  // Forked children open the card themselves, because an open card belongs to the process that opened it.
  static Traits traits() { return {.forks = false, .missing = missing()}; }
};

/// Copies nothing at the sender: each source is registered and read.
struct IbvRegisteredFixture : IbvFixture {
  static Drivers drivers() { return drivers_with({.copied_bytes = 0}); }
};

/// Copies buffers of any size at both ends, while the staging memory has room.
struct IbvStagedFixture : IbvFixture {
  static Drivers drivers() { return drivers_with({.copied_bytes = std::size_t{1} << 30}); }
};

/// Queues of one place: all reads but one wait for credit.
struct IbvShallowFixture : IbvFixture {
  static Drivers drivers() {
    rdma::Options rdma;
    rdma.queue_depth = 1;
    return drivers_with({.copied_bytes = 0, .rdma = rdma});
  }
};

namespace {

using ::testing::HasSubstr;

TEST_F(Ibv, SmallBuffersAreLeftToOtherChannelsIfThereAreAny) {
  for (const bool only : {false, true}) {
    Letter letter(a());
    letter.only_channel = only;
    auto offer = a().channel().offer(memory->filled(16 * kilobyte - 1, 1), Sharing::by_value, letter, {});
    ASSERT_EQ(std::holds_alternative<Ticket>(offer), only);
    if (only) {
      a().channel().withdraw(std::get<Ticket>(offer));
    } else {
      EXPECT_THAT(std::get<Refusal>(offer).reason, HasSubstr("below 16384 bytes"));
      EXPECT_TRUE(std::get<Refusal>(offer).passing) << "it would be warned of";
    }
  }
}

TEST(CardFetch, ReadsABufferInQuartersOf64To256KiB) {
  constexpr std::size_t kib = 1024;
  using ibv::CardFetch;
  EXPECT_EQ(CardFetch::piece_bytes(1), 64 * kib);
  EXPECT_EQ(CardFetch::piece_bytes(256 * kib), 64 * kib);
  EXPECT_EQ(CardFetch::piece_bytes(260 * kib), 68 * kib) << "whole pages";
  EXPECT_EQ(CardFetch::piece_bytes(1024 * kib), 256 * kib);
  EXPECT_EQ(CardFetch::piece_bytes(std::size_t{1} << 33), 256 * kib);
}

TEST_F(Ibv, ALinkHasOneQueuePairAtEachEnd) {
  if (cards.queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto ports = source_of(offered(10 * megabyte)).keys.size();
  EXPECT_EQ(cards.queue_pairs(), 2 * ports);
}

/// A link with two channels, each in a pair of devices of its own.
struct TwoChannels {
  struct End {
    End(std::size_t number, const char* peer) : to(peer), driver(driver_of_end(number, {})) {}
    WireEnd& open(std::size_t channel, DeviceMemory& memory, WireEnd::Sockets sockets) {
      auto& place = ends[channel] =
          std::make_unique<WireEnd>(to, *driver, DevicePair{}, memory, std::move(sockets), &shared);
      place->start();
      return *place;
    }
    const std::string to;
    std::unique_ptr<IbvDriver> driver;
    SharedState shared;
    std::array<std::unique_ptr<WireEnd>, 2> ends;
  };
  ~TwoChannels() {
    for (auto* end : {&a, &b}) {
      for (auto& each : end->ends) each->finish();
    }
  }
  End a{0, "b"}, b{1, "a"};
};

TEST_F(Ibv, ChannelsOfALinkShareItsQueuePairsWhicheverWasOpenedFirstAtAnEnd) {
  if (cards.queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto of_one_channel = cards.queue_pairs();
  disconnect();
  std::array<std::pair<WireEnd::Sockets, WireEnd::Sockets>, 2> sockets{connected_sockets(), connected_sockets()};
  TwoChannels link;
  // Each end opens another channel first, so each end's first messages come by a channel that the other has not opened.
  link.a.open(0, *memory, std::move(sockets[0].first));
  link.b.open(1, *memory, std::move(sockets[1].second));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  link.a.open(1, *memory, std::move(sockets[1].first));
  link.b.open(0, *memory, std::move(sockets[0].second));
  for (std::size_t channel = 0; channel < 2; ++channel) {
    auto& from = *link.a.ends[channel];
    auto& to = *link.b.ends[channel];
    ASSERT_TRUE(from.wait_ready()->ok() && to.wait_ready()->ok());
    const auto released = from.send(memory->filled(3 * megabyte, 1));
    const auto arrivals = to.receive();
    ASSERT_EQ(arrivals.size(), 1U);
    EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 1));
    EXPECT_EQ(released.wait_name(), "Ok");
  }
  EXPECT_EQ(cards.queue_pairs(), of_one_channel);
  const auto ports = std::get<std::vector<rdma::CardPort>>(rdma::usable_ports({}));
  for (const int up : {0, 1}) {
    for (const auto& port : ports) ASSERT_EQ(cards.set_port(port.device.c_str(), port.number, up), 0);
    for (auto* end : {&link.a, &link.b}) {
      for (auto& each : end->ends)
        ASSERT_TRUE(eventually([&] { return each->wait_ready()->ok() == (up == 1); })) << "each channel is told";
    }
  }
}

TEST_F(Ibv, AChannelThatIsOpenedLaterIsReadyAtOnceAndConnectsNothing) {
  if (cards.queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto of_one_channel = cards.queue_pairs();
  disconnect();
  std::array<std::pair<WireEnd::Sockets, WireEnd::Sockets>, 2> sockets{connected_sockets(), connected_sockets()};
  TwoChannels link;
  for (std::size_t channel = 0; channel < 2; ++channel) {
    auto& from = link.a.open(channel, *memory, std::move(sockets[channel].first));
    auto& to = link.b.open(channel, *memory, std::move(sockets[channel].second));
    ASSERT_TRUE(from.wait_ready()->ok() && to.wait_ready()->ok());
    EXPECT_EQ(cards.queue_pairs(), of_one_channel);
  }
}

TEST_F(Ibv, ASmallSourceIsReleasedAtOnceAndALargeOneByTheAcknowledgement) {
  forbid_bulk();
  for (const auto bytes : {32 * kilobyte, 4 * megabyte}) {
    Letter letter(a());
    ASSERT_TRUE(letter.offer(memory->filled(bytes, 1)));
    EXPECT_TRUE(letter.tickets.front().acknowledge);
    EXPECT_EQ(letter.released.front().runs(), bytes < megabyte ? 1 : 0);
    letter.send();
    expect_arrives(bytes, 1);
    EXPECT_EQ(letter.released.front().wait_name(), "Ok");
    EXPECT_EQ(letter.released.front().runs(), 1);
  }
}

TEST_F(Ibv, MemoryIsNotShared) {
  Letter letter(a());
  EXPECT_FALSE(letter.offer(memory->filled(megabyte, 1), {}, Sharing::shared));
  EXPECT_THAT(letter.refusal, HasSubstr("cannot share"));
}

TEST_F(Ibv, ExplainsWhichPortsCarry) { EXPECT_THAT(a().channel().describe(), HasSubstr(" port 1, ")); }

}  // namespace

INSTANTIATE_CHANNEL_SUITE(IbvFixture);
INSTANTIATE_CHANNEL_SUITE(IbvRegisteredFixture);
INSTANTIATE_CHANNEL_SUITE(IbvStagedFixture);
INSTANTIATE_CHANNEL_SUITE(IbvShallowFixture);

namespace {

// ---- Failures of the card

TEST_F(Ibv, ABufferWithAWrongKeyArrivesByTheSocketAndTheQueuePairsAreMadeAnew) {
  Letter letter(a());
  ASSERT_TRUE(letter.offer(memory->filled(3 * megabyte, 4)));
  auto source = source_of(letter.tickets.front());
  for (auto& key : source.keys) key.key ^= 0x5a5a;
  letter.tickets.front().opaque = encode(ibv::IbvTicket(source));
  letter.send();
  expect_arrives(3 * megabyte, 4);
  EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  ASSERT_TRUE(eventually([&] { return usable() && carries_now(); }));
  expect_carries(5 * megabyte, 5);
}

TEST_F(Ibv, ABufferWhoseRegistrationWasRevokedArrivesByTheSocket) {
  if (cards.revoke == nullptr) GTEST_SKIP() << "the cards are not emulated";
  Letter letter(a());
  ASSERT_TRUE(letter.offer(memory->filled(3 * megabyte, 4)));
  for (const auto& key : source_of(letter.tickets.front()).keys) (void)cards.revoke(key.key);
  letter.send();
  expect_arrives(3 * megabyte, 4);
  ASSERT_TRUE(eventually([&] { return usable() && carries_now(); }));
}

TEST_F(Ibv, BuffersUnderWayWhenThePortGoesDownArriveAndThePairIsUsableAgainWhenItIsUp) {
  if (cards.set_port == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto ports = source_of(offered(10 * megabyte)).keys.size();
  const auto ports_then = std::get<std::vector<rdma::CardPort>>(rdma::usable_ports({}));
  const auto set_ports = [&](int up) {
    for (const auto& port : ports_then) ASSERT_EQ(cards.set_port(port.device.c_str(), port.number, up), 0);
  };
  cards.stall(1);
  const auto released = a().send(memory->filled(8 * megabyte, 6));
  ASSERT_TRUE(eventually([&] { return cards.stalled() > 0; }));
  set_ports(0);
  expect_arrives(8 * megabyte, 6);
  EXPECT_EQ(released.wait_name(), "Ok");
  cards.stall(0);

  ASSERT_TRUE(eventually([&] { return !carries_now(); }));
  ASSERT_TRUE(eventually([&] {
    Letter letter(a());
    return !letter.offer(memory->filled(megabyte, 1)) && !letter.refusal.empty();
  }));
  ASSERT_TRUE(eventually([&] { return !a().wait_ready()->ok() && !b().wait_ready()->ok(); }));

  set_ports(1);
  ASSERT_TRUE(eventually([&] { return usable() && carries_now(); }));
  expect_carries(8 * megabyte, 7);
  EXPECT_TRUE(eventually([&] { return lanes_of(a()) == ports; }));  // the ports come up one after another
}

TEST_F(Ibv, AQueuePairThatFailsInTheMiddleLosesNoBuffer) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  for (std::uint32_t round = 0; round < 3; ++round) {
    std::vector<Outcome> released;
    for (std::uint32_t i = 0; i < 20; ++i) released.push_back(a().send(memory->filled(2 * megabyte, i)));
    fail_a_queue_pair();
    for (std::uint32_t i = 0; i < 20; ++i) expect_arrives(2 * megabyte, i);
    for (const auto& each : released) EXPECT_EQ(each.wait_name(), "Ok");
    ASSERT_TRUE(eventually([&] { return usable() && carries_now(); }));
  }
}

TEST_F(Ibv, ManySmallBuffersInBothDirectionsWhileQueuePairsFailAreNotLost) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto all = lanes();
  const std::uint32_t fails_at = all > 1 ? 150 : 299;  // without a lane the channel refuses
  for (std::uint32_t round = 0; round < 3; ++round) {
    std::vector<Outcome> released;
    for (std::uint32_t i = 0; i < 300; ++i) {
      const auto bytes = 100 + 97 * i;
      released.push_back(a().send(memory->filled(bytes, i)));
      released.push_back(b().send(memory->filled(bytes, i)));
      if (i == fails_at) fail_a_queue_pair();
    }
    for (std::uint32_t i = 0; i < 300; ++i) {
      expect_arrives(100 + 97 * i, i);
      const auto back = a().receive();
      ASSERT_EQ(back.size(), 1U);
      EXPECT_TRUE(memory->holds(back.front()->buffer, i));
    }
    for (const auto& each : released) EXPECT_EQ(each.wait_name(), "Ok");
    ASSERT_TRUE(eventually([&] { return usable() && lanes() == all; }));
  }
}

// ---- Memory

TEST_F(Ibv, ManyLargeBuffersAreUnderWayAtOnce) {
  forbid_bulk();
  constexpr std::uint32_t buffers = 32;
  std::vector<Outcome> released;
  for (std::uint32_t i = 0; i < buffers; ++i) released.push_back(a().send(memory->filled(8 * megabyte, i)));
  for (std::uint32_t i = 0; i < buffers; ++i) expect_arrives(8 * megabyte, i);
  for (const auto& each : released) EXPECT_EQ(each.wait_name(), "Ok");
}

TEST_F(Ibv, MemoryThatIsFreedAndMappedAnewIsReadAsItIsNow) {
  forbid_bulk();
  void* address = nullptr;
  for (std::uint32_t i = 0; i < 5; ++i) {
    void* const mapped = ::mmap(address, 4 * megabyte, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | (address != nullptr ? MAP_FIXED : 0), -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    address = mapped;
    const Buffer buffer{{}, static_cast<std::byte*>(mapped), 4 * megabyte, nullptr, nullptr};
    memory->fill(buffer, i);
    expect_carries(buffer, i);
    ASSERT_EQ(::munmap(mapped, 4 * megabyte), 0);
  }
}

TEST_F(Ibv, ARegionStaysRegisteredUntilItEnds) {
  forbid_bulk();
  if (cards.registered_bytes == nullptr) GTEST_SKIP() << "the cards are not emulated";
  auto region = Regions::of_this_process().make(4 * megabyte);
  ASSERT_TRUE(region.ok());
  memory->fill(*region, 3);
  expect_carries(*region, 3);  // by a copy; the region is registered meanwhile
  ASSERT_TRUE(eventually([&] {
    Letter letter(a());
    return letter.offer(*region) && source_of(letter.tickets.front()).address == address_of(*region);
  }));
  expect_carries(*region, 3);
  const auto with_region = cards.registered_bytes();
  EXPECT_GE(with_region, 4 * megabyte);
  *region = Buffer{};
  EXPECT_TRUE(eventually([&] { return cards.registered_bytes() <= with_region - 4 * megabyte; }));
}

TEST_F(Ibv, ForeignMemoryIsRegisteredOnlyWhileItsOfferIsOpen) {
  if (cards.registered_bytes == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto before = cards.registered_bytes();
  {
    Letter letter(a());
    ASSERT_TRUE(letter.offer(memory->filled(4 * megabyte, 1)));
    EXPECT_GE(cards.registered_bytes(), before + 4 * megabyte);
  }
  EXPECT_EQ(cards.registered_bytes(), before);
}

TEST_F(Ibv, AnOfferIsDeregisteredBeforeItsSourceIsReleased) {
  if (cards.registered_bytes == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto before = cards.registered_bytes();
  std::uint64_t at_release = ~std::uint64_t{0};
  {
    Letter letter(a());
    ASSERT_TRUE(
        letter.offer(memory->filled(4 * megabyte, 1), [&](const Status&) { at_release = cards.registered_bytes(); }));
  }
  EXPECT_EQ(at_release, before);
}

TEST_F(Ibv, WithoutRightsToPinBuffersGoThroughStagingMemoryOrAreRefusedWithTheReason) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  cards.limit_memory(2 * megabyte + 64 * kilobyte);
  connect({.staging_bytes = megabyte});
  expect_carries(700 * kilobyte, 2);  // both ends have a staging area of 1 MB, and nothing else
  Letter letter(a());
  const bool taken = letter.offer(memory->filled(3 * megabyte, 1));
  EXPECT_FALSE(taken);
  EXPECT_THAT(letter.refusal, HasSubstr("ulimit -l"));
  cards.limit_memory(~std::uint64_t{0});
}

TEST_F(Ibv, APullIntoMemoryThatCannotBeRegisteredGoesThroughStagingMemory) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  expect_carries(64 * kilobyte, 1);  // makes the staging areas
  Letter letter(a());
  ASSERT_TRUE(letter.offer(memory->filled(5 * megabyte, 2)));
  cards.limit_memory(cards.registered_bytes());
  forbid_bulk();
  letter.send();
  expect_arrives(5 * megabyte, 2);
  cards.limit_memory(~std::uint64_t{0});
}

TEST_F(Ibv, ThePinnedMemoryIsBoundedByTheOption) {
  rdma::Options rdma;
  rdma.pinned_bytes = 20 * megabyte;
  connect({.staging_bytes = 2 * megabyte, .rdma = rdma});
  std::vector<Result<Buffer>> regions;
  for (std::uint32_t i = 0; i < 6; ++i) {
    regions.push_back(Regions::of_this_process().make(6 * megabyte));
    ASSERT_TRUE(regions.back().ok());
    memory->fill(*regions.back(), i);
    expect_carries(*regions.back(), i);  // an older one is deregistered to make room
    EXPECT_LE(pinned_bytes().load(), 40 * megabyte) << "of both drivers";
  }
  EXPECT_GT(pinned_bytes().load(), 10 * megabyte);
}

TEST_F(Ibv, PinnedMemoryIsCountedAndGivenBack) {
  expect_carries(4 * megabyte, 1);
  EXPECT_GT(pinned_bytes().load(), 0U);
  disconnect();
  EXPECT_EQ(pinned_bytes().load(), 0U);
}

}  // namespace
}  // namespace tensorferry::conformance
