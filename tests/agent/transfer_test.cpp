// The channel suite's transfers between agents, with every transport and every channel.
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "channels/cma/cma_channel.h"
#include "tests/agent/agents.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;

class Transfers : public ::testing::TestWithParam<Ways> {
 protected:
  Transfers() {
    serve_echo(*a);
    serve_echo(*b);
    const auto first = GetParam().channels.substr(0, GetParam().channels.find(','));
    eventually([&] {
      const auto route = a->explain("b");
      return route.ok() && route->channel == first;
    });
  }
  /// Sends the buffers there and back by the channel of this test.
  static Status echo(RawAgent& from, const std::string& to, const std::vector<Buffer>& buffers) {
    auto message = message_of("m");
    message.buffers = buffers;
    const auto reply = call_sync(from, to, "echo", message);
    if (!reply.ok()) return reply.status();
    if (reply->buffers.size() != buffers.size()) return {Code::internal, "another number of buffers"};
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (!same_bytes(reply->buffers[i], buffers[i])) return {Code::internal, "other bytes"};
    }
    return {};
  }
  static void add_mail(RawAgentOptions& options) {
    options.registry = with_mail();
    options.registry.add("cma", 60,
                         [] { return std::make_unique<CmaDriver>(cma::CmaOptions{.within_process = true}); });
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam(), add_mail), b = join(store, "b", GetParam(), add_mail);
};

INSTANTIATE_TEST_SUITE_P(Over, Transfers,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"ring", "xth"}, Ways{"unix", "xth"},
                                           Ways{"ring", "shm,basic"}, Ways{"unix", "shm,basic"},
                                           Ways{"ring", "cma,basic"}, Ways{"tcp", "cma,basic"},
                                           Ways{"ring", "mail,basic"}, Ways{"unix", "mail,basic"}, Ways{"tcp", "basic"},
                                           Ways{"tcp", "xth"}, Ways{"tcp", "mail,basic"}, Ways{"tls", "basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(Transfers, OfEmptyTinyAndOddSizesAroundEveryBound) {
  for (const std::size_t around :
       {1UL, 64UL, 4096UL, 30'000UL, 48UL << 10, 64UL << 10, 256UL << 10, 1UL << 20, 5UL << 20}) {
    for (const std::size_t bytes : {around - 1, around, around + 1}) {
      const auto status = echo(*a, "b", {patterned(bytes, 1), patterned(0), patterned(bytes, 2)});
      ASSERT_TRUE(status.ok()) << bytes << ": " << status.text();
    }
  }
}

TEST_P(Transfers, OfManyBuffersOfMixedSizesInOneMessage) {
  std::vector<Buffer> buffers;
  std::mt19937 random(5);
  for (unsigned i = 0; i < 400; ++i) buffers.push_back(patterned(random() % (i % 20 == 0 ? 600'000 : 9000), i));
  const auto status = echo(*a, "b", buffers);
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Transfers, InBothDirectionsFromManyThreads) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::string wrong;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (unsigned i = 0; i < 15; ++i) {
        std::vector<Buffer> buffers;
        for (unsigned n = random() % 4 + 1; n > 0; --n) buffers.push_back(patterned(random() % 400'000, random()));
        const auto status = echo(t % 2 == 0 ? *a : *b, t % 2 == 0 ? "b" : "a", buffers);
        const std::lock_guard lock(mutex);
        if (!status.ok() && wrong.empty()) wrong = status.text();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, "");
}

TEST_P(Transfers, InFlightKeepTheirBytesApart) {
  std::vector<std::pair<Call, Buffer>> calls;
  for (unsigned i = 0; i < 100; ++i) {
    auto message = message_of("m");
    message.buffers = {patterned(i % 10 == 0 ? 500'000 : 20'000 + i, i)};
    calls.emplace_back(a->call("b", "echo", message), message.buffers[0]);
  }
  for (auto& [call, sent] : calls) {
    ASSERT_TRUE(call.wait());
    const auto reply = call.take();
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_TRUE(same_bytes(reply->buffers.at(0), sent));
  }
}

TEST_P(Transfers, OfReusedMemoryCarryTheNewBytes) {
  for (const std::size_t bytes : {10'000UL, 400'000UL}) {
    Bytes memory(bytes);
    for (unsigned i = 0; i < 50; ++i) {
      const auto expected = patterned(bytes, i);
      std::memcpy(memory.data(), expected.data, bytes);
      auto message = message_of("m");
      message.buffers = {{{}, memory.data(), bytes, nullptr, nullptr}};
      std::atomic<bool> sent{false};
      auto call = a->call("b", "echo", std::move(message));
      call.on_sent([&](const Status&) { sent = true; });
      ASSERT_TRUE(eventually([&] { return sent.load(); }));
      std::memset(memory.data(), 0xdd, bytes);
      ASSERT_TRUE(call.wait());
      const auto reply = call.take();
      ASSERT_TRUE(reply.ok()) << reply.status().text();
      EXPECT_TRUE(same_bytes(reply->buffers.at(0), expected)) << i;
    }
  }
}

TEST_P(Transfers, ToASlowReceiverArriveWhole) {
  std::atomic<int> wrong{0};
  b->serve("slow", [&](const Request& request, Reply reply) {
    std::this_thread::sleep_for(milliseconds(10));
    const auto seed = static_cast<unsigned>(std::stoi(std::string(text_of(request.arguments.payload))));
    for (const auto& buffer : request.arguments.buffers)
      wrong += same_bytes(buffer, patterned(buffer.bytes, seed)) ? 0 : 1;
    reply.send({});
  });
  std::vector<Call> calls;
  for (unsigned i = 0; i < 60; ++i) {
    auto message = message_of(std::to_string(i));
    message.buffers = {patterned(300'000, i), patterned(50'000, i)};
    calls.push_back(a->call("b", "slow", std::move(message)));
  }
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok());
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(Transfers, StayValidAfterBothAgentsHaveLeft) {
  std::vector<Received> kept;
  auto message = message_of("m");
  for (const std::size_t bytes : {100UL, 50'000UL, 600'000UL}) message.buffers.push_back(patterned(bytes, 7));
  for (int i = 0; i < 5; ++i) {
    auto reply = call_sync(*a, "b", "echo", message);
    ASSERT_TRUE(reply.ok());
    kept.push_back(std::move(*reply));
  }
  a->leave();
  b->leave();
  a.reset();
  b.reset();
  for (const auto& received : kept) {
    for (std::size_t i = 0; i < message.buffers.size(); ++i) {
      EXPECT_TRUE(same_bytes(received.buffers.at(i), message.buffers[i]));
      std::memset(received.buffers[i].data, 1, received.buffers[i].bytes);
    }
  }
}

TEST_P(Transfers, CutOffHalfwayEndEveryCall) {
  for (int round = 0; round < rounds(1000); ++round) {
    const auto guest = join(store, "guest", GetParam(), add_mail);
    serve_echo(*guest);
    std::vector<Call> calls;
    std::atomic<int> sent{0};
    for (unsigned i = 0; i < 20; ++i) {
      auto message = message_of("m");
      message.buffers = {patterned(i % 2 == 0 ? 2'000'000 : 100'000, i)};
      calls.push_back(a->call("guest", "echo", std::move(message)));
      calls.back().on_sent([&](const Status&) { ++sent; });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round * 977 % 20'000));
    guest->leave();
    for (auto& call : calls) {
      ASSERT_TRUE(call.wait(Clock().now() + long_enough));
      const auto status = call.take().status();
      EXPECT_TRUE(status.ok() || status.code() == Code::connection_lost || status.code() == Code::not_found)
          << status.text();
    }
    EXPECT_TRUE(eventually([&] { return sent == 20; })) << sent;
  }
}

TEST(LargeTransfer, OfFourGibibytesAndOneByte) {
  if (!is_soak) GTEST_SKIP() << "takes 12 GB: TENSORFERRY_SOAK=1";
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {"ring", "basic"},
                      [](RawAgentOptions& options) { options.max_bytes_in_flight = std::size_t{8} << 30; });
  const auto b = join(store, "b", {"ring", "basic"});
  serve_echo(*b);
  auto message = message_of("m");
  message.buffers = {patterned((std::size_t{4} << 30) + 1, 3)};
  const auto reply = call_sync(*a, "b", "echo", message, within(seconds(120)));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_TRUE(same_bytes(reply->buffers.at(0), message.buffers[0]));
}

}  // namespace
}  // namespace tensorferry
