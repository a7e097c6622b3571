// Agents over connections with seeded faults, against a model of calls and references.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/simulation/world.h"

namespace tensorferry::testing {
namespace {

using Kind = CallRecord::Kind;

/// Runs the schedule of one seed. Returns what the model does not allow.
std::vector<std::string> simulate(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t bound) { return static_cast<std::size_t>(random() % bound); };
  const std::size_t agents = 2 + below(2);
  // A warm world has its sessions before faults begin: from then on, no idempotent call may be lost.
  const bool warm = below(3) != 0;
  World world(seed, agents, warm);
  if (warm) {
    for (std::size_t from = 0; from < agents; ++from) {
      for (std::size_t to = 0; to < agents; ++to) {
        if (from == to) continue;
        const auto& name = world.at(to).id().name;
        (void)eventually([&] {
          return world.at(from).agent->find(name, Milliseconds(100)).ok() &&
                 call_sync(*world.at(from).agent, name, "warm", {}, within(std::chrono::seconds(10))).status().code() ==
                     Code::not_found;
        });
      }
    }
  }
  for (int step = 0; step < 50; ++step) {
    const auto from = below(agents);
    const auto to = (from + 1 + below(agents - 1)) % agents;
    const std::size_t bytes = below(3) != 0 ? 0 : std::size_t{1} << below(19);
    const auto order = static_cast<std::uint32_t>(1 + below(2));
    const auto which = below(1000);
    switch (below(12)) {
      case 0:
        world.call(Kind::plain, from, to, bytes, 0);
        break;
      case 1:
      case 2:
        world.call(Kind::ordered, from, to, bytes, order);
        break;
      case 3:
      case 4:
        world.call(Kind::idempotent, from, to, bytes, 0);
        break;
      case 5:
        world.call(Kind::cancelled, from, to, 0, 0);
        break;
      case 6:
        world.call(Kind::expiring, from, to, 0, 0);
        break;
      case 7:
        world.create(from, to, which % 2 == 0);
        break;
      case 8:
      case 9:
        world.pass(which, to);
        break;
      case 10:
        world.drop(which);
        break;
      default:
        world.probe(which);
    }
    if (below(6) == 0) world.cancel_calls();
    if (below(25) == 0) world.relay().end_connections();
    if (below(2) == 0) std::this_thread::sleep_for(Milliseconds(below(8)));
  }
  world.finish(warm);
  return world.problems();
}

TEST(Simulation, CallsAndReferencesFollowTheModelUnderSeededFaults) {
  const char* given = std::getenv("TENSORFERRY_SEED");
  const std::uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  const std::uint64_t seeds = given != nullptr ? 1 : rounds(2) == 2 ? 10'000 : under_sanitizer ? 40 : 200;
  std::atomic<std::uint64_t> next{first};
  std::vector<std::thread> workers;
  for (std::uint64_t worker = 0; worker < std::min<std::uint64_t>(6, seeds); ++worker) {
    workers.emplace_back([&] {
      for (auto seed = next++; seed < first + seeds; seed = next++) {
        for (const auto& problem : simulate(seed))
          ADD_FAILURE() << "seed " << seed << ": " << problem << " (TENSORFERRY_SEED=" << seed << " replays it)";
      }
    });
  }
  for (auto& worker : workers) worker.join();
}

}  // namespace
}  // namespace tensorferry::testing
