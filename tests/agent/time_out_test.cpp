// What the error of a timed-out call tells: how far the call came, how long that took, and how busy the peer was.
#include <gmock/gmock.h>

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "agent/calls/time_out_text.h"
#include "agent/observing/late_answers.h"
#include "tests/agent/peers.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Stage = wire::CallStatus::Stage;

// ---- The text alone

class TimeOutText : public ::testing::Test {
 protected:
  std::string text() const { return time_out_text(*call, view, call->made + seconds(60)); }
  /// The callee's report came 59.5 s after the call was made.
  void report(wire::CallStatus status) { call->set_report({status, call->made + milliseconds(59500)}); }
  std::uint64_t after(milliseconds passed) const {
    return static_cast<std::uint64_t>(microseconds(milliseconds(59500) - passed).count());
  }

  std::shared_ptr<Call::State> call = std::make_shared<Call::State>("py:model:train_step", RawCallOptions{});
  TimeOutContext view{"trainer3", true, "", "tcp", milliseconds(1500)};
  void SetUp() override { call->progress.sent_at = (call->made + milliseconds(1)).time_since_epoch().count(); }
};

TEST_F(TimeOutText, TellsThatNoConnectionCouldBeOpened) {
  call->progress.sent_at = 0;
  call->progress.hold = SendHold::connection;
  view.connected = false;
  view.silence = std::nullopt;
  EXPECT_EQ(text(),
            "\"train_step\" on \"trainer3\": no answer in 60.0 s; not sent, because no connection to it could be "
            "opened yet. Raise timeout= or the deadline around the call");
  view.dialling = ": connecting to 10.0.0.3:7000";
  view.silence = seconds(20);
  EXPECT_THAT(text(),
              HasSubstr("could be opened yet: connecting to 10.0.0.3:7000; last heard of the peer 20.0 s ago. Raise"));
}

TEST_F(TimeOutText, TellsWhatARequestWaitedForBeforeItWasSent) {
  call->progress.sent_at = 0;
  call->progress.hold = SendHold::probe;
  EXPECT_THAT(text(), HasSubstr("not sent, because the channel that it needs is still being tested"));
  call->progress.hold = SendHold::order;
  EXPECT_THAT(text(), HasSubstr("not sent, because an earlier call of its order key waits"));
}

TEST_F(TimeOutText, TellsThatNothingIsKnownOfASentCall) {
  EXPECT_THAT(text(), HasSubstr("no answer in 60.0 s; sent 59.9 s ago by tcp, not known to have been received; last "
                                "heard of the peer 1.5 s ago. Raise timeout="));
  view.connected = false;
  EXPECT_THAT(text(), HasSubstr("not known to have been received; the connection is lost; last heard"));
}

TEST_F(TimeOutText, TellsOfARunningCallThatHadToWaitForAHandler) {
  wire::CallStatus status;
  status.stage = Stage::running;
  status.received_us = after(milliseconds(2));
  status.started_us = after(milliseconds(3100));
  status.busy_at_arrival = status.handlers = 64;
  report(status);
  EXPECT_EQ(
      text(),
      "\"train_step\" on \"trainer3\": no answer in 60.0 s; received there after 2 ms, started after 3.1 s (64 of "
      "64 handlers were busy), still running. Raise timeout= or the deadline around the call, or max_threads on "
      "\"trainer3\"");
}

TEST_F(TimeOutText, TellsOfARunningCallThatBeganAtOnce) {
  wire::CallStatus status;
  status.stage = Stage::running;
  status.received_us = after(milliseconds(2));
  status.started_us = after(milliseconds(3));
  status.handlers = 64;
  status.busy = 64;
  report(status);
  EXPECT_THAT(text(), HasSubstr("received there after 2 ms, started after 3 ms, still running. Raise timeout= or the "
                                "deadline around the call"));
  EXPECT_THAT(text(), Not(HasSubstr("max_threads")));
}

TEST_F(TimeOutText, TellsOfACallInTheQueueOfHandlers) {
  wire::CallStatus status;
  status.stage = Stage::queued;
  status.received_us = after(milliseconds(2));
  status.handlers = status.busy = 16;
  status.waiting = 30;
  report(status);
  EXPECT_THAT(text(),
              HasSubstr("received there after 2 ms, waiting there for a handler (16 of 16 handlers are busy, 30 "
                        "calls wait). Raise"));
  EXPECT_THAT(text(), HasSubstr("max_threads on \"trainer3\""));
}

TEST_F(TimeOutText, TakesTimesBeforeTheCallForItsBegin) {
  wire::CallStatus status;
  status.stage = Stage::running;
  for (const std::uint64_t wild :
       {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 62, after(milliseconds(-9))}) {
    status.received_us = status.started_us = wild;
    report(status);
    EXPECT_THAT(text(), HasSubstr("received there after 0 ms, started after 0 ms")) << wild;
  }
}

TEST_F(TimeOutText, TellsOfArgumentsThatHadNotArrived) {
  wire::CallStatus status;
  status.stage = Stage::arriving;
  status.received_us = after(milliseconds(2));
  report(status);
  EXPECT_THAT(text(), HasSubstr("received there after 2 ms, but its arguments had not all arrived."));
}

TEST_F(TimeOutText, TellsWhereARequestOrAnAnswerIsThatTheCalleeDoesNotHave) {
  report({});
  EXPECT_THAT(text(), HasSubstr("answered there, but the answer has not arrived."));
  call->place.in_ring = true;
  EXPECT_THAT(text(), HasSubstr("put into shared memory, from which the peer has not taken it yet."));
  call->progress.landing = true;
  view.awaited = ": 2 of this link wait for control message 3 of the peer, of which 2 have come";
  EXPECT_THAT(text(), HasSubstr("the answer has come, but its tensors had not all arrived: 2 of this link wait for"));
}

// ---- Calls

class TimedOut : public ::testing::TestWithParam<Ways> {
 protected:
  void serve_blocked() {
    b->serve("blocked", [this](const Request&, Reply reply) {
      ++inside;
      while (!open && !reply.cancelled()) std::this_thread::sleep_for(milliseconds(1));
      reply.send({});
    });
  }
  /// How often a test makes a call that shall time out in a given state. One of the two may get no core in time to send
  /// the call, to begin it, or to say how far it has come.
  static constexpr int attempts = 20;
  /// Returns the error of a call that times out and tells `wanted`, a regular expression, or of the last attempt.
  std::string text_of(std::string_view function, const RawCallOptions& options, const std::string& wanted) {
    std::string text;
    for (int i = 0; i < attempts && !::testing::Matches(ContainsRegex(wanted))(text); ++i) {
      const Since since;
      const auto reply = call_sync(*a, "b", function, {}, options);
      took = since.passed();
      EXPECT_EQ(reply.status().code(), Code::deadline_exceeded);
      text = std::string(reply.status().what());
    }
    return text;
  }
  milliseconds took{0};  // the last call of text_of()
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam());
  std::shared_ptr<RawAgent> b = join(store, "b", GetParam(), [](auto& options) { options.max_threads = 3; });
  void TearDown() override {
    open = true;
    // The handlers read `open`, and leave() waits for them for a second only.
    EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0; }));
  }
};

INSTANTIATE_TEST_SUITE_P(Over, TimedOut,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(TimedOut, CallsTellThatTheyRun) {
  serve_blocked();
  const std::string wanted =
      "^\"blocked\" on \"b\": no answer in 0.9 s; received there after [0-9.]+ m?s, started after [0-9.]+ m?s, still "
      "running. Raise timeout= or the deadline around the call$";
  EXPECT_THAT(text_of("blocked", within(milliseconds(900)), wanted), ContainsRegex(wanted));
  EXPECT_GE(took, milliseconds(900));
  EXPECT_LT(took, long_enough) << "the question how far the call has come must not delay its end";
}

TEST_P(TimedOut, CallsWithoutAWaiterTellThatTheyRun) {
  serve_blocked();
  std::string text;
  const auto tell = [&] {
    const auto told = std::make_shared<std::promise<std::string>>();
    a->call("b", "blocked", {}, within(milliseconds(900))).on_done([told](const Result<Received>& reply) {
      told->set_value(std::string(reply.status().what()));
    });
    return told->get_future().get();
  };
  for (int i = 0; i < attempts && text.find("still running") == std::string::npos; ++i) text = tell();
  EXPECT_THAT(text, HasSubstr("still running"));
}

TEST_P(TimedOut, CallsWhoseDeadlineWasFarEndAtIt) {
  serve_blocked();
  const Since since;
  const auto reply = call_sync(*a, "b", "blocked", {}, within(milliseconds(2500)));  // the ticks slow down meanwhile
  EXPECT_EQ(reply.status().code(), Code::deadline_exceeded);
  EXPECT_GE(since.passed(), milliseconds(2500));
  EXPECT_LT(since.passed(), long_enough);
}

TEST_P(TimedOut, CallsTellThatAllHandlersWereBusy) {
  serve_blocked();
  std::vector<Call> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(a->call("b", "blocked", {}));
  ASSERT_TRUE(eventually([&] { return inside == 3; }));
  const std::string wanted =
      "received there after [0-9.]+ m?s, waiting there for a handler \\(3 of 3 handlers are busy\\). Raise timeout= or "
      "the deadline around the call, or max_threads on \"b\"$";
  EXPECT_THAT(text_of("blocked", within(milliseconds(900)), wanted), ContainsRegex(wanted));
  EXPECT_EQ(inside, 3);
}

TEST_P(TimedOut, CallsTellThatTheyBeganLate) {
  b->serve("wait", [&](const Request&, Reply reply) {
    ++inside;
    while (!reply.cancelled() && !open) std::this_thread::sleep_for(milliseconds(1));
    reply.send({});
  });
  std::string text;
  for (int i = 0; i < attempts && text.find("started after") == std::string::npos; ++i) {
    std::vector<Call> ahead;
    for (int each = 0; each < 3; ++each) ahead.push_back(a->call("b", "wait", {}));
    ASSERT_TRUE(eventually([&] { return inside == 3; }));
    auto late = a->call("b", "wait", {}, within(milliseconds(1500)));
    ASSERT_TRUE(eventually([&] { return b->in_flight().second == 4 || late.done(); }));
    std::this_thread::sleep_for(milliseconds(300));
    for (auto& call : ahead) call.cancel();
    ASSERT_TRUE(late.wait(Clock().now() + long_enough));
    text = std::string(late.take().status().what());
    ASSERT_TRUE(eventually([&] { return b->in_flight().second == 0; }));
    inside = 0;
  }
  EXPECT_THAT(text, ContainsRegex("started after [0-9]+.[0-9]+ s \\(3 of 3 handlers were busy\\), still running"));
}

TEST_P(TimedOut, CallsTellThatTheyWaitForAnEarlierOneOfTheirOrder) {
  serve_blocked();
  RawCallOptions first, second = within(milliseconds(900));
  first.order = second.order = 7;
  auto ahead = a->call("b", "blocked", {}, first);
  const std::string wanted = "received there after [0-9.]+ m?s, waiting there for an earlier call of its order key\\.";
  EXPECT_THAT(text_of("blocked", second, wanted), ContainsRegex(wanted));
}

TEST_P(TimedOut, CallsToAnAbsentPeerTellThatTheyWereNotSent) {
  auto options = within(milliseconds(200));
  options.wait_for_ready = true;
  const auto reply = call_sync(*a, "nobody", "f", {}, options);
  EXPECT_EQ(reply.status().code(), Code::deadline_exceeded);
  EXPECT_THAT(
      std::string(reply.status().what()),
      HasSubstr("\"f\" on \"nobody\": no answer in 0.2 s; not sent, because no connection to it could be opened "
                "yet"));
}

TEST_P(TimedOut, CallsThatAreAnsweredLateAreCountedAtBothEnds) {
  b->serve("blocked", [this](const Request&, Reply reply) {
    ++inside;
    // The callee may learn a moment after the caller that the time is over.
    while (!open || !reply.cancelled()) std::this_thread::sleep_for(milliseconds(1));
    reply.send({});
  });
  const std::string wanted = "no answer in 0.5 s; received there";
  EXPECT_THAT(text_of("blocked", within(milliseconds(500)), wanted), HasSubstr(wanted));
  ASSERT_GE(inside, 1);
  EXPECT_EQ(b->counters().late_answers, 0U);
  const auto late = static_cast<std::uint64_t>(inside);
  open = true;
  EXPECT_TRUE(eventually([&] { return b->counters().late_answers == late; }));
  b->serve("nap", [](const Request&, Reply reply) {  // meanwhile the caller reads the late reply
    std::this_thread::sleep_for(milliseconds(100));
    reply.send({});
  });
  ASSERT_TRUE(call_sync(*a, "b", "nap", {}).ok());
  // An attempt that waited for a handler was answered late too, without running.
  EXPECT_TRUE(eventually([&] { return a->counters().late_replies >= late; })) << a->counters().late_replies;
  EXPECT_EQ(b->counters().late_answers, late);
}

TEST(LateAnswers, AreLoggedAtMostOnceAMinute) {
  LateAnswers late;
  const auto logged_at = [&](Clock::time_point now) {
    ::testing::internal::CaptureStderr();
    late.log_if_due(now);
    return ::testing::internal::GetCapturedStderr();
  };
  const auto now = Clock().now();
  EXPECT_EQ(logged_at(now), "");
  late.add("a", "step");
  EXPECT_THAT(logged_at(now), HasSubstr("peer=a call=step answered 1 calls after their callers had given up"));
  late.add("a", "step");
  late.add("c", "other");
  EXPECT_EQ(logged_at(now + seconds(59)), "");
  EXPECT_THAT(logged_at(now + seconds(61)), HasSubstr("peer=c call=other answered 2 calls"));
  EXPECT_EQ(logged_at(now + seconds(200)), "") << "there are none since then";
}

class TimedOutAtAProcess : public PeerTest {};

INSTANTIATE_TEST_SUITE_P(Over, TimedOutAtAProcess,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(TimedOutAtAProcess, CallsToAStoppedPeerTellWhenItWasLastHeardOf) {
  const auto b = start("b");
  ASSERT_TRUE(eventually([&] { return me->explain("b").ok(); }));  // waits until the peer has mapped the ring
  ASSERT_TRUE(call_sync(*me, "b", "echo", {}).ok());
  b->signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(300));
  std::string text;
  // A tick of a stalled machine may notice the last reply late.
  for (int i = 0; i < 3 && (text.empty() || text.find(" ms ago") != std::string::npos); ++i) {
    const Since since;
    const auto reply = call_sync(*me, "b", "echo", {}, within(milliseconds(400)));
    EXPECT_LT(since.passed(), seconds(20));
    EXPECT_EQ(reply.status().code(), Code::deadline_exceeded);
    text = std::string(reply.status().what());
  }
  b->signal(SIGCONT);
  const auto by = GetParam().transport == "ring"   ? "shared memory"
                  : GetParam().transport == "unix" ? "unix socket"
                                                   : "tcp";
  EXPECT_THAT(text,
              ContainsRegex("\"echo\" on \"b\": no answer in 0.4 s; sent [0-9].[0-9] s ago by " + std::string(by) +
                            ", not known to have been received; last heard of the peer [0-9]\\.[0-9] s ago. Raise"));
}

}  // namespace
}  // namespace tensorferry
