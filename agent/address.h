/// Where an agent listens: the interface and port of its TCP address, the name of its unix socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "channels/file_descriptor.h"
#include "channels/status.h"

namespace tensorferry {

/// One address of one network interface that is up. IPv6 link-local addresses are left out: they need a scope.
struct InterfaceAddress {
  std::string interface;
  std::string address;  // numeric
  bool loopback = false;
  bool operator==(const InterfaceAddress&) const = default;
};

/// What getifaddrs says; IPv4 before IPv6, else in the kernel's order.
std::vector<InterfaceAddress> interface_addresses();

/// The numeric addresses of a host, IPv4 before IPv6; empty where it has none. Asks the resolver: may take seconds.
std::vector<std::string> resolve_host(const std::string& host);

/// Whether only this host can reach it: a loopback literal, or a name of which every address is one. Unresolvable:
/// false.
bool is_loopback(const std::string& host);

/// The first of `addresses` that `spec` admits. As users of NCCL_SOCKET_IFNAME know it: a comma-separated list of
/// prefixes ("eth,ib"), in order of preference; "=" in front asks for whole names ("=eth0"), "^" excludes ("^docker").
std::optional<InterfaceAddress> match_interface(std::string_view spec, const std::vector<InterfaceAddress>& addresses);

/// The address to listen on. `spec`: RawAgentOptions::interface, "" for TENSORFERRY_SOCKET_IFNAME, and where that is
/// not set either: the address of ours from which `reaches` (the rendezvous) is reached, loopback for "" and for a
/// loopback one. NotFound: no interface matches (names those that are there), or no route.
Result<InterfaceAddress> listening_address(std::string_view spec, const std::string& reaches);

/// Ports to try, in order; 0-0: whichever the kernel picks.
struct PortRange {
  std::uint16_t first = 0, last = 0;
  bool operator==(const PortRange&) const = default;
};
/// "" (any), "7000", "7000-7099". InvalidArgument: anything else.
Result<PortRange> parse_ports(std::string_view text);

/// Both numeric. IPv6 hosts stand in brackets.
struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
std::string join_host_port(std::string_view host, std::uint16_t port);
/// InvalidArgument: no port, a port outside 1..65535, unbalanced brackets, no host.
Result<HostPort> split_host_port(std::string_view text);

struct TcpListener {
  FileDescriptor socket;  // listening, non-blocking, close-on-exec
  std::uint16_t port = 0;
};
/// Listens on the first free port of the range. ResourceExhausted: all are taken (names the range).
Result<TcpListener> listen_tcp(const std::string& address, PortRange ports);

/// Connects without blocking the caller beyond what the kernel does at once: non-blocking, TCP_NODELAY, close-on-exec;
/// `address` is numeric. The connection is complete when the socket is writable and SO_ERROR is 0.
Result<FileDescriptor> start_connect_tcp(const std::string& address, std::uint16_t port);

struct UnixListener {
  FileDescriptor socket;  // listening, non-blocking, close-on-exec
  std::string address;    // "@name" (abstract) or a path
};
/// Listens on a fresh unix socket. `directory`: RawAgentOptions::socket_dir, "" for TENSORFERRY_SOCKET_DIR; where
/// neither is set, an abstract name (visible in this network namespace alone). A directory must be the user's own and
/// closed to others (0700; made where missing): PermissionDenied with the chmod to type. Socket files that dead agents
/// left there are removed. The caller unlinks its own path when it stops (remove_unix_socket).
Result<UnixListener> listen_unix(const std::string& directory);
/// Connects; non-blocking afterwards, close-on-exec. ConnectionLost: nobody listens there.
Result<FileDescriptor> connect_unix(const std::string& address);
void remove_unix_socket(const std::string& address) noexcept;  // nothing for an abstract one

}  // namespace tensorferry
