// Agents across fork(). A forked child cannot use its parent's agent, and each attempt fails with that reason. The
// parent's agent continues.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "tests/agent/agents.h"
#include "tests/agent/forked.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

class Forks : public ::testing::TestWithParam<Ways> {
 protected:
  void SetUp() override {
#ifdef TENSORFERRY_UNDER_TSAN
    GTEST_SKIP() << "ThreadSanitizer allows no threads in a child of a process with threads";
#endif
    serve_echo(*b);
    ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("before")).ok());
  }
  void expect_both_go_on() {
    for (auto* from : {a.get(), b.get()}) {
      serve_echo(*from);
      const auto reply = call_sync(*from, from == a.get() ? "b" : "a", "echo", message_of("after"));
      EXPECT_TRUE(reply.ok()) << reply.status().text();
    }
  }

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam());
  std::shared_ptr<RawAgent> b = join(store, "b", GetParam());
};

INSTANTIATE_TEST_SUITE_P(Over, Forks, ::testing::Values(Ways{"ring", ""}, Ways{"unix", ""}, Ways{"tcp", ""}),
                         [](const auto& tested) { return name_of(tested.param); });

/// Returns whether `status` says that the agent belongs to the parent.
bool says_so(const Status& status) {
  return status.code() == Code::agent_closed &&
         status.what().find("the parent of this forked process") != std::string_view::npos;
}

TEST_P(Forks, AChildGetsAnErrorAtItsFirstUse) {
  EXPECT_TRUE(a->usable_here().ok());
  const auto result = in_child([&] {
    if (!says_so(a->usable_here())) return 1;
    if (!says_so(call_sync(*a, "b", "echo", message_of("child")).status())) return 2;
    if (!says_so(call_sync(*a, "nobody", "echo", message_of("child")).status())) return 3;
    if (!says_so(a->find("b", milliseconds(10)).status())) return 4;
    if (!says_so(a->explain("b").status())) return 5;
    if (!says_so(a->barrier("child", milliseconds(10)))) return 6;
    if (!says_so(a->wait_for_world(2, milliseconds(10)).status())) return 7;
    return 0;
  });
  EXPECT_EQ(result, 0);
  expect_both_go_on();
}

TEST_P(Forks, AChildDoesNotDisturbItsParentsAgents) {
  const auto result = in_child([&] {
    a->leave();
    a.reset();
    b.reset();
    return 0;
  });
  EXPECT_EQ(result, 0);
  expect_both_go_on();
  EXPECT_EQ(a->counters().calls_failed, 0U);
}

TEST_P(Forks, CallsUnderWayEndInAChildAndContinueInTheParent) {
  std::atomic<bool> open{false};
  b->serve("wait", [&](const Request&, Reply reply) {
    // Longer than in_child() takes, which forks up to four times.
    eventually([&] { return open.load(); });
    reply.send(message_of("done"));
  });
  auto waited = a->call("b", "wait", {});
  auto told = a->call("b", "wait", {});
  std::atomic<int> completions{0};
  told.on_done([&](const Result<Received>& reply) { completions += reply.ok() ? 1 : 100; });
  ASSERT_TRUE(eventually([&] { return b->in_flight().second == 2; }));
  const auto result = in_child([&] {
    if (!waited.done() || !waited.wait()) return 1;
    waited.cancel();
    if (!says_so(waited.take().status())) return 2;
    if (!told.claim() || !told.wait() || !says_so(told.take().status())) return 3;
    bool sent = false;
    waited.on_sent([&](const Status&) { sent = true; });
    bool done = false;
    auto later = waited;
    later.on_done([&](const Result<Received>& reply) { done = says_so(reply.status()); });
    return sent && done ? 0 : 4;
  });
  EXPECT_EQ(result, 0);
  open = true;
  ASSERT_TRUE(waited.wait());
  EXPECT_TRUE(waited.take().ok());
  EXPECT_TRUE(eventually([&] { return completions == 1; }));
}

TEST_P(Forks, AChildJoinsAsAnAgentOfItsOwn) {
  const auto result = in_child([&] {
    // Not the copy of the parent's store: a thread of the parent may hold its lock.
    const auto own = std::make_shared<MemoryStore>();
    auto mine = join(own, "child", GetParam());
    auto other = join(own, "other child", GetParam());
    if (!mine || !other) return 1;
    serve_echo(*other);
    if (!call_sync(*mine, "other child", "echo", message_of("hello")).ok()) return 2;
    mine->leave();
    other->leave();
    return 0;
  });
  EXPECT_EQ(result, 0);
  expect_both_go_on();
}

TEST_P(Forks, AChildThatReturnsFromAHandlerNeitherAnswersNorServes) {
  b->serve("fork", [&](const Request&, Reply reply) {
    bool in_child = false;
    const auto status = forked([&] { in_child = true; });
    reply.send(message_of(in_child ? "from the child" : std::to_string(status)));
  });
  const auto reply = call_sync(*a, "b", "fork", {}, within(std::chrono::seconds(60)));
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(text_of(reply->payload), "1");
  expect_both_go_on();
}

TEST_P(Forks, ChildrenBesideManyCallsDoNoHarm) {
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  std::thread caller([&] {
    while (!stop) failed += call_sync(*a, "b", "echo", message_of("busy")).ok() ? 0 : 1;
  });
  for (int i = 0; i < rounds(2000); ++i) {
    EXPECT_EQ(in_child([&] {
                const bool told = says_so(call_sync(*a, "b", "echo", message_of("child")).status());
                a->leave();
                return told ? 0 : 1;
              }),
              0);
  }
  stop = true;
  caller.join();
  EXPECT_EQ(failed, 0);
}

}  // namespace
}  // namespace tensorferry
