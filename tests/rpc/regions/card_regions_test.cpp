// Regions that network cards read and write, on emulated cards or on real verbs: what they bring, what a key does not
// allow, and what drops, failures and kills do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <random>
#include <thread>

#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "base/environment.h"
#include "channels/ibv/ibv_channel.h"
#include "channels/ibv/messages.h"
#include "channels/one_sided.h"
#include "tests/agent/patience.h"
#include "tests/channels/cards_of_ends.h"
#include "tests/emulated_verbs/control.h"
#include "tests/rpc/regions/region_agents.h"

namespace tensorferry::testing {
namespace {

using regions::Reach;
using regions::RegionRights;
using regions::Runs;
using ::testing::AnyOf;
using ::testing::HasSubstr;

const RegionRights both{true, true, {}};
const Ways by_cards{"tcp", "ibv,basic"};

/// Joins with the card of an end, and uses no way that a host alone has.
std::unique_ptr<RegionAgent> agent_of_end(std::size_t end, const std::shared_ptr<Store>& store,
                                          const std::string& name) {
  const auto card = rdma::card_of_end(end);
  if (!card.empty()) ::setenv(environment::rdma_devices.name, card.c_str(), 1);
  auto out = std::make_unique<RegionAgent>(store, name, by_cards);
  if (!card.empty()) ::unsetenv(environment::rdma_devices.name);
  out->remote->reach_at_most(Reach::by_card);
  return out;
}

/// Returns why there are no cards; "": there are.
std::string no_cards() {
  const auto descriptor = IbvDriver().descriptor({});
  const auto* refusal = std::get_if<Refusal>(&descriptor);
  return refusal != nullptr ? refusal->reason : "";
}

/// Reads until a read has gone by a card.
void use_the_card(regions::RemoteRegion& region) {
  const auto word = patterned(std::min<std::uint64_t>(region.bytes(), 8), 5);
  EXPECT_TRUE(eventually([&] {
    EXPECT_TRUE(region.read(Runs::one(0, word.bytes), word).ok());
    return region.reach() == Reach::by_card;
  }));
}

class CardRegions : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = no_cards(); !reason.empty()) GTEST_SKIP() << reason;
    owner = agent_of_end(0, store, "owner");
    reader = agent_of_end(1, store, "reader");
  }
  /// Makes a region of the owner's, and opens it at the reader when cards reach it.
  std::shared_ptr<regions::RemoteRegion> opened(const Buffer& memory, const RegionRights& rights) {
    id = *owner->owned->add(memory, rights);
    auto region = reader->remote->open(owner->key_of(id));
    EXPECT_TRUE(region.ok()) << region.status().text();
    if ((*region)->readable()) use_the_card(**region);
    return *region;
  }
  /// Returns what the owner tells of the region's keys.
  regions::RegionKeys keys() {
    const auto visit = reader->visits->visit("owner")->number();
    const regions::RegionMessage asked = regions::AskKeys{visit, id};
    const auto told = call_sync(*reader->agent, "owner", regions::region_function, {encode(asked), {}, {}, {}});
    EXPECT_TRUE(told.ok()) << told.status().text();
    return decode<regions::RegionKeys>(told->payload).value();
  }
  /// Does what a peer that breaks the protocol may do: a transfer by keys, unchecked but by the card.
  Status transfer(const regions::RegionKeys& by, std::uint64_t offset, const Buffer& here, bool writes) {
    const auto transfers = reader->agent->one_sided("owner");
    if (!transfers) return {Code::channel_unavailable, "no cards"};
    std::promise<Status> ended;
    transfers->transfer({by.region, here.bytes, {offset}, here, writes, by.page, 0, id},
                        [&](Status status) { ended.set_value(std::move(status)); });
    return ended.get_future().get();
  }
  static constexpr std::size_t block = 512, blocks = 4096;

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::unique_ptr<RegionAgent> owner, reader;
  std::uint64_t id = 0;
  emulated_verbs::Controls cards = emulated_verbs::controls();
};

TEST_F(CardRegions, AreReadByTheCard) {
  const auto bytes = patterned(3 << 20);
  const auto region = opened(bytes, {});
  for (const auto& [offset, size] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 3 << 20}, {0, 4096}, {5, 1}, {(3 << 20) - 7, 7}, {100, 0}, {12345, 2'000'000}}) {
    const auto into = patterned(size, 9);
    const auto read = region->read(Runs::one(offset, size), into);
    ASSERT_TRUE(read.ok()) << read.text();
    EXPECT_TRUE(same_bytes(into, part_of(bytes, offset, size))) << offset << " " << size;
    EXPECT_EQ(region->reach(), Reach::by_card);
  }
}

TEST_F(CardRegions, GatherBlocksInTheOrderOfTheirOffsets) {
  const auto bytes = patterned(block * blocks);
  const auto region = opened(bytes, {});
  std::mt19937 random(7);
  for (const std::size_t count : {0, 1, 3, 700, 5000}) {
    Runs runs{block, {}};
    for (std::size_t i = 0; i < count; ++i) {
      const bool follows = i > 0 && random() % 2 == 0 && runs.offsets.back() + block < block * blocks;
      runs.offsets.push_back(follows ? runs.offsets.back() + block : block * (random() % blocks));
    }
    const auto into = patterned(block * count, 9);
    const auto read = region->read(runs, into);
    ASSERT_TRUE(read.ok()) << read.text();
    EXPECT_EQ(region->reach(), Reach::by_card);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(same_bytes(part_of(into, i * block, block), part_of(bytes, runs.offsets[i], block))) << i;
    }
  }
}

TEST_F(CardRegions, ScatterBlocksToTheirOffsets) {
  const auto bytes = patterned(block * blocks);
  const auto region = opened(bytes, both);
  std::vector<std::uint64_t> order(blocks);
  for (std::size_t i = 0; i < blocks; ++i) order[i] = i * block;
  std::mt19937 random(7);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{700}, blocks}) {
    std::ranges::shuffle(order, random);
    const Runs runs{block, {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count)}};
    const auto expected = patterned(block * blocks, 9);
    std::memcpy(expected.data, bytes.data, expected.bytes);
    const auto from = patterned(block * count, 11);
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(expected.data + runs.offsets[i], from.data + i * block, block);
    }
    const auto written = region->write(runs, from);
    ASSERT_TRUE(written.ok()) << written.text();
    EXPECT_EQ(region->reach(), Reach::by_card);
    ASSERT_TRUE(same_bytes(expected, bytes)) << count;
  }
}

TEST_F(CardRegions, AWriteIsThereBeforeItsNotification) {
  const auto bytes = patterned(1 << 20);
  const auto region = opened(bytes, both);
  for (unsigned number = 1; number <= 50; ++number) {
    const auto from = patterned(200'000, 100 + number);
    ASSERT_TRUE(region->write(Runs::one(number, from.bytes), from, number).ok());
    const auto told = owner->owned->await_notification(id, number, Clock().now() + long_enough);
    ASSERT_TRUE(told.ok()) << told.status().text();
    EXPECT_TRUE(same_bytes(from, part_of(bytes, number, from.bytes)));
  }
}

TEST_F(CardRegions, ARegionThatPeersOnlyWriteIsWrittenByCard) {
  const auto bytes = patterned(100'000);
  const auto region = opened(bytes, {false, true, {}});
  const auto from = patterned(100'000, 3);
  EXPECT_TRUE(eventually([&] {
    EXPECT_TRUE(region->write(Runs::one(0, from.bytes), from).ok());
    return region->reach() == Reach::by_card;
  }));
  EXPECT_TRUE(same_bytes(from, bytes));
  EXPECT_EQ(region->read(Runs::one(0, 8), patterned(8, 9)).code(), Code::permission_denied);
  const auto into = patterned(4096, 9);
  EXPECT_EQ(transfer(keys(), 0, into, false).code(), Code::channel_unavailable);
  EXPECT_TRUE(same_bytes(into, patterned(4096, 9)));
}

TEST_F(CardRegions, TheKeyAllowsNoWriteOfARegionThatPeersOnlyRead) {
  const auto bytes = patterned(100'000);
  const auto region = opened(bytes, {});
  EXPECT_EQ(region->write(Runs::one(0, 8), patterned(8, 9)).code(), Code::permission_denied);
  // A peer that breaks the protocol does not look at the flag in the owner's record.
  auto forged = keys();
  auto record = decode<ibv::KeyedMemory>(forged.region).value();
  EXPECT_FALSE(record.write);
  record.write = true;
  forged.region = encode(record);
  EXPECT_EQ(transfer(forged, 0, patterned(4096, 9), true).code(), Code::channel_unavailable);
  EXPECT_TRUE(same_bytes(bytes, patterned(100'000)));
  use_the_card(*region);  // the connection is made anew
}

TEST_F(CardRegions, ADropIsNotFoundAndTakesTheKeyBack) {
  const auto bytes = patterned(1 << 20);
  const auto region = opened(bytes, both);
  const auto old = keys();
  ASSERT_FALSE(old.region.empty());
  const auto registered = cards.registered_bytes != nullptr ? cards.registered_bytes() : 0;
  ASSERT_TRUE(owner->owned->drop(id).ok());
  if (cards.registered_bytes != nullptr) {
    EXPECT_LE(cards.registered_bytes(), registered - bytes.bytes);
  }
  const auto into = patterned(4096, 9);
  EXPECT_THAT(transfer(old, 0, into, false).code(), AnyOf(Code::channel_unavailable, Code::not_found));
  EXPECT_TRUE(same_bytes(into, patterned(4096, 9)));
  EXPECT_THAT(transfer(old, 0, patterned(4096, 9), true).code(), AnyOf(Code::channel_unavailable, Code::not_found));
  EXPECT_TRUE(same_bytes(bytes, patterned(1 << 20)));
  const auto read = region->read(Runs::one(0, 4096), into);
  EXPECT_EQ(read.code(), Code::not_found) << read.text();
  // Another region in the same memory has a key of its own, and the old one does not reach it.
  const auto again = opened(bytes, both);
  EXPECT_EQ(region->read(Runs::one(0, 4096), into).code(), Code::not_found);
  EXPECT_TRUE(again->read(Runs::one(0, 4096), into).ok());
  EXPECT_TRUE(same_bytes(into, part_of(bytes, 0, 4096)));
}

TEST_F(CardRegions, NoReadThatSucceedsHasBytesOfWhatFollowsADrop) {
  constexpr std::size_t bytes = 256 << 10;
  const auto memory = patterned(bytes);
  const auto zeros = patterned(bytes);
  std::memset(zeros.data, 0, bytes);
  for (int round = 0; round < rounds(1000) + 10; ++round) {
    std::memset(memory.data, 1, bytes);
    id = *owner->owned->add(memory, {});
    const auto region = *reader->remote->open(owner->key_of(id));
    if (round < 4)
      use_the_card(*region);  // a drop in between may fail the queue pairs, which are made anew with pauses
    std::atomic<bool> begun = false;
    std::thread dropping([&] {
      while (!begun) std::this_thread::yield();
      EXPECT_TRUE(owner->owned->drop(id).ok());
      std::memset(memory.data, 0, bytes);
    });
    const auto into = patterned(bytes, 9);
    Status status;
    while (status.ok()) {
      begun = true;
      status = region->read(Runs::one(0, bytes), into);
      ASSERT_TRUE(!status.ok() || std::count(into.data, into.data + bytes, std::byte{1}) == bytes) << round;
    }
    EXPECT_EQ(status.code(), Code::not_found) << status.text();
    dropping.join();
  }
}

TEST_F(CardRegions, ATransferWhoseQueuePairFailsIsServed) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "only emulated cards fail at will";
  const auto bytes = patterned(1 << 20);
  const auto region = opened(bytes, both);
  for (int round = 0; round < 3; ++round) {
    (void)cards.fail_queue_pairs(100);
    const auto into = patterned(1 << 20, 9);
    const auto read = region->read(Runs::one(0, bytes.bytes), into);
    ASSERT_TRUE(read.ok()) << read.text();
    EXPECT_TRUE(same_bytes(into, bytes));
    const auto from = patterned(1 << 20, 20 + static_cast<unsigned>(round));
    ASSERT_TRUE(region->write(Runs::one(0, from.bytes), from).ok());
    EXPECT_TRUE(same_bytes(from, bytes));
    use_the_card(*region);
  }
}

TEST_F(CardRegions, MemoryThatNoCardMayPinIsServed) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "only emulated cards run out of memory at will";
  (void)opened(patterned(4096), {});
  cards.limit_memory(cards.registered_bytes());
  const auto bytes = patterned(1 << 20);
  const auto other = *owner->owned->add(bytes, {});
  const auto region = *reader->remote->open(owner->key_of(other));
  const auto into = patterned(1 << 20, 9);
  const auto read = region->read(Runs::one(0, bytes.bytes), into);
  cards.limit_memory(~std::uint64_t{0});
  ASSERT_TRUE(read.ok()) << read.text();
  EXPECT_EQ(region->reach(), Reach::served);
  EXPECT_TRUE(same_bytes(into, bytes));
}

TEST_F(CardRegions, KeysAreGivenOnlyToAPeerWithAGrant) {
  const auto visit = reader->visits->visit("owner")->number();
  id = *owner->owned->add(patterned(4096), {true, false, {"somebody else"}});
  const auto ask = [&](std::uint64_t region) {
    const regions::RegionMessage asked = regions::AskKeys{visit, region};
    return call_sync(*reader->agent, "owner", regions::region_function, {encode(asked), {}, {}, {}}).status().code();
  };
  EXPECT_TRUE(eventually([&] { return ask(id) != Code::ok; }));
  EXPECT_EQ(ask(id), Code::permission_denied);
  EXPECT_EQ(ask(id + 7), Code::not_found);
  id = *owner->owned->add(patterned(4096), {});
  EXPECT_EQ(ask(id), Code::not_found) << "it has not opened the region";
}

TEST_F(CardRegions, NothingStaysRegisteredWhenAllHaveLeft) {
  (void)opened(patterned(1 << 20), both);
  reader.reset();
  owner.reset();
  if (cards.registered_bytes != nullptr) {
    EXPECT_EQ(cards.registered_bytes(), 0U);
  }
}

#ifndef TENSORFERRY_UNDER_TSAN  // under it, a forked child of a process with threads cannot make threads
/// A process that owns a region until it is killed.
TEST(CardRegionKills, AreConnectionLostAtReaders) {
  for (unsigned round = 0; round < 5; ++round) {
    int ports[2];
    ASSERT_EQ(::pipe(ports), 0);
    const auto child = ::fork();
    if (child == 0) {
      std::uint16_t port = 0;
      if (::read(ports[0], &port, sizeof port) != sizeof port) ::_exit(1);
      const auto owner = agent_of_end(0, *connect_tcp_store("127.0.0.1", port, "", long_enough), "owner");
      if (!owner->owned->add(patterned(8 << 20), {}, "table").ok()) ::_exit(1);
      for (;;) ::pause();
    }
    int status = 0;
    const auto end = [&] {
      ::kill(child, SIGKILL);
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ::close(ports[0]);
      ::close(ports[1]);
    };
    if (const auto reason = no_cards(); !reason.empty()) {
      end();
      GTEST_SKIP() << reason;
    }
    const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
    const auto port = server->port();
    ASSERT_EQ(::write(ports[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
    const auto reader = agent_of_end(1, *connect_tcp_store("127.0.0.1", port, "", long_enough), "reader");
    std::shared_ptr<regions::RemoteRegion> region;
    ASSERT_TRUE(eventually([&] {
      const auto opened = reader->remote->open({"owner", 0, 0, "table"});
      if (opened.ok()) region = *opened;
      return opened.ok();
    }));
    use_the_card(*region);
    std::thread killing([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(std::mt19937(round)() % 20'000));
      end();
    });
    const auto into = patterned(8 << 20, 9);
    Status read;
    while (read.ok()) {
      read = region->read(Runs::one(0, into.bytes), into);
      EXPECT_TRUE(!read.ok() || same_bytes(into, patterned(8 << 20)));
    }
    EXPECT_EQ(read.code(), Code::connection_lost) << read.text();
    killing.join();
  }
}
#endif

}  // namespace
}  // namespace tensorferry::testing
