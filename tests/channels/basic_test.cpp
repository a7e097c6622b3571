#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "channels/basic/basic_channel.h"
#include "channels/completion.h"
#include "tests/channels/basic_tickets.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

struct BasicFixture {
  static constexpr auto name = "basic";
  static Drivers drivers() { return {std::make_unique<BasicDriver>()}; }
  static Traits traits() { return {}; }
};

class Basic : public testing::Test {
 protected:
  BasicDriver driver;
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{driver, driver, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;
};

TEST_F(Basic, SmallBuffersFollowTheirFrameAndLargeOnesUseTheBulkConnection) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->allocate(BasicDriver::bulk_from - 1)));
  EXPECT_EQ(letter.appended(), 1u);
  ASSERT_TRUE(letter.offer(memory->allocate(BasicDriver::bulk_from)));
  EXPECT_EQ(letter.appended(), 1u);
}

TEST_F(Basic, ASmallMessageDoesNotWaitBehindALargeBuffer) {
  b.bulk().hold_after(1000);
  const auto large = a.send(memory->filled(20 << 20, 1));
  const auto small = a.send(memory->filled(2000, 2));
  EXPECT_EQ(small.wait_name(), "Ok");
  EXPECT_EQ(large.runs(), 0);
  b.bulk().resume();
  EXPECT_EQ(large.wait_name(), "Ok");
}

TEST_F(Basic, ALargeBufferDoesNotWaitForItsPull) {
  const auto written = a.send(memory->filled(BasicDriver::bulk_from, 1));
  EXPECT_EQ(written.wait_name(), "Ok");
}

TEST_F(Basic, NeedsNoAcknowledgement) {
  b.behave({.acknowledges = false});
  Letter letter(a);
  for (std::size_t bytes : {0, 1, 1 << 20}) ASSERT_TRUE(letter.offer(memory->filled(bytes, 1)));
  for (const auto& ticket : letter.tickets) EXPECT_FALSE(ticket.acknowledge);
  letter.send();
  for (const auto& released : letter.released) EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_F(Basic, ADroppedMessageReleasesItsAppendedBuffers) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->allocate(100)));
  letter.drop();
  EXPECT_EQ(letter.released.front().wait_name(), "Cancelled");
}

TEST_F(Basic, ATicketOfAnotherSizeThanTheBytesFailsWithoutAWrite) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1 << 20, 1)));
  letter.tickets.front().bytes += 1;
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "ProtocolError");
}

TEST_F(Basic, ABulkTicketPulledTwiceIsAProtocolError) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1 << 20, 1)));
  letter.tickets.push_back(letter.tickets.front());
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 2u);
  EXPECT_EQ(arrivals[0]->landed.wait_name(), "Ok");
  EXPECT_EQ(arrivals[1]->landed.wait_name(), "ProtocolError");
}

/// A buffer in pieces, of which the last one is smaller.
constexpr std::size_t in_pieces = BasicDriver::pieces_from + BasicDriver::piece_bytes / 2 + 1;

/// Counts what is sent as bulk data, and what is received to be dropped. Keeps the control messages.
struct CountingWire final : Wire {
  ControlId control(Bytes message, Descriptors) override {
    controls.push_back(std::move(message));
    return controls.size();
  }
  void read(Buffer, Completion) override {}
  void send_bulk(std::uint64_t, Buffer part, Completion written) override {
    bytes += part.bytes;
    ++pieces;
    complete(std::move(written), {});
  }
  void receive_bulk(std::uint64_t, Buffer destination, Completion) override {
    to_drop += destination.data == nullptr ? destination.bytes : 0;
  }
  void ready(Status) override {}
  [[nodiscard]] std::string_view peer() const override { return "peer"; }
  [[nodiscard]] bool splits_bulk() const override { return true; }
  std::size_t bytes = 0, pieces = 0, to_drop = 0;
  std::vector<Bytes> controls;
};

struct BasicInPieces : Basic {
  BasicInPieces() { a.splits = true; }
};

TEST_F(BasicInPieces, ALargeBufferGoesInPiecesAndLandsWhole) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(BasicDriver::pieces_from - 1, 1)));
  ASSERT_TRUE(letter.offer(memory->filled(in_pieces, 2)));
  ASSERT_TRUE(letter.offer(memory->filled(BasicDriver::bulk_from, 3)));
  EXPECT_EQ(letter.tickets[0].opaque, (Bytes{std::byte{2}, std::byte{1}}));
  EXPECT_EQ(letter.tickets[1].opaque, pieces_ticket(2, BasicDriver::piece_bytes));
  EXPECT_EQ(letter.tickets[2].opaque, (Bytes{std::byte{2}, std::byte{5}})) << "its three pieces have other sequences";
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(arrivals[i]->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrivals[i]->buffer, i + 1)) << i;
    EXPECT_EQ(letter.released[i].wait_name(), "Ok");
    EXPECT_EQ(letter.released[i].runs(), 1);
  }
}

TEST_F(BasicInPieces, ItLandsWithItsLastPiece) {
  b.bulk().hold_after(BasicDriver::pieces_from + 1000);
  Outcome pulled, landed;
  b.behave({.before_pull = [&](Arrival&) { pulled.completion()({}); },
            .on_landed = [&](Arrival&) { landed.completion()({}); }});
  const auto released = a.send(memory->filled(std::size_t{64} << 20, 1));
  EXPECT_EQ(pulled.wait_name(), "Ok");
  EXPECT_EQ(landed.runs(), 0);
  EXPECT_EQ(released.runs(), 0);
  b.bulk().resume();
  EXPECT_EQ(landed.wait_name(), "Ok");
  EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_F(BasicInPieces, AnEndInTheMiddleFailsItOnce) {
  b.bulk().hold_after(BasicDriver::piece_bytes + 1000);
  const auto released = a.send(memory->filled(std::size_t{64} << 20, 1));
  const auto until = std::chrono::steady_clock::now() + patience;
  while (b.expected_bulk() == 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  a.close(Status(Code::connection_lost, "the network is gone"));
  b.bulk().resume();
  EXPECT_EQ(released.wait_name(), "ConnectionLost");
  EXPECT_EQ(released.runs(), 1);
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "ConnectionLost");
  EXPECT_EQ(arrivals.front()->landed.runs(), 1);
}

TEST_F(BasicInPieces, MoreThanFourGibibytesOfThemStayBelowTheBound) {
  Buffer huge = memory->allocate(1);  // no byte of it is read
  huge.bytes = (std::size_t{5} << 30) + 1;
  CountingWire wire;
  const auto channel = driver.open(wire, {});
  Letter letter(a);
  Outcome released;
  const auto offer = channel->offer(huge, Sharing::by_value, letter, released.completion());
  EXPECT_TRUE(std::holds_alternative<Ticket>(offer));
  EXPECT_EQ(wire.bytes, huge.bytes);
  EXPECT_LE(wire.pieces, BasicDriver::most_pieces);
  EXPECT_EQ(released.runs(), 1);
}

TEST_F(BasicInPieces, AWithdrawnOneIsDroppedPieceByPiece) {
  {
    Letter letter(a);
    ASSERT_TRUE(letter.offer(memory->filled(in_pieces, 1)));
  }
  const auto next = a.send(memory->filled(in_pieces, 2));
  EXPECT_EQ(next.wait_name(), "Ok");
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 2));
}

TEST_F(BasicInPieces, AllWithdrawnOnesAreDroppedHoweverManyTheyAre) {
  constexpr std::size_t buffers = 65;  // 66,560 pieces
  Buffer huge = memory->allocate(1);   // no byte of it is read
  huge.bytes = BasicDriver::most_pieces * BasicDriver::piece_bytes;
  CountingWire sent, received;
  const auto sender = driver.open(sent, {}), receiver = driver.open(received, {});
  for (std::size_t i = 0; i < buffers; ++i) {
    Letter letter(a);
    const auto offer = sender->offer(huge, Sharing::by_value, letter, {});
    ASSERT_TRUE(std::holds_alternative<Ticket>(offer));
    sender->withdraw(std::get<Ticket>(offer));
  }
  for (const auto& control : sent.controls) receiver->control(control, {});
  EXPECT_EQ(received.to_drop, buffers * huge.bytes);
}

TEST_F(BasicInPieces, WithoutMemoryForItThePiecesAreDropped) {
  b.behave({.before_pull = [](Arrival& arrival) { arrival.has_memory = arrival.number.message != 1; }});
  (void)a.send(memory->filled(in_pieces, 1));
  const auto refused = b.receive();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused.front()->landed.wait_name(), "ResourceExhausted");
  (void)a.send(memory->filled(in_pieces, 2));
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 2));
}

TEST_F(BasicInPieces, ATicketThatNoSenderMakesIsRefusedBeforeAnyMemoryIsTaken) {
  constexpr std::uint64_t bytes = std::uint64_t{16} << 20, most = ~std::uint64_t{0};
  const std::vector<std::pair<std::uint64_t, Bytes>> wrong = {
      {bytes, pieces_ticket(1, 0)},                                       // pieces without bytes
      {bytes, pieces_ticket(1, bytes)},                                   // one piece
      {bytes, pieces_ticket(1, most)},                                    //
      {bytes, pieces_ticket(1, BasicDriver::piece_bytes - 1)},            // smaller ones than any sender makes
      {bytes, pieces_ticket(1, bytes / (BasicDriver::most_pieces + 1))},  // and too many
      {most, pieces_ticket(1, BasicDriver::piece_bytes)},                 // too many
      {most, pieces_ticket(1, 1)},                                        //
      {bytes, pieces_ticket(most - 1, bytes / 4)},                        // their sequences wrap around
      {0, pieces_ticket(1, 1)},                                           // an empty buffer
      {bytes, Bytes{std::byte{3}, std::byte{1}}},                         // cut
  };
  for (const auto& [size, opaque] : wrong) {
    Letter letter(a);
    letter.tickets.push_back({.bytes = size, .opaque = opaque});
    letter.send();
    const auto arrivals = b.receive();
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "ProtocolError");
    EXPECT_EQ(arrivals.front()->filled, 0);
  }
  EXPECT_EQ(b.expected_bulk(), 0u);
}

TEST_F(BasicInPieces, PiecesOfAnotherSizeThanTheTicketSaysFail) {
  for (const std::uint64_t piece : {BasicDriver::piece_bytes + 1, 2 * BasicDriver::piece_bytes}) {
    WirePair other(driver, driver, {}, *memory, *memory);
    other.a->splits = true;
    Letter letter(*other.a);
    ASSERT_TRUE(letter.offer(memory->filled(in_pieces, 1)));
    letter.tickets.front().opaque = pieces_ticket(1, piece);
    letter.send();
    const auto arrivals = other.b->receive();
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "ProtocolError");
  }
}

TEST_F(BasicInPieces, PiecesThatAnotherTicketNamesFail) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(in_pieces, 1)));
  letter.tickets.push_back(letter.tickets.front());
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 2u);
  EXPECT_EQ(arrivals[0]->landed.wait_name(), "Ok");
  EXPECT_EQ(arrivals[1]->landed.wait_name(), "ProtocolError");
}

TEST_F(Basic, RefusesOtherThanCpuMemory) {
  const Device gpu{DeviceType::cuda, 0};
  EXPECT_TRUE(std::holds_alternative<Refusal>(driver.descriptor(gpu)));
  Letter letter(a);
  auto buffer = memory->allocate(10);
  buffer.device = gpu;
  EXPECT_FALSE(letter.offer(buffer));
  EXPECT_NE(letter.refusal.find("cuda:0"), std::string::npos);
}

TEST_F(Basic, NeedsNoProbe) { EXPECT_TRUE(driver.immediate()); }

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(BasicFixture);
