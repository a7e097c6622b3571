// Large buffers in flight: the bulk connections that they go on.
#include "agent/transport/bulk_streams.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

#include "agent/transport/long_slice.h"
#include "channels/basic/basic_channel.h"
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

// ---- Pieces of a buffer, over several networks

constexpr auto spreads = wire::feature::several_bulk | wire::feature::pieces | wire::feature::several_networks;

/// A raw peer that has dialled the agent by TCP, and so dials its bulk connections too.
struct RawDialler {
  RawDialler(std::shared_ptr<MemoryStore> of, std::uint32_t features)
      : store(std::move(of)), hello(hello_of(features)), calls(raw_dial(store, "agent", hello, false)) {
    EXPECT_TRUE(calls.write(plain_frame(wire::Kind::ping)).ok());
    EXPECT_TRUE(calls.read(wire::Kind::pong).ok());  // the agent has the connection, and calls by it
  }

  RawConnection dial(wire::Hello::Purpose purpose) {
    auto bulk = hello;
    bulk.purpose = purpose;
    return raw_dial(store, "agent", bulk, false);
  }
  /// Returns the ticket of the next request's buffer.
  Bytes read_ticket() {
    const auto request = calls.read(wire::Kind::request);
    const auto frame =
        request.ok() ? wire::Frame::decode(request->header, request->body) : Result<wire::Frame>(request.status());
    EXPECT_TRUE(frame.ok()) << frame.status().text();
    if (!frame.ok() || frame->buffers.empty()) return {};
    return {frame->buffers[0].ticket.begin(), frame->buffers[0].ticket.end()};
  }
  /// Reads the agent's wish for a bulk connection, and dials it.
  RawConnection grant() {
    EXPECT_TRUE(calls.read(wire::Kind::want_bulk).ok());
    return dial(wire::Hello::Purpose::bulk_back);
  }

  static wire::Hello hello_of(std::uint32_t features) {
    auto hello = raw_hello("raw");
    hello.features = features;
    return hello;
  }
  std::shared_ptr<MemoryStore> store;
  wire::Hello hello;
  RawConnection calls;
};

constexpr std::size_t very_large = std::size_t{64} << 20;  // more than a few sockets take

/// Reads so many pieces, from whichever connection has one, and returns how many came by each.
std::vector<int> read_pieces(std::vector<RawConnection>& connections, std::size_t pieces, const Buffer& sent) {
  std::vector<int> came(connections.size());
  for (; pieces != 0; --pieces) {
    std::vector<pollfd> readable;
    for (const auto& each : connections) readable.push_back({each.fd(), POLLIN, 0});
    if (::poll(readable.data(), readable.size(), static_cast<int>(long_enough.count())) <= 0) break;
    std::size_t from = 0;
    while ((readable[from].revents & POLLIN) == 0) ++from;
    const auto frame = connections[from].read(wire::Kind::bulk);
    if (!frame.ok()) break;
    const auto at = (frame->header.sequence - 1) * BasicDriver::piece_bytes;
    EXPECT_LE(at + frame->header.trailing, sent.bytes);
    const auto bytes = connections[from].read_bytes(frame->header.trailing);
    EXPECT_EQ(std::memcmp(bytes.data(), sent.data + at, bytes.size()), 0) << "sequence " << frame->header.sequence;
    ++came[from];
  }
  EXPECT_EQ(pieces, 0U) << "pieces are missing";
  return came;
}

TEST_F(BulkConnections, WithSeveralNetworksABufferGoesInPiecesSideBySide) {
  RawDialler peer(store, spreads);
  const auto calls = send_buffers(*agent, 1, very_large);
  EXPECT_EQ(peer.read_ticket(), pieces_ticket(1, BasicDriver::piece_bytes));
  std::vector<RawConnection> bulk;
  for (int i = 0; i < 3; ++i) bulk.push_back(peer.grant());  // while nothing has been read
  const auto came = read_pieces(bulk, very_large / BasicDriver::piece_bytes, patterned(very_large, 1));
  for (const auto pieces : came) EXPECT_GT(pieces, 0);
}

TEST_F(BulkConnections, IdleConnectionsToSeveralNetworksTakePiecesToo) {
  RawDialler peer(store, spreads);
  auto calls = send_buffers(*agent, 1, very_large);
  std::vector<RawConnection> bulk;
  for (int i = 0; i < 2; ++i) bulk.push_back(peer.grant());
  (void)read_pieces(bulk, very_large / BasicDriver::piece_bytes, patterned(very_large, 1));
  const auto more = send_buffers(*agent, 1, very_large);
  for (auto& each : bulk) {  // both, while nothing is read
    const auto frame = each.read(wire::Kind::bulk);
    ASSERT_TRUE(frame.ok()) << frame.status().text();
    EXPECT_EQ(frame->header.trailing, BasicDriver::piece_bytes);
  }
}

TEST_F(BulkConnections, PiecesEndIfAllConnectionsGoOverOneNetwork) {
  RawDialler peer(store, spreads);
  const auto calls = send_buffers(*agent, 1, very_large);
  EXPECT_EQ(peer.read_ticket(), pieces_ticket(1, BasicDriver::piece_bytes));
  std::vector<RawConnection> bulk;
  for (std::size_t i = 0; i < BulkStreams::most; ++i) bulk.push_back(peer.grant());
  (void)read_pieces(bulk, very_large / BasicDriver::piece_bytes, patterned(very_large, 1));
  const auto more = send_buffers(*agent, 1, large);
  EXPECT_EQ(peer.read_ticket(), bulk_ticket(very_large / BasicDriver::piece_bytes + 1));
}

struct BulkConnectionsWithout : BulkConnections, ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(BulkConnectionsWithout, OneOfTheFeaturesTakeWholeBuffers) {
  RawDialler peer(store, spreads & ~GetParam());
  const auto calls = send_buffers(*agent, 1, large);
  EXPECT_EQ(peer.read_ticket(), bulk_ticket(1));
}

INSTANTIATE_TEST_SUITE_P(Each, BulkConnectionsWithout,
                         ::testing::Values(wire::feature::several_bulk, wire::feature::pieces,
                                           wire::feature::several_networks));

TEST_F(BulkConnections, PiecesInAnyOrderOnAnyConnectionLandInTheirPlaces) {
  constexpr auto piece = BasicDriver::piece_bytes;
  const auto whole = patterned(2 * piece + 100, 3);
  agent->serve("holds", [&](const Request& request, Reply reply) {
    const auto& came = request.arguments.buffers.at(0);
    const bool same = came.bytes == whole.bytes && std::equal(whole.data, whole.data + whole.bytes, came.data);
    reply.send(message_of(same ? "same" : "other bytes"));
  });
  RawDialler peer(store, spreads);
  auto one = peer.dial(wire::Hello::Purpose::bulk), other = peer.dial(wire::Hello::Purpose::bulk);
  const auto send = [&](RawConnection& by, std::size_t number) {
    const auto part =
        std::string_view(reinterpret_cast<const char*>(whole.data), whole.bytes).substr(number * piece, piece);
    wire::Header header;
    header.kind = wire::Kind::bulk;
    header.sequence = 7 + number;
    header.trailing = part.size();
    ASSERT_TRUE(by.write(wire::assemble(header, {}, {}, {})).ok());
    ASSERT_TRUE(by.write(part).ok());
  };
  const auto ticket = record_frame(whole.bytes, pieces_ticket(7, piece));
  ASSERT_TRUE(peer.calls.write(request_frame(1, "holds", ticket, 1)).ok());
  send(one, 2);
  send(other, 1);
  send(one, 0);
  const auto reply = peer.calls.read(wire::Kind::reply);
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  const auto frame = wire::Frame::decode(reply->header, reply->body);
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(text_of(frame->payload), "same");
}

TEST_F(BulkConnections, APieceOfAnotherSizeEndsTheLink) {
  serve_echo(*agent);
  RawDialler peer(store, spreads);
  auto bulk = peer.dial(wire::Hello::Purpose::bulk);
  constexpr auto piece = BasicDriver::piece_bytes;
  const auto ticket = record_frame(2 * piece + 2, pieces_ticket(7, piece));
  ASSERT_TRUE(peer.calls.write(request_frame(1, "echo", ticket, 1)).ok());
  wire::Header header;
  header.kind = wire::Kind::bulk;
  header.sequence = 9;  // has two bytes
  header.trailing = 4;
  ASSERT_TRUE(bulk.write(wire::assemble(header, {}, {}, {})).ok());
  EXPECT_TRUE(peer.calls.ended());
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
