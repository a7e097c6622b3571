/// Tests of a queue pair against a peer that calls verbs itself, and so can do what no honest peer does.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "channels/rdma/local_cards.h"
#include "tests/agent/patience.h"
#include "tests/channels/rdma_ends.h"

namespace tensorferry::rdma {
namespace {

constexpr std::size_t memory_bytes = 64 << 10;

class RdmaHostile : public ::testing::Test {
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
    peer = std::make_unique<End>(EndSettings(), std::get<0>(found).back());
    const auto there = peer->address();
    ASSERT_TRUE(
        pair->connect({there.gid, there.lid, static_cast<std::uint8_t>(peer->port().mtu), there.number, there.psn})
            .ok());
    const auto& here = pair->address();
    peer->connect({here.number, here.first_packet, here.gid, here.lid});
    theirs = std::make_unique<Registered>(peer->verbs(), peer->domain(), memory_bytes, End::all_rights);
    theirs->fill(3);
  }
  void TearDown() override {
    if (cards == nullptr) return;
    pair->fail({Code::channel_unavailable, "the end of the test"});
    cards->end();
    pair.reset();
    theirs.reset();
  }

  /// Returns the key by which the peer does with `mine` what `access` allows.
  std::uint32_t lend(Access access) {
    auto made = cards->registrations->make_apart(mine.data(), mine.size(), access, {0});
    if (!made.ok()) throw std::runtime_error(made.status().text());
    lent = *std::move(made);
    return lent->keys(0).remote;
  }
  /// Returns what becomes of a request for the peer's first `bytes` bytes and those of `mine` from `offset` on.
  ibv_wc_status status_of(ibv_wr_opcode opcode, std::size_t offset, std::size_t bytes, std::uint32_t key) {
    EXPECT_EQ(
        peer->post(opcode, 1, theirs->piece(0, bytes), reinterpret_cast<std::uintptr_t>(mine.data()) + offset, key), 0);
    return peer->wait().status;
  }
  void expect_failure(const std::string& part) {
    ASSERT_TRUE(testing::eventually([&] { return failed.load(); }, std::chrono::seconds(20)));
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }

  std::vector<std::byte> mine = std::vector<std::byte>(memory_bytes, std::byte{7});
  const std::vector<std::byte> untouched = mine;
  std::shared_ptr<LocalCards> cards;
  std::shared_ptr<QueuePair> pair;
  std::shared_ptr<Registration> lent;
  std::unique_ptr<End> peer;
  std::unique_ptr<Registered> theirs;
  std::string reason;
  std::atomic<bool> failed{false};
};

TEST_F(RdmaHostile, AMessageFailsTheQueuePair) {
  ASSERT_EQ(peer->post(IBV_WR_SEND, 1, theirs->piece(0, 64)), 0);
  expect_failure("");
}

TEST_F(RdmaHostile, AnEmptyMessageFailsTheQueuePair) {
  ASSERT_EQ(peer->post(IBV_WR_SEND_WITH_IMM, 1, {}), 0);
  expect_failure("takes none");
}

TEST_F(RdmaHostile, AWriteWithAnImmediateFailsTheQueuePair) {
  (void)status_of(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 64, lend(Access::peers_write));
  expect_failure("takes none");
}

TEST_F(RdmaHostile, MemoryThatIsOfferedCannotBeWritten) {
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, 0, 64, lend(Access::offered)), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(mine, untouched);
}

TEST_F(RdmaHostile, MemoryThatPeersWriteCannotBeRead) {
  EXPECT_EQ(status_of(IBV_WR_RDMA_READ, 0, 64, lend(Access::peers_write)), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(RdmaHostile, BytesBehindMemoryThatPeersWriteCannotBeWritten) {
  EXPECT_EQ(status_of(IBV_WR_RDMA_WRITE, memory_bytes - 64, 65, lend(Access::peers_write)), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(mine, untouched);
  expect_failure("");
}

}  // namespace
}  // namespace tensorferry::rdma
