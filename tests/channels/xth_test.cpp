#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "channels/region.h"
#include "channels/xth/directory.h"
#include "channels/xth/xth_channel.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

struct XthFixture {
  static constexpr auto name = "xth";
  static Drivers drivers() { return {std::make_unique<XthDriver>(), std::make_unique<XthDriver>()}; }
  static Traits traits() { return {.same_process = true, .shares = true}; }
};

class Xth : public testing::Test {
 protected:
  XthDriver driver;
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{driver, driver, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;

  /// Pulls `ticket` as the only one of a message with no bytes behind it. Returns the name of the status.
  std::string_view pull(const Ticket& ticket) {
    const auto arrival = std::make_shared<Arrival>(ticket, Arrival::Number{1, 0}, *memory);
    b.pull(arrival);
    EXPECT_EQ(arrival->landed.runs(), 1);
    EXPECT_EQ(arrival->consumed.runs(), 1);
    return arrival->landed.wait_name();
  }
};

TEST_F(Xth, AForkedChildCountsAsAnotherProcess) {
  const auto mine = std::get<Bytes>(driver.descriptor({}));
  ASSERT_EQ(mine.size(), 16u);
  EXPECT_FALSE(XthDriver().reaches(mine, std::get<Bytes>(XthDriver().descriptor({}))).has_value());

  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const auto child = ::fork();
  if (child == 0) {
    const auto its = std::get<Bytes>(driver.descriptor({}));
    ::_exit(::write(pipe[1], its.data(), its.size()) == 16 ? 0 : 1);
  }
  Bytes its(16);
  EXPECT_EQ(::read(pipe[0], its.data(), its.size()), 16);
  ::waitpid(child, nullptr, 0);
  ::close(pipe[0]);
  ::close(pipe[1]);
  EXPECT_NE(mine, its);
  const auto refusal = driver.reaches(mine, its);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->reason, "another process");
  EXPECT_TRUE(driver.reaches(mine, {}).has_value());
  EXPECT_TRUE(driver.reaches({}, {}).has_value());
}

TEST_F(Xth, TicketsHoldNoAddress) {
  Letter letter(a);
  const auto buffer = memory->filled(1000, 1);
  ASSERT_TRUE(letter.offer(buffer));
  const auto& opaque = letter.tickets.front().opaque;
  const auto address = std::as_bytes(std::span(&buffer.data, 1));
  EXPECT_EQ(std::search(opaque.begin(), opaque.end(), address.begin(), address.end()), opaque.end());
}

TEST_F(Xth, InventedTicketsReachNothing) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1000, 1)));
  auto ticket = letter.tickets.front();
  std::mt19937_64 random(5);
  for (int i = 0; i < 1000; ++i) {
    const auto guess = random();
    std::memcpy(ticket.opaque.data() + 8 * (i % 2), &guess, sizeof guess);
    EXPECT_EQ(pull(ticket), "ConnectionLost");
  }
}

/// xth and cuda_xth find offers in one table. A peer may send a ticket of one of them by the other.
TEST_F(Xth, ATicketIsGoodForTheChannelAndTheDeviceOfItsOfferAlone) {
  const auto gpu = [](std::uint8_t index) {
    return Buffer{{DeviceType::cuda, index}, reinterpret_cast<std::byte*>(16), 100, nullptr, {}};
  };
  xth::LocalEnd of_gpu("cuda_xth", {{DeviceType::cuda, 1}, {DeviceType::cuda, 0}}, a);
  const auto ticket = std::get<Ticket>(of_gpu.offer(gpu(1), {}));
  EXPECT_EQ(pull(ticket), "ProtocolError");
  xth::LocalEnd other_channel("mine", {{DeviceType::cuda, 0}, {DeviceType::cuda, 1}}, b);
  EXPECT_EQ(other_channel.begin_copy(ticket).status().code(), Code::protocol_error);
  xth::LocalEnd other_source("cuda_xth", {{DeviceType::cuda, 0}, {DeviceType::cuda, 2}}, b);
  EXPECT_EQ(other_source.begin_copy(ticket).status().code(), Code::protocol_error);
  xth::LocalEnd other_destination("cuda_xth", {{DeviceType::cuda, 2}, {DeviceType::cuda, 1}}, b);
  EXPECT_EQ(other_destination.begin_copy(ticket).status().code(), Code::protocol_error);
  xth::LocalEnd right("cuda_xth", {{DeviceType::cuda, 0}, {DeviceType::cuda, 1}}, b);
  const auto source = right.begin_copy(ticket);
  ASSERT_TRUE(source.ok()) << source.status().text();
  source->end_copy();

  xth::LocalEnd of_host("xth", {}, a);
  const auto on_host = std::get<Ticket>(of_host.offer(memory->filled(100, 1), {}));
  EXPECT_EQ(right.begin_copy(on_host).status().code(), Code::protocol_error);
  EXPECT_EQ(pull(on_host), "Ok");
}

TEST_F(Xth, OnlyARegionIsHandedOver) {
  auto mine = *Regions::of_this_process().make(5000);
  memory->fill(mine, 1);
  Letter letter(a);
  EXPECT_FALSE(letter.offer(memory->filled(5000, 1), {}, Sharing::shared));
  ASSERT_TRUE(letter.offer(mine, {}, Sharing::shared)) << letter.refusal;
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals.front()->buffer.data, mine.data);
  mine = {};
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 1)) << "its owner came with it";
}

TEST_F(Xth, ATicketOfAnotherSizeIsAProtocolErrorWithoutHarmToTheRightOne) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1000, 1)));
  auto ticket = letter.tickets.front();
  for (std::uint64_t bytes : {0ULL, 999ULL, 1001ULL, ~0ULL}) {
    ticket.bytes = bytes;
    EXPECT_EQ(pull(ticket), "ProtocolError");
  }
  EXPECT_EQ(pull(letter.tickets.front()), "Ok");
}

TEST_F(Xth, ATicketCanBePulledOnce) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1000, 1)));
  EXPECT_EQ(pull(letter.tickets.front()), "Ok");
  EXPECT_EQ(pull(letter.tickets.front()), "ProtocolError");
}

TEST_F(Xth, AWithdrawnTicketCannotBePulled) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1000, 1)));
  const auto ticket = letter.tickets.front();
  letter.drop();
  EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  EXPECT_EQ(pull(ticket), "ProtocolError");
}

TEST_F(Xth, TheSourceIsReleasedByTheAcknowledgementOnly) {
  b.behave({.acknowledges = false});
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1000, 1)));
  EXPECT_TRUE(letter.tickets.front().acknowledge);
  letter.send();
  EXPECT_EQ(b.receive().size(), 1u);
  EXPECT_EQ(letter.released.front().runs(), 0);
  a.channel().acknowledged(letter.tickets.front());
  EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  a.channel().acknowledged(letter.tickets.front());
  a.channel().withdraw(letter.tickets.front());
  EXPECT_EQ(letter.released.front().runs(), 1);
}

TEST_F(Xth, ASourceIsReleasedAfterACopyUnderWay) {
  for (const bool closes : {true, false}) {
    SCOPED_TRACE(closes ? "closed" : "withdrawn");
    WirePair other(driver, driver, {}, *memory, *memory);
    Letter letter(*other.a);
    ASSERT_TRUE(letter.offer(memory->filled(1000, 7)));
    const auto arrival = std::make_shared<Arrival>(letter.tickets.front(), Arrival::Number{1, 0}, *memory);
    int early = -1;
    arrival->on_reserve = [&] {
      closes ? other.a->close(Status(Code::agent_closed, "closed by the test"))
             : other.a->channel().withdraw(letter.tickets.front());
      early = letter.released.front().runs();
    };
    other.b->pull(arrival);
    EXPECT_EQ(early, 0);
    EXPECT_EQ(arrival->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrival->buffer, 7));
    EXPECT_EQ(letter.released.front().wait_name(), closes ? "AgentClosed" : "Ok");
    EXPECT_EQ(letter.released.front().runs(), 1);
  }
}

TEST_F(Xth, ValuesAreValues) {
  const auto source = memory->filled(1000, 1);
  a.send(source);
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 1u);
  memory->fill(source, 2);
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 1));
}

TEST_F(Xth, AClosedEndLeaksNothing) {
  Letter letter(a);
  ASSERT_TRUE(letter.offer(memory->filled(1000, 1)));
  a.close(Status(Code::agent_closed, "closed by the test"));
  EXPECT_EQ(letter.released.front().wait_name(), "AgentClosed");
  EXPECT_EQ(pull(letter.tickets.front()), "ConnectionLost");
}

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(XthFixture);
