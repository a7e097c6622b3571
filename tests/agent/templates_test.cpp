// Templates: payloads that travel as their difference from an earlier payload.
#include "agent/templates.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using Use = wire::Template::Use;

Bytes structure(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  Bytes out(bytes);
  for (auto& byte : out) byte = static_cast<std::byte>(random());
  return out;
}

// ---- Differences

TEST(Differences, ComeTogetherAgain) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto from = structure(random() % 300, static_cast<unsigned>(round));
    auto to = from;
    for (unsigned n = random() % 20; n > 0 && !to.empty(); --n) to[random() % to.size()] = static_cast<std::byte>(n);
    const auto between = differences(from, to, 10'000);
    ASSERT_TRUE(between);
    EXPECT_EQ(between->empty(), from == to);
    EXPECT_EQ(apply_differences(from, *between), to);
  }
}

TEST(Differences, OfAFewBytesAreShort) {
  const auto from = structure(100'000, 1);
  auto to = from;
  to[70] ^= std::byte{1};
  to[72] ^= std::byte{1};
  to[99'999] ^= std::byte{1};
  EXPECT_EQ(differences(from, to, 100)->size(), 1U + 1 + 3 + 3 + 1 + 1);
  EXPECT_FALSE(differences(from, structure(100'000, 2), 50'000)) << "longer than allowed";
}

TEST(Differences, OfSomethingElseAreRefused) {
  const auto from = structure(10, 1);
  for (const auto& each : std::vector<std::vector<int>>{{11, 0}, {0, 11}, {8, 3, 1, 2, 3}, {0, 4, 1}, {3}, {0x80}}) {
    Bytes bytes;
    for (const auto byte : each) bytes.push_back(static_cast<std::byte>(byte));
    EXPECT_FALSE(apply_differences(from, bytes)) << ::testing::PrintToString(each);
  }
}

// ---- The tables

class Tables : public ::testing::Test {
 protected:
  SentTemplates::Way way(const Bytes& payload) {
    return sent.way(payload, [this] { return ++releases; });
  }
  std::uint64_t releases = 0;
  SentTemplates sent;
  ReceivedTemplates received;
};

TEST_F(Tables, SendDifferencesOnceTheReceiverHasKeptTheFirst) {
  const auto first = structure(1000, 1);
  auto second = first;
  second[500] ^= std::byte{1};
  const auto whole = way(first);
  ASSERT_EQ(whole.what.use, Use::keep);
  EXPECT_EQ(way(second).what.use, Use::none) << "it may not have come yet, and is not to be kept twice";
  sent.acknowledged(whole.what.release + 1);
  EXPECT_EQ(way(second).what.use, Use::none) << "that was another id";
  sent.acknowledged(whole.what.release);
  ASSERT_TRUE(received.keep(whole.what.number, first).ok());
  const auto less = way(second);
  ASSERT_EQ(less.what.use, Use::differences);
  EXPECT_LT(less.differences.size(), 6U);
  EXPECT_EQ(*received.restore(less.what.number, less.differences), second);
}

TEST_F(Tables, LeaveTheShortTheLongAndTheUnlikeAsTheyAre) {
  EXPECT_EQ(way(structure(TemplateBounds::least - 1, 1)).what.use, Use::none);
  EXPECT_EQ(way(structure(TemplateBounds::most + 1, 1)).what.use, Use::none);
  sent.acknowledged(way(structure(1000, 1)).what.release);
  EXPECT_EQ(way(structure(1000, 2)).what.use, Use::keep);
  EXPECT_EQ(way(structure(1001, 1)).what.use, Use::keep);
}

TEST_F(Tables, TakeInOnlyWhatComesAgainWhenHalfFullAndNothingWhenFull) {
  std::size_t kept = 0, asked = 0;
  for (std::size_t bytes = 200; bytes < 200 + TemplateBounds::count; ++bytes, ++asked)
    kept += way(structure(bytes, 1)).what.use == Use::keep ? 1 : 0;
  EXPECT_EQ(kept, TemplateBounds::count / 2);
  EXPECT_EQ(way(structure(2000, 1)).what.use, Use::none);
  EXPECT_EQ(way(structure(2000, 2)).what.use, Use::keep) << "one of that length has come before";
  std::size_t bytes = 0;
  for (unsigned i = 0; i < 10'000; ++i) {
    const auto length = TemplateBounds::most - i / 4;
    if (way(structure(length, i)).what.use == Use::keep) bytes += length;
    if (bytes > TemplateBounds::bytes || i > 200) break;
  }
  EXPECT_GT(bytes, TemplateBounds::bytes / 2);
  EXPECT_LE(bytes, TemplateBounds::bytes);
}

TEST_F(Tables, KeepAgainWhatWentNowhere) {
  const auto payload = structure(1000, 1);
  const auto first = way(payload);
  sent.forget(first.what.release);
  const auto second = way(payload);
  ASSERT_EQ(second.what.use, Use::keep);
  EXPECT_NE(second.what.number, first.what.number);
  sent.acknowledged(first.what.release);
  EXPECT_EQ(way(payload).what.use, Use::none);
  sent.acknowledged(second.what.release);
  EXPECT_EQ(way(payload).what.number, second.what.number);
}

TEST_F(Tables, RefuseWhatMakesNoSense) {
  const auto refused = [](const Status& status) { return status.code() == Code::protocol_error; };
  ASSERT_TRUE(received.keep(3, structure(1000, 1)).ok());
  EXPECT_TRUE(refused(received.keep(3, structure(1000, 1)))) << "twice";
  EXPECT_TRUE(refused(received.keep(TemplateBounds::count, structure(1000, 1)))) << "beyond the last number";
  EXPECT_TRUE(refused(received.keep(4, Bytes(TemplateBounds::bytes)))) << "too much together";
  EXPECT_TRUE(refused(received.restore(4, {}).status())) << "never kept";
  EXPECT_TRUE(refused(received.restore(3, Bytes(1, std::byte{1})).status())) << "not its differences";
}

// ---- Between agents

class Templates : public ::testing::TestWithParam<Ways> {
 protected:
  Templates() {
    serve_echo(*a);
    serve_echo(*b);
  }
  /// Sends the payload and this many buffers there and back.
  void echo(const Bytes& payload, std::size_t buffers) {
    Message message{payload, {}, {}, {}};
    for (unsigned i = 0; i < buffers; ++i) message.buffers.push_back(patterned(5'000, i));
    const auto sent = message.buffers;
    const auto reply = call_sync(*a, "b", "echo", std::move(message));
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_EQ(reply->payload, payload);
    ASSERT_EQ(reply->buffers.size(), buffers);
    for (std::size_t i = 0; i < buffers; ++i) EXPECT_TRUE(same_bytes(reply->buffers[i], sent[i]));
  }
  [[nodiscard]] std::uint64_t spared() const {
    return a->counters().structure_bytes_spared + b->counters().structure_bytes_spared;
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam()), b = join(store, "b", GetParam());
};

INSTANTIATE_TEST_SUITE_P(Over, Templates, ::testing::Values(Ways{"ring", ""}, Ways{"unix", ""}, Ways{"tcp", ""}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(Templates, SpareAStructureThatIsSentAgainBothWays) {
  auto payload = structure(3000, 1);
  echo(payload, 3);
  EXPECT_EQ(spared(), 0U);
  payload[100] ^= std::byte{1};
  echo(payload, 3);
  EXPECT_GT(a->counters().structure_bytes_spared, payload.size() - 10) << "the first reply said that it has been kept";
  payload[200] ^= std::byte{1};
  echo(payload, 3);
  EXPECT_GT(b->counters().structure_bytes_spared, payload.size() - 10) << "and the second call did";
}

TEST_P(Templates, OfMessagesTooLongForAFrameWork) {
  auto payload = structure(100'000, 1);
  ASSERT_TRUE(eventually([&] {
    payload[70'000] ^= std::byte{1};
    echo(payload, 2);
    return spared() > 1'000'000;
  }));
}

TEST_P(Templates, OfManyThreadsAreNotMixedUp) {
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 8; ++thread) {
    threads.emplace_back([this, thread] {
      auto payload = structure(400 + thread / 2, thread / 3);
      for (unsigned i = 0; i < 300; ++i) {
        payload[(i * 7 + thread) % payload.size()] = static_cast<std::byte>(i);
        echo(payload, 1 + thread % 3);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(spared(), 0U);
}

TEST_P(Templates, EndWithTheLinkAndBeginAnew) {
  const auto payload = structure(3000, 1);
  const auto again = [&] {
    return eventually([&] {
      const auto before = a->counters().structure_bytes_spared;
      echo(payload, 1);
      return a->counters().structure_bytes_spared > before;
    });
  };
  ASSERT_TRUE(again());
  b->leave();
  b = join(store, "b", GetParam());
  serve_echo(*b);
  ASSERT_TRUE(eventually([&] { return call_sync(*a, "b", "echo", message_of("m")).ok(); }));
  EXPECT_TRUE(again());
}

TEST_P(Templates, OfRepliesThatNobodyWaitsForAreKeptAllTheSame) {
  std::atomic<bool> late{true};
  b->serve("late", [&](const Request&, Reply reply) {
    if (late) std::this_thread::sleep_for(Milliseconds(100));
    Message message{structure(3000, 1), {}, {}, {}};
    message.buffers.push_back(patterned(5'000));
    reply.send(std::move(message));
  });
  EXPECT_EQ(call_sync(*a, "b", "late", message_of("m"), within(Milliseconds(20))).status().code(),
            Code::deadline_exceeded);
  late = false;
  EXPECT_TRUE(eventually([&] {
    EXPECT_TRUE(call_sync(*a, "b", "late", message_of("m")).ok());
    return b->counters().structure_bytes_spared > 0;
  }));
}

// ---- Invalid input from peers

Bytes request_with(const wire::Template& as, std::string_view payload) {
  return request_frame(1, "echo", {}, 0, 0, payload, as);
}

TEST(TemplateOfAPeer, IsKeptAndAcknowledged) {
  const auto store = std::make_shared<MemoryStore>();
  const auto agent = join(store, "agent");
  serve_echo(*agent);
  auto connection = raw_dial(store, "agent", raw_hello("stranger"));
  ASSERT_TRUE(connection.write(request_with({Use::keep, 5, 1234}, "a payload")).ok());
  const auto first = connection.read(wire::Kind::reply);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(wire::Frame::decode(first->header, first->body)->releases, std::vector<std::uint64_t>{1234});
  const Bytes another = *differences(view_of("a payload"), view_of("a Payload"), 100);
  ASSERT_TRUE(connection.write(request_with({Use::differences, 5, 0}, text_of(another))).ok());
  const auto reply = connection.read(wire::Kind::reply);
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(text_of(wire::Frame::decode(reply->header, reply->body)->payload), "a Payload");
}

TEST(TemplateOfAPeer, ThatMakesNoSenseEndsItsLink) {
  const auto store = std::make_shared<MemoryStore>();
  const auto agent = join(store, "agent");
  serve_echo(*agent);
  for (const auto& as : {wire::Template{Use::keep, 5000, 1}, wire::Template{Use::differences, 0, 0}}) {
    auto connection = raw_dial(store, "agent", raw_hello("stranger"));
    ASSERT_TRUE(connection.write(request_with(as, "a payload")).ok());
    EXPECT_TRUE(connection.ended());
  }
}

TEST(TemplateOfAPeer, IsNotAskedOfOneThatKeepsNone) {
  const auto store = std::make_shared<MemoryStore>();
  const auto agent = join(store, "agent");
  RawPeer peer(store, "old");  // announces no features
  Message message{structure(3000, 1), {}, {}, {}};
  message.buffers.push_back(patterned(5'000));
  const auto call = agent->call("old", "f", std::move(message));
  auto accepted = peer.accept();
  const auto request = accepted.connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok());
  EXPECT_NE(accepted.hello.features & wire::feature::templates, 0U);
  const auto frame = wire::Frame::decode(request->header, request->body);
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->as.use, Use::none);
  EXPECT_EQ(frame->payload.size(), 3000U);
}

}  // namespace
}  // namespace tensorferry
