#include <atomic>
#include <future>
#include <latch>
#include <stdexcept>
#include <thread>

#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::HasSubstr;

class Futures : public TypedAgents {
 protected:
  void SetUp() override {
    sim->serve("half", [](int n) {
      if (n % 2 != 0) throw std::invalid_argument("odd");
      return n / 2;
    });
    // This handler may still run after the test.
    sim->serve("wait", [released = released](const CallContext& call) {
      while (!*released && !call.cancelled()) std::this_thread::sleep_for(1ms);
    });
  }
  void TearDown() override { *released = true; }

  std::shared_ptr<std::atomic<bool>> released = std::make_shared<std::atomic<bool>>(false);
};

TEST_F(Futures, GiveTheirResultOnce) {
  auto future = trainer->call<int>("sim", "half", 4);
  EXPECT_TRUE(future.valid());
  EXPECT_EQ(future.get(), 2);
  EXPECT_FALSE(future.valid());
  EXPECT_THROW(future.get(), InvalidArgument);
  EXPECT_THROW(Future<int>().get(), InvalidArgument);
  EXPECT_EQ(Future<int>::ready(3).get(), 3);
}

TEST_F(Futures, RunTheirContinuations) {
  auto future = trainer->call<int>("sim", "half", 8)
                    .then([this](int half) { return trainer->call<int>("sim", "half", half).get(); })
                    .then([](int quarter) { return std::to_string(quarter); });
  EXPECT_EQ(future.get(), "2");
  bool ran = false;
  Future<void>::ready().then([&] { ran = true; }).get();
  EXPECT_TRUE(ran);
}

TEST_F(Futures, SkipContinuationsAfterAnException) {
  std::atomic<bool> ran{false};
  auto future = trainer->call<int>("sim", "half", 3).then([&](int) { ran = true; });
  EXPECT_THAT(thrown_by<RemoteError>([&] { future.get(); }), HasSubstr("odd"));
  EXPECT_FALSE(ran);
  auto thrown = trainer->call<int>("sim", "half", 2).then([](int) -> int { throw std::domain_error("mine"); });
  EXPECT_EQ(thrown_by<std::domain_error>([&] { thrown.get(); }), "mine");
}

TEST_F(Futures, LogTheExceptionOfACallbackAndContinue) {
  ::testing::internal::CaptureStderr();
  std::promise<void> ran;
  trainer->call<int>("sim", "half", 2).then([](int) { throw std::domain_error("nobody looks at me"); }).then([] {
  });  // dropped, and not logged: this callback did not throw, and it has taken the first one's exception
  static_cast<void>(trainer->call<int>("sim", "half", 2).then([](int) { throw std::domain_error("unheard of"); }));
  static_cast<void>(trainer->call<int>("sim", "half", 2).then([&](int) { ran.set_value(); }));
  ASSERT_EQ(ran.get_future().wait_for(patience), std::future_status::ready);
  const auto until = std::chrono::steady_clock::now() + patience;
  while (trainer->in_flight().first != 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(trainer->call<int>("sim", "half", 4).get(), 2);
  trainer->leave();  // afterwards all callbacks have ended
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("unheard of"));
}

TEST_F(Futures, MayBeDroppedUnresolved) {
  for (int i = 0; i < 100; ++i) static_cast<void>(trainer->call<int>("sim", "half", 2 * i));
  static_cast<void>(trainer->call("sim", "wait"));
  EXPECT_EQ(trainer->call<int>("sim", "half", 2).get(), 1);
}

TEST_F(Futures, EndWithTheirAgent) {
  auto waiting = trainer->call_with({.timeout = 0ms}, "sim", "wait");
  auto followed = trainer->call_with({.timeout = 0ms}, "sim", "wait").then([] { return 1; });
  std::vector<Future<void>> many;
  for (int i = 0; i < 16; ++i) many.push_back(trainer->call_with({.timeout = 0ms}, "sim", "wait"));
  std::thread waiter([&] { EXPECT_THROW(waiting.get(), AgentClosed); });
  trainer.reset();
  waiter.join();
  EXPECT_THROW(followed.get(), AgentClosed);
  for (auto& each : many) EXPECT_THROW(each.get(), AgentClosed);
}

TEST_F(Futures, FailWhenTheAgentHasLeft) {
  trainer->leave();
  EXPECT_THROW(trainer->call<int>("sim", "half", 2).get(), AgentClosed);
  std::atomic<bool> ran{false};
  auto followed = trainer->call<int>("sim", "half", 2).then([&](int) { ran = true; });
  EXPECT_THROW(followed.get(), AgentClosed);
  EXPECT_FALSE(ran);
}

TEST_F(Futures, CancelTheCallThatTheyContinue) {
  auto followed = trainer->call_with({.timeout = 0ms}, "sim", "wait").then([] {});
  followed.cancel();
  EXPECT_THROW(followed.get(), Cancelled);
}

Future<int> quarter(std::shared_ptr<Agent> agent, int n) {
  const int half = co_await agent->call<int>("sim", "half", n);
  co_return co_await agent->call<int>("sim", "half", half);
}

Future<std::string> quarter_or_why_not(std::shared_ptr<Agent> agent, int n) {
  try {
    co_return std::to_string(co_await quarter(agent, n));
  } catch (const RemoteError& error) {
    co_return error.message();
  }
}

Future<void> throws_at_once() {
  co_await Future<int>::ready(1);
  throw std::domain_error("at once");
}

TEST_F(Futures, CanBeAwaited) {
  EXPECT_EQ(quarter(trainer, 8).get(), 2);
  std::vector<Future<int>> many;
  for (int i = 0; i < 64; ++i) many.push_back(quarter(trainer, 4 * i));
  for (int i = 0; i < 64; ++i) EXPECT_EQ(many[static_cast<std::size_t>(i)].get(), i);
}

TEST_F(Futures, ThrowThroughCoAwait) {
  EXPECT_THAT(thrown_by<RemoteError>([&] { quarter(trainer, 6).get(); }), HasSubstr("odd"));
  EXPECT_EQ(quarter_or_why_not(trainer, 6).get(), "odd");
  EXPECT_EQ(thrown_by<std::domain_error>([&] { throws_at_once().get(); }), "at once");
}

TEST_F(Futures, ThatAreAwaitedEndWithTheirAgent) {
  auto agent = join(store, "short-lived");
  struct Waits {
    static Future<void> on(Agent* given) {
      auto call = given->call_with({.timeout = 0ms}, "sim", "wait");
      co_await call;
    }
  };
  auto future = Waits::on(agent.get());
  agent.reset();
  EXPECT_THROW(future.get(), AgentClosed);
}

}  // namespace
