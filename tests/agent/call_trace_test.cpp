// Traces of calls: what an agent records, and that both ends of a call have the same number.
#include "agent/observing/call_trace.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>

#include "tests/agent/agents.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns the text behind each match of `pattern`'s first group.
std::multiset<std::string> all_of(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  std::multiset<std::string> found;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), expression); it != std::sregex_iterator(); ++it)
    found.insert((*it)[1]);
  return found;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

class Traces : public ::testing::TestWithParam<Ways> {
 protected:
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam());
  std::shared_ptr<RawAgent> b = join(store, "b", GetParam());
  void SetUp() override {
    serve_echo(*b);
    ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
    ASSERT_TRUE(a->explain("b").ok());  // waits until the peer has mapped the ring
  }
};

INSTANTIATE_TEST_SUITE_P(Over, Traces,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(Traces, HaveEachCallAtBothEndsWithOneNumber) {
  const auto at_a = a->start_trace(), at_b = b->start_trace();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(call_sync(*a, "b", "echo", message_of("hello")).ok());
  const auto made = a->stop_trace(at_a), served = b->stop_trace(at_b);
  EXPECT_EQ(count(made, "\"name\":\"echo\""), 10U);
  EXPECT_EQ(count(served, "\"name\":\"echo\""), 10U);
  EXPECT_THAT(made, HasSubstr("\"callee\":\"b\",\"bytes\":5,\"transport\":\"" + GetParam().transport + "\""));
  EXPECT_THAT(made, HasSubstr("\"status\":\"ok\""));
  EXPECT_THAT(served, HasSubstr("\"caller\":\"a\",\"bytes\":5,\"transport\":\"" + GetParam().transport + "\""));
  const std::string begins = R"x("ph":"s"[^}]*"id":"(0x[0-9a-f]+)")x", ends = R"x("ph":"f"[^}]*"id":"(0x[0-9a-f]+)")x";
  EXPECT_EQ(all_of(made, begins).size(), 10U);
  EXPECT_EQ(all_of(made, begins), all_of(served, ends)) << "the arrows of the requests";
  EXPECT_EQ(all_of(served, begins), all_of(made, ends)) << "the arrows of the replies";
}

TEST_P(Traces, NameTheChannelOfTheFirstBuffer) {
  const auto at_a = a->start_trace();
  Message message;
  message.buffers = {patterned(1 << 20)};
  ASSERT_TRUE(call_sync(*a, "b", "echo", std::move(message)).ok());
  const auto made = a->stop_trace(at_a);
  EXPECT_THAT(made, HasSubstr("\"bytes\":1048576"));
  EXPECT_THAT(made, HasSubstr("\"channel\":\"basic\""));
}

TEST_P(Traces, SayWhichCallsFailed) {
  const auto at_a = a->start_trace();
  ASSERT_FALSE(call_sync(*a, "b", "nothing of that name", {}).ok());
  EXPECT_THAT(a->stop_trace(at_a), HasSubstr("\"status\":\"failed\""));
}

TEST_P(Traces, HaveOnlyTheCallsOfTheirRecording) {
  const auto first = a->start_trace();
  ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  const auto second = a->start_trace();
  ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  EXPECT_EQ(count(a->stop_trace(second), "\"name\":\"echo\""), 1U);
  EXPECT_EQ(count(a->stop_trace(first), "\"name\":\"echo\""), 2U);
  ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  EXPECT_EQ(count(a->stop_trace(a->start_trace()), "\"name\":\"echo\""), 0U);
}

TEST(Trace, CountsTheCallsBeyondItsBound) {
  CallTrace trace;
  const auto recording = trace.start();
  const auto record = std::make_shared<CallRecord>();
  for (std::size_t i = 0; i < CallTrace::most_records + 7; ++i) trace.add(record);
  EXPECT_THAT(trace.stop(recording, {"a", -1, 1}, "boot"), HasSubstr("\"dropped_calls\":7"));
  EXPECT_FALSE(trace.on());
}

TEST(Trace, ShowsACallThatEndedEarlyUpToItsLastStage) {
  CallTrace trace;
  const auto recording = trace.start();
  const auto record = std::make_shared<CallRecord>();
  record->function = "odd \"name\"\n";
  record->peer = "b";
  record->stages[CallRecord::made] = 1'000'000;
  record->stages[CallRecord::landed] = 3'000'500;
  trace.add(record);
  const auto text = trace.stop(recording, {"a", -1, 1}, "boot");
  EXPECT_THAT(
      text, HasSubstr("\"name\":\"odd \\\"name\\\"\\u000a\",\"cat\":\"tensorferry\",\"ts\":1000.000,\"dur\":2000.500"));
  EXPECT_THAT(text, HasSubstr("\"name\":\"send\",\"cat\":\"tensorferry\",\"ts\":1000.000,\"dur\":2000.500"));
  EXPECT_THAT(text, Not(HasSubstr("\"name\":\"wait\"")));
  EXPECT_THAT(text, Not(HasSubstr("\"ph\":\"s\""))) << "it was not sent";
}

TEST(Trace, PutsNameAndProcessBeforeTheExtension) {
  const auto own = ".a_b." + std::to_string(::getpid());
  EXPECT_EQ(trace_path("/tmp/out.json", "a/b"), "/tmp/out" + own + ".json");
  EXPECT_EQ(trace_path("/tmp.d/out", "a/b"), "/tmp.d/out" + own);
  EXPECT_EQ(trace_path(".hidden", "a/b"), ".hidden" + own);
}

TEST(Trace, IsWrittenWhenAnAgentLeavesIfTheOptionNamesAFile) {
  const auto folder = std::filesystem::temp_directory_path() / ("tf-trace-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const auto path = (folder / "job.json").string();
  const std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  {
    const auto traced = [&](RawAgentOptions& options) { options.trace = path; };
    const auto a = join(store, "a", {}, traced), b = join(store, "b", {}, traced);
    serve_echo(*b);
    ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  }
  for (const std::string name : {"a", "b"}) {
    std::ifstream file(trace_path(path, name));
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(count(text, "\"name\":\"echo\""), 1U) << name;
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tensorferry
