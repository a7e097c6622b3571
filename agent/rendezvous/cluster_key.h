/// The key that the agents of a job share: the user's own, or one made up at rendezvous.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "agent/auth.h"
#include "agent/rendezvous/store.h"

namespace tensorferry {

struct ClusterKey {
  Key key;           // never empty
  bool own = false;  // the user's: guards records and listening beyond loopback; false: as secret as the store
};
/// `option`, else the environment's (Key::load), else one that the first agent to ask makes up and leaves in the store,
/// where that is reached from this host alone. Unauthenticated (with the lines to type) where it is not.
Result<ClusterKey> cluster_key(Store& store, const std::string& prefix, std::string_view option,
                               std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace tensorferry
