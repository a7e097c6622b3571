// The parts of a channel set that keep what waits for the peer.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "agent/buffers/acknowledgements.h"
#include "agent/buffers/bulk_reads.h"
#include "agent/buffers/incoming_controls.h"
#include "agent/buffers/offered_buffers.h"
#include "agent/buffers/probes.h"
#include "agent/message.h"

namespace tensorferry {
namespace {

const Status lost(Code::connection_lost, "the link has ended");

/// A destination, and the status with which it completed.
struct Destination {
  std::byte byte{};
  std::vector<Code> landed{};

  BulkReads::Read read() {
    return {{{}, &byte, 1, nullptr, nullptr}, [this](const Status& status) { landed.push_back(status.code()); }};
  }
  BulkReads::Read dropping() {
    return {{{}, nullptr, 1, nullptr, nullptr}, [this](const Status& status) { landed.push_back(status.code()); }};
  }
};

TEST(BulkReads, GiveEachDestinationOnce) {
  BulkReads reads;
  Destination mine;
  EXPECT_EQ(reads.add({1, 7}, mine.read()), BulkReads::Added::waits);
  EXPECT_FALSE(reads.take({2, 7}));
  EXPECT_FALSE(reads.take({1, 8}));
  const auto read = reads.take({1, 7});
  ASSERT_TRUE(read);
  EXPECT_EQ(read->destination.data, &mine.byte);
  EXPECT_FALSE(reads.take({1, 7}));
  EXPECT_TRUE(mine.landed.empty());
}

TEST(BulkReads, RefuseASecondDestinationOfTheSameBytes) {
  BulkReads reads;
  Destination first, second;
  EXPECT_EQ(reads.add({1, 7}, first.read()), BulkReads::Added::waits);
  EXPECT_EQ(reads.add({1, 7}, second.read()), BulkReads::Added::unneeded);
  EXPECT_EQ(second.landed, std::vector{Code::protocol_error});
  EXPECT_EQ(reads.take({1, 7})->destination.data, &first.byte);
}

TEST(BulkReads, GiveBytesThatOneTicketDropsToTheOther) {
  for (const bool dropped_first : {false, true}) {
    BulkReads reads;
    Destination wanted, dropped;
    EXPECT_EQ(reads.add({1, 7}, dropped_first ? dropped.dropping() : wanted.read()), BulkReads::Added::waits);
    EXPECT_EQ(reads.add({1, 7}, dropped_first ? wanted.read() : dropped.dropping()), BulkReads::Added::unneeded);
    EXPECT_EQ(dropped.landed, std::vector{Code::ok});
    EXPECT_EQ(reads.take({1, 7})->destination.data, &wanted.byte);
    EXPECT_TRUE(wanted.landed.empty());
  }
}

TEST(BulkReads, DropABoundedNumberAtOnce) {
  BulkReads reads;
  Destination dropped, wanted;
  for (std::uint64_t i = 0; i < BulkReads::most_dropping; ++i)
    ASSERT_EQ(reads.add({1, i}, dropped.dropping()), BulkReads::Added::waits);
  EXPECT_EQ(reads.add({2, 1}, dropped.dropping()), BulkReads::Added::too_many);
  EXPECT_EQ(dropped.landed, std::vector{Code::protocol_error});
  EXPECT_EQ(reads.add({2, 1}, wanted.read()), BulkReads::Added::waits);
  ASSERT_TRUE(reads.take({1, 0}));
  EXPECT_EQ(reads.add({1, 1}, wanted.read()), BulkReads::Added::unneeded) << "it takes the place of one that drops";
  for (const std::uint64_t again : {3, 4})
    EXPECT_EQ(reads.add({2, again}, dropped.dropping()), BulkReads::Added::waits);
  EXPECT_EQ(reads.add({2, 5}, dropped.dropping()), BulkReads::Added::too_many);
}

TEST(BulkReads, OfAnEndedLinkFail) {
  BulkReads reads;
  Destination before, after;
  EXPECT_EQ(reads.add({1, 7}, before.read()), BulkReads::Added::waits);
  const auto left = reads.end(lost);
  ASSERT_EQ(left.size(), 1U);
  EXPECT_EQ(left.begin()->second.destination.data, &before.byte);
  EXPECT_EQ(reads.add({1, 8}, after.read()), BulkReads::Added::unneeded);
  EXPECT_EQ(after.landed, std::vector{Code::connection_lost});
  EXPECT_FALSE(reads.take({1, 7}));
}

/// Pulls that note their names.
struct Pulled {
  std::vector<std::string> names{};

  IncomingControls::Pull pull(std::string name) {
    return [this, name = std::move(name)](const Status& status) {
      names.push_back(name + (status.ok() ? "" : " failed"));
    };
  }
};

TEST(IncomingControls, RunAPullAfterItsMessage) {
  IncomingControls controls;
  Pulled pulled;
  controls.when_received(2, pulled.pull("a"));
  controls.when_received(1, pulled.pull("b"));
  controls.when_received(2, pulled.pull("c"));
  EXPECT_TRUE(pulled.names.empty());
  EXPECT_TRUE(controls.is_next(1));
  EXPECT_FALSE(controls.is_next(2));
  for (const auto& pull : controls.received(1)) pull({});
  EXPECT_EQ(pulled.names, std::vector<std::string>{"b"});
  EXPECT_FALSE(controls.is_next(1));
  for (const auto& pull : controls.received(2)) pull({});
  EXPECT_EQ(pulled.names, (std::vector<std::string>{"b", "a", "c"}));
  controls.when_received(1, pulled.pull("d"));
  EXPECT_EQ(pulled.names.back(), "d");
}

TEST(IncomingControls, OfAnEndedLinkFailWhatTheyDidNotBring) {
  IncomingControls controls;
  Pulled pulled;
  EXPECT_TRUE(controls.received(1).empty());
  controls.when_received(2, pulled.pull("a"));
  for (const auto& [after, pull] : controls.end(lost)) pull(lost);
  controls.when_received(2, pulled.pull("b"));
  controls.when_received(1, pulled.pull("c"));
  EXPECT_EQ(pulled.names, (std::vector<std::string>{"a failed", "b failed", "c"}));
}

TEST(Probes, RunWhatWaitsWhenTheNextOneEnds) {
  int on_pool = 0, ran = 0;
  Probes probes([&](Probes::Job job) {
    ++on_pool;
    job();
  });
  const auto known = probes.count();
  ASSERT_EQ(known, 0U);
  probes.when_ended(*known, [&] { ++ran; });
  EXPECT_EQ(ran, 0);
  probes.one_ended();
  EXPECT_EQ(ran, 1);
  probes.when_ended(*known, [&] { ++ran; });  // one has ended since
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(on_pool, 2);
  probes.one_ended();
  EXPECT_EQ(ran, 2);
}

TEST(Probes, OfAnEndedLinkKeepNoJob) {
  int on_pool = 0, ran = 0;
  Probes probes([&](const Probes::Job&) { ++on_pool; });
  probes.when_ended(0, [&] { ++ran; });
  auto left = probes.end();
  ASSERT_EQ(left.size(), 1U);
  EXPECT_FALSE(probes.count());
  probes.when_ended(0, [&] { ++ran; });
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(on_pool, 0);
}

OfferedBuffers::Offered offer(std::uint64_t bytes) {
  Ticket ticket;
  ticket.bytes = bytes;
  return {nullptr, std::move(ticket)};
}

TEST(OfferedBuffers, AreKeptByTheirIdsUntilTheyAreTakenOrTheLinkEnds) {
  OfferedBuffers offers;
  const auto id = offers.next();
  EXPECT_NE(id, 0U);
  EXPECT_NE(offers.next(), id);
  EXPECT_TRUE(offers.add({{id, offer(5)}, {0, offer(6)}}).ok());
  EXPECT_FALSE(offers.take(0));  // ends without an acknowledgement
  const auto offered = offers.take(id);
  ASSERT_TRUE(offered);
  EXPECT_EQ(offered->ticket.bytes, 5U);
  EXPECT_FALSE(offers.take(id));

  EXPECT_TRUE(offers.add({{id + 1, offer(7)}}).ok());
  offers.end(lost);
  EXPECT_FALSE(offers.take(id + 1));
  EXPECT_EQ(offers.add({}).code(), Code::connection_lost);
}

TEST(Acknowledgements, AreTakenInPortionsAndPutBack) {
  Acknowledgements owed;
  for (std::uint64_t id = 1; id <= 3; ++id) owed.add(id);
  auto taken = owed.take(2);
  EXPECT_EQ(taken.size(), 2U);
  owed.put_back(taken);
  taken = owed.take(100);
  std::sort(taken.begin(), taken.end());
  EXPECT_EQ(taken, (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_TRUE(owed.take(1).empty());
}

}  // namespace
}  // namespace tensorferry
