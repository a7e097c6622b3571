// Large buffers in flight: the bulk connections that they go on.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

#include "agent/transport/long_slice.h"
#include "tests/agent/agents.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;

constexpr std::size_t large = std::size_t{8} << 20;  // no socket takes it whole

wire::Hello hello_with(std::uint32_t features) {
  auto hello = raw_hello("raw", 0);
  hello.features = features;
  return hello;
}

/// Calls that each send a buffer of `bytes` bytes to the raw peer. The seeds of their patterns count up from 1.
std::vector<Call> send_buffers(RawAgent& agent, int count, std::size_t bytes) {
  std::vector<Call> calls;
  for (int i = 1; i <= count; ++i) {
    auto message = message_of("m");
    message.buffers = {patterned(bytes, static_cast<unsigned>(i))};
    calls.push_back(agent.call("raw", "f", std::move(message)));
  }
  return calls;
}

/// Reads one bulk frame and its buffer, and returns its sequence if the bytes are those of its call.
std::uint64_t read_buffer(RawConnection& connection, std::size_t bytes) {
  const auto frame = connection.read();
  EXPECT_TRUE(frame.ok()) << frame.status().text();
  if (!frame.ok()) return 0;
  EXPECT_EQ(frame->header.kind, wire::Kind::bulk);
  EXPECT_EQ(frame->header.trailing, bytes);
  const auto came = connection.read_bytes(bytes);
  const auto sent = patterned(bytes, static_cast<unsigned>(frame->header.sequence));
  EXPECT_EQ(std::memcmp(came.data(), sent.data, bytes), 0) << "sequence " << frame->header.sequence;
  return frame->header.sequence;
}

struct BulkConnections : ::testing::Test {
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> agent = join(store, "agent");

  static RawConnection accept(RawPeer& peer, wire::Hello::Purpose purpose) {
    auto accepted = peer.accept();
    EXPECT_EQ(accepted.hello.purpose, purpose);
    return std::move(accepted.connection);
  }
};

TEST_F(BulkConnections, ABufferThatWaitsGetsAConnectionOfItsOwn) {
  RawPeer peer(store, "raw", hello_with(wire::feature::several_bulk));
  const auto calls = send_buffers(*agent, 3, large);
  const auto requests = accept(peer, wire::Hello::Purpose::calls);
  auto first = accept(peer, wire::Hello::Purpose::bulk);
  auto second = accept(peer, wire::Hello::Purpose::bulk);  // while nothing of the first has been read
  EXPECT_EQ(read_buffer(second, large), 2U);
  EXPECT_EQ(read_buffer(first, large), 1U);
}

TEST_F(BulkConnections, APeerThatTakesOneConnectionGetsOne) {
  RawPeer peer(store, "raw", hello_with(0));
  const auto calls = send_buffers(*agent, 3, large);
  const auto requests = accept(peer, wire::Hello::Purpose::calls);
  auto only = accept(peer, wire::Hello::Purpose::bulk);
  for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) EXPECT_EQ(read_buffer(only, large), sequence);
}

TEST_F(BulkConnections, SmallerBuffersShareOne) {
  constexpr std::size_t bytes = std::size_t{600} << 10;
  RawPeer peer(store, "raw", hello_with(wire::feature::several_bulk));
  const auto calls = send_buffers(*agent, 5, bytes);
  const auto requests = accept(peer, wire::Hello::Purpose::calls);
  auto only = accept(peer, wire::Hello::Purpose::bulk);
  for (std::uint64_t sequence = 1; sequence <= 5; ++sequence) EXPECT_EQ(read_buffer(only, bytes), sequence);
}

// It has not taken the first one yet when it asks again.
TEST_F(BulkConnections, APeerThatWantsTwoAtOnceGetsBoth) {
  RawPeer peer(store, "raw", hello_with(wire::feature::several_bulk));
  const auto call = agent->call("raw", "f", message_of("m"));
  auto requests = accept(peer, wire::Hello::Purpose::calls);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(requests.write(plain_frame(wire::Kind::want_bulk)).ok());
  const auto first = accept(peer, wire::Hello::Purpose::bulk_back);
  const auto second = accept(peer, wire::Hello::Purpose::bulk_back);
}

TEST_F(BulkConnections, ABufferComesAfterTheFrameThatAnnouncesIt) {
  constexpr std::size_t bytes = std::size_t{600} << 10;
  RawPeer peer(store, "raw", hello_with(0));
  auto calls = send_buffers(*agent, 1, bytes);
  auto requests = accept(peer, wire::Hello::Purpose::calls);
  auto bulk = accept(peer, wire::Hello::Purpose::bulk);
  EXPECT_EQ(read_buffer(bulk, bytes), 1U);
  ASSERT_TRUE(requests.read(wire::Kind::request).ok());
  int before_their_frame = 0;
  for (unsigned seed = 2; seed <= 20; ++seed) {
    std::thread reader([&] {  // beside the caller, which writes
      pollfd came{bulk.fd(), POLLIN, 0};
      EXPECT_EQ(::poll(&came, 1, 10'000), 1);
      char first = 0;
      if (::recv(requests.fd(), &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1) ++before_their_frame;
    });
    auto message = message_of("m");
    message.buffers = {patterned(bytes, seed)};
    calls.push_back(agent->call("raw", "f", std::move(message)));
    reader.join();
    ASSERT_TRUE(requests.read(wire::Kind::request).ok());
    EXPECT_EQ(read_buffer(bulk, bytes), seed);
  }
  // The thread that has written the last buffer may, rarely, take the next one too. The receiver copes with that.
  EXPECT_LE(before_their_frame, 4);
}

TEST_F(BulkConnections, ACallFailsIfItsLinkEndsWhileItsBufferWaits) {
  RawPeer peer(store, "raw", hello_with(0));
  auto calls = send_buffers(*agent, 3, large);
  auto requests = accept(peer, wire::Hello::Purpose::calls);
  auto only = accept(peer, wire::Hello::Purpose::bulk);
  ASSERT_TRUE(only.read(wire::Kind::bulk).ok());  // the agent has taken it
  only.close();
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    EXPECT_EQ(call.take().status().code(), Code::connection_lost);
  }
}

/// Returns the time slice of the calling thread, in nanoseconds; 0: the kernel has none that a thread can set.
std::uint64_t slice_of_this_thread() {
  std::array<std::uint64_t, 6> attributes{};  // the fourth is sched_runtime
  if (::syscall(SYS_sched_getattr, 0, attributes.data(), sizeof attributes, 0) != 0) return 0;
  return attributes[3];
}

TEST(LongSlice, LastsAsLongAsTheObject) {
  const auto before = slice_of_this_thread();
  if (before == 0) GTEST_SKIP() << "this kernel has no time slices that a thread can set";
  {
    const LongSlice slice;
    EXPECT_EQ(slice_of_this_thread(), 50'000'000U);
  }
  EXPECT_EQ(slice_of_this_thread(), before);
}

class BulkBetweenAgents : public ::testing::TestWithParam<Ways> {};
INSTANTIATE_TEST_SUITE_P(Over, BulkBetweenAgents, ::testing::Values(Ways{"unix", "basic"}, Ways{"tcp", "basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(BulkBetweenAgents, ManyLargeBuffersInFlightKeepTheirBytes) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", GetParam());
  const auto b = join(store, "b", GetParam());
  serve_echo(*b);
  for (int round = 0; round < 3; ++round) {
    std::vector<Call> calls;
    std::vector<Buffer> sent;
    for (unsigned i = 0; i < 12; ++i) {
      sent.push_back(patterned((std::size_t{i % 4} << 20) + (std::size_t{300} << 10) + i, i));
      auto message = message_of("m");
      message.buffers = {sent.back()};
      calls.push_back(a->call("b", "echo", std::move(message)));
    }
    for (std::size_t i = 0; i < calls.size(); ++i) {
      ASSERT_TRUE(calls[i].wait());
      const auto reply = calls[i].take();
      ASSERT_TRUE(reply.ok()) << reply.status().text();
      ASSERT_EQ(reply->buffers.size(), 1U);
      EXPECT_TRUE(same_bytes(reply->buffers[0], sent[i])) << i;
    }
  }
}

}  // namespace
}  // namespace tensorferry
