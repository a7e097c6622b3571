#include <gtest/gtest.h>

#include "channels/basic/basic_channel.h"
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

TEST_F(Basic, WithdrawalsOfUnsentBuffersUseBoundedMemory) {
  for (std::uint64_t sequence = 1; sequence <= 1 << 17; ++sequence) {
    Bytes message;
    Writer out(message);
    out.varint(sequence + 1000);
    out.varint(1);
    b.channel().control(message, {});
  }
  EXPECT_EQ(b.expected_bulk(), std::size_t{1} << 16);
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
