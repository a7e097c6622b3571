// The guarantees of calls: deadlines, cancellation, memory, order, completion.
#include <gmock/gmock.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"
#include "tests/base/manual_clock.h"
#include "tests/channels/shm_maps.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

std::string what(const Status& status) { return std::string(status.what()); }

/// Serves the function "later", and keeps its replies.
class KeptReplies {
 public:
  explicit KeptReplies(RawAgent& agent) {
    agent.serve("later", [this](const Request&, Reply reply) {
      reply.on_cancelled([this] { ++told; });
      const std::lock_guard lock(mutex_);
      replies_.push_back(std::move(reply));
    });
  }
  int count() {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(replies_.size());
  }
  std::vector<Reply> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(replies_, {});
  }
  std::atomic<int> told{0};  // how many have been cancelled

 private:
  std::mutex mutex_;
  std::vector<Reply> replies_;
};

class Calls : public ::testing::TestWithParam<Ways> {
 protected:
  void serve_blocked() {
    blocks = true;
    b->serve("blocked", [this](const Request&, Reply reply) {
      ++inside;
      while (!open) std::this_thread::sleep_for(milliseconds(1));
      reply.send({});
    });
  }
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  bool blocks = false;
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam());
  std::shared_ptr<RawAgent> b = join(store, "b", GetParam());
  void TearDown() override {
    open = true;
    // The handlers read `open`, and leave() waits for them for a second only.
    EXPECT_TRUE(!blocks || eventually([&] { return b->in_flight().second == 0; }));
  }
};

INSTANTIATE_TEST_SUITE_P(Over, Calls,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"unix", "basic"}, Ways{"tcp", "basic"},
                                           Ways{"tls", "basic"}, Ways{"ring", "shm,basic"}, Ways{"unix", ""}),
                         [](const auto& tested) { return name_of(tested.param); });

// ---- Deadlines

TEST_P(Calls, CarryTheirRemainingTime) {
  std::optional<Clock::time_point> seen;
  b->serve("deadline", [&](const Request&, Reply reply) {
    seen = reply.deadline();
    reply.send({});
  });
  const auto before = Clock().now();
  ASSERT_TRUE(call_sync(*a, "b", "deadline", {}, within(seconds(20))).ok());
  ASSERT_TRUE(seen.has_value());
  EXPECT_GE(*seen, before + seconds(19));
  EXPECT_LE(*seen, Clock().now() + seconds(21));
  ASSERT_TRUE(call_sync(*a, "b", "deadline", {}, within(milliseconds(0))).ok());
  EXPECT_FALSE(seen.has_value());
}

TEST_P(Calls, ThatExpireFailAtBothEnds) {
  std::atomic<int> began{0}, expired{0};
  b->serve("wait", [&](const Request&, Reply reply) {
    ++began;
    if (eventually([&] { return reply.cancelled(); })) ++expired;
    reply.send({});
  });
  // A call that does not reach a starved callee in time begins no handler: then another one is made.
  for (int i = 0; i < 50 && began == 0; ++i) {
    const Since since;
    const auto late = call_sync(*a, "b", "wait", {}, within(milliseconds(100)));
    EXPECT_EQ(late.status().code(), Code::deadline_exceeded);
    EXPECT_THAT(what(late.status()), HasSubstr("\"wait\" on \"b\": no answer in 0.1 s"));
    EXPECT_GE(since.passed(), milliseconds(100));
  }
  EXPECT_GE(began, 1);
  EXPECT_TRUE(eventually([&] { return expired == began; }));
  EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0 && a->in_flight().first == 0; }));
}

TEST_P(Calls, ThatExpireFailWithoutAWaiter) {
  serve_blocked();
  std::atomic<int> failed{0};
  a->call("b", "blocked", {}, within(milliseconds(50))).on_done([&](const Result<Received>& reply) {
    failed += reply.status().code() == Code::deadline_exceeded ? 1 : 100;
  });
  EXPECT_TRUE(eventually([&] { return failed != 0; }));
  EXPECT_EQ(failed, 1);
}

TEST_P(Calls, WhoseDeadlinePassesInTheQueueAreNotRun) {
  const auto time = ManualClock::make();
  const auto with_clock = [&](RawAgentOptions& options) { options.surroundings.clock = time->clock(); };
  const auto caller = join(store, "caller", GetParam(), with_clock);
  const auto callee = join(store, "callee", GetParam(), with_clock);
  callee->serve("blocked", [&](const Request&, Reply reply) {
    EXPECT_TRUE(eventually([&] { return open.load(); }));
    reply.send({});
  });
  std::atomic<int> ran{0};
  callee->serve("count", [&](const Request&, Reply reply) {
    ++ran;
    reply.send({});
  });
  auto first = RawCallOptions{}, second = within(milliseconds(50));
  first.order = second.order = 9;
  auto blocked = caller->call("callee", "blocked", {}, first), late = caller->call("callee", "count", {}, second);
  ASSERT_TRUE(eventually([&] { return callee->in_flight().second == 2; }));
  time->advance(milliseconds(51));
  EXPECT_TRUE(late.wait());
  EXPECT_EQ(late.take().status().code(), Code::deadline_exceeded);
  open = true;
  EXPECT_TRUE(blocked.wait());
  EXPECT_TRUE(eventually([&] { return callee->in_flight().second == 0; }));
  EXPECT_EQ(ran, 0);
}

TEST_P(Calls, IgnoreTheLateReplyOfAnotherCall) {
  serve_echo(*b);
  b->serve("late", [](const Request& request, Reply reply) {
    std::this_thread::sleep_for(milliseconds(15));
    auto message = message_of("late");
    message.buffers = {patterned(request.arguments.buffers.at(0).bytes, 1)};
    reply.send(message);
  });
  for (int i = 0; i < 30; ++i) {
    auto message = message_of("x");
    message.buffers = {patterned(10'000)};
    (void)call_sync(*a, "b", "late", message, within(milliseconds(5 + i % 15)));
    auto options = within(long_enough);
    options.into = {patterned(10'000, 200)};
    message.payload = bytes_of(std::to_string(i));
    message.buffers = {patterned(10'000, static_cast<unsigned>(i + 5))};
    const auto reply = call_sync(*a, "b", "echo", message, options);
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_EQ(text_of(reply->payload), std::to_string(i));
    EXPECT_TRUE(same_bytes(options.into[0], message.buffers[0]));
  }
}

// ---- Cancellation

TEST_P(Calls, ThatAreCancelledFailAtTheCallerAndAreReportedAtTheCallee) {
  std::atomic<int> started{0}, seen{0};
  b->serve("wait", [&](const Request&, Reply reply) {
    ++started;
    seen += eventually([&] { return reply.cancelled(); }) ? 1 : 100;
    auto message = message_of("nobody wants it");
    message.buffers = {patterned(8 << 20)};
    reply.send(message);
  });
  auto call = a->call("b", "wait", {});
  EXPECT_FALSE(call.wait(Clock().now() + milliseconds(50)));
  ASSERT_TRUE(eventually([&] { return started == 1; }));
  call.cancel();
  ASSERT_TRUE(call.done());
  EXPECT_EQ(call.take().status().code(), Code::cancelled);
  EXPECT_TRUE(eventually([&] { return seen != 0; }));
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0; }));
  EXPECT_TRUE(b->counters().bytes_sent.empty()) << "a late result is not sent";
}

TEST_P(Calls, ThatAreCancelledNotifyTheirHandlerOnce) {
  KeptReplies replies(*b);
  constexpr int calls = 50;
  std::vector<Call> made;
  for (int i = 0; i < calls; ++i) {
    made.push_back(a->call("b", "later", {}, within(seconds(60))));
    if (i % 2 == 0) made.back().cancel();  // if the callee has not read it yet, it does not run
  }
  EXPECT_TRUE(eventually([&] { return replies.count() >= calls / 2 && replies.told == replies.count() - calls / 2; }));
  for (auto& call : made) call.cancel();
  EXPECT_TRUE(eventually([&] { return replies.told == replies.count(); }));
  for (auto& reply : replies.take()) {
    bool at_once = false;
    reply.on_cancelled([&] { at_once = true; });
    EXPECT_TRUE(at_once) << "it has happened";
  }
  EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0; })) << "a handler that runs uses `replies`";
}

// While a link is new, one thread sends a call and another may cancel it at the same moment.
TEST(CancelledCalls, OfNewLinksAreReportedToTheirHandlers) {
  for (int round = 0; round < 30; ++round) {
    const auto store = std::make_shared<MemoryStore>();
    const auto a = join(store, "a"), b = join(store, "b");
    KeptReplies replies(*b);
    b->serve("now", [](const Request&, Reply reply) { reply.send({}); });
    for (int i = 0; i < 20; ++i) a->call("b", "later", {}, within(seconds(60))).cancel();
    ASSERT_TRUE(call_sync(*a, "b", "now", {}, within(seconds(60))).ok());
    ASSERT_TRUE(eventually([&] { return replies.told == replies.count(); }))
        << replies.told << " of " << replies.count() << " in round " << round;
    replies.take();
    ASSERT_TRUE(eventually([&] { return b->in_flight().second == 0; })) << "a handler that runs uses `replies`";
  }
}

TEST_P(Calls, ThatAreCancelledReleaseTheirArguments) {
  serve_echo(*b);
  auto options = within(seconds(60));
  options.wait_for_ready = true;
  for (const std::size_t bytes : {100UL, 100'000UL, 5'000'000UL}) {
    auto message = message_of("m");
    message.buffers = {patterned(bytes)};
    const std::weak_ptr<void> memory = message.buffers[0].owner;
    std::atomic<int> sent{0};
    auto call = a->call("nobody yet", "f", std::move(message), options);
    call.on_sent([&](const Status&) { ++sent; });
    ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("x")).ok()) << "a later call is sent";
    EXPECT_EQ(sent, 0);
    call.cancel();
    EXPECT_TRUE(eventually([&] { return sent == 1 && memory.expired(); })) << bytes;
  }
}

TEST_P(Calls, ThatAreAbandonedStillRun) {
  std::atomic<int> ran{0};
  b->serve("count", [&](const Request&, Reply reply) {
    ++ran;
    reply.send({});
  });
  for (int i = 0; i < 100; ++i) (void)a->call("b", "count", {});
  EXPECT_TRUE(eventually([&] { return ran == 100 && a->in_flight().first == 0; }));
}

// ---- The caller's memory

TEST_P(Calls, LandTheirReplyInTheCallersMemory) {
  serve_echo(*b);
  for (const std::size_t bytes : {1UL, 4096UL, 5000UL, 300'000UL, 3'000'000UL}) {
    auto message = message_of("m");
    message.buffers = {patterned(bytes, 1), patterned(bytes, 2), patterned(bytes, 3)};
    RawCallOptions options;
    options.into = {patterned(bytes, 77),
                    patterned(bytes + 1, 78)};  // the second has another size, the third is missing
    const auto untouched = patterned(bytes + 1, 78);
    const auto reply = call_sync(*a, "b", "echo", message, options);
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_EQ(reply->buffers[0].data, options.into[0].data);
    EXPECT_NE(reply->buffers[1].data, options.into[1].data);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bytes(reply->buffers[i], message.buffers[i]));
    EXPECT_TRUE(same_bytes(options.into[1], untouched));
  }
}

TEST_P(Calls, MayOverwriteTheirArgumentsOnceTheyAreSent) {
  b->serve("echo", [](Request request, Reply reply) {
    std::this_thread::sleep_for(milliseconds(20));
    reply.send({{}, std::move(request.arguments.buffers), {}, {}});
  });
  for (const std::size_t bytes : {1000UL, 100'000UL, 200'000UL, 4'000'000UL}) {
    auto message = message_of("m");
    message.buffers = {patterned(bytes, 1), patterned(bytes, 2)};
    std::atomic<int> sent{0};
    auto call = a->call("b", "echo", message);
    call.on_sent([&](const Status&) {
      for (auto& buffer : message.buffers) std::memset(buffer.data, 0xee, bytes);
      ++sent;
    });
    call.on_sent([&](const Status&) { ++sent; }, true);
    ASSERT_TRUE(call.wait());
    const auto reply = call.take();
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_TRUE(same_bytes(reply->buffers[0], patterned(bytes, 1))) << bytes;
    EXPECT_TRUE(same_bytes(reply->buffers[1], patterned(bytes, 2))) << bytes;
    EXPECT_TRUE(eventually([&] { return sent == 2; })) << bytes;
  }
}

TEST_P(Calls, ThatWereNeverSentReportThatTheArgumentsAreFree) {
  std::atomic<int> sent{0};
  const auto count = [&](const Status&) { ++sent; };
  auto message = message_of("m");
  message.buffers = {patterned(100'000)};
  a->call("nobody", "f", message).on_sent(count);
  EXPECT_TRUE(eventually([&] { return sent == 1; }));
  RawCallOptions unknown;
  unknown.require = "no such channel";
  a->call("b", "f", message, unknown).on_sent(count);
  EXPECT_TRUE(eventually([&] { return sent == 2; }));
  a->leave();
  a->call("b", "f", message).on_sent(count);
  EXPECT_EQ(sent, 3);
}

// ---- Order

TEST_P(Calls, OfOneOrderKeyRunInOrderAtAnySize) {
  std::mutex mutex;
  std::vector<int> order;
  std::atomic<int> at_once{0}, most{0};
  b->serve("note", [&](const Request& request, Reply reply) {
    most = std::max(most.load(), ++at_once);
    const int number = std::stoi(std::string(text_of(request.arguments.payload)));
    if (number % 50 == 0) std::this_thread::sleep_for(milliseconds(2));
    {
      const std::lock_guard lock(mutex);
      order.push_back(number);
    }
    --at_once;
    reply.send({});
  });
  RawCallOptions options;
  options.order = 5;
  const std::size_t sizes[] = {0, 100, 20'000, 300'000, 0, 1'000'000, 10};
  std::vector<Call> calls;
  for (int i = 0; i < 1000; ++i) {
    auto message = message_of(std::to_string(i));
    if (i % 10 == 0) message.buffers = {patterned(sizes[static_cast<std::size_t>(i / 10) % std::size(sizes)])};
    calls.push_back(a->call("b", "note", std::move(message), options));
  }
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    ASSERT_TRUE(call.take().ok());
  }
  ASSERT_EQ(order.size(), 1000U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(most, 1);
}

TEST_P(Calls, WithoutTheOrderKeyOrWithAnotherOneOvertake) {
  serve_blocked();
  serve_echo(*b);
  RawCallOptions one, other;
  one.order = 1;
  other.order = 2;
  auto blocked = a->call("b", "blocked", {}, one);
  auto behind = a->call("b", "echo", message_of("behind"), one);
  ASSERT_TRUE(eventually([&] { return inside == 1; }));
  EXPECT_TRUE(call_sync(*a, "b", "echo", message_of("no key")).ok());
  EXPECT_TRUE(call_sync(*a, "b", "echo", message_of("another"), other).ok());
  EXPECT_FALSE(behind.wait(Clock().now() + milliseconds(20)));
  open = true;
  EXPECT_TRUE(behind.wait());
  EXPECT_TRUE(behind.take().ok());
}

TEST_P(Calls, OfOneOrderKeyContinueAfterAFailureOrCancellation) {
  serve_blocked();
  serve_echo(*b);
  RawCallOptions ordered;
  ordered.order = 3;
  auto blocked = a->call("b", "blocked", {}, ordered);
  auto unknown = a->call("b", "no such function", {}, ordered);
  auto cancelled = a->call("b", "echo", message_of("c"), ordered);
  auto last = a->call("b", "echo", message_of("last"), ordered);
  cancelled.cancel();
  open = true;
  ASSERT_TRUE(last.wait());
  EXPECT_EQ(text_of(last.take()->payload), "last");
  ASSERT_TRUE(unknown.wait());
  EXPECT_EQ(unknown.take().status().code(), Code::not_found);
}

// ---- Waiting and completing

void on_signal(int) {}

TEST_P(Calls, StopWaitingAtASignal) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  ::sigaction(SIGUSR1, &action, nullptr);
  serve_blocked();
  std::vector<Call> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(a->call("b", "blocked", {}));
  std::atomic<int> asked{0}, waiting{0}, stopped{0};
  std::vector<std::thread> threads;  // one of them reads, and the others sleep
  for (auto& call : calls) {
    threads.emplace_back([&] {
      ++waiting;
      if (!call.wait(std::nullopt, [&] { return ++asked > 3; })) ++stopped;
    });
  }
  ASSERT_TRUE(eventually([&] { return waiting == 3; }));
  ASSERT_TRUE(eventually([&] {
    for (auto& thread : threads) ::pthread_kill(thread.native_handle(), SIGUSR1);
    return stopped == 3;
  }));
  for (auto& thread : threads) thread.join();
  open = true;
  for (auto& call : calls) {
    EXPECT_TRUE(call.wait()) << "they may be waited for again";
    EXPECT_TRUE(call.take().ok());
    EXPECT_FALSE(call.take().ok()) << "a reply is taken once";
  }
}

TEST_P(Calls, CompleteOnceAtEveryKindOfEnd) {
  serve_echo(*b);
  b->serve("hang", [](const Request&, Reply reply) {
    std::thread([kept = std::make_shared<Reply>(std::move(reply))] {
      std::this_thread::sleep_for(milliseconds(30));
    }).detach();
  });
  std::mt19937 random(3);
  const int count = rounds(100'000);
  std::vector<std::atomic<int>> completed(static_cast<std::size_t>(count));
  std::atomic<int> all{0};
  std::vector<Call> calls;
  for (int i = 0; i < count; ++i) {
    const bool hangs = random() % 4 == 0;
    auto call = a->call("b", hangs ? "hang" : "echo", message_of("x"), within(milliseconds(1 + random() % 40)));
    call.on_done([&, i](const Result<Received>&) {
      ++completed[static_cast<std::size_t>(i)];
      ++all;
    });
    calls.push_back(call);
    if (random() % 4 == 0) calls[random() % calls.size()].cancel();
    if (random() % 20 == 0) std::this_thread::sleep_for(milliseconds(1));
    if (i == count * 9 / 10) b->leave();
  }
  a->leave();
  EXPECT_EQ(all, count) << "a has left, so all callbacks have ended";
  for (const auto& times : completed) EXPECT_EQ(times, 1);
}

TEST_P(Calls, WithAClaimedCompletionDoNotRunIt) {
  serve_blocked();
  std::atomic<int> ran{0};
  auto call = a->call("b", "blocked", {});
  call.on_done([&](const Result<Received>&) { ++ran; });
  EXPECT_TRUE(call.claim());
  EXPECT_FALSE(call.claim());
  open = true;
  ASSERT_TRUE(call.wait());
  EXPECT_TRUE(call.take().ok());
  EXPECT_EQ(ran, 0);
}

TEST_P(Calls, RunACompletionThatIsGivenAfterAWaitEndedEarly) {
  serve_echo(*b);
  serve_blocked();
  for (int i = 0; i < 100; ++i)
    ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("x")).ok());  // the ring opens meanwhile
  std::atomic<int> ran{0};
  std::this_thread::sleep_for(milliseconds(100));  // the link's tick rests, and a call without a deadline starts none
  auto blocked = a->call("b", "blocked", {}, within(milliseconds(0)));
  EXPECT_FALSE(blocked.wait(Clock().now() + milliseconds(20)));
  blocked.on_done([&](const Result<Received>& reply) { ran += reply.ok() ? 1 : 100; });
  ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("x")).ok());
  EXPECT_EQ(ran, 0);
  open = true;
  EXPECT_TRUE(eventually([&] { return ran == 1; }));
}

TEST_P(Calls, WithLazyCompletionCompleteOnce) {
  serve_echo(*b);
  serve_blocked();
  std::atomic<int> ran{0}, claimed{0};
  std::vector<Call> calls;
  const auto start = [&](std::string_view function) {
    calls.push_back(a->call("b", function, message_of("x")));
    calls.back().on_done([&](const Result<Received>& reply) { ran += reply.ok() ? 1 : 1'000'000; }, false,
                         Call::Notice::lazy);
  };
  start("blocked");  // the sentinel call returns last: the others must not wait for it
  for (int i = 0; i < 500; ++i) start("echo");
  for (std::size_t i = 1; i < calls.size(); i += 5) {
    if (!calls[i].claim()) continue;
    EXPECT_TRUE(calls[i].wait());
    EXPECT_TRUE(calls[i].take().ok());
    ++claimed;
  }
  calls[2].escalate();
  EXPECT_TRUE(eventually([&] { return ran + claimed == 500; }));
  open = true;
  EXPECT_TRUE(eventually([&] { return ran + claimed == 501; }));
  for (int i = 0; i < 500; ++i) start("echo");
  EXPECT_TRUE(eventually([&] { return ran + claimed == 1001; }));
}

TEST_P(Calls, OfManyWaitingThreadsNeedNoOtherReader) {
  serve_echo(*b);
  std::vector<std::thread> threads;
  std::atomic<int> late{0};
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < rounds(20'000); ++i) {
        const auto reply = call_sync(*a, "b", "echo", message_of("x"), within(long_enough));
        if (!reply.ok()) ++late;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(late, 0);
}

// ---- A slow sender

TEST(SlowReply, IntoTheCallersMemoryHoldsTheCallUntilTheLastWrite) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a");
  for (const bool completes : {true, false}) {
    const std::string name =
        completes ? "slow" : "slow and cut off";  // each has its own link, as the first link may end late
    RawPeer slow(store, name);
    const auto sent = patterned(100'000, 5);
    auto options = within(milliseconds(2000));
    options.into = {patterned(sent.bytes, 99)};
    auto call = a->call(name, "f", {}, options);
    auto peer = slow.accept();
    const auto request = peer.connection.read(wire::Kind::request);
    ASSERT_TRUE(request.ok());
    const auto frame = reply_frame(request->header.call, record_frame(sent.bytes, appended_ticket), 1, sent.bytes);
    ASSERT_TRUE(peer.connection.write(frame).ok());
    ASSERT_TRUE(peer.connection.write(ByteView(sent.data, 50'000)).ok());
    EXPECT_FALSE(call.wait(Clock().now() + milliseconds(2400)))
        << "its deadline has passed, its memory may still be written";
    call.cancel();
    EXPECT_FALSE(call.done());
    if (completes) {
      ASSERT_TRUE(peer.connection.write(ByteView(sent.data + 50'000, 50'000)).ok());
      ASSERT_TRUE(call.wait(Clock().now() + long_enough));
      EXPECT_TRUE(call.take().ok());
      EXPECT_TRUE(same_bytes(options.into[0], sent));
    }
    peer.connection.close();
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    if (!completes) {
      EXPECT_EQ(call.take().status().code(), Code::connection_lost);
    }
    EXPECT_TRUE(eventually([&] { return a->in_flight().first == 0; }));
  }
}

TEST(CancelledCalls, ReleaseTheBuffersOfRepliesThatHaveCome) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a"), b = join(store, "b");
  std::mutex mutex;
  std::vector<std::weak_ptr<void>> sources;
  std::atomic<std::size_t> replied{0};
  b->serve("make", [&](const Request&, Reply reply) {
    Message message;
    message.buffers = {patterned(100'000)};
    {
      const std::lock_guard lock(mutex);
      sources.emplace_back(message.buffers[0].owner);
    }
    reply.send(std::move(message));
    ++replied;
  });
  const auto held = [&] {
    const std::lock_guard lock(mutex);
    return std::count_if(sources.begin(), sources.end(), [](const auto& each) { return !each.expired(); });
  };
  ASSERT_TRUE(call_sync(*a, "b", "make", {}).ok());
  for (std::size_t i = 1; i <= 200; ++i) {
    auto call = a->call("b", "make", {});
    // Without a waiting thread the reply stays in its slot until the caller's tick, which comes each 10 ms.
    while (replied <= i) std::this_thread::yield();
    call.cancel();
  }
  EXPECT_TRUE(eventually([&] { return held() == 0; })) << held() << " of 200 replies are held";
}

TEST(SlowReply, OfAnExpiredCallIsReadAndDropped) {
  const auto store = std::make_shared<MemoryStore>();
  const auto time = ManualClock::make();
  const auto a = join(store, "a", {}, [&](RawAgentOptions& options) { options.surroundings.clock = time->clock(); });
  RawPeer slow(store, "slow");
  const auto sent = patterned(100'000, 5);
  auto call = a->call("slow", "f", {}, within(seconds(1)));
  auto peer = slow.accept();
  const auto request = peer.connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok());
  time->advance(seconds(1));
  ASSERT_TRUE(call.wait());
  EXPECT_EQ(call.take().status().code(), Code::deadline_exceeded);
  EXPECT_EQ(peer.connection.read(wire::Kind::cancel)->header.call, request->header.call);
  const auto late = reply_frame(request->header.call, record_frame(sent.bytes, appended_ticket), 1, sent.bytes);
  ASSERT_TRUE(peer.connection.write(late).ok());
  ASSERT_TRUE(peer.connection.write(ByteView(sent.data, sent.bytes)).ok());
  auto next = a->call("slow", "g", {}, within(long_enough));
  const auto second = peer.connection.read(wire::Kind::request);
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second->header.call, request->header.call);
  ASSERT_TRUE(peer.connection.write(reply_frame(second->header.call, {}, 0, 0, "mine")).ok());
  ASSERT_TRUE(next.wait());
  EXPECT_EQ(text_of(next.take()->payload), "mine");
}

// ---- Threads that wait for one connection

TEST(Waiters, ThatLeaveWhenTheyAreCalledToReadHandOver) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {"unix", ""}), b = join(store, "b", {"unix", ""});
  b->serve("sleep", [](Request request, Reply reply) {
    std::this_thread::sleep_for(std::chrono::microseconds(std::stoi(std::string(text_of(request.arguments.payload)))));
    reply.send({});
  });
  const auto sleep = [&](int microseconds) {  // without a deadline, because a deadline keeps the tick running
    return a->call("b", "sleep", message_of(std::to_string(microseconds)), within({}));
  };
  ASSERT_TRUE(sleep(0).wait());
  std::this_thread::sleep_for(milliseconds(500));  // until the tick stops: it would mend a lost hand-over after 10 ms
  std::mt19937 random(1);
  auto usual = std::chrono::nanoseconds(milliseconds(1));  // from the start of a round to the first reply
  for (int round = rounds(50'000); round > 0 && !HasFailure(); --round) {
    const auto began = Clock().now();
    Clock::time_point answered;
    auto first = sleep(500), second = sleep(20'000);
    std::thread reads([&] {
      EXPECT_TRUE(first.wait());
      answered = Clock().now();
    });
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::thread leaves(
        [&] { (void)second.wait(began + usual + std::chrono::microseconds(static_cast<int>(random() % 200) - 150)); });
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    auto third = sleep(1000);
    EXPECT_TRUE(third.wait(Clock().now() + long_enough)) << "no thread reads";
    reads.join();
    leaves.join();
    usual += (answered - began - usual) / 4;
    second.cancel();
    EXPECT_TRUE(second.wait());
    EXPECT_TRUE(sleep(0).wait());  // no call is in flight afterwards, so the pool stops reading
  }
}

TEST(Links, ThatEndWhileTheirRingsAreMadeLeakNoMemory) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a");
  serve_echo(*a);
  const auto before = shared_mappings();
  std::mt19937 random(1);
  for (int round = rounds(20'000); round > 0; --round) {
    const auto b = join(store, "b");
    b->serve("hang", [](const Request&, Reply reply) {
      while (!reply.cancelled()) std::this_thread::sleep_for(milliseconds(1));
    });
    ASSERT_TRUE(call_sync(*b, "a", "echo", {}, within(long_enough)).ok());
    // This thread reads that the ring was accepted while the pool reads that b has left.
    auto hangs = a->call("b", "hang", {}, within(long_enough));
    std::thread leaves([&, after = std::chrono::microseconds(random() % 1500)] {
      std::this_thread::sleep_for(after);
      b->leave();
    });
    ASSERT_TRUE(hangs.wait());
    leaves.join();
  }
  EXPECT_TRUE(eventually([&] { return shared_mappings() == before; }))
      << shared_mappings() << ", before " << before << "; " << a->link_state("b");
}

// ---- Executors

/// An executor that takes long to enter, like a lock under which another thread computes.
class SlowExecutor final : public Executor {
 public:
  void* attach() override { return nullptr; }
  void enter(void*) override {
    ++entered;
    std::this_thread::sleep_for(milliseconds(2));
    lock_.lock();
  }
  void leave(void*) override { lock_.unlock(); }
  void detach(void*) override {}

  std::atomic<int> entered{0};

 private:
  std::mutex lock_;
};

TEST(SlowExecutors, AreKeptBetweenCloseRequests) {
  const auto store = std::make_shared<MemoryStore>();
  const auto executor = std::make_shared<SlowExecutor>();
  const auto a = join(store, "a");
  const auto b = join(store, "b", {}, [&](RawAgentOptions& options) { options.executor = executor; });
  b->serve("nothing", [](const Request&, Reply reply) { reply.send({}); }, {.executor = true});
  constexpr int calls = 50;
  EXPECT_TRUE(eventually([&] {  // repeated, because a busy machine may delay the caller's next call
    const int before = executor->entered;
    for (int i = 0; i < calls; ++i) EXPECT_TRUE(call_sync(*a, "b", "nothing", {}, within(long_enough)).ok());
    return executor->entered - before < calls / 2;
  }));
}

}  // namespace
}  // namespace tensorferry
