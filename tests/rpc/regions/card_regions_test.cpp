// Regions that network cards read and write, on emulated cards or on real verbs, in memory of the host and of GPUs:
// what they bring, what a key does not allow, and what drops, failures and kills do.
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
#ifdef TENSORFERRY_HAS_CUDA
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/device.h"
#include "channels/cuda_gdr/cuda_gdr_channel.h"
#include "tests/conformance/cuda_memory.h"
#endif

namespace tensorferry::testing {
namespace {

using regions::Reach;
using regions::RegionRights;
using regions::Runs;
using ::testing::AnyOf;
using ::testing::HasSubstr;

const RegionRights both{true, true, {}};

/// Where the memory of the region and that of its reader is.
struct Place {
  std::string name;
  Device owner, reader;
  friend void PrintTo(const Place& place, std::ostream* out) { *out << place.name; }
};

/// Copies between memory of the host and of GPUs.
void copy(const Buffer& to, const Buffer& from) {
#ifdef TENSORFERRY_HAS_CUDA
  if (to.device != Device() || from.device != Device()) {
    const cuda::DeviceGuard here(0);
    cuda::CopyTimer timer;
    timer.copy(cuda::address_of(to.data), cuda::address_of(from.data), to.bytes);
    EXPECT_TRUE(timer.wait("a test's copy").ok());
    return;
  }
#endif
  std::memcpy(to.data, from.data, to.bytes);
}

/// Returns memory with the bytes of patterned().
Buffer filled(Device device, std::size_t bytes, unsigned seed = 1) {
  auto out = patterned(bytes, seed);
#ifdef TENSORFERRY_HAS_CUDA
  if (device != Device()) {
    const cuda::DeviceGuard here(device.index);
    CUdeviceptr address = 0;
    EXPECT_EQ(cuda::api()->mem_alloc(&address, std::max<std::size_t>(bytes, 1)), CUDA_SUCCESS);
    auto* const data = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    const std::shared_ptr<void> owner(data, [device, address](void*) {
      const cuda::DeviceGuard there(device.index);
      cuda::api()->mem_free(address);
    });
    Buffer there{device, data, bytes, nullptr, owner};
    if (bytes != 0) copy(there, out);
    return there;
  }
#endif
  (void)device;
  return out;
}

/// Returns whether the memory has these bytes of the host's.
bool has(const Buffer& memory, const Buffer& bytes) {
  const auto got = patterned(memory.bytes, 77);
  if (memory.bytes != 0) copy(got, memory);
  return same_bytes(got, bytes);
}

/// Joins with the card of an end, and uses no way that a host alone has.
std::unique_ptr<RegionAgent> agent_of_end(std::size_t end, const std::shared_ptr<Store>& store, const std::string& name,
                                          Device owner) {
  const auto card = rdma::card_of_end(end);
  if (!card.empty()) ::setenv(environment::rdma_devices.name, card.c_str(), 1);
  const Ways by_cards{"tcp", owner == Device() ? "ibv,basic" : "cuda_gdr,cuda_basic,basic"};
  auto out = std::make_unique<RegionAgent>(store, name, by_cards, [&](RawAgentOptions& options) {
    if (owner != Device()) options.devices = {Device(), owner};
  });
  if (!card.empty()) ::unsetenv(environment::rdma_devices.name);
  out->remote->reach_at_most(Reach::by_card);
  return out;
}

/// Returns why there are no cards for memory on the device; "": there are.
std::string no_cards(Device device) {
#ifdef TENSORFERRY_HAS_CUDA
  if (device != Device()) {
    if (auto why = conformance::why_no_cuda(1); !why.empty()) return why;
    const auto found = CudaGdrDriver().descriptor(device);
    const auto* none = std::get_if<Refusal>(&found);
    return none != nullptr ? none->reason : "";
  }
#endif
  const auto descriptor = IbvDriver().descriptor(device);
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

class CardRegions : public ::testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    if (const auto reason = no_cards(GetParam().owner); !reason.empty()) GTEST_SKIP() << reason;
    owner = agent_of_end(0, store, "owner", GetParam().owner);
    reader = agent_of_end(1, store, "reader", GetParam().owner);
  }
  /// Returns memory of the owner, or of the reader, with the bytes of patterned().
  static Buffer theirs(std::size_t bytes, unsigned seed = 1) { return filled(GetParam().owner, bytes, seed); }
  static Buffer mine(std::size_t bytes, unsigned seed) { return filled(GetParam().reader, bytes, seed); }
  /// Writes, and waits until the owner knows.
  void write_and_tell(regions::RemoteRegion& region, const Runs& runs, const Buffer& from) {
    const auto written = region.write(runs, from, ++last_notification);
    ASSERT_TRUE(written.ok()) << written.text();
    EXPECT_TRUE(owner->owned->await_notification(id, last_notification, Clock().now() + long_enough).ok());
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
    const auto transfers = reader->agent->one_sided("owner", GetParam().owner, GetParam().owner);
    if (!transfers) return {Code::channel_unavailable, "no cards"};
    std::promise<Status> ended;
    transfers->transfer({by.region, here.bytes, {offset}, here, writes, by.page, 0, id},
                        [&](Status status) { ended.set_value(std::move(status)); });
    return ended.get_future().get();
  }
  static constexpr std::size_t block = 512, blocks = 4096;

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::unique_ptr<RegionAgent> owner, reader;
  std::uint64_t id = 0, last_notification = 0;
  emulated_verbs::Controls cards = emulated_verbs::controls();
};

TEST_P(CardRegions, AreReadByTheCard) {
  const auto bytes = patterned(3 << 20);
  const auto region = opened(theirs(bytes.bytes), {});
  for (const auto& [offset, size] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 3 << 20}, {0, 4096}, {5, 1}, {(3 << 20) - 7, 7}, {100, 0}, {12345, 2'000'000}}) {
    const auto into = mine(size, 9);
    const auto read = region->read(Runs::one(offset, size), into);
    ASSERT_TRUE(read.ok()) << read.text();
    EXPECT_TRUE(has(into, part_of(bytes, offset, size))) << offset << " " << size;
    EXPECT_EQ(region->reach(), Reach::by_card);
  }
}

TEST_P(CardRegions, GatherBlocksInTheOrderOfTheirOffsets) {
  const auto bytes = patterned(block * blocks);
  const auto region = opened(theirs(bytes.bytes), {});
  std::mt19937 random(7);
  for (const std::size_t count : {0, 1, 3, 700, 5000}) {
    Runs runs{block, {}};
    for (std::size_t i = 0; i < count; ++i) {
      const bool follows = i > 0 && random() % 2 == 0 && runs.offsets.back() + block < block * blocks;
      runs.offsets.push_back(follows ? runs.offsets.back() + block : block * (random() % blocks));
    }
    const auto into = mine(block * count, 9);
    const auto read = region->read(runs, into);
    ASSERT_TRUE(read.ok()) << read.text();
    EXPECT_EQ(region->reach(), Reach::by_card);
    const auto expected = patterned(block * count, 11);
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(expected.data + i * block, bytes.data + runs.offsets[i], block);
    }
    ASSERT_TRUE(has(into, expected)) << count;
  }
}

TEST_P(CardRegions, ScatterBlocksToTheirOffsets) {
  const auto bytes = theirs(block * blocks);
  const auto region = opened(bytes, both);
  std::vector<std::uint64_t> order(blocks);
  for (std::size_t i = 0; i < blocks; ++i) order[i] = i * block;
  std::mt19937 random(7);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{700}, blocks}) {
    std::ranges::shuffle(order, random);
    const Runs runs{block, {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count)}};
    const auto expected = patterned(block * blocks, 9);
    copy(expected, bytes);
    const auto from = patterned(block * count, 11);
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(expected.data + runs.offsets[i], from.data + i * block, block);
    }
    write_and_tell(*region, runs, mine(from.bytes, 11));
    EXPECT_EQ(region->reach(), Reach::by_card);
    ASSERT_TRUE(has(bytes, expected)) << count;
  }
}

TEST_P(CardRegions, AWriteIsThereBeforeItsNotification) {
  const auto bytes = theirs(1 << 20);
  const auto region = opened(bytes, both);
  for (unsigned number = 1; number <= 50; ++number) {
    const auto from = patterned(200'000, 100 + number);
    write_and_tell(*region, Runs::one(number, from.bytes), mine(from.bytes, 100 + number));
    EXPECT_TRUE(has({bytes.device, bytes.data + number, from.bytes, nullptr, bytes.owner}, from)) << number;
  }
}

TEST_P(CardRegions, ARegionThatPeersOnlyWriteIsWrittenByCard) {
  const auto bytes = theirs(100'000);
  const auto region = opened(bytes, {false, true, {}});
  const auto from = mine(100'000, 3);
  EXPECT_TRUE(eventually([&] {
    write_and_tell(*region, Runs::one(0, from.bytes), from);
    return region->reach() == Reach::by_card;
  }));
  EXPECT_TRUE(has(bytes, patterned(100'000, 3)));
  EXPECT_EQ(region->read(Runs::one(0, 8), patterned(8, 9)).code(), Code::permission_denied);
  const auto into = patterned(4096, 9);
  EXPECT_EQ(transfer(keys(), 0, into, false).code(), Code::channel_unavailable);
  EXPECT_TRUE(same_bytes(into, patterned(4096, 9)));
}

TEST_P(CardRegions, TheKeyAllowsNoWriteOfARegionThatPeersOnlyRead) {
  const auto bytes = theirs(100'000);
  const auto region = opened(bytes, {});
  EXPECT_EQ(region->write(Runs::one(0, 8), patterned(8, 9)).code(), Code::permission_denied);
  // A peer that breaks the protocol does not look at the flag in the owner's record.
  auto forged = keys();
  auto record = decode<ibv::KeyedMemory>(forged.region).value();
  EXPECT_FALSE(record.write);
  record.write = true;
  forged.region = encode(record);
  EXPECT_EQ(transfer(forged, 0, patterned(4096, 9), true).code(), Code::channel_unavailable);
  EXPECT_TRUE(has(bytes, patterned(100'000)));
  use_the_card(*region);  // the connection is made anew
}

TEST_P(CardRegions, TheKeyReachesNoByteBesideTheRegion) {
  const auto all = theirs(64 << 10);
  constexpr std::size_t begin = 8200, bytes = 5000;
  const auto region = opened({all.device, all.data + begin, bytes, nullptr, all.owner}, both);
  for (const bool before : {true, false}) {
    auto forged = keys();
    auto record = decode<ibv::KeyedMemory>(forged.region).value();
    if (before) --record.address;
    ++record.bytes;
    forged.region = encode(record);
    for (const bool writes : {false, true}) {
      const auto here = patterned(16, 9);
      EXPECT_EQ(transfer(forged, before ? 0 : record.bytes - 16, here, writes).code(), Code::channel_unavailable);
      EXPECT_TRUE(same_bytes(here, patterned(16, 9)));
      use_the_card(*region);
    }
  }
  EXPECT_TRUE(has(all, patterned(64 << 10)));
}

TEST_P(CardRegions, ADropIsNotFoundAndTakesTheKeyBack) {
  const auto bytes = theirs(1 << 20);
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
  EXPECT_TRUE(has(bytes, patterned(1 << 20)));
  const auto read = region->read(Runs::one(0, 4096), into);
  EXPECT_EQ(read.code(), Code::not_found) << read.text();
  // Another region in the same memory has a key of its own, and the old one does not reach it.
  const auto again = opened(bytes, both);
  EXPECT_EQ(region->read(Runs::one(0, 4096), into).code(), Code::not_found);
  EXPECT_TRUE(again->read(Runs::one(0, 4096), into).ok());
  EXPECT_TRUE(same_bytes(into, patterned(4096)));
}

TEST_P(CardRegions, NoReadThatSucceedsHasBytesOfWhatFollowsADrop) {
  constexpr std::size_t bytes = 256 << 10;
  const auto memory = theirs(bytes);
  const auto ones = patterned(bytes), zeros = patterned(bytes);
  std::memset(ones.data, 1, bytes);
  std::memset(zeros.data, 0, bytes);
  for (int round = 0; round < rounds(1000) + 10; ++round) {
    copy(memory, ones);
    id = *owner->owned->add(memory, {});
    const auto region = *reader->remote->open(owner->key_of(id));
    if (round < 4)
      use_the_card(*region);  // a drop in between may fail the queue pairs, which are made anew with pauses
    std::atomic<bool> begun = false;
    std::thread dropping([&] {
      while (!begun) std::this_thread::yield();
      EXPECT_TRUE(owner->owned->drop(id).ok());
      copy(memory, zeros);
    });
    const auto into = mine(bytes, 9);
    Status status;
    while (status.ok()) {
      begun = true;
      status = region->read(Runs::one(0, bytes), into);
      ASSERT_TRUE(!status.ok() || has(into, ones)) << round;
    }
    EXPECT_EQ(status.code(), Code::not_found) << status.text();
    dropping.join();
  }
}

TEST_P(CardRegions, ATransferWhoseQueuePairFailsIsServed) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "only emulated cards fail at will";
  const auto bytes = theirs(1 << 20);
  const auto region = opened(bytes, both);
  auto now = patterned(1 << 20);
  for (unsigned round = 0; round < 3; ++round) {
    (void)cards.fail_queue_pairs(100);
    const auto into = mine(1 << 20, 9);
    const auto read = region->read(Runs::one(0, bytes.bytes), into);
    ASSERT_TRUE(read.ok()) << read.text();
    EXPECT_TRUE(has(into, now));
    now = patterned(1 << 20, 20 + round);
    write_and_tell(*region, Runs::one(0, bytes.bytes), mine(1 << 20, 20 + round));
    EXPECT_TRUE(has(bytes, now));
    use_the_card(*region);
  }
}

TEST_P(CardRegions, MemoryThatNoCardMayPinIsServed) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "only emulated cards run out of memory at will";
  (void)opened(theirs(4096), {});
  cards.limit_memory(cards.registered_bytes());
  const auto bytes = theirs(1 << 20);
  const auto other = *owner->owned->add(bytes, {});
  const auto region = *reader->remote->open(owner->key_of(other));
  const auto into = mine(1 << 20, 9);
  const auto read = region->read(Runs::one(0, bytes.bytes), into);
  cards.limit_memory(~std::uint64_t{0});
  ASSERT_TRUE(read.ok()) << read.text();
  EXPECT_EQ(region->reach(), Reach::served);
  EXPECT_TRUE(has(into, patterned(1 << 20)));
}

TEST_P(CardRegions, AReadThatTheCardsHoldUpEndsWhenTheyNoLongerTouchItsMemory) {
  if (cards.stall == nullptr) GTEST_SKIP() << "only emulated cards stop at will";
  const auto region = opened(theirs(1 << 20), {});
  cards.stall(1);
  const auto into = mine(1 << 20, 9);
  std::atomic<bool> asked = false;
  auto read = std::async(std::launch::async, [&] {
    return region->read(Runs::one(0, into.bytes), into, {Milliseconds(1), [&] { return asked = true; }});
  });
  EXPECT_TRUE(eventually([&] { return cards.stalled() > 0 && asked; }));
  EXPECT_EQ(read.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  cards.stall(0);
  EXPECT_EQ(read.get().code(), Code::cancelled);
  const auto again = region->read(Runs::one(0, into.bytes), into);
  EXPECT_TRUE(again.ok()) << again.text();
  EXPECT_TRUE(has(into, patterned(1 << 20)));
}

TEST_P(CardRegions, KeysAreGivenOnlyToAPeerWithAGrant) {
  const auto visit = reader->visits->visit("owner")->number();
  id = *owner->owned->add(theirs(4096), {true, false, {"somebody else"}});
  const auto ask = [&](std::uint64_t region) {
    const regions::RegionMessage asked = regions::AskKeys{visit, region};
    return call_sync(*reader->agent, "owner", regions::region_function, {encode(asked), {}, {}, {}}).status().code();
  };
  EXPECT_TRUE(eventually([&] { return ask(id) != Code::ok; }));
  EXPECT_EQ(ask(id), Code::permission_denied);
  EXPECT_EQ(ask(id + 7), Code::not_found);
  id = *owner->owned->add(theirs(4096), {});
  EXPECT_EQ(ask(id), Code::not_found) << "it has not opened the region";
}

TEST_P(CardRegions, NothingStaysRegisteredWhenAllHaveLeft) {
  EXPECT_TRUE(opened(theirs(1 << 20), both)->read(Runs::one(0, 1 << 20), mine(1 << 20, 9)).ok());
  reader.reset();
  owner.reset();
  if (cards.registered_bytes != nullptr) {
    EXPECT_EQ(cards.registered_bytes(), 0U);
  }
}

#ifndef TENSORFERRY_UNDER_TSAN  // under it, a forked child of a process with threads cannot make threads
/// A process that owns a region until it is killed.
class CardRegionKills : public ::testing::TestWithParam<Place> {};

TEST_P(CardRegionKills, AreConnectionLostAtReaders) {
  const auto where = GetParam();
  const unsigned rounds = where.owner == Device() ? 5 : 1;  // a process that has used a GPU must not fork
  for (unsigned round = 0; round < rounds; ++round) {
    int ports[2];
    ASSERT_EQ(::pipe(ports), 0);
    const auto child = ::fork();
    if (child == 0) {
      std::uint16_t port = 0;
      if (::read(ports[0], &port, sizeof port) != sizeof port) ::_exit(1);
      const auto owner = agent_of_end(0, *connect_tcp_store("127.0.0.1", port, "", long_enough), "owner", where.owner);
      if (!owner->owned->add(filled(where.owner, 8 << 20), {}, "table").ok()) ::_exit(1);
      for (;;) ::pause();
    }
    int status = 0;
    const auto end = [&] {
      ::kill(child, SIGKILL);
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ::close(ports[0]);
      ::close(ports[1]);
    };
    if (const auto reason = no_cards(where.owner); !reason.empty()) {
      end();
      GTEST_SKIP() << reason;
    }
    const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
    const auto port = server->port();
    ASSERT_EQ(::write(ports[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
    const auto reader = agent_of_end(1, *connect_tcp_store("127.0.0.1", port, "", long_enough), "reader", where.owner);
    const auto into = filled(where.reader, 8 << 20, 9);
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
    Status read;
    while (read.ok()) {
      read = region->read(Runs::one(0, into.bytes), into);
      EXPECT_TRUE(!read.ok() || has(into, patterned(8 << 20)));
    }
    EXPECT_EQ(read.code(), Code::connection_lost) << read.text();
    killing.join();
  }
}
#endif

std::vector<Place> places() {
  std::vector<Place> out{{"host", {}, {}}};
#ifdef TENSORFERRY_HAS_CUDA
  constexpr Device gpu{DeviceType::cuda, 0};
  out.push_back({"gpu_to_host", gpu, {}});
  out.push_back({"gpus", gpu, gpu});
#endif
  return out;
}
const auto name_of_place = [](const auto& place) { return place.param.name; };
INSTANTIATE_TEST_SUITE_P(Places, CardRegions, ::testing::ValuesIn(places()), name_of_place);
#ifndef TENSORFERRY_UNDER_TSAN
/// Where the process of the reader uses a GPU too, as cards need it.
std::vector<Place> places_of_processes() {
  auto out = places();
  std::erase_if(out, [](const Place& place) { return place.owner != place.reader; });
  return out;
}
INSTANTIATE_TEST_SUITE_P(Places, CardRegionKills, ::testing::ValuesIn(places_of_processes()), name_of_place);
#endif

}  // namespace
}  // namespace tensorferry::testing
