#include "agent/dial/network_paths.h"

#include <arpa/inet.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "agent/transport/address.h"
#include "base/file_descriptor.h"

namespace tensorferry {
namespace {

/// Returns the speed that an interface reports, in Mbit/s; 0: none.
unsigned speed_of(const std::string& interface, int socket) {
  ethtool_cmd command{};
  command.cmd = ETHTOOL_GSET;
  ifreq request{};
  std::strncpy(request.ifr_name, interface.c_str(), IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&command);
  if (::ioctl(socket, SIOCETHTOOL, &request) != 0) return 0;
  const auto mbits = ethtool_cmd_speed(&command);
  return mbits == static_cast<unsigned>(SPEED_UNKNOWN) ? 0 : mbits;
}

/// Connects a datagram socket, which sends no packet. An empty one: there is no route.
FileDescriptor connected_datagram_socket(const std::string& host) {
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  const bool is_v4 = ::inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1;
  if (!is_v4 && ::inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) != 1) return {};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  v4.sin_port = v6.sin6_port = htons(9);
  FileDescriptor socket(::socket(is_v4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto* to = is_v4 ? reinterpret_cast<const sockaddr*>(&v4) : reinterpret_cast<const sockaddr*>(&v6);
  if (!socket || ::connect(socket.get(), to, is_v4 ? sizeof v4 : sizeof v6) != 0) return {};
  return socket;
}

/// Returns the host of "host:port"; "": it is none.
std::string host_of(const std::string& address) {
  const auto parsed = split_host_port(address);
  return parsed ? parsed->host : "";
}

}  // namespace

std::optional<LocalRoute> route_to(const std::string& host) {
  const auto socket = connected_datagram_socket(host);
  if (!socket) return std::nullopt;
  LocalRoute route{local_host(socket.get())};
  for (const auto& each : interface_addresses()) {
    if (each.address != route.from) continue;
    route.interface = each.interface;
    route.mbits = speed_of(each.interface, socket.get());
  }
  return route;
}

std::vector<NetworkPath> separate_paths(const std::vector<std::string>& ours, const std::vector<std::string>& theirs,
                                        const std::function<std::optional<LocalRoute>(const std::string&)>& route) {
  if (ours.size() < 2 || theirs.size() < 2) return {};
  std::vector<NetworkPath> paths;
  std::vector<std::string> interfaces;  // theirs
  unsigned first_mbits = 0;
  for (const auto& to : theirs) {
    const auto host = host_of(to);
    const auto found = host.empty() ? std::nullopt : route(host);
    if (!found || found->from == host) continue;
    const auto is_from = [&](const auto& address) { return host_of(address) == found->from; };
    const auto is_taken = [&](const auto& path) { return path.from == found->from; };
    if (std::none_of(ours.begin(), ours.end(), is_from) || std::any_of(paths.begin(), paths.end(), is_taken)) continue;
    // Two addresses of one interface, as an IPv4 and an IPv6 one, are one path.
    if (!found->interface.empty() &&
        std::find(interfaces.begin(), interfaces.end(), found->interface) != interfaces.end())
      continue;
    if (paths.empty()) first_mbits = found->mbits;
    if (found->mbits != 0 && found->mbits < first_mbits / 2) continue;
    paths.push_back({found->from, to});
    interfaces.push_back(found->interface);
  }
  if (paths.size() < 2) paths.clear();
  return paths;
}

const NetworkPath& least_used(const std::vector<NetworkPath>& paths, const std::vector<std::string>& used) {
  return *std::min_element(paths.begin(), paths.end(), [&](const auto& a, const auto& b) {
    return std::count(used.begin(), used.end(), a.from) < std::count(used.begin(), used.end(), b.from);
  });
}

}  // namespace tensorferry
