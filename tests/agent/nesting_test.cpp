// Calls inside calls: a handler that waits for a call of its own holds no place that its callees need.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;

struct Case {
  Ways ways;
  int threads;
};
void PrintTo(const Case& tested, std::ostream* out) { *out << name_of(tested.ways) << ' ' << tested.threads; }

/// Agents in a ring. The function "hop" of each calls the next agent's as long as the number in its payload is not 0.
class Nesting : public ::testing::TestWithParam<Case> {
 protected:
  void make_ring(int size) {
    for (int i = 0; i < size; ++i) {
      agents.push_back(join(store, "agent" + std::to_string(i), GetParam().ways,
                            [](RawAgentOptions& options) { options.max_threads = GetParam().threads; }));
    }
    for (int i = 0; i < size; ++i) {
      auto& here = *agents[static_cast<std::size_t>(i)];
      here.serve("hop", [&here, next = "agent" + std::to_string((i + 1) % size)](Request request, Reply reply) {
        const auto hops = std::to_integer<int>(request.arguments.payload.at(0));
        if (hops == 0) return reply.send(message_of("end"));
        auto answer = call_sync(here, next, "hop", hops_left(hops - 1), within(seconds(60)));
        if (!answer) return reply.fail(answer.status());
        reply.send({std::move(answer->payload), {}, {}, {}});
      });
    }
  }
  static Message hops_left(int hops) { return {Bytes{static_cast<std::byte>(hops)}, {}, {}, {}}; }
  /// Begins this many chains of nested calls at once, each of `calls` calls, and waits for their ends.
  void run_chains(int chains, int calls) {
    std::vector<Call> all;
    for (int i = 0; i < chains; ++i)
      all.push_back(agents[0]->call("agent1", "hop", hops_left(calls - 1), within(seconds(60))));
    for (auto& call : all) {
      ASSERT_TRUE(call.wait());
      const auto reply = call.take();
      ASSERT_TRUE(reply.ok()) << reply.status().text();
      EXPECT_EQ(text_of(reply->payload), "end");
    }
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<RawAgent>> agents;
};

INSTANTIATE_TEST_SUITE_P(Over, Nesting,
                         ::testing::Values(Case{{"ring", "basic"}, 16}, Case{{"ring", "basic"}, 2},
                                           Case{{"unix", "basic"}, 2}, Case{{"tcp", "basic"}, 16}),
                         [](const auto& tested) {
                           return name_of(tested.param.ways) + "_" + std::to_string(tested.param.threads);
                         });

TEST_P(Nesting, ManyChainsBetweenTwoAgentsEnd) {
  make_ring(2);
  run_chains(64, 3);  // a -> b -> a -> b
}

TEST_P(Nesting, DeepChainsEnd) {
  make_ring(2);
  run_chains(8, 40);
}

TEST_P(Nesting, ChainsAroundThreeAgentsEnd) {
  make_ring(3);
  run_chains(64, 7);
}

/// A wait for an idempotent call gives the handler's place up once, and takes it again.
TEST_P(Nesting, NoMoreHandlersRunAfterWaitsForIdempotentCalls) {
  make_ring(2);
  agents[1]->serve("relay", [&](const Request&, Reply reply) {
    auto options = within(seconds(60));
    options.idempotent = true;
    const auto answer = call_sync(*agents[1], "agent0", "hop", hops_left(0), std::move(options));
    if (!answer) return reply.fail(answer.status());
    reply.send({});
  });
  const int most = GetParam().threads;
  std::atomic<int> running{0}, seen{0};
  agents[1]->serve("stay", [&](const Request&, Reply reply) {
    const int now = ++running;
    for (int before = seen; before < now && !seen.compare_exchange_weak(before, now);) {
    }
    eventually([&] { return seen > most; }, std::chrono::milliseconds(200));
    --running;
    reply.send({});
  });
  for (int i = 0; i < 8; ++i) {
    const auto reply = call_sync(*agents[0], "agent1", "relay", {}, within(seconds(60)));
    ASSERT_TRUE(reply.ok()) << reply.status().text();
  }
  std::vector<Call> all;
  for (int i = 0; i < 2 * most; ++i) all.push_back(agents[0]->call("agent1", "stay", {}, within(seconds(60))));
  for (auto& call : all) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok());
  }
  EXPECT_LE(seen, most);
}

/// Every handler waits for a signal that only another request's handler gives.
TEST_P(Nesting, AHandlerMayWaitForAnotherRequestOutsideACall) {
  make_ring(2);
  std::mutex mutex;
  std::condition_variable changed;
  int signals = 0;
  agents[1]->serve("wait", [&](const Request&, Reply reply) {
    {
      const WaitInHandler place;
      std::unique_lock lock(mutex);
      changed.wait_for(lock, seconds(60), [&] { return signals > 0; });
      --signals;
    }
    reply.send({});
  });
  agents[1]->serve("signal", [&](const Request&, Reply reply) {
    const std::lock_guard lock(mutex);
    ++signals;
    changed.notify_all();
    reply.send({});
  });
  std::vector<Call> waiting;
  for (int i = 0; i < 40; ++i) waiting.push_back(agents[0]->call("agent1", "wait", {}, within(seconds(60))));
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(call_sync(*agents[0], "agent1", "signal", {}, within(long_enough)).ok());
  for (auto& call : waiting) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok());
  }
}

}  // namespace
}  // namespace tensorferry
