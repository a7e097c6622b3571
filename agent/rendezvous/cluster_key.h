/// The cluster key of a job: the user's own, or one that the first agent generates and leaves in the store.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "agent/auth.h"
#include "agent/rendezvous/store.h"

namespace tensorferry {

struct ClusterKey {
  Key key;           // never empty
  bool own = false;  // the user's own: signs records, allows listening beyond loopback. Else as secret as the store
};
/// Returns the user's key (`option`, else the environment's: Key::load) if there is one. Otherwise, if only this host
/// reaches the store, returns the key that the first agent to ask has generated; waits up to `timeout` for it.
///
/// Unauthenticated: there is no key and other hosts reach the store (the text has the lines to type); DeadlineExceeded:
/// the first agent has not set the key in time; also Key::load's and the store's errors.
Result<ClusterKey> cluster_key(Store& store, const std::string& prefix, std::string_view option,
                               std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace tensorferry
