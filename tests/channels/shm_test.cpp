#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "channels/region.h"
#include "channels/shm/shm_channel.h"
#include "tests/channels/shm_maps.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

struct ShmFixture {
  static constexpr auto name = "shm";
  static Drivers drivers() { return {std::make_unique<ShmDriver>()}; }
  static Traits traits() { return {.shares = true}; }
};

/// Each end has its own driver, as in two agents.
struct ShmTwoDriversFixture {
  static constexpr auto name = "shm";
  static Drivers drivers() { return {std::make_unique<ShmDriver>(), std::make_unique<ShmDriver>()}; }
  static Traits traits() { return {.shares = true}; }
};

namespace {

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

shm::Limits small_limits() {
  shm::Limits limits;
  limits.held_bytes = 4 * megabyte;
  limits.idle_bytes = 8 * megabyte;
  limits.floor_bytes = megabyte;
  limits.idle_for = std::chrono::milliseconds(50);
  return limits;
}

template <class Condition>
bool eventually(Condition holds) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

class Shm : public testing::Test {
 protected:
  explicit Shm(shm::Limits limits = {}) : driver(limits) {}
  void SetUp() override {
    ASSERT_TRUE(a.wait_ready()->ok());
    ASSERT_TRUE(b.wait_ready()->ok());
  }
  /// Sends a buffer that other channels could carry too, so that the channel takes it only if it has a warm block.
  bool sends_warm(const Buffer& buffer, std::string* why = nullptr) {
    Letter letter(a);
    letter.only_channel = false;
    const bool offered = letter.offer(buffer);
    if (why != nullptr) *why = letter.refusal;
    if (offered) letter.send();
    return offered;
  }
  std::shared_ptr<Arrival> carry(const Buffer& buffer, Sharing sharing = Sharing::by_value) {
    Letter letter(a);
    EXPECT_TRUE(letter.offer(buffer, {}, sharing)) << letter.refusal;
    letter.send();
    return sole_owner(b.receive());
  }

  ShmDriver driver, other;
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{driver, other, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;
};

class ShmWithSmallLimits : public Shm {
 protected:
  ShmWithSmallLimits() : Shm(small_limits()) {}
};

TEST_F(Shm, TheSourceIsFreeWhenTheOfferReturns) {
  b.messages().hold_after(0);
  for (std::size_t bytes : {kilobyte, 20 * megabyte}) {
    Letter letter(a);
    ASSERT_TRUE(letter.offer(memory->filled(bytes, 1)));
    EXPECT_EQ(letter.released.front().runs(), 1);
    EXPECT_FALSE(letter.tickets.front().acknowledge);
  }
}

TEST_F(Shm, TheReceiverAdoptsTheBlock) {
  const auto arrival = carry(memory->filled(megabyte, 3));
  ASSERT_NE(arrival, nullptr);
  EXPECT_TRUE(in_shared_mapping(arrival->buffer.data, arrival->buffer.bytes));
  EXPECT_TRUE(memory->holds(arrival->buffer, 3));
}

TEST_F(Shm, ValuesAreValues) {
  const auto source = memory->filled(megabyte, 1);
  const auto arrival = carry(source);
  ASSERT_NE(arrival, nullptr);
  memory->fill(source, 2);
  EXPECT_TRUE(memory->holds(arrival->buffer, 1));
  memory->fill(arrival->buffer, 3);
  EXPECT_TRUE(memory->holds(source, 2));
}

TEST_F(Shm, WithoutAWarmBlockAnOfferIsRefusedUntilOneIsReady) {
  for (std::size_t bytes : {5 * kilobyte, megabyte, 20 * megabyte}) {
    const auto buffer = memory->filled(bytes, 4);
    std::string why;
    EXPECT_FALSE(sends_warm(buffer, &why));
    EXPECT_NE(why.find("no warm block"), std::string::npos) << why;
    ASSERT_TRUE(eventually([&] { return sends_warm(buffer); }));
    const auto arrivals = b.receive();
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 4));
  }
}

TEST_F(Shm, ARefusalForLackOfAWarmBlockIsMarkedTemporary) {
  Letter letter(a);
  letter.only_channel = false;
  auto offer = a.channel().offer(memory->filled(megabyte, 1), Sharing::by_value, letter, {});
  ASSERT_TRUE(std::holds_alternative<Refusal>(offer));
  EXPECT_TRUE(std::get<Refusal>(offer).passing);
}

TEST_F(Shm, TheMostRecentlyReturnedBlockIsReusedFirst) {
  auto first = carry(memory->filled(megabyte, 1));
  auto second = carry(memory->filled(megabyte, 2));
  const auto *const first_at = first->buffer.data, *const second_at = second->buffer.data;
  EXPECT_NE(first_at, second_at);
  for (auto* arrival : {&second, &first}) {
    ASSERT_TRUE(eventually([&] { return arrival->use_count() == 1; })) << "the reader still has it";
    arrival->reset();
  }
  auto again = carry(memory->filled(megabyte, 3));
  EXPECT_EQ(again->buffer.data, first_at);
  EXPECT_EQ(carry(memory->filled(megabyte, 4))->buffer.data, second_at);
  EXPECT_TRUE(memory->holds(again->buffer, 3));
}

TEST_F(Shm, ABlockIsReusedOnlyAfterItsLastOwnerReleasesIt) {
  auto first = carry(memory->filled(megabyte, 1));
  Owner second_owner = first->buffer.owner;
  auto* const at = first->buffer.data;
  first.reset();
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_NE(carry(memory->filled(megabyte, 10 + i))->buffer.data, at);
  second_owner.reset();
  std::vector<std::shared_ptr<Arrival>> held;  // blocks that were populated meanwhile may be used first
  bool again = false;
  for (std::uint32_t i = 0; i < 10 && !again; ++i) {
    held.push_back(carry(memory->filled(megabyte, 20 + i)));
    again = held.back()->buffer.data == at;
  }
  EXPECT_TRUE(again);
}

TEST_F(Shm, OwnersOnManyThreadsReturnBlocksConcurrently) {
  constexpr std::size_t threads = 4, each = 200;
  for (int round = 0; round < 5; ++round) {
    std::vector<Arrivals> held(threads);
    for (std::size_t i = 0; i < threads * each; ++i) {
      held[i % threads].push_back(carry(memory->filled(6 * kilobyte, static_cast<std::uint32_t>(i))));
      ASSERT_NE(held[i % threads].back(), nullptr);
    }
    for (std::size_t i = 0; i < threads * each; ++i)
      ASSERT_TRUE(memory->holds(held[i % threads][i / threads]->buffer, static_cast<std::uint32_t>(i)));
    std::vector<std::thread> owners;
    owners.reserve(threads);
    for (auto& mine : held) owners.emplace_back([&mine] { mine.clear(); });
    for (auto& owner : owners) owner.join();
    carry(memory->filled(6 * kilobyte, 0));  // makes the sender take back the returned blocks
    EXPECT_LE(driver.usage().held, 6 * kilobyte);
  }
  EXPECT_LE(driver.usage().idle, 2 * threads * each * 6 * kilobyte + megabyte);
}

TEST_F(Shm, SmallBuffersShareMappings) {
  const auto before = shared_mappings();
  Arrivals held;
  for (std::uint32_t i = 0; i < 2000; ++i) held.push_back(carry(memory->filled(5000, i)));
  // Both ends are in this process, so each segment is mapped twice.
  EXPECT_LE(shared_mappings(), before + 2 * 10);
  for (std::uint32_t i = 0; i < 2000; ++i) ASSERT_TRUE(memory->holds(held[i]->buffer, i));
}

TEST_F(ShmWithSmallLimits, TheBytesHeldByReceiversAreBoundedAndTheBoundRecovers) {
  Arrivals held;
  for (std::uint32_t i = 0; i < 4; ++i) held.push_back(carry(memory->filled(megabyte, i)));
  EXPECT_EQ(driver.usage().held, 4 * megabyte);
  Letter refused(a);
  EXPECT_FALSE(refused.offer(memory->filled(10 * kilobyte, 1)));
  EXPECT_NE(refused.refusal.find("receivers hold 4 MB of shared memory, and may hold 4"), std::string::npos)
      << refused.refusal;
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(memory->holds(held[i]->buffer, i));
  held.pop_back();
  EXPECT_NE(carry(memory->filled(megabyte, 5)), nullptr);
}

TEST_F(ShmWithSmallLimits, ABufferBeyondTheReceiversLimitIsRefused) {
  Letter letter(a);
  EXPECT_FALSE(letter.offer(memory->allocate(5 * megabyte)));
  EXPECT_NE(letter.refusal.find("larger than"), std::string::npos) << letter.refusal;
}

TEST_F(ShmWithSmallLimits, UnusedBlocksAreFreedDownToTheFloor) {
  const auto mappings = shared_mappings();
  {
    Arrivals held;
    for (std::uint32_t i = 0; i < 4; ++i) held.push_back(carry(memory->filled(megabyte, i)));
    EXPECT_GE(shared_mappings(), mappings + 6);  // at both ends: segments of one, one and two blocks
  }
  EXPECT_TRUE(eventually([&] { return driver.usage().held == 0 && driver.usage().idle <= megabyte; }));
  EXPECT_TRUE(eventually([&] { return shared_mappings() <= mappings + 2; })) << "the memory is still mapped";
  EXPECT_NE(carry(memory->filled(megabyte, 7)), nullptr);
}

TEST_F(ShmWithSmallLimits, HeldBlocksAreNotFreed) {
  const auto held = carry(memory->filled(2 * megabyte, 1));
  std::size_t with_others = 0;
  {
    Arrivals others;
    for (std::uint32_t i = 0; i < 2; ++i) others.push_back(carry(memory->filled(megabyte, i)));
    with_others = shared_mappings();
  }
  EXPECT_TRUE(eventually([&] { return shared_mappings() < with_others; })) << "others are freed meanwhile";
  EXPECT_TRUE(memory->holds(held->buffer, 1));
  EXPECT_EQ(driver.usage().held, 2 * megabyte);
}

TEST_F(Shm, TheEndOfTheLinkFreesUnheldBlocks) {
  auto held = carry(memory->filled(megabyte, 1));
  for (std::uint32_t i = 0; i < 3; ++i) carry(memory->filled(3 * megabyte, i));
  pair.a->finish();
  pair.b->finish();
  EXPECT_EQ(driver.usage().held, 0u);
  EXPECT_EQ(driver.usage().idle, 0u);
  EXPECT_TRUE(memory->holds(held->buffer, 1));
  EXPECT_TRUE(eventually([] { return shared_mappings() <= 2 * 2 + 1; }));  // the ledgers, and the held block
}

TEST_F(Shm, LinksMayEndWhileTheirMemoryIsPrepared) {
  for (int i = 0; i < 30; ++i) {
    WirePair brief(driver, other, {}, *memory, *memory);
    Letter letter(*brief.a);
    letter.only_channel = false;
    letter.offer(memory->allocate(8 * megabyte));
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(eventually([&] { return driver.usage().idle == 0; }));
}

TEST_F(Shm, ARegionIsHandedOverWithoutACopy) {
  auto mine = Regions::of_this_process().make(3 * megabyte + 5);
  ASSERT_TRUE(mine.ok());
  memory->fill(*mine, 1);
  const auto arrival = carry(*mine, Sharing::shared);
  ASSERT_NE(arrival, nullptr);
  EXPECT_EQ(arrival->buffer.bytes, mine->bytes);
  EXPECT_TRUE(memory->holds(arrival->buffer, 1));
  memory->fill(*mine, 2);
  EXPECT_TRUE(memory->holds(arrival->buffer, 2)) << "the receiver has bytes of its own";
  memory->fill(arrival->buffer, 3);
  EXPECT_TRUE(memory->holds(*mine, 3));
}

TEST_F(Shm, ARegionMayBeHandedOverAgainAndInPart) {
  const auto mine = *Regions::of_this_process().make(megabyte);
  Arrivals held;
  for (int i = 0; i < 3; ++i) held.push_back(carry(mine, Sharing::shared));
  auto part = mine;
  part.data += 1000;
  part.bytes = 2000;
  memory->fill(part, 7);
  const auto arrival = carry(part, Sharing::shared);
  EXPECT_EQ(arrival->buffer.bytes, 2000u);
  EXPECT_TRUE(memory->holds(arrival->buffer, 7));
  held.clear();
  EXPECT_TRUE(memory->holds(arrival->buffer, 7));
}

TEST_F(Shm, ARegionIsHandedOverByEveryLink) {
  WirePair second(driver, other, {}, *memory, *memory);
  const auto mine = *Regions::of_this_process().make(megabyte);
  memory->fill(mine, 5);
  Letter letter(*second.a);
  ASSERT_TRUE(letter.offer(mine, {}, Sharing::shared)) << letter.refusal;
  letter.send();
  const auto arrivals = second.b->receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 5));
}

TEST_F(Shm, ARegionSentByValueIsCopied) {
  const auto mine = *Regions::of_this_process().make(megabyte);
  memory->fill(mine, 1);
  const auto arrival = carry(mine);
  memory->fill(mine, 2);
  EXPECT_TRUE(memory->holds(arrival->buffer, 1));
}

TEST_F(Shm, OtherMemoryCannotBeShared) {
  const auto mine = *Regions::of_this_process().make(megabyte);
  auto beyond = mine;
  beyond.bytes += 4096;
  for (const auto& buffer : {memory->filled(megabyte, 1), beyond, Buffer{}}) {
    Letter letter(a);
    EXPECT_FALSE(letter.offer(buffer, {}, Sharing::shared));
    EXPECT_FALSE(letter.refusal.empty());
  }
  const auto received = carry(memory->filled(megabyte, 1));
  Letter letter(b);
  EXPECT_FALSE(letter.offer(received->buffer, {}, Sharing::shared)) << "a received block is the sender's";
}

TEST_F(Shm, SharedMemoryDoesNotLandInTheCallersMemory) {
  b.behave({.before_pull = [](Arrival& arrival) { arrival.may_adopt = false; }});
  const auto mine = *Regions::of_this_process().make(megabyte);
  EXPECT_EQ(carry(mine, Sharing::shared)->landed.wait_name(), "ChannelUnavailable");
}

TEST_F(Shm, HandedOverMemoryOutlivesItsMakerAndEndsWithItsLastOwner) {
  const auto mappings = shared_mappings();
  auto mine = *Regions::of_this_process().make(megabyte);
  memory->fill(mine, 6);
  auto arrival = carry(mine, Sharing::shared);
  mine = {};
  EXPECT_TRUE(memory->holds(arrival->buffer, 6));
  arrival.reset();
  EXPECT_TRUE(eventually([&] { return shared_mappings() == mappings; })) << "the peer still has it mapped";
}

TEST_F(Shm, ARegionIsAnnouncedOnce) {
  const auto mappings = shared_mappings();
  const auto mine = *Regions::of_this_process().make(megabyte);
  Arrivals held;
  for (int i = 0; i < 100; ++i) held.push_back(carry(mine, Sharing::shared));
  EXPECT_EQ(shared_mappings(), mappings + 2) << "one here, one at the peer";
}

TEST_F(Shm, ATicketThatArrivesAfterTheEndOfItsRegionIsValid) {
  const auto mappings = shared_mappings();
  auto mine = *Regions::of_this_process().make(megabyte);
  memory->fill(mine, 4);
  Letter early(a), late(a), unsent(a);
  for (auto* letter : {&early, &late, &unsent}) ASSERT_TRUE(letter->offer(mine, {}, Sharing::shared));
  unsent.drop();
  early.send();
  ASSERT_EQ(b.receive().size(), 1u);
  mine = {};
  const auto other_region = *Regions::of_this_process().make(megabyte);  // handed over after the first is gone
  ASSERT_NE(carry(other_region, Sharing::shared), nullptr);
  late.send();
  auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 4));
  arrivals.clear();
  EXPECT_TRUE(eventually([&] { return shared_mappings() == mappings + 2; })) << "the peer still has it mapped";
}

TEST_F(Shm, ThousandsOfRegionsLeakNothing) {
  const auto mappings = shared_mappings();
  for (int i = 0; i < 2000; ++i) {
    const auto mine = *Regions::of_this_process().make(megabyte);
    ASSERT_NE(carry(mine, Sharing::shared), nullptr);
  }
  EXPECT_TRUE(eventually([&] { return shared_mappings() == mappings; }));
}

TEST_F(Shm, SharedMemoryOutlivesLinksAndDrivers) {
  const auto mine = *Regions::of_this_process().make(megabyte);
  Buffer theirs;
  {
    ShmDriver brief;
    WirePair ends(brief, other, {}, *memory, *memory);
    Letter letter(*ends.a);
    ASSERT_TRUE(letter.offer(mine, {}, Sharing::shared)) << letter.refusal;
    letter.send();
    theirs = ends.b->receive().front()->buffer;
  }
  memory->fill(mine, 1);
  EXPECT_TRUE(memory->holds(theirs, 1));
}

}  // namespace

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(ShmFixture);
INSTANTIATE_CHANNEL_SUITE(ShmTwoDriversFixture);
