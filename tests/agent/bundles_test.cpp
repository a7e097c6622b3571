// Bundles: small buffers of one message that travel as one buffer.
#include <array>
#include <atomic>
#include <cstring>
#include <random>

#include "agent/buffers/channel_set.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

class Bundles : public ::testing::TestWithParam<Ways> {
 protected:
  Bundles() {
    serve_echo(*a);
    serve_echo(*b);
    const auto first = GetParam().channels.substr(0, GetParam().channels.find(','));
    eventually([&] {
      const auto route = a->explain("b");
      return route.ok() && route->channel == first;
    });
  }
  /// Sends the buffers there and back, and returns the buffers that arrive.
  std::vector<Buffer> echo(const std::vector<Buffer>& buffers, RawCallOptions options = {}) {
    auto message = message_of("m");
    message.buffers = buffers;
    auto reply = call_sync(*a, "b", "echo", std::move(message), std::move(options));
    EXPECT_TRUE(reply.ok()) << reply.status().text();
    return reply.ok() ? std::move(reply->buffers) : std::vector<Buffer>();
  }
  /// Sends until the memory for bundles is warm.
  void warm_up(const std::vector<Buffer>& buffers) {
    for (int i = 0; i < 50; ++i) echo(buffers);
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam()), b = join(store, "b", GetParam());
};

INSTANTIATE_TEST_SUITE_P(Over, Bundles,
                         ::testing::Values(Ways{"ring", "shm,basic"}, Ways{"ring", "shm,cma,basic"},
                                           Ways{"unix", "shm,basic"}, Ways{"tcp", "basic"}),
                         [](const auto& tested) { return name_of(tested.param) + std::to_string(tested.index); });

std::vector<Buffer> leaves(std::size_t count, std::size_t bytes) {
  std::vector<Buffer> buffers;
  for (unsigned i = 0; i < count; ++i) buffers.push_back(patterned(bytes + i, i));
  return buffers;
}

TEST_P(Bundles, AreUnpackedInTheOrderOfTheMessage) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::vector<Buffer> buffers;
    for (unsigned n = random() % 60; n > 0; --n) {
      constexpr std::array<std::size_t, 7> bounds{1,      100, inline_bytes, 30'000, bundled_bytes, 2 * bundled_bytes,
                                                  1 << 20};
      const auto bound = bounds[random() % bounds.size()];
      buffers.push_back(patterned(random() % 8 == 0 ? random() % 2 * bound : random() % (bound + 1), n));
    }
    const auto came = echo(buffers);
    ASSERT_EQ(came.size(), buffers.size());
    for (std::size_t i = 0; i < buffers.size(); ++i) ASSERT_TRUE(same_bytes(came[i], buffers[i])) << i;
  }
}

TEST_P(Bundles, CountOnlyTheBytesOfTheirBuffers) {
  const auto buffers = leaves(100, 20'000);
  std::size_t bytes = 0;
  for (const auto& buffer : buffers) bytes += buffer.bytes;
  warm_up(buffers);
  const auto total = [](const std::map<std::string, std::uint64_t>& channels) {
    std::uint64_t sum = 0;
    for (const auto& [name, count] : channels) sum += count;
    return sum;
  };
  const auto sent = total(a->counters().bytes_sent), received = total(a->counters().bytes_received);
  echo(buffers);
  EXPECT_EQ(total(a->counters().bytes_sent) - sent, bytes);
  EXPECT_EQ(total(a->counters().bytes_received) - received, bytes);
}

TEST_P(Bundles, ArriveAsSeparateBuffersOfTheReceiver) {
  const auto buffers = leaves(40, 10'001);
  warm_up(buffers);
  auto came = echo(buffers);
  ASSERT_EQ(came.size(), buffers.size());
  for (std::size_t i = 0; i < came.size(); i += 2) std::memset(came[i].data, 0xee, came[i].bytes);
  for (std::size_t i = 1; i < came.size(); i += 2) EXPECT_TRUE(same_bytes(came[i], buffers[i])) << i;
  auto kept = std::move(came[7]);
  came.clear();
  for (int i = 0; i < 20; ++i) echo(leaves(40, 10'001));
  a->leave();
  b->leave();
  a.reset();
  b.reset();
  EXPECT_TRUE(same_bytes(kept, buffers[7]));
  std::memset(kept.data, 1, kept.bytes);
}

TEST_P(Bundles, LandInTheCallersMemory) {
  const auto buffers = leaves(30, 9'000);
  warm_up(buffers);
  RawCallOptions options;
  for (std::size_t i = 0; i < 20; ++i) {
    const auto bytes = buffers[i].bytes + (i % 5 == 0 ? 1 : 0);  // a buffer of another size is not used
    options.into.push_back(i % 7 == 0 ? Buffer() : patterned(bytes, 200));
  }
  const auto into = options.into;
  const auto came = echo(buffers, std::move(options));
  ASSERT_EQ(came.size(), buffers.size());
  for (std::size_t i = 0; i < came.size(); ++i) {
    EXPECT_TRUE(same_bytes(came[i], buffers[i])) << i;
    const bool fits = i < into.size() && i % 5 != 0 && i % 7 != 0;
    EXPECT_EQ(i < into.size() && came[i].data == into[i].data, fits) << i;
  }
  EXPECT_TRUE(same_bytes(into[5], patterned(into[5].bytes, 200)));
}

TEST_P(Bundles, OfMoreBuffersThanAFrameCanNameAreSpilled) {
  const auto buffers = leaves(20'000, 100);
  for (int i = 0; i < 2; ++i) {
    const auto came = echo(buffers);
    ASSERT_EQ(came.size(), buffers.size());
    for (std::size_t each = 0; each < came.size(); ++each) ASSERT_TRUE(same_bytes(came[each], buffers[each])) << each;
  }
}

TEST_P(Bundles, AreReadBeforeTheCallReportsSent) {
  const auto buffers = leaves(60, 20'000);
  warm_up(buffers);
  std::vector<Buffer> memory;
  for (const auto& buffer : buffers) memory.push_back(patterned(buffer.bytes, 77));
  auto message = message_of("m");
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    std::memcpy(memory[i].data, buffers[i].data, buffers[i].bytes);
    message.buffers.push_back(memory[i]);
    message.buffers.back().owner.reset();
  }
  auto call = a->call("b", "echo", std::move(message));
  std::atomic<bool> sent{false};
  call.on_sent([&](const Status&) { sent = true; });
  ASSERT_TRUE(eventually([&] { return sent.load(); }));
  for (const auto& each : memory) std::memset(each.data, 0xdd, each.bytes);
  ASSERT_TRUE(call.wait());
  const auto reply = call.take();
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  for (std::size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(same_bytes(reply->buffers[i], buffers[i])) << i;
}

// ---- Invalid input from peers

wire::BufferRecord appended_bundle(std::vector<wire::BufferRecord::Part> parts) {
  wire::BufferRecord record;
  record.channel = 0;
  record.ticket = appended_ticket;
  for (const auto& part : parts) record.bytes = Bundle::next_part(record.bytes) + part.bytes;
  record.parts = std::move(parts);
  return record;
}

Bytes encoded(const std::vector<wire::BufferRecord>& records) {
  Bytes out;
  Writer writer(out);
  for (const auto& record : records) record.encode(writer);
  return out;
}

TEST(BundleOfAPeer, ArrivesByAnyChannel) {
  const auto store = std::make_shared<MemoryStore>();
  const auto agent = join(store, "agent");
  std::vector<std::string> came;
  agent->serve("look", [&](const Request& request, Reply reply) {
    for (const auto& buffer : request.arguments.buffers)
      came.emplace_back(text_of(ByteView(buffer.data, buffer.bytes)));
    reply.send({});
  });
  auto connection = raw_dial(store, "agent", raw_hello("stranger"));
  auto alone = appended_bundle({});
  alone.bytes = 3;
  const auto bundle = appended_bundle({{0, 2}, {2, 4}});
  Bytes behind(bundle.bytes);
  std::memcpy(behind.data(), "AA", 2);
  std::memcpy(behind.data() + 64, "CCCC", 4);
  for (const char letter : {'B', 'B', 'B'}) behind.push_back(static_cast<std::byte>(letter));
  auto frame = request_frame(1, "look", encoded({bundle, alone}), 2, behind.size());
  frame.insert(frame.end(), behind.begin(), behind.end());
  ASSERT_TRUE(connection.write(frame).ok());
  ASSERT_TRUE(connection.read(wire::Kind::reply).ok());
  EXPECT_EQ(came, (std::vector<std::string>{"AA", "BBB", "CCCC"}));
}

TEST(BundleOfAPeer, ThatIsInvalidEndsItsLink) {
  const auto store = std::make_shared<MemoryStore>();
  const auto agent = join(store, "agent");
  serve_echo(*agent);
  for (const auto& parts : std::vector<std::vector<wire::BufferRecord::Part>>{{{1, 5}}, {{0, 5}, {2, 5}}, {{9, 1}}}) {
    auto connection = raw_dial(store, "agent", raw_hello("stranger"));
    ASSERT_TRUE(connection.write(request_frame(1, "echo", encoded({appended_bundle(parts)}), 1)).ok());
    EXPECT_TRUE(connection.ended());
  }
}

TEST(BundleOfAPeer, IsNotSentToAPeerWithoutTheFeature) {
  const auto store = std::make_shared<MemoryStore>();
  const auto agent = join(store, "agent");
  RawPeer peer(store, "old");  // announces no features
  auto message = message_of("m");
  message.buffers = leaves(5, 10'000);
  const auto call = agent->call("old", "f", std::move(message));
  auto accepted = peer.accept();
  const auto request = accepted.connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok());
  EXPECT_NE(accepted.hello.features & wire::feature::bundles, 0U);
  const auto frame = wire::Frame::decode(request->header, request->body);
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->buffers.size(), 5U);
  for (const auto& record : frame->buffers) EXPECT_TRUE(record.parts.empty());
}

}  // namespace
}  // namespace tensorferry
