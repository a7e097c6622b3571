#include "agent/agent.h"

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;

class AgentCalls : public ::testing::TestWithParam<Ways> {
 protected:
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam());
  std::shared_ptr<RawAgent> b = join(store, "b", GetParam());
};

INSTANTIATE_TEST_SUITE_P(Over, AgentCalls,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"unix", "basic"}, Ways{"tcp", "basic"},
                                           Ways{"tls", "basic"}, Ways{"ring", "shm,basic"}, Ways{"unix", ""}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(AgentCalls, ReturnTheBytesThatWereSent) {
  serve_echo(*b);
  const auto reply = call_sync(*a, "b", "echo", message_of("hello"));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(text_of(reply->payload), "hello");
}

TEST_P(AgentCalls, CarryBuffersOfEverySizeBothWays) {
  serve_echo(*b);
  for (const std::size_t bytes : {0UL, 1UL, 100UL, 4096UL, 4097UL, 100'000UL, 262'144UL, 262'145UL, 5'000'000UL}) {
    auto message = message_of("m");
    message.buffers = {patterned(bytes, 1), patterned(3, 2), patterned(bytes / 2, 3)};
    const auto reply = call_sync(*a, "b", "echo", message);
    ASSERT_TRUE(reply.ok()) << bytes << ": " << reply.status().text();
    ASSERT_EQ(reply->buffers.size(), 3U);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bytes(reply->buffers[i], message.buffers[i])) << bytes;
  }
}

TEST_P(AgentCalls, OfAPayloadLongerThanAFrameArriveWhole) {
  serve_echo(*b);
  const std::string longer(300'000, 'x');
  const auto reply = call_sync(*a, "b", "echo", message_of(longer));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(text_of(reply->payload), longer);
}

TEST_P(AgentCalls, OfThousandsOfBuffersArriveWhole) {
  serve_echo(*b);
  auto message = message_of("many");
  for (unsigned i = 0; i < 3000; ++i) message.buffers.push_back(patterned(i * 7, i));
  const auto reply = call_sync(*a, "b", "echo", message);
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  ASSERT_EQ(reply->buffers.size(), 3000U);
  for (std::size_t i = 0; i < 3000; ++i) ASSERT_TRUE(same_bytes(reply->buffers[i], message.buffers[i])) << i;
}

TEST_P(AgentCalls, FindWhatAReplacedHandlerServesAsItIsDestroyed) {
  std::shared_ptr<void> end(nullptr, [this](void*) { serve_echo(*b); });
  b->serve("f", [end = std::move(end)](const Request&, Reply reply) { reply.send({}); });
  b->serve("f", [](const Request&, Reply reply) { reply.send({}); });
  EXPECT_TRUE(call_sync(*a, "b", "echo", {}).ok());
}

TEST_P(AgentCalls, AreRefusedByTheResolverUntilTheNameIsServed) {
  int asked = 0;
  b->resolve_with([&](std::string_view name) -> Result<std::optional<std::pair<Handler, HandlerOptions>>> {
    ++asked;
    if (name == "unknown") return std::optional<std::pair<Handler, HandlerOptions>>();
    return Status(Code::permission_denied, "not " + std::string(name));
  });
  for (int i = 1; i <= 3; ++i) {
    const auto reply = call_sync(*a, "b", "echo", message_of("hello"));
    EXPECT_EQ(reply.status().code(), Code::permission_denied) << reply.status().text();
    EXPECT_EQ(asked, i);
  }
  EXPECT_EQ(call_sync(*a, "b", "unknown", {}).status().code(), Code::not_found);
  serve_echo(*b);
  EXPECT_TRUE(call_sync(*a, "b", "echo", message_of("hello")).ok());
  EXPECT_EQ(asked, 4);
}

TEST_P(AgentCalls, ToTheSameAgentWork) {
  serve_echo(*a);
  auto message = message_of("me");
  message.buffers = {patterned(1'000'000)};
  const auto reply = call_sync(*a, "a", "echo", message);
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_TRUE(same_bytes(reply->buffers[0], message.buffers[0]));
  EXPECT_NE(reply->buffers[0].data, message.buffers[0].data);
}

TEST_P(AgentCalls, ManyInFlightFromManyThreadsEachGetTheirOwnReply) {
  serve_echo(*b);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        std::vector<std::pair<Call, std::string>> calls;
        for (int i = 0; i < 50; ++i) {
          const auto text = std::to_string(t) + "/" + std::to_string(round) + "/" + std::to_string(i);
          calls.emplace_back(a->call("b", "echo", message_of(text)), text);
        }
        for (auto& [call, text] : calls) {
          if (!call.wait()) ++wrong;
          const auto reply = call.take();
          if (!reply || text_of(reply->payload) != text) ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(AgentCalls, NestedTwoHundredDeepBetweenTwoAgentsDoNotDeadlock) {
  const auto nest = [](RawAgent& self, std::string other) {
    return [&self, other](const Request& request, Reply reply) {
      const int depth = std::stoi(std::string(text_of(request.arguments.payload)));
      if (depth == 0) return reply.send(message_of("0"));
      auto inner = call_sync(self, other, "nest", message_of(std::to_string(depth - 1)));
      if (!inner) return reply.fail(inner.status());
      reply.send(message_of(std::to_string(std::stoi(std::string(text_of(inner->payload))) + 1)));
    };
  };
  a->serve("nest", nest(*a, "b"));
  b->serve("nest", nest(*b, "a"));
  const auto reply = call_sync(*a, "b", "nest", message_of("200"));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(text_of(reply->payload), "200");
}

TEST_P(AgentCalls, ThatTakeTooLongFailWithoutHarmToTheNextCall) {
  b->serve("slow", [](const Request&, Reply reply) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    reply.send(message_of("late"));
  });
  serve_echo(*b);
  const auto late = call_sync(*a, "b", "slow", {}, within(Milliseconds(50)));
  EXPECT_EQ(late.status().code(), Code::deadline_exceeded) << late.status().text();
  EXPECT_NE(late.status().what().find("\"slow\" on \"b\""), std::string::npos);
  for (int i = 0; i < 100; ++i) {
    const auto reply = call_sync(*a, "b", "echo", message_of(std::to_string(i)));
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_EQ(text_of(reply->payload), std::to_string(i));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST_P(AgentCalls, ToAnUnknownFunctionOrPeerFail) {
  EXPECT_EQ(call_sync(*a, "b", "nothing", {}).status().code(), Code::not_found);
  EXPECT_EQ(call_sync(*a, "nobody", "nothing", {}).status().code(), Code::not_found);
}

TEST_P(AgentCalls, WhoseHandlerNeverRepliesFail) {
  b->serve("drop", [](const Request&, const Reply&) {});
  EXPECT_EQ(call_sync(*a, "b", "drop", {}).status().code(), Code::internal);
}

TEST_P(AgentCalls, PendingWhenThePeerLeavesFailWithItsName) {
  const auto served = std::make_shared<std::promise<void>>();
  b->serve("hang", [served](const Request&, Reply reply) {
    static std::vector<Reply> kept;
    kept.push_back(std::move(reply));
    served->set_value();
  });
  auto call = a->call("b", "hang", {});
  ASSERT_EQ(served->get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_FALSE(call.done());
  b->leave();
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto lost = call.take();
  EXPECT_EQ(lost.status().code(), Code::connection_lost);
  EXPECT_NE(lost.status().what().find("\"b\""), std::string::npos) << lost.status().text();
}

TEST_P(AgentCalls, CompletionsRunOnceWithoutAWaiter) {
  serve_echo(*b);
  std::atomic<int> done{0};
  for (int i = 0; i < 100; ++i) {
    a->call("b", "echo", message_of("x")).on_done([&](const Result<Received>& reply) {
      done += reply.ok() ? 1 : 1000;
    });
  }
  EXPECT_TRUE(eventually([&] { return done >= 100; }));
  EXPECT_EQ(done, 100);
}

TEST_P(AgentCalls, AgentsThatHaveLeftHoldNoThreadsAndNoDescriptors) {
  const auto descriptors = open_descriptors(), running = threads();
  const auto guest = join(store, "guest", GetParam()), host = join(store, "host", GetParam());
  serve_echo(*host);
  {
    auto message = message_of("m");
    message.buffers = {patterned(1'000'000)};
    EXPECT_TRUE(call_sync(*guest, "host", "echo", std::move(message)).ok());
  }
  EXPECT_GT(open_descriptors(), descriptors);
  guest->leave();
  host->leave();
  EXPECT_TRUE(eventually([&] { return open_descriptors() <= descriptors && threads() <= running; }))
      << open_descriptors() << " of " << descriptors << " descriptors, " << threads() << " of " << running
      << " threads";
  EXPECT_EQ(call_sync(*guest, "host", "echo", {}).status().code(), Code::agent_closed);
}

}  // namespace
}  // namespace tensorferry
