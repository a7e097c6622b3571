#include "agent/calls/pending_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;

std::shared_ptr<Call::State> a_call(std::string name = "f") {
  return std::make_shared<Call::State>(std::move(name), RawCallOptions{});
}

TEST(PendingCalls, AreFoundUntilTheyAreRemovedOnce) {
  PendingCalls pending;
  const auto call = a_call();
  const auto id = pending.add(call);
  EXPECT_NE(id, 0U);
  EXPECT_EQ(pending.find(id), call);
  EXPECT_EQ(pending.size(), 1U);
  EXPECT_EQ(pending.remove(id), call);
  EXPECT_EQ(pending.remove(id), nullptr);
  EXPECT_EQ(pending.find(id), nullptr);
  EXPECT_EQ(pending.size(), 0U);
}

TEST(PendingCalls, OfOneSlotHaveDifferentIds) {
  PendingCalls pending;
  std::set<std::uint64_t> ids;
  std::uint64_t last = 0;
  for (int i = 0; i < 1000; ++i) {
    const auto call = a_call();
    const auto id = pending.add(call);
    EXPECT_TRUE(ids.insert(id).second);
    if (last != 0) {
      EXPECT_EQ(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(last)) << "the slot is used again";
      EXPECT_EQ(pending.find(last), nullptr);
      EXPECT_EQ(pending.remove(last), nullptr);
      EXPECT_EQ(pending.land(last).call, nullptr);
    }
    EXPECT_EQ(pending.remove(id), call);
    last = id;
  }
}

TEST(PendingCalls, AreNotFoundByInventedIds) {
  PendingCalls pending;
  const auto id = pending.add(a_call());
  const std::uint64_t generation = std::uint64_t{1} << 32;
  for (const std::uint64_t wrong :
       {std::uint64_t{0}, id + 1, id + generation, id - generation, ~std::uint64_t{0}, id % generation}) {
    EXPECT_EQ(pending.find(wrong), nullptr) << wrong;
    EXPECT_EQ(pending.remove(wrong), nullptr) << wrong;
  }
  EXPECT_EQ(pending.size(), 1U);
}

TEST(PendingCalls, WhoseReplyLandsInTheCallersMemoryCannotBeCancelled) {
  PendingCalls pending;
  RawCallOptions options;
  options.into = {patterned(10)};
  const auto call = std::make_shared<Call::State>("f", options);
  const auto id = pending.add(call);
  EXPECT_EQ(pending.land(id).call, call);
  EXPECT_TRUE(pending.land(id).again) << "a second reply to it";
  EXPECT_EQ(pending.give_up(id), nullptr);
  EXPECT_EQ(pending.remove(id), call);
}

TEST(PendingCalls, WhoseReplyLandsElsewhereCanBeCancelled) {
  PendingCalls pending;
  const auto call = a_call();
  const auto id = pending.add(call);
  EXPECT_EQ(pending.land(id).call, call);
  EXPECT_EQ(pending.give_up(id), call);
  EXPECT_EQ(pending.remove(id), nullptr);
}

TEST(PendingCalls, EndOnceIfManyThreadsEndThem) {
  PendingCalls pending;
  std::atomic<int> removed{0}, added{0};
  std::atomic<std::uint64_t> latest{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < rounds(2'000'000); ++i) {
        const auto id = pending.add(a_call());
        ++added;
        const auto others = latest.exchange(id);
        if (others != 0 && pending.give_up(others)) ++removed;
        if (random() % 2 == 0 && pending.remove(id)) ++removed;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(added - removed, static_cast<int>(pending.size()));
  EXPECT_EQ(pending.all().size(), pending.size());
}

}  // namespace
}  // namespace tensorferry
