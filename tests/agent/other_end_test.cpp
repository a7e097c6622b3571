// Who is at the other end of a link, and what waits for a connection to it.
#include "agent/connections/other_end.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "agent/connections/unsent_messages.h"

namespace tensorferry {
namespace {

wire::Hello hello(std::uint64_t incarnation) {
  wire::Hello hello;
  hello.name = "peer";
  hello.rank = 1;
  hello.incarnation = incarnation;
  return hello;
}

OtherEnd unknown() { return {{"peer", -1, 0}, nullptr}; }

TEST(OtherEnd, IsTheIncarnationThatSaysHelloFirst) {
  auto other = unknown();
  const auto session = std::make_shared<Session>(PeerInfo{"peer", 1, 7});
  EXPECT_EQ(other.incarnation(), 0U);
  EXPECT_TRUE(other.is_of(hello(7), {}));
  EXPECT_EQ(other.meet(hello(7), session, {}), nullptr);
  EXPECT_EQ(other.incarnation(), 7U);
  EXPECT_EQ(other.peer().rank, 1);
  EXPECT_EQ(other.peer().incarnation, 7U);
  EXPECT_EQ(other.session(), session);
  EXPECT_TRUE(other.is_of(hello(7), {}));
  EXPECT_FALSE(other.is_of(hello(8), {}));
  EXPECT_EQ(other.meet(hello(7), nullptr, {}), session) << "the caller drops it";
}

// Whoever has the key can state the name and the incarnation of another agent.
TEST(OtherEnd, TakesConnectionsOfOneUserAlone) {
  auto other = unknown();
  EXPECT_TRUE(other.is_of(hello(7), 1000));
  (void)other.meet(hello(7), nullptr, 1000);
  EXPECT_EQ(other.user(), 1000U);
  EXPECT_TRUE(other.is_of(hello(7), 1000));
  EXPECT_FALSE(other.is_of(hello(7), 1001));
  EXPECT_FALSE(other.is_of(hello(7), std::nullopt)) << "the kernel does not say whose it is";
  auto remote = unknown();
  (void)remote.meet(hello(7), nullptr, std::nullopt);
  EXPECT_TRUE(remote.is_of(hello(7), std::nullopt));
  EXPECT_FALSE(remote.is_of(hello(7), 1000));
}

TEST(OtherEnd, PartsWithADeadSessionAlone) {
  const auto dead = std::make_shared<Session>(PeerInfo{"peer", 1, 7});
  const auto other_one = std::make_shared<Session>(PeerInfo{"peer", 1, 8});
  OtherEnd other({"peer", -1, 0}, dead);
  EXPECT_EQ(other.part_with(*other_one), nullptr);
  EXPECT_EQ(other.session(), dead);
  EXPECT_EQ(other.part_with(*dead), dead);
  EXPECT_EQ(other.session(), nullptr);
}

UnsentCall call(std::string name, RawCallOptions options = {}) {
  return {std::make_shared<Call::State>(std::move(name), std::move(options)), {}};
}

TEST(UnsentMessages, GiveCallsAndKeepTheOrderOfTheOthers) {
  UnsentMessages unsent;
  for (const auto* name : {"a", "b", "c", "d"}) unsent.calls.push_back(call(name));
  const auto taken =
      unsent.take_calls_if([](const Call::State& one) { return one.function == "a" || one.function == "c"; });
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_EQ(taken.front().call->function, "a");
  EXPECT_EQ(taken.back().call->function, "c");
  ASSERT_EQ(unsent.calls.size(), 2U);
  EXPECT_EQ(unsent.calls.front().call->function, "b");
  EXPECT_EQ(unsent.calls.back().call->function, "d");
}

TEST(UnsentMessages, HaveThePatienceOfTheMostPatientCall) {
  UnsentMessages unsent;
  RawCallOptions options;
  options.timeout = Milliseconds(60000);
  unsent.calls.push_back(call("impatient", options));
  EXPECT_EQ(unsent.patience(Clock().now()).count(), 0);
  options.wait_for_ready = true;
  options.timeout = Milliseconds(5000);
  unsent.calls.push_back(call("patient", options));
  const auto made = unsent.calls.back().call->made;
  options.timeout = Milliseconds(1000);
  unsent.calls.push_back(call("less patient", options));
  EXPECT_EQ(unsent.patience(made), Milliseconds(5000));
  options.timeout = Milliseconds(0);  // no deadline
  unsent.calls.push_back(call("for ever", options));
  EXPECT_GE(unsent.patience(made), std::chrono::hours(1));
}

}  // namespace
}  // namespace tensorferry
