// Whole agents without threads, stepped by seeds: see stepped_world.h.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "tests/agent/patience.h"
#include "tests/simulation/scarce_memory.h"
#include "tests/simulation/stepped_world.h"

namespace tensorferry::testing {
namespace {

/// Seeds that have failed before, of any test: they run first.
constexpr std::array<std::uint64_t, 8> failed_before{74, 96, 168, 239, 257, 311, 329, 354};

/// Runs the seeds of a test: the one that TENSORFERRY_SEED names, or those that have failed and `usual` many more.
void run_seeds(std::uint64_t usual, SteppedFaults faults) {
  const char* given = std::getenv("TENSORFERRY_SEED");
  std::vector<std::uint64_t> seeds(failed_before.begin(), failed_before.end());
  const auto more = is_soak ? 20 * usual : under_sanitizer ? usual / 8 : usual;
  for (std::uint64_t seed = 1; seed <= more; ++seed) seeds.push_back(seed);
  if (given != nullptr) seeds = {std::strtoull(given, nullptr, 10)};
  std::map<Code, std::size_t> outcomes;
  std::uint64_t steps = 0, failed_allocations = 0;
  for (const auto seed : seeds) {
    SteppedWorld world(seed, faults);
    for (const auto& problem : world.run())
      ADD_FAILURE() << "seed " << seed << ": " << problem << " (TENSORFERRY_SEED=" << seed << " replays it)";
    steps += world.steps();
    failed_allocations += world.failed_allocations();
    for (const auto& [code, count] : world.outcomes()) outcomes[code] += count;
  }
  if (given == nullptr) {
    EXPECT_EQ(failed_allocations != 0, ScarceMemory::runs_out && faults.memory != 0);
  }
  std::cout << seeds.size() << " seeds, " << steps << " steps, " << failed_allocations
            << " failed allocations; calls by outcome:";
  for (const auto& [code, count] : outcomes) std::cout << ' ' << Status(code, "").text() << count;
  std::cout << '\n';
}

TEST(SteppedAgents, CallsEndOnceAsTheyShouldWithoutFaults) { run_seeds(100, {}); }

TEST(SteppedAgents, CallsEndOnceAlthoughConnectionsEnd) { run_seeds(200, {.ends = true}); }

TEST(SteppedAgents, CallsEndOnceAlthoughTheNetworkIsParted) { run_seeds(200, {.ends = true, .partitions = true}); }

TEST(SteppedAgents, CallsEndOnceAlthoughAgentsDie) {
  run_seeds(200, {.ends = true, .partitions = true, .deaths = true});
}

TEST(SteppedAgents, CallsEndOnceAlthoughMemoryRunsOut) { run_seeds(240, {.memory = 2000}); }

TEST(SteppedAgents, CallsEndOnceAlthoughThereIsNoMemoryUntilTheReserveIsGivenBack) {
  run_seeds(160, {.memory = 2000, .until_released = true});
}

TEST(SteppedAgents, CallsEndOnceAlthoughMemoryRunsOutOftenAndAgentsDie) {
  run_seeds(160, {.ends = true, .partitions = true, .deaths = true, .memory = 200, .until_released = true});
}

TEST(SteppedAgents, LostCallsSayWhatHasHappenedToTheirPeer) { run_seeds(200, {.deaths = true}); }

// ---- Situations

using SeenBy = SteppedNetwork::SeenBy;
constexpr auto beat = SteppedWorld::heartbeat;

TEST(SteppedPeers, AreNotLostWhileTheyAreIdleOrBusy) {
  SteppedWorld world(1, {});
  const auto first = world.call(0, 1, true), under_way = world.call(1, 0, false);
  world.pass(20 * beat);
  EXPECT_TRUE(world.ended(first));
  EXPECT_FALSE(world.ended(under_way)) << world.status(under_way).text();
  EXPECT_EQ(world.lost(0) + world.lost(1), 0);
  EXPECT_TRUE(world.agent(0).link_state("agent1").starts_with("link to \"agent1\": up"));
}

TEST(SteppedPeers, ThatFallSilentAreLostAfterThreeHeartbeatsAndDeadAfterTheirTimeOut) {
  SteppedWorld world(1, {});
  (void)world.call(0, 1, true);
  const auto under_way = world.call(0, 1, false);
  world.pass(2 * beat);
  world.freeze(1);
  world.pass(2 * beat);
  EXPECT_FALSE(world.ended(under_way));
  world.pass(3 * beat);
  ASSERT_TRUE(world.ended(under_way));
  EXPECT_EQ(world.status(under_way).code(), Code::connection_lost);
  EXPECT_NE(world.status(under_way).text().find("it sent nothing for"), std::string::npos)
      << world.status(under_way).text();
  EXPECT_EQ(world.lost(0), 0) << "the session goes on";
  world.pass(SteppedWorld::peer_timeout + 10 * beat);
  EXPECT_EQ(world.lost(0), 1);
}

TEST(SteppedPeers, OutliveAPartitionOfLessThanThreeHeartbeats) {
  SteppedWorld world(1, {});
  (void)world.call(0, 1, true);
  world.pass(2 * beat);
  const auto under_way = world.call(0, 1, true);
  world.network().part(0, 1, true);
  world.pass(2 * beat);
  EXPECT_FALSE(world.ended(under_way));
  world.network().heal();
  world.pass(beat);
  EXPECT_TRUE(world.ended(under_way) && world.status(under_way).ok()) << world.status(under_way).text();
}

TEST(SteppedPeers, ThatDialEachOtherAtOnceHaveOneLink) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SteppedWorld world(seed, {});
    const auto one = world.call(0, 1, true), other = world.call(1, 0, true);
    world.pass(beat);
    EXPECT_TRUE(world.status(one).ok() && world.status(other).ok()) << seed << world.status(one).text();
    EXPECT_TRUE(world.ended(one) && world.ended(other)) << seed;
    EXPECT_EQ(world.network().connections(), 1U) << seed;
  }
}

TEST(SteppedPeers, NeedOneLinkAgainAfterBothEndsHaveLostIt) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SteppedWorld world(seed, {});
    (void)world.call(0, 1, true);
    (void)world.call(1, 0, true);
    world.pass(beat);
    while (world.network().ready() != 0 || world.network().connections() < 1) world.pass(beat);
    world.network().end(0, false, SeenBy::both);
    world.pass(5 * beat);
    const auto one = world.call(0, 1, true), other = world.call(1, 0, true);
    world.pass(beat);
    EXPECT_TRUE(world.ended(one) && world.status(one).ok()) << seed << world.status(one).text();
    EXPECT_TRUE(world.ended(other) && world.status(other).ok()) << seed << world.status(other).text();
    EXPECT_EQ(world.network().connections(), 1U) << seed;
    EXPECT_EQ(world.lost(0) + world.lost(1), 0);
  }
}

// ---- What holds for each seed

TEST(SteppedAgents, ASeedsRunIsAlwaysTheSame) {
  for (std::uint64_t seed = 1; seed < 20; ++seed) {
    SteppedWorld one(seed, {.ends = true, .partitions = true, .deaths = true});
    SteppedWorld other(seed, {.ends = true, .partitions = true, .deaths = true});
    EXPECT_TRUE(one.run().empty());
    EXPECT_TRUE(other.run().empty());
    EXPECT_EQ(one.digest(), other.digest()) << "seed " << seed;
    EXPECT_EQ(one.steps(), other.steps());
  }
}

}  // namespace
}  // namespace tensorferry::testing
