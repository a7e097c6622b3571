/// Agents on hosts that an imperfect network connects: delays, losses, slow paths, resets, and the end of a peer.
#include <gmock/gmock.h>

#include <cstdio>
#include <thread>

#include "tests/network/hosts.h"

namespace tensorferry::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t megabyte = 1 << 20;

TEST_F(NetworkTest, CallsAndALargeTensorPassALongPath) {
  open({"a", "b"});
  set_paths({.delay = 50ms});
  const auto b = start("b");
  const auto a = join("a");
  for (int i = 0; i < 10; ++i) EXPECT_EQ(a->call<int>("b", "record", i).get(), i);
  EXPECT_TRUE(is_patterned(a->call<Tensor>("b", "echo", patterned_tensor(megabyte)).get()));
  EXPECT_EQ(a->call<std::int64_t>("b", "count bytes", std::vector{patterned_tensor(64 * megabyte)}).get(),
            64 * megabyte);
}

TEST_F(NetworkTest, CallsAndALargeTensorPassAPathThatLosesOnePercent) {
  open({"a", "b"});
  set_paths({.delay = 500us, .loss = 0.01});
  const auto b = start("b");
  const auto a = join("a");
  for (int i = 0; i < 500; ++i) EXPECT_EQ(a->call<int>("b", "record", i).get(), i);
  EXPECT_EQ(a->call<std::int64_t>("b", "count bytes", std::vector{patterned_tensor(64 * megabyte)}).get(),
            64 * megabyte);
  EXPECT_GT(network->traffic("a", "b").lost, 100U);
}

TEST_F(NetworkTest, CallsPassALongPathThatLosesOnePercent) {
  open({"a", "b"});
  set_paths({.delay = 50ms, .loss = 0.01});
  const auto b = start("b");
  const auto a = join("a");
  std::vector<Future<int>> calls;
  for (int i = 0; i < 500; ++i) calls.push_back(a->call<int>("b", "record", i));
  for (int i = 0; i < 500; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i);
  EXPECT_TRUE(is_patterned(a->call<Tensor>("b", "echo", patterned_tensor(megabyte)).get()));
}

TEST_F(NetworkTest, ATensorTakesTheTimeThatTheRateGives) {
  open({"a", "b"});
  const auto b = start("b");
  const auto a = join("a");
  a->call<int>("b", "record", 0).get();
  set_paths({.bits_per_second = 100e6, .delay = 2ms});
  const Since since;
  a->call<std::int64_t>("b", "count bytes", std::vector{patterned_tensor(16 * megabyte)}).get();
  EXPECT_GT(since.passed(), 1340ms);
  EXPECT_LT(since.passed(), 3s);
}

TEST_F(NetworkTest, SmallCallsPassBesideALargeTensorOnASlowPath) {
  open({"a", "b"});
  const auto b = start("b");
  const auto a = join("a");
  a->call<int>("b", "record", 0).get();
  set_paths({.bits_per_second = 50e6, .delay = 10ms});
  auto tensor = a->call<std::int64_t>("b", "count bytes", std::vector{patterned_tensor(16 * megabyte)});
  int calls = 0;
  auto slowest = 0ms;
  for (; !tensor.done(); ++calls) {
    const Since since;
    a->call<int>("b", "record", calls).get();
    slowest = std::max(slowest, since.passed());
  }
  EXPECT_EQ(tensor.get(), 16 * megabyte);
  EXPECT_GT(calls, 10);
  EXPECT_LT(slowest, 1s);
}

TEST_F(NetworkTest, AfterAResetTheNextCallWorks) {
  open({"a", "b"});
  set_paths({.delay = 1ms});
  const auto b = start("b");
  const auto a = join("a", 5s, [](Agent& agent) { agent.serve("echo", [](Tensor tensor) { return tensor; }); });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(a->call<int>("b", "record", i).get(), i);
    EXPECT_EQ(a->call<std::int64_t>("b", "ask", "a", std::int64_t{100}).get(), 100);
    auto under_way = a->call("b", "sleep", 20'000);
    EXPECT_GE(network->reset_connections(store->port()), 1U);
    EXPECT_THROW(under_way.get(), ConnectionLost);
  }
  EXPECT_EQ(a->call<std::int64_t>("b", "ask", "a", std::int64_t{megabyte}).get(), megabyte);
}

TEST_F(NetworkTest, TheDeathOfAPeerEndsTheCallsToIt) {
  open({"a", "b"});
  set_paths({.delay = 20ms});
  const auto b = start("b");
  const auto a = join("a");
  a->call<int>("b", "record", 0).get();
  auto small = a->call("b", "sleep", 20'000);
  set_paths({.bits_per_second = 10e6, .delay = 20ms});
  auto large = a->call<Tensor>("b", "echo", patterned_tensor(16 * megabyte));
  std::this_thread::sleep_for(100ms);
  b->kill();
  const Since since;
  EXPECT_THROW(small.get(), ConnectionLost);
  EXPECT_THROW(large.get(), ConnectionLost);
  EXPECT_LT(since.passed(), 2s);
  const auto again = start("b");
  EXPECT_EQ(a->call<int>("b", "record", 1).get(), 1);
}

TEST_F(NetworkTest, APeerThatVanishesIsLostAfterThreeHeartbeats) {
  open({"a", "b"});
  const auto b = start("b", 200ms);
  const auto a = join("a", 200ms);
  a->call<int>("b", "record", 0).get();
  auto call = a->call("b", "sleep", 20'000);
  network->cut_between("a", "b");
  b->kill();
  const Since since;
  EXPECT_THROW(call.get(), ConnectionLost);
  EXPECT_GT(since.passed(), 300ms);
  EXPECT_LT(since.passed(), 3s);
}

TEST_F(NetworkTest, AStoppedPeerThatGoesOnWithinThreeHeartbeatsKeepsItsCalls) {
  open({"a", "b"});
  const auto b = start("b", 1s);
  const auto a = join("a", 1s);
  a->call<int>("b", "record", 0).get();
  auto call = a->call("b", "sleep", 100);
  b->signal(SIGSTOP);
  std::this_thread::sleep_for(1500ms);
  b->signal(SIGCONT);
  call.get();
}

TEST_F(NetworkTest, LargeTensorsFillAGigabitWithTenMillisecondsEachWay) {
  open({"a", "b"});
  set_paths({.bits_per_second = 1e9, .delay = 10ms});
  const auto b = start("b");
  const auto a = join("a");
  const std::vector tensors{patterned_tensor(64 * megabyte)};
  a->call<std::int64_t>("b", "count bytes", tensors).get();  // lets the connection grow its window
  const Since since;
  for (int i = 0; i < 3; ++i) a->call<std::int64_t>("b", "count bytes", tensors).get();
  const auto rate = 3.0 * 64 * megabyte * 8 / static_cast<double>(since.passed().count()) / 1e6;
  std::printf("%.2f Gbit/s\n", rate);
  EXPECT_GT(rate, 0.3) << "0.8 and more on a machine that is not busy";
}

}  // namespace
}  // namespace tensorferry::testing
