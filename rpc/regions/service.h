/// One agent's one-sided memory: its regions and publications, and those of its peers that it uses.
#pragma once

#include <memory>
#include <utility>

#include "agent/agent.h"
#include "rpc/regions/owned_regions.h"
#include "rpc/regions/publications.h"
#include "rpc/regions/remote_region.h"
#include "rpc/regions/subscription.h"
#include "rpc/regions/visits.h"

namespace tensorferry::regions {

/// Joins the parts. Serves `tf:attend`, `tf:region` and `tf:version` from its construction on. Thread-safe.
class RegionService final {
 public:
  explicit RegionService(std::shared_ptr<RawAgent> agent)
      : visitors(Visitors::serve(*agent)),
        visits(std::make_shared<Visits>(agent)),
        owned(OwnedRegions::serve(agent, *visitors)),
        remote(std::make_shared<RemoteRegions>(agent, visits)),
        publications(Publications::serve(agent, *visitors, owned)),
        subscriptions(std::make_shared<Subscriptions>(agent, visits, publications, remote)) {}
  ~RegionService() { close(); }
  RegionService(const RegionService&) = delete;
  RegionService& operator=(const RegionService&) = delete;

  /// Ends the visits of this agent to others, so that no call of theirs is in flight here or there: the agent is about
  /// to wait for calls in flight. Memory that is mapped stays valid; every other use of it fails with AgentClosed.
  void end_visits() { visits->close(); }
  /// Drops all regions and publications, and ends all visits. The agent is about to leave.
  void close() {
    publications->close();
    owned->close();
    visits->close();
    visitors->close({Code::connection_lost, "its owner has left"});
  }

  Copier copier;  // for copies out of versions
  const std::shared_ptr<Visitors> visitors;
  const std::shared_ptr<Visits> visits;
  const std::shared_ptr<OwnedRegions> owned;
  const std::shared_ptr<RemoteRegions> remote;
  const std::shared_ptr<Publications> publications;
  const std::shared_ptr<Subscriptions> subscriptions;
};

}  // namespace tensorferry::regions
