/// Tests of a queue pair and its inbox, with a peer that calls verbs itself and so can do what no honest peer does.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "channels/rdma/local_cards.h"
#include "channels/rdma/outbox.h"
#include "tests/agent/patience.h"
#include "tests/channels/rdma_ends.h"

namespace tensorferry::rdma {
namespace {

constexpr std::size_t inbox_bytes = 64 << 10;

bool eventually(const std::function<bool()>& condition) {
  return tensorferry::testing::eventually(condition, std::chrono::seconds(20));
}

/// What a take() came to.
struct Taken {
  std::atomic<int> runs{0};
  Status status;
  std::vector<std::byte> bytes;
};

class RdmaInbox : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto found = usable_ports(Options());
    if (const auto* const refusal = std::get_if<Refusal>(&found)) GTEST_SKIP() << refusal->reason;
    auto opened = LocalCards::open({std::get<0>(found).front()}, Options(), 1 << 20);
    ASSERT_TRUE(opened.ok());
    cards = *opened;
    auto made = QueuePair::make(cards->cards[0], cards->ports[0].port, Options(), [this](const Status& why) {
      reason = std::string(why.what());
      failed = true;
    });
    ASSERT_TRUE(made.ok()) << made.status().text();
    pair = *made;
    ASSERT_TRUE(cards->completions->add(pair).ok());
    auto box = Inbox::make(*cards->registrations, 0, inbox_bytes);
    ASSERT_TRUE(box.ok());
    inbox = *box;
    ASSERT_TRUE(pair->receive_into(inbox).ok());
    EndSettings settings;
    settings.send_depth = 512;
    settings.entries = 1024;
    peer = std::make_unique<End>(settings, std::get<0>(found).back());
    const auto there = peer->address();
    ASSERT_TRUE(
        pair->connect({there.gid, there.lid, static_cast<std::uint8_t>(peer->port().mtu), there.number, there.psn})
            .ok());
    const auto& here = pair->address();
    peer->connect({here.number, here.first_packet, here.gid, here.lid});
    memory = std::make_unique<Registered>(peer->verbs(), peer->domain(), inbox_bytes, End::all_rights);
    memory->fill(3);
  }
  void TearDown() override {
    if (cards == nullptr) return;
    pair->fail({Code::channel_unavailable, "the end of the test"});
    cards->end();
    pair.reset();
    memory.reset();
  }

  /// The peer writes `bytes` bytes to the same place in the inbox that they have in its memory.
  void write(std::size_t offset, std::size_t bytes, std::uint32_t immediate, int flags = IBV_SEND_SIGNALED) {
    ASSERT_EQ(peer->post(IBV_WR_RDMA_WRITE_WITH_IMM, immediate, memory->piece(offset, bytes), inbox->address() + offset,
                         inbox->key(), static_cast<unsigned>(flags), htonl(immediate)),
              0);
  }
  std::shared_ptr<Taken> take(std::uint64_t number, std::size_t offset, std::size_t bytes) {
    auto taken = std::make_shared<Taken>();
    pair->take(number, offset, [taken, bytes](const Status& status, const std::byte* data) {
      taken->status = status;
      if (data != nullptr) taken->bytes.assign(data, data + bytes);
      ++taken->runs;
    });
    return taken;
  }
  void expect_bytes(const std::shared_ptr<Taken>& taken, std::size_t offset) {
    ASSERT_TRUE(eventually([&] { return taken->runs == 1; }));
    ASSERT_TRUE(taken->status.ok()) << taken->status.text();
    EXPECT_EQ(std::memcmp(taken->bytes.data(), memory->bytes().data() + offset, taken->bytes.size()), 0);
  }
  void expect_failure(const std::string& part) {
    ASSERT_TRUE(eventually([&] { return failed.load(); }));
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }

  std::shared_ptr<LocalCards> cards;
  std::shared_ptr<QueuePair> pair;
  std::shared_ptr<Inbox> inbox;
  std::unique_ptr<End> peer;
  std::unique_ptr<Registered> memory;
  std::string reason;
  std::atomic<bool> failed{false};
};

TEST_F(RdmaInbox, TakesWhatThePeerWritesBeforeAndAfterTheTake) {
  write(100, 5000, 1);
  ASSERT_EQ(peer->wait().status, IBV_WC_SUCCESS);
  expect_bytes(take(1, 100, 5000), 100);
  const auto waits = take(2, 9000, 10);
  EXPECT_EQ(waits->runs, 0);
  write(9000, 10, 2);
  expect_bytes(waits, 9000);
}

TEST_F(RdmaInbox, TakesInAnyOrder) {
  std::vector<std::shared_ptr<Taken>> taken;
  for (const std::uint32_t number : {5U, 2U, 4U, 1U, 3U}) taken.push_back(take(number, 64 * number, 64));
  for (const std::uint32_t number : {1U, 2U, 3U, 4U, 5U}) write(64 * number, 64, number);
  std::size_t at = 0;
  for (const std::uint32_t number : {5U, 2U, 4U, 1U, 3U}) expect_bytes(taken[at++], 64 * number);
}

TEST_F(RdmaInbox, MoreWritesThanReceiveRequestsWaitForOnes) {
  const auto writes = 2U * pair->receives() + 10;
  for (std::uint32_t number = 1; number <= writes; ++number) {
    write(64, 64, number, number % 32 == 0 ? IBV_SEND_SIGNALED | IBV_SEND_SOLICITED : IBV_SEND_SIGNALED);
  }
  for (std::uint32_t number = 1; number <= writes; ++number) ASSERT_EQ(peer->wait().status, IBV_WC_SUCCESS) << number;
  expect_bytes(take(writes, 64, 64), 64);
  EXPECT_FALSE(failed);
}

TEST_F(RdmaInbox, WritesThatWakeNoOneAreFoundByTheTake) {
  const auto writes = std::uint32_t{pair->receives()} + 10;
  for (std::uint32_t number = 1; number <= writes; ++number) write(64, 64, number);
  expect_bytes(take(writes, 64, 64), 64);
}

TEST_F(RdmaInbox, AnImmediateOutOfOrderFailsIt) {
  write(0, 64, 1);
  const auto waits = take(3, 0, 64);
  write(0, 64, 3);
  expect_failure("did not expect");
  ASSERT_TRUE(eventually([&] { return waits->runs == 1; }));
  EXPECT_EQ(waits->status.code(), Code::channel_unavailable);
  expect_bytes(take(1, 0, 64), 0);  // this one had arrived
  EXPECT_EQ(take(2, 0, 64)->runs, 1) << "it never arrives";
}

TEST_F(RdmaInbox, AMessageThatIsNoWriteFailsIt) {
  (void)take(1, 0, 64);
  ASSERT_EQ(peer->post(IBV_WR_SEND, 1, memory->piece(0, 64)), 0);
  expect_failure("");
}

TEST_F(RdmaInbox, AnEmptyMessageFailsIt) {
  (void)take(1, 0, 64);
  ASSERT_EQ(peer->post(IBV_WR_SEND_WITH_IMM, 1, {}, 0, 0, IBV_SEND_SIGNALED, htonl(1)), 0);
  expect_failure("did not expect");
}

TEST_F(RdmaInbox, ThePeerCannotWriteBehindTheInbox) {
  ASSERT_EQ(peer->post(IBV_WR_RDMA_WRITE_WITH_IMM, 1, memory->piece(0, 65), inbox->address() + inbox_bytes - 64,
                       inbox->key(), IBV_SEND_SIGNALED, htonl(1)),
            0);
  EXPECT_EQ(peer->wait().status, IBV_WC_REM_ACCESS_ERR);
  expect_failure("");
}

TEST_F(RdmaInbox, ThePeerCannotReadTheInbox) {
  ASSERT_EQ(peer->post(IBV_WR_RDMA_READ, 1, memory->piece(0, 64), inbox->address(), inbox->key()), 0);
  EXPECT_EQ(peer->wait().status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(RdmaInbox, ThePeerCannotWriteMemoryThatIsOffered) {
  std::vector<std::byte> offered(4096, std::byte{7});
  {
    auto made = cards->registrations->make(offered.data(), offered.size(), Access::offered, {0});
    ASSERT_TRUE(made.ok());
    ASSERT_EQ(peer->post(IBV_WR_RDMA_WRITE, 1, memory->piece(0, 64), reinterpret_cast<std::uintptr_t>(offered.data()),
                         (*made)->keys(0).remote),
              0);
    EXPECT_EQ(peer->wait().status, IBV_WC_REM_ACCESS_ERR);
  }
  EXPECT_EQ(offered, std::vector<std::byte>(4096, std::byte{7}));
}

TEST_F(RdmaInbox, AWriteWithoutAnImmediateIsNotTold) {
  const auto waits = take(1, 0, 64);
  ASSERT_EQ(peer->post(IBV_WR_RDMA_WRITE, 1, memory->piece(0, 64), inbox->address(), inbox->key()), 0);
  ASSERT_EQ(peer->wait().status, IBV_WC_SUCCESS);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(waits->runs, 0);
  EXPECT_FALSE(failed);
}

TEST_F(RdmaInbox, AFailedOneEndsTheTakesThatWait) {
  const auto waits = take(1, 0, 64);
  pair->fail({Code::channel_unavailable, "by the test"});
  ASSERT_TRUE(eventually([&] { return waits->runs == 1; }));
  EXPECT_FALSE(waits->status.ok());
  EXPECT_EQ(take(1, 0, 64)->runs, 1);
  EXPECT_FALSE(pair->write({}, {}).has_value());
}

TEST_F(RdmaInbox, AnOutboxBelievesAPeerNoMoreThanItSays) {
  const auto make = [&](OfferedInbox theirs) { return std::make_shared<Outbox>(pair, theirs); };
  const auto piece = cards->staging->take(4096, {0});
  ASSERT_TRUE(piece.ok());
  const auto key = piece->registration->keys(0).local;
  EXPECT_FALSE(make({0, 4096, 7, 0, 128})->write(piece->data, key, 64, nullptr)) << "no bytes";
  EXPECT_FALSE(make({0, 4096, 7, 63, 128})->write(piece->data, key, 1, nullptr)) << "not one piece";
  EXPECT_FALSE(make({0, 4096, 7, 4096, 0})->write(piece->data, key, 64, nullptr)) << "no receive request";
  EXPECT_FALSE(failed);
  // A key that is none fails the queue pair, and nothing else.
  EXPECT_TRUE(make({0, ~std::uint64_t{0} - 63, 7, 4096, 1})->write(piece->data, key, 64, piece->owner));
  expect_failure("remote access error");
}

}  // namespace
}  // namespace tensorferry::rdma
