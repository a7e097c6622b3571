/// Tests of the small buffers that `ibv` writes into the peer's inbox.
#include "tests/channels/ibv_fixture.h"

namespace tensorferry::conformance {
namespace {

constexpr std::size_t written_most = 32 * kilobyte;

TEST_F(Ibv, SmallBuffersAreWrittenAndLargerOnesRead) {
  forbid_bulk();
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{220}, std::size_t{221}, written_most}) {
    EXPECT_TRUE(written_of(offered(bytes))) << bytes;
    expect_carries(bytes, 3);
  }
  EXPECT_FALSE(written_of(offered(written_most + 1)));
  expect_carries(written_most + 1, 4);
}

TEST_F(Ibv, TheSourceOfAWrittenBufferIsReleasedInsideItsOffer) {
  forbid_bulk();
  Letter letter(a());
  const auto source = memory->filled(written_most, 1);
  ASSERT_TRUE(letter.offer(source));
  EXPECT_EQ(letter.released.front().runs(), 1);
  memory->fill(source, 2);  // the caller may use its memory again
  letter.send();
  expect_arrives(written_most, 1);
}

TEST_F(Ibv, WithoutCreditABufferIsReadUntilAnAcknowledgementBringsCreditBack) {
  rdma::Options rdma;
  rdma.inbox_bytes = 2 * written_most;
  rdma.devices = "emu0";
  if (cards.queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  connect({.rdma = rdma});
  forbid_bulk();
  b().behave({.acknowledges = false});
  for (std::uint32_t i = 0; i < 2; ++i) (void)a().send(memory->filled(written_most, i));
  EXPECT_FALSE(written_of(offered(written_most))) << "the inbox is full";
  EXPECT_FALSE(written_of(offered(1)));
  expect_arrives(written_most, 0);
  expect_arrives(written_most, 1);
  b().behave({});
  EXPECT_FALSE(written_of(offered(written_most))) << "nothing was acknowledged";
  connect({.rdma = rdma});
  for (std::uint32_t i = 0; i < 100; ++i) expect_carries(written_most, i);
  EXPECT_TRUE(eventually([&] { return written_of(offered(written_most)).has_value(); }));
}

TEST_F(Ibv, WithdrawnAndDiscardedBuffersGiveTheirCreditBack) {
  forbid_bulk();
  int written = 0;
  for (int i = 0; i < 1000; ++i) written += written_of(offered(written_most)) ? 1 : 0;  // else the card is busy
  EXPECT_GT(written, 200) << "more than the inbox holds, and more than the peer has receive requests for";
  expect_carries(written_most, 1);
  b().behave({.on_message = [this](Arrivals& arrivals) {
    for (auto& each : arrivals) b().discard(each);
  }});
  for (int i = 0; i < 200; ++i) {
    Letter letter(a());
    ASSERT_TRUE(letter.offer(memory->filled(kilobyte, 1)));
    letter.send();
  }
  ASSERT_TRUE(eventually([&] { return a().unacknowledged() == 0 && written_of(offered(written_most)); }));
  for (std::uint32_t i = 0; i < 10; ++i) {
    const auto arrival = send_changed(written_most, i, [](const auto&) {});
    EXPECT_EQ(arrival->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrival->buffer, i));
  }
}

TEST_F(Ibv, ATicketThatOvertakesItsBytesWaitsForThem) {
  rdma::Options rdma;
  rdma.devices = "emu0";
  connect({.rdma = rdma});
  forbid_bulk();
  const auto arrival = send_changed(kilobyte, 5, [](auto& written) { ++written.number; });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(arrival->landed.runs(), 0);
  (void)a().send(memory->filled(kilobyte, 6));
  EXPECT_EQ(arrival->landed.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(arrival->buffer, 5));
}

TEST_F(Ibv, ABufferThatNeverComesBecauseItsQueuePairFailedComesByTheSocket) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto waits = send_changed(kilobyte, 5, [](auto& written) { written.number += 1000; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(waits->landed.runs(), 0);
  EXPECT_GT(cards.fail_queue_pairs(4096), 0U);
  EXPECT_EQ(waits->landed.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(waits->buffer, 5));
  ASSERT_TRUE(eventually([&] { return usable() && carries_now(); }));
}

TEST_F(Ibv, ATicketOfAQueuePairThatHasFailedIsRequestedByTheSocket) {
  const auto late = send_changed(kilobyte, 7, [](auto& written) { written.attempt += 5; });
  EXPECT_EQ(late->landed.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(late->buffer, 7));
}

TEST_F(Ibv, ATicketOfBytesOutsideTheInboxIsAProtocolError) {
  for (const auto offset : {std::uint64_t{512} << 10, (std::uint64_t{512} << 10) - kilobyte + 1, ~std::uint64_t{0}}) {
    const auto outside = send_changed(kilobyte, 7, [&](auto& written) { written.offset = offset; });
    EXPECT_EQ(outside->landed.wait_name(), "ProtocolError");
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

TEST_F(Ibv, WithoutMemoryForAnInboxSmallBuffersAreRead) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  for (const bool by_option : {false, true}) {
    rdma::Options rdma;
    rdma.devices = "emu0";
    if (by_option) {
      rdma.pinned_bytes = 300 * kilobyte;
    } else {
      cards.limit_memory(300 * kilobyte);
    }
    connect({.staging_bytes = 128 * kilobyte, .rdma = rdma});
    forbid_bulk();
    EXPECT_FALSE(written_of(offered(20 * kilobyte)));
    expect_carries(20 * kilobyte, 1);
    disconnect();
    cards.limit_memory(~std::uint64_t{0});
  }
}

TEST_F(Ibv, AnEndThatLetsNoPeerWriteIsReadFrom) {
  disconnect();
  one = std::make_unique<IbvDriver>(ibv::IbvOptions{.rdma = without_writes()});
  other = std::make_unique<IbvDriver>();
  pair = std::make_unique<WirePair>(*one, *other, DevicePair{}, *memory, *memory);
  ASSERT_TRUE(eventually([&] { return usable() && carries_now(); }));
  forbid_bulk();
  expect_carries(kilobyte, 1);
  Letter letter(b());
  ASSERT_TRUE(letter.offer(memory->filled(kilobyte, 1)));
  EXPECT_FALSE(written_of(letter.tickets.front()));
}

}  // namespace
}  // namespace tensorferry::conformance
