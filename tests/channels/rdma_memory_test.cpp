/// Tests of registered memory (channels/rdma/registrations.h, staging_area.h) and of pairing ports, on emulated cards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "channels/host_memory.h"
#include "channels/pinned_bytes.h"
#include "channels/rdma/local_cards.h"
#include "channels/region.h"
#include "tests/emulated_verbs/control.h"

namespace tensorferry::rdma {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

class RdmaMemory : public testing::Test {
 protected:
  void SetUp() override {
    const auto ports = usable_ports({});
    if (const auto* refusal = std::get_if<Refusal>(&ports)) GTEST_SKIP() << refusal->reason;
    if (emulated.registered_bytes == nullptr) GTEST_SKIP() << "the cards are not emulated";
    open(0);
  }
  void TearDown() override {
    if (cards == nullptr) return;
    emulated.limit_memory(~std::uint64_t{0});
    cards.reset();
    EXPECT_EQ(emulated.registered_bytes(), 0U);
    EXPECT_EQ(pinned_bytes().load(), 0U);
  }
  void open(std::uint64_t pinned, std::size_t staging = megabyte) {
    Options options;
    options.pinned_bytes = pinned;
    auto opened = LocalCards::open(std::get<std::vector<CardPort>>(usable_ports({})), options, staging);
    ASSERT_TRUE(opened.ok()) << opened.status().text();
    cards = *opened;
  }
  Registrations& registrations() { return *cards->registrations; }
  Result<std::shared_ptr<Registration>> make(const Buffer& buffer, Access access) {
    return registrations().make(buffer.data, buffer.bytes, access, {0});
  }

  emulated_verbs::Controls emulated = emulated_verbs::controls();
  std::shared_ptr<LocalCards> cards;
};

TEST_F(RdmaMemory, ABlockOfAReceivePoolStaysRegisteredForLandingUntilItIsFreed) {
  HostMemory memory(HostMemory::Limits{.idle_bytes = 0});
  auto buffer = memory.allocate(megabyte, {});
  ASSERT_EQ(registrations().find(buffer.data, buffer.bytes, Access::lands, {0}), nullptr);
  ASSERT_TRUE(make(buffer, Access::lands).ok());
  EXPECT_NE(registrations().find(buffer.data + 100, 100, Access::lands, {0}), nullptr);
  EXPECT_EQ(registrations().find(buffer.data, 100, Access::offered, {0}), nullptr) << "a peer could read it";
  EXPECT_EQ(registrations().kept(), 1U);
  EXPECT_EQ(emulated.registered_bytes(), megabyte);
  buffer = {};
  EXPECT_EQ(registrations().kept(), 0U);
  EXPECT_EQ(emulated.registered_bytes(), 0U);
}

TEST_F(RdmaMemory, ABlockOfAReceivePoolIsReadableByPeersOnlyWhileItIsOffered) {
  HostMemory memory;
  const auto buffer = memory.allocate(megabyte, {});
  {
    const auto offered = make(buffer, Access::offered);
    ASSERT_TRUE(offered.ok());
    EXPECT_EQ(emulated.registered_bytes(), megabyte);
  }
  EXPECT_EQ(emulated.registered_bytes(), 0U);
}

TEST_F(RdmaMemory, MemoryAtAUsedAddressIsRegisteredAnew) {
  std::byte* address = nullptr;
  std::uint32_t key = 0;
  for (int i = 0; i < 3; ++i) {
    HostMemory memory(HostMemory::Limits{.idle_bytes = 0});
    const auto buffer = memory.allocate(4 * megabyte, {});
    EXPECT_EQ(registrations().find(buffer.data, buffer.bytes, Access::lands, {0}), nullptr);
    const auto made = make(buffer, Access::lands);
    ASSERT_TRUE(made.ok());
    if (i > 0 && buffer.data == address) {
      EXPECT_NE((*made)->keys(0).local, key);
    }
    address = buffer.data;
    key = (*made)->keys(0).local;
  }
}

TEST_F(RdmaMemory, OtherMemoryIsRegisteredForTheTimeOfItsUseAndSharedMeanwhile) {
  std::vector<std::byte> bytes(megabyte);
  const Buffer buffer{{}, bytes.data(), bytes.size(), nullptr, nullptr};
  auto one = make(buffer, Access::offered), two = make(buffer, Access::offered);
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ((*one)->keys(0).remote, (*two)->keys(0).remote);
  EXPECT_EQ(emulated.registered_bytes(), megabyte);
  EXPECT_EQ(registrations().find(buffer.data, buffer.bytes, Access::offered, {0}), nullptr) << "nothing is kept";
  one->reset();
  EXPECT_EQ(emulated.registered_bytes(), megabyte);
  two->reset();
  EXPECT_EQ(emulated.registered_bytes(), 0U);
}

TEST_F(RdmaMemory, HeldMemoryIsRegisteredAheadWithEveryCardAndUntilTheHoldEnds) {
  auto bytes = std::make_shared<std::vector<std::byte>>(megabyte);
  auto* const data = bytes->data();
  auto hold = Allocations::of_this_process().hold(data, megabyte, bytes);
  EXPECT_EQ(emulated.registered_bytes(), megabyte * cards->cards.size());
  const auto in_use = registrations().find(data, 100, Access::offered, {0});
  ASSERT_NE(in_use, nullptr);
  hold.reset();
  EXPECT_EQ(registrations().find(data, 100, Access::offered, {0}), nullptr);
  EXPECT_EQ(emulated.registered_bytes(), megabyte * cards->cards.size()) << "a transfer is under way";
}

TEST_F(RdmaMemory, WithoutRoomTheRegistrationThatWasUsedLongestAgoIsDropped) {
  open(3 * megabyte);
  HostMemory memory;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 3; ++i) {
    buffers.push_back(memory.allocate(megabyte, {}));
    ASSERT_TRUE(make(buffers.back(), Access::lands).ok());
  }
  const auto found = [&](std::size_t i) {
    return registrations().find(buffers[i].data, megabyte, Access::lands, {0}) != nullptr;
  };
  EXPECT_TRUE(found(0));  // and so it was used last
  buffers.push_back(memory.allocate(megabyte, {}));
  ASSERT_TRUE(make(buffers.back(), Access::lands).ok());
  EXPECT_TRUE(found(0));
  EXPECT_FALSE(found(1));
  EXPECT_TRUE(found(2));
  EXPECT_EQ(pinned_bytes().load(), 3 * megabyte);
}

TEST_F(RdmaMemory, WhatIsInUseIsNotDroppedAndTheReasonNamesTheBound) {
  open(megabyte);
  HostMemory memory;
  const auto one = memory.allocate(megabyte, {}), two = memory.allocate(megabyte, {});
  const auto used = make(one, Access::lands);
  ASSERT_TRUE(used.ok());
  const auto refused = make(two, Access::lands);
  EXPECT_EQ(refused.status().code(), Code::resource_exhausted);
  EXPECT_THAT(std::string(refused.status().what()), HasSubstr("TENSORFERRY_RDMA_PINNED"));
}

TEST_F(RdmaMemory, APartOfARegionIsRegisteredIfTheWholeMayNotBe) {
  open(2 * megabyte);
  auto region = Regions::of_this_process().make(16 * megabyte);
  ASSERT_TRUE(region.ok());
  const auto part = registrations().make(region->data + 4096, megabyte, Access::offered, {0});
  EXPECT_TRUE(part.ok()) << part.status().text();
  EXPECT_EQ(registrations().kept(), 0U);
}

TEST_F(RdmaMemory, TheKernelsLimitIsNamed) {
  emulated.limit_memory(megabyte);
  std::vector<std::byte> bytes(2 * megabyte);
  const auto refused = make({{}, bytes.data(), bytes.size(), nullptr, nullptr}, Access::offered);
  EXPECT_EQ(refused.status().code(), Code::resource_exhausted);
  EXPECT_THAT(std::string(refused.status().what()), HasSubstr("ulimit -l"));
  EXPECT_EQ(pinned_bytes().load(), 0U);
}

TEST_F(RdmaMemory, StagingPiecesDoNotOverlapAndJoinAgainWhenTheyComeBack) {
  {
    std::vector<StagingArea::Piece> pieces;
    for (int i = 0; i < 16; ++i) {
      auto piece = cards->staging->take(64 * kilobyte - 7, {0});
      ASSERT_TRUE(piece.ok()) << piece.status().text();
      pieces.push_back(std::move(*piece));
    }
    EXPECT_EQ(cards->staging->used(), megabyte);
    EXPECT_EQ(cards->staging->take(1, {0}).status().code(), Code::resource_exhausted);
    for (std::size_t i = 1; i < pieces.size(); ++i) EXPECT_GE(pieces[i].data, pieces[i - 1].data + 64 * kilobyte - 7);
    for (std::size_t i = 0; i < pieces.size(); i += 2) pieces[i] = {};
    EXPECT_FALSE(cards->staging->take(65 * kilobyte, {0}).ok()) << "no two neighbours are free";
  }
  EXPECT_EQ(cards->staging->used(), 0U);
  EXPECT_TRUE(cards->staging->take(megabyte, {0}).ok());
}

TEST_F(RdmaMemory, TheStagingAreaIsAsLargeAsMayBePinned) {
  emulated.limit_memory(300 * kilobyte);
  EXPECT_TRUE(cards->staging->take(200 * kilobyte, {0}).ok());
  EXPECT_FALSE(cards->staging->take(300 * kilobyte, {0}).ok());
}

TEST_F(RdmaMemory, WithoutAnyRightToPinTheStagingAreaSaysWhy) {
  emulated.limit_memory(0);
  const auto refused = cards->staging->take(kilobyte, {0});
  EXPECT_THAT(std::string(refused.status().what()), HasSubstr("ulimit -l"));
}

// ---- Ports

PortAddress port(GidKind kind, std::vector<std::uint8_t> end, bool link_local = false, bool ipv4 = false) {
  PortAddress made{static_cast<std::uint8_t>(kind), {}};
  if (link_local) made.gid = {0xfe, 0x80};
  if (!link_local && !ipv4) made.gid = {0x20, 0x01};
  if (ipv4) made.gid[10] = made.gid[11] = 0xff;
  std::copy(end.begin(), end.end(), made.gid.end() - static_cast<std::ptrdiff_t>(end.size()));
  return made;
}

TEST(RdmaPorts, ReachOthersOfTheirFabricAndAddressFamily) {
  const auto v4 = port(GidKind::roce_v2, {10, 0, 0, 1}, false, true);
  const auto other_v4 = port(GidKind::roce_v2, {10, 1, 0, 2}, false, true);
  const auto v6 = port(GidKind::roce_v2, {9}), local = port(GidKind::roce_v2, {7}, true);
  const auto v1 = port(GidKind::roce_v1, {8}, true);
  auto infiniband = port(GidKind::infiniband, {1}, true), other_subnet = port(GidKind::infiniband, {2}, true);
  other_subnet.gid[7] = 9;
  EXPECT_TRUE(can_reach(v4, other_v4));
  EXPECT_TRUE(can_reach(infiniband, port(GidKind::infiniband, {5}, true)));
  for (const auto& [one, other] :
       {std::pair(v4, v6), {v6, local}, {local, v1}, {infiniband, other_subnet}, {v1, infiniband}}) {
    EXPECT_FALSE(can_reach(one, other));
    EXPECT_FALSE(can_reach(other, one));
  }
}

TEST(RdmaPorts, ArePairedOnceInTheOrderOfTheFirstList) {
  const auto a = port(GidKind::roce_v2, {10, 0, 0, 1}, false, true), b = port(GidKind::roce_v1, {8}, true);
  EXPECT_THAT(pair_ports({a, a, b}, {b, a}), ElementsAre(Pair(0, 1), Pair(2, 0)));
  EXPECT_THAT(pair_ports({b}, {a, a}), ElementsAre());
  EXPECT_THAT(pair_ports({}, {a}), ElementsAre());
}

}  // namespace
}  // namespace tensorferry::rdma
