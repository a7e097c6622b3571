// The flight recorder, the histograms of latencies, and what RawAgent::metrics() counts.
#include "agent/observing/flight_recorder.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>

#include "agent/observing/agent_metrics.h"
#include "tests/agent/agents.h"

namespace tensorferry {

/// What GoogleTest prints of an event.
static void PrintTo(const FlightEvent& event, std::ostream* out) { *out << event.name << ": " << event.text; }

namespace {

using namespace tensorferry::testing;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::uint64_t count_of(const LatencyCounts& counts) {
  return std::accumulate(counts.counts.begin(), counts.counts.end(), std::uint64_t{0});
}

TEST(Latencies, FallIntoTheBucketThatTheirBoundEnds) {
  LatencyHistogram histogram;
  using namespace std::chrono_literals;
  histogram.add(-1ns);  // a clock that went back
  histogram.add(1us);
  histogram.add(1001ns);
  histogram.add(2us);
  histogram.add(2001ns);
  histogram.add(24h);
  const auto counts = histogram.counts();
  EXPECT_EQ(counts.counts[0], 2U);
  EXPECT_EQ(counts.counts[1], 2U);
  EXPECT_EQ(counts.counts[2], 1U);
  EXPECT_EQ(counts.counts.back(), 1U);
  EXPECT_EQ(count_of(counts), 6U);
}

TEST(Flight, KeepsTheLastEventsOfASubject) {
  FlightRecorder recorder;
  for (std::size_t i = 0; i < FlightRecorder::most_events + 5; ++i)
    recorder.note(FlightSubject::link, "peer", "event " + std::to_string(i));
  recorder.note(FlightSubject::group, "default", "formed");
  const auto events = recorder.events();
  ASSERT_THAT(events, SizeIs(FlightRecorder::most_events + 1));
  EXPECT_EQ(events.front().text, "event 5");
  EXPECT_EQ(events.back().text, "formed");
}

TEST(Flight, CountsAnEventThatRepeats) {
  FlightRecorder recorder;
  for (int i = 0; i < 3; ++i) recorder.note(FlightSubject::link, "peer", "not reached");
  ASSERT_THAT(recorder.events(), SizeIs(1));
  EXPECT_EQ(recorder.events().front().times, 3U);
  EXPECT_THAT(recorder.last(FlightSubject::link, "peer", 3), HasSubstr("(3 times)"));
  EXPECT_EQ(recorder.last(FlightSubject::link, "another", 3), "");
}

TEST(Flight, IsBoundedInSubjectsAndInTheLengthOfTexts) {
  FlightRecorder recorder;
  for (std::size_t i = 0; i < FlightRecorder::most_subjects + 3; ++i)
    recorder.note(FlightSubject::calls, "peer" + std::to_string(i), std::string(10000, 'x'));
  const auto events = recorder.events();
  ASSERT_THAT(events, SizeIs(FlightRecorder::most_subjects));
  EXPECT_EQ(events.front().name, "peer3");
  EXPECT_THAT(events.front().text, SizeIs(FlightRecorder::longest_text));
}

class Observed : public ::testing::Test {
 protected:
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a");
  std::shared_ptr<RawAgent> b = join(store, "b");
  void SetUp() override {
    serve_echo(*b);
    ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  }
};

TEST_F(Observed, AgentsCountCallsTimesAndErrorsByKind) {
  ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("hello")).ok());
  EXPECT_EQ(call_sync(*a, "b", "missing", {}).status().code(), Code::not_found);
  const auto made = a->metrics();
  EXPECT_EQ(made.failed, (std::map<std::string, std::uint64_t>{{"NotFound", 1}}));
  EXPECT_EQ(count_of(made.call_time), 3U);
  EXPECT_EQ(made.pending, 0U);
  ASSERT_THAT(made.links, SizeIs(1));
  EXPECT_EQ(made.links.front().peer.name, "b");
  EXPECT_EQ(made.links.front().state, "up");
  EXPECT_EQ(made.links.front().calls_made, 3U);
  b->leave();  // the callee counts a call after it has answered it
  const auto served = b->metrics();
  EXPECT_EQ(count_of(served.serve_time), 3U);
  EXPECT_LE(count_of(served.queue_time), 3U);
}

TEST_F(Observed, AnAgentThatCountsNoTimesCountsCallsAllTheSame) {
  a->time_calls(false);
  ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  EXPECT_EQ(count_of(a->metrics().call_time), 1U);
  EXPECT_EQ(a->metrics().counters.calls_sent, 2U);
}

TEST_F(Observed, TheOldestCallsInFlightComeFirst) {
  std::vector<Reply> held;
  std::mutex mutex;
  b->serve("hold", [&](Request, Reply reply) {
    const std::lock_guard lock(mutex);
    held.push_back(std::move(reply));
  });
  std::vector<Call> calls;
  for (std::size_t i = 0; i < AgentMetrics::most_oldest_calls + 2; ++i) calls.push_back(a->call("b", "hold", {}));
  const auto now = a->metrics();
  ASSERT_THAT(now.oldest_calls, SizeIs(AgentMetrics::most_oldest_calls));
  EXPECT_EQ(now.oldest_calls.front().function, "hold");
  EXPECT_GE(now.oldest_calls.front().age, now.oldest_calls.back().age);
  b->leave();
}

TEST_F(Observed, TheRecorderTellsHowALinkBeganAndEnded) {
  const auto recorded = [&](FlightSubject subject, const std::string& text) {
    const auto events = a->flight_events();
    return std::any_of(events.begin(), events.end(), [&](const FlightEvent& each) {
      return each.subject == subject && each.name == "b" && each.text.find(text) != std::string::npos;
    });
  };
  EXPECT_TRUE(recorded(FlightSubject::link, "connection for calls dialled (unix socket)"))
      << ::testing::PrintToString(a->flight_events());
  b->leave();
  while (call_sync(*a, "b", "echo", {}).ok()) std::this_thread::yield();
  // The end is noted after the calls have failed.
  EXPECT_TRUE(eventually([&] { return recorded(FlightSubject::link, "ended: it left the job"); }))
      << ::testing::PrintToString(a->flight_events());
  EXPECT_TRUE(recorded(FlightSubject::calls, "echo"));
}

}  // namespace
}  // namespace tensorferry
