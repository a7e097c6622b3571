#include "tests/conformance/channel_suite.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <future>
#include <thread>

namespace tensorferry::conformance {

void ChannelSuite::make_drivers() {
  drivers_ = GetParam().drivers();
  memory_a_ = GetParam().memory(GetParam().devices.local);
  memory_b_ = GetParam().memory(GetParam().devices.remote);
}

void ChannelSuite::connect() {
  disconnect();
  pair_ = std::make_unique<WirePair>(driver_a(), driver_b(), GetParam().devices, memory_a(), memory_b());
  a_ = pair_->a.get();
  b_ = pair_->b.get();
  for (auto* end : {a_, b_}) {
    const auto probed = end->wait_ready();
    ASSERT_TRUE(probed.has_value()) << "the probe did not end";
    ASSERT_TRUE(probed->ok()) << probed->text();
  }
}

void ChannelSuite::SetUp() {
  if (!traits().missing.empty()) GTEST_SKIP() << traits().missing;
  make_drivers();
  connect();
}

void ChannelSuite::TearDown() { disconnect(); }

void ChannelProcessSuite::SetUp() {
  if (!traits().missing.empty()) GTEST_SKIP() << traits().missing;
  if (traits().same_process) GTEST_SKIP() << "both ends are in one process";
}

void ChannelSuite::expect_arrives(WireEnd& to, std::size_t bytes, std::uint32_t seed) {
  const auto arrivals = to.receive();
  ASSERT_EQ(arrivals.size(), 1u) << "the message did not come, or did not complete";
  auto& arrival = *arrivals.front();
  EXPECT_EQ(arrival.landed.wait_name(), "Ok");
  EXPECT_EQ(arrival.consumed.wait_name(), "Ok");
  EXPECT_EQ(arrival.filled, 1);
  ASSERT_GE(arrival.buffer.bytes, bytes);
  arrival.buffer.bytes = bytes;
  EXPECT_TRUE(to.memory().holds(arrival.buffer, seed)) << bytes << " bytes, seed " << seed;
}

void ChannelSuite::expect_carries(WireEnd& from, WireEnd& to, std::size_t bytes, std::uint32_t seed) {
  const auto released = from.send(from.memory().filled(bytes, seed));
  expect_arrives(to, bytes, seed);
  EXPECT_EQ(released.wait_name(), "Ok");
  EXPECT_EQ(released.runs(), 1);
}

void ChannelSuite::expect_once(const Outcome& outcome, const char* what) {
  EXPECT_TRUE(outcome.wait().has_value()) << what << " did not complete";
  EXPECT_EQ(outcome.runs(), 1) << what;
}

bool ChannelSuite::becomes_true(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

bool ChannelSuite::returns_elsewhere(std::function<void()> work) {
  auto done = std::make_shared<std::promise<void>>();
  auto returned = done->get_future();
  std::thread thread([work = std::move(work), done] {
    work();
    done->set_value();
  });
  const bool back = returned.wait_for(patience) == std::future_status::ready;
  // If the thread hangs, the test fails without waiting for it.
  back ? thread.join() : thread.detach();
  return back;
}

void ChannelProcessSuite::in_a_process_that_may_fork(const std::function<void()>& body) {
  if (traits().forks) return body();
  std::fflush(stdout);
  const auto child = ::fork();
  if (child == 0) {
    body();
    drop_drivers();  // with their threads, which ThreadSanitizer would take for leaked ones
    std::fflush(stdout);
    ::_exit(HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "in the process that forks; its failures stand above";
}

}  // namespace tensorferry::conformance
