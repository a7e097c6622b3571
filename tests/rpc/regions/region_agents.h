/// Agents with one-sided memory, for tests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "channels/region.h"
#include "rpc/regions/owned_regions.h"
#include "rpc/regions/remote_region.h"
#include "rpc/regions/visits.h"
#include "tests/agent/agents.h"

namespace tensorferry::testing {

/// One agent, and both sides of its regions.
struct RegionAgent {
  RegionAgent(const std::shared_ptr<Store>& store, const std::string& name, const Ways& ways = {},
              const std::function<void(RawAgentOptions&)>& change = {})
      : agent(join(store, name, ways, change)) {}
  ~RegionAgent() { leave(); }
  RegionAgent(const RegionAgent&) = delete;
  RegionAgent& operator=(const RegionAgent&) = delete;
  void leave() {
    owned->close();
    visits->close();
    visitors->close({Code::connection_lost, "the agent has left"});
    agent->leave();
  }
  [[nodiscard]] regions::RegionKey key_of(std::uint64_t id) const {
    return {agent->self().name, agent->self().incarnation, id};
  }

  std::shared_ptr<RawAgent> agent;
  std::shared_ptr<regions::Visitors> visitors = regions::Visitors::serve(*agent);
  std::shared_ptr<regions::Visits> visits = std::make_shared<regions::Visits>(agent);
  std::shared_ptr<regions::OwnedRegions> owned = regions::OwnedRegions::serve(agent, *visitors);
  std::shared_ptr<regions::RemoteRegions> remote = std::make_shared<regions::RemoteRegions>(agent, visits);
};

/// Returns memory that peers can map, with the bytes of patterned().
inline Buffer mappable(std::size_t bytes, unsigned seed = 1) {
  auto made = Regions::of_this_process().make(bytes);
  EXPECT_TRUE(made.ok()) << made.status().text();
  const auto pattern = patterned(bytes, seed);
  std::memcpy(made->data, pattern.data, bytes);
  return *made;
}

inline Buffer part_of(const Buffer& all, std::size_t offset, std::size_t bytes) {
  return {{}, all.data + offset, bytes, nullptr, all.owner};
}

}  // namespace tensorferry::testing
