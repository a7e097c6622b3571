/// Tests of `cuda_basic` with CPU memory at both ends. They need no GPU, and cover everything except the GPU's copies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <thread>

#include "channels/cuda_basic/later_tickets.h"
#include "channels/cuda_basic/messages.h"
#include "channels/cuda_basic/ring.h"
#include "channels/cuda_basic/transfer.h"
#include "tests/channels/host_driver.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {
namespace {

constexpr std::size_t megabyte = 1 << 20;

class CudaBasicHost : public testing::Test {
 protected:
  /// Sends buffers until the channel sends one by the ring.
  void send_until_by_ring() {
    using cuda_basic::FlowKind;
    const auto until = std::chrono::steady_clock::now() + patience;
    while (kind(sent_and_received()) != FlowKind::ring && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(kind(sent_and_received()), FlowKind::ring);
  }
  static cuda_basic::FlowKind kind(const Ticket& ticket) {
    return decode<cuda_basic::CudaBasicTicket>(ticket.opaque)->kind;
  }
  Ticket sent_and_received() {
    const auto released = pair.a->send(memory->filled(100, 1));
    const auto arrivals = pair.b->receive();
    EXPECT_EQ(arrivals.at(0)->landed.wait_name(), "Ok");
    EXPECT_EQ(released.wait_name(), "Ok");
    return arrivals.at(0)->ticket;
  }

  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  HostDriver driver;
  WirePair pair{driver, driver, {}, *memory, *memory};
};

TEST_F(CudaBasicHost, ALaterBufferThatIsPulledFirstWaitsForTheEarlierOne) {
  for (const bool by_ring : {false, true}) {
    if (by_ring) send_until_by_ring();
    Arrivals came;
    std::promise<void> all_came;
    std::atomic<bool> first_pulled{false}, early{false};
    pair.b->behave({.on_message =
                        [&](Arrivals& arrivals) {
                          came.push_back(arrivals.at(0));
                          if (came.size() == 3) all_came.set_value();
                        },
                    .on_landed =
                        [&](Arrival&) {
                          if (!first_pulled) early = true;
                        }});
    const auto first = pair.a->send(memory->filled(9 * megabyte, 1));
    const auto second = pair.a->send(memory->filled(70 * megabyte, 2));
    const auto third = pair.a->send(memory->filled(1, 3));
    all_came.get_future().wait();
    for (const auto i : {2u, 1u}) pair.b->pull(came[i]);
    first_pulled = true;
    pair.b->pull(came[0]);
    for (std::size_t i = 0; i < 3; ++i) {
      ASSERT_EQ(pair.b->receive().size(), 1u);
      EXPECT_EQ(came[i]->landed.wait_name(), "Ok");
      EXPECT_TRUE(memory->holds(came[i]->buffer, static_cast<std::uint32_t>(i + 1)))
          << i << (by_ring ? " by ring" : " as bulk data");
    }
    for (const auto& released : {first, second, third}) EXPECT_EQ(released.wait_name(), "Ok");
    EXPECT_FALSE(early) << "a later buffer landed before the first one was pulled";
    pair.b->behave({});
  }
}

TEST_F(CudaBasicHost, DescribesTheRouteAndTheSpeedOfALargeBuffer) {
  send_until_by_ring();
  EXPECT_EQ(pair.a->channel().describe(), "by way of the host");
  pair.a->send(memory->filled(16 * megabyte, 1));
  EXPECT_EQ(pair.b->receive().at(0)->landed.wait_name(), "Ok");
  sent_and_received();
  EXPECT_THAT(pair.a->channel().describe(), testing::MatchesRegex("by way of the host, [0-9.]+ GB/s"));
}

TEST_F(CudaBasicHost, WithdrawnBuffersAreSkipped) {
  for (const bool by_ring : {false, true}) {
    if (by_ring) send_until_by_ring();
    {
      Letter letter(*pair.a);
      ASSERT_TRUE(letter.offer(memory->filled(70 * megabyte, 1)));
      ASSERT_TRUE(letter.offer(memory->filled(3, 1)));
      letter.drop();
      for (const auto& released : letter.released) EXPECT_EQ(released.wait_name(), "Ok");
    }
    sent_and_received();
  }
}

/// An announcement goes to a pull that names its id, whichever comes first.
TEST_F(CudaBasicHost, ABusyBufferIsAnnouncedBeforeOrAfterItsPull) {
  const auto announce = [&](cuda_basic::CudaBasicTicket way) {
    return pair.a->control(encode(cuda_basic::Announced{7, way.kind, way.first}), {});
  };
  for (const bool before : {true, false}) {
    Letter letter(*pair.a);
    ASSERT_TRUE(letter.offer(memory->filled(100, 4)));
    auto& ticket = letter.tickets.at(0);
    const auto way = *decode<cuda_basic::CudaBasicTicket>(ticket.opaque);
    ticket.opaque = encode(cuda_basic::CudaBasicTicket{cuda_basic::FlowKind::later, 7});
    if (before) {
      ticket.after = announce(way);
      letter.send();
    } else {
      letter.send();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      announce(way);
    }
    const auto arrivals = pair.b->receive();
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_EQ(arrivals.at(0)->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrivals.at(0)->buffer, 4));
  }
}

TEST_F(CudaBasicHost, ABusyBufferWhoseGpuFailsAndARingThatIsNotThereFailThePull) {
  using cuda_basic::FlowKind;
  for (const auto& [announced, expected] :
       {std::pair{cuda_basic::Announced{.id = 7}, "ChannelUnavailable"}, {{7, FlowKind::ring, 1}, "ProtocolError"}}) {
    const Ticket ticket{.bytes = 100, .opaque = encode(cuda_basic::CudaBasicTicket{FlowKind::later, 7})};
    Arrival arrival(ticket, {}, *memory);
    pair.a->control(encode(announced), {});
    pair.b->channel().pull(ticket, arrival, arrival.landed.completion(), arrival.consumed.completion());
    EXPECT_EQ(arrival.landed.wait_name(), expected);
    EXPECT_EQ(arrival.consumed.wait_name(), expected);
  }
}

TEST_F(CudaBasicHost, AnIdThatIsAnnouncedTwiceBreaksTheProtocol) {
  Letter letter(*pair.a);
  ASSERT_TRUE(letter.offer(memory->filled(100, 1)));
  for (int i = 0; i < 2; ++i) {
    letter.tickets.at(0).after = pair.a->control(encode(cuda_basic::Announced{.id = 7, .first = 1}), {});
  }
  letter.send();
  EXPECT_EQ(pair.b->receive().at(0)->landed.wait_name(), "ProtocolError");
}

}  // namespace

struct CudaBasicHostFixture {
  static constexpr auto name = "cuda_basic";
  static Drivers drivers() { return {std::make_unique<HostDriver>()}; }
  static Traits traits() { return {.forks = false}; }
};

}  // namespace tensorferry::conformance

namespace tensorferry::cuda_basic {
namespace {

DrivenPtr transfer_of(std::size_t bytes) {
  Transfer transfer;
  transfer.memory.bytes = bytes;
  return std::make_shared<Driven>(std::move(transfer));
}

TEST(CudaBasicChunks, AreASixteenthOfABufferWithinBounds) {
  constexpr std::size_t mega = 1 << 20;
  EXPECT_EQ(chunk_bytes(1), mega);
  EXPECT_EQ(chunk_bytes(32 * mega), 2 * mega);
  EXPECT_EQ(chunk_bytes(48 * mega + 17), 3 * mega);
  EXPECT_EQ(chunk_bytes(4096 * mega), Ring::slot_bytes);
  EXPECT_EQ(chunks_of(1), 1u);
  EXPECT_EQ(chunks_of(32 * mega), 16u);
  EXPECT_EQ(chunks_of(32 * mega + 1), 17u);
  EXPECT_EQ(chunks_of(std::numeric_limits<std::size_t>::max()), std::uint64_t{1} << 42);
}

TEST(CudaBasicQueue, OverlappingSequenceNumbersAreRefused) {
  constexpr std::size_t mega = 1 << 20;
  Queue queue(0);
  ASSERT_TRUE(queue.insert(10, transfer_of(4 * mega)).ok());  // chunks 10 to 13
  for (const auto& [first, bytes] : {std::pair{std::uint64_t{10}, mega}, {13, mega}, {12, mega}, {9, 2 * mega}}) {
    EXPECT_EQ(queue.insert(first, transfer_of(bytes)).code(), Code::protocol_error) << first;
  }
  EXPECT_EQ(queue.insert(std::numeric_limits<std::uint64_t>::max(), transfer_of(1)).code(), Code::protocol_error);
  EXPECT_TRUE(queue.insert(9, transfer_of(mega)).ok());
  EXPECT_TRUE(queue.insert(14, transfer_of(mega)).ok());
  EXPECT_EQ(queue.due(), nullptr);
  ASSERT_TRUE(queue.insert(0, transfer_of(9 * mega)).ok());
  for (std::uint64_t number = 0; number < 15; ++number) {
    ASSERT_NE(queue.due(), nullptr) << number;
    EXPECT_EQ(queue.begin().number, number);
  }
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(queue.insert(14, transfer_of(1)).code(), Code::protocol_error);
}

Transfer transfer_into(std::vector<Status>& landed) {
  Transfer transfer;
  transfer.memory.bytes = 1;
  transfer.landed = [&landed](Status status) { landed.push_back(std::move(status)); };
  return transfer;
}

TEST(CudaBasicLaterTickets, KeepABoundedNumberAndNoIdTwice) {
  LaterTickets tickets;
  std::vector<Status> landed;
  for (std::uint64_t id = 1; id <= LaterTickets::most; ++id) {
    auto transfer = transfer_into(landed);
    ASSERT_TRUE(tickets.add(id, transfer).ok());
    ASSERT_TRUE(tickets.announce({.id = LaterTickets::most + id}).ok());
  }
  auto transfer = transfer_into(landed);
  EXPECT_EQ(tickets.add(1, transfer).status().code(), Code::protocol_error) << "twice";
  EXPECT_EQ(tickets.add(0, transfer).status().code(), Code::protocol_error) << "too many";
  EXPECT_EQ(tickets.announce({.id = LaterTickets::most + 1}).status().code(), Code::protocol_error) << "twice";
  EXPECT_EQ(tickets.announce({.id = 0}).status().code(), Code::protocol_error) << "too many";
  ASSERT_TRUE(transfer.landed) << "left as it is";
  const auto kept = tickets.announce({.id = 1});
  ASSERT_TRUE(kept.ok());
  EXPECT_TRUE(kept->has_value());
  const auto announced = tickets.add(LaterTickets::most + 1, transfer);
  ASSERT_TRUE(announced.ok());
  EXPECT_TRUE(announced->has_value());
  ASSERT_TRUE(transfer.landed) << "left as it is";
  EXPECT_TRUE(landed.empty());
  tickets.close({Code::connection_lost, "gone"});
  EXPECT_EQ(landed.size(), LaterTickets::most - 1);
  EXPECT_EQ(landed.front().code(), Code::connection_lost);
  EXPECT_EQ(tickets.add(1, transfer).status().code(), Code::connection_lost);
  EXPECT_EQ(tickets.announce({.id = 1}).status().code(), Code::connection_lost);
}

TEST(CudaBasicQueue, GrowsWithinABound) {
  Queue queue(0);
  std::uint64_t number = 0;
  while (number <= Queue::most && queue.insert(2 * number + 1, transfer_of(1)).ok()) ++number;
  EXPECT_EQ(number, Queue::most);
}

TEST(CudaBasicQueue, AnEndLeavesTheCurrentTransferToItsCopier) {
  constexpr std::size_t mega = 1 << 20;
  Queue queue(0);
  const auto begun = transfer_of(2 * mega), waiting = transfer_of(mega);
  EXPECT_EQ(*queue.append(begun), 0u);
  EXPECT_EQ(*queue.append(waiting), 2u);
  (void)queue.begin();
  const auto over = queue.close({Code::connection_lost, "gone"});
  ASSERT_EQ(over.size(), 1u);
  EXPECT_EQ(over.front(), waiting);
  EXPECT_FALSE(begun->over());
  EXPECT_EQ(begun->status.code(), Code::connection_lost);
  --begun->pending;
  EXPECT_TRUE(begun->over());
  EXPECT_EQ(queue.append(transfer_of(1)).status().code(), Code::connection_lost);
  EXPECT_EQ(queue.insert(9, transfer_of(1)).code(), Code::connection_lost);
}

}  // namespace
}  // namespace tensorferry::cuda_basic

INSTANTIATE_CHANNEL_SUITE(CudaBasicHostFixture);
