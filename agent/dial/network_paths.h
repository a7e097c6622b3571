/// The networks that this host and a peer have in common. The bulk connections of a link are spread over them if there
/// are several. Free functions without shared state: any thread may call them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tensorferry {

/// How the kernel would send to a host now.
struct LocalRoute {
  std::string from;    // the numeric address of this host that it would use
  unsigned mbits = 0;  // the speed that the address's interface reports; 0: it reports none
  std::string interface = {};
};
/// Returns the route to a numeric address. Sends no packet. Nullopt: there is none.
std::optional<LocalRoute> route_to(const std::string& host);

/// A path to a peer over an interface of its own.
struct NetworkPath {
  std::string from;  // a numeric address of this host
  std::string to;    // "host:port", as in the peer's record
  bool operator==(const NetworkPath&) const = default;
};

/// Returns the paths from the addresses `ours` to the addresses `theirs`, which are those of two agents' records, in
/// the order of `theirs`; empty if there are fewer than two. `route`: as route_to(). Leaves out:
/// - an address to which the kernel sends from an address that is not in `ours`, so the user has not chosen its
///   interface; or from an address or an interface that another path has; or from the same address, so it is on this
///   host;
/// - a path over an interface less than half as fast as the first path's: the whole buffer would wait for its piece.
std::vector<NetworkPath> separate_paths(const std::vector<std::string>& ours, const std::vector<std::string>& theirs,
                                        const std::function<std::optional<LocalRoute>(const std::string&)>& route);

/// Returns the path whose own address is least often among `used`; the first of several. `paths` is not empty.
const NetworkPath& least_used(const std::vector<NetworkPath>& paths, const std::vector<std::string>& used);

}  // namespace tensorferry
