/// Network addresses of an agent: interfaces, TCP ports and unix sockets, and the sockets that listen on them or
/// connect to them. Free functions without shared state: any thread may call them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry {

/// One address of one network interface that is up. IPv6 link-local addresses are left out, because they need a scope.
struct InterfaceAddress {
  std::string interface;
  std::string address;  // numeric
  bool loopback = false;
  bool operator==(const InterfaceAddress&) const = default;
};

/// Returns the addresses of getifaddrs(3): IPv4 before IPv6, otherwise in the kernel's order. Empty if it fails.
std::vector<InterfaceAddress> interface_addresses();

/// Returns the numeric addresses of a host, IPv4 before IPv6; empty if it has none. Asks the resolver, which may take
/// seconds.
std::vector<std::string> resolve_host(const std::string& host);

/// Returns whether only this host can reach `host`: it is a loopback address, or a name with loopback addresses alone.
/// False if the name does not resolve. Asks the resolver, which may take seconds.
bool is_loopback(const std::string& host);

/// Returns the first of `addresses` that matches `spec`. The syntax is that of NCCL_SOCKET_IFNAME: a comma-separated
/// list of interface name prefixes, in order of preference ("eth,ib"). A leading "=" compares whole names ("=eth0"). A
/// leading "^" excludes the listed interfaces ("^docker"), and loopback with them.
std::optional<InterfaceAddress> match_interface(std::string_view spec, const std::vector<InterfaceAddress>& addresses);

/// Returns the addresses that match `spec`, one of each interface, in the order of `spec`; among interfaces that match
/// the same prefix, or all but the excluded ones, in the order of `addresses`.
std::vector<InterfaceAddress> match_interfaces(std::string_view spec, const std::vector<InterfaceAddress>& addresses);

/// Returns the addresses to listen on, best first: one of each interface that matches if `spec` or
/// TENSORFERRY_SOCKET_IFNAME is set, else listening_address(). Fails as that does. If no interface matches a list
/// without "^" and "=", its items count as names or addresses of this host.
Result<std::vector<InterfaceAddress>> listening_addresses(std::string_view spec, const std::string& reaches);

/// Returns the address to listen on. It is the first that applies:
/// - the interface that `spec` (RawAgentOptions::interface) matches, if `spec` is not empty;
/// - the interface that TENSORFERRY_SOCKET_IFNAME matches, if that is set;
/// - loopback, if `reaches` (the host of the rendezvous) is empty or loopback;
/// - the local address from which the kernel routes to `reaches`.
///
/// NotFound: no interface matches (the text lists the interfaces), `reaches` does not resolve, or no route leads there.
Result<InterfaceAddress> listening_address(std::string_view spec, const std::string& reaches);

/// Ports to try, in order. 0-0: the kernel picks one.
struct PortRange {
  std::uint16_t first = 0, last = 0;
  bool operator==(const PortRange&) const = default;
};
/// Parses "" (the kernel picks), "7000" or "7000-7099". InvalidArgument: any other text.
Result<PortRange> parse_ports(std::string_view text);

/// A host and a port. In text, IPv6 addresses stand in brackets.
struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// Returns "host:port", or "[host]:port" if the host is an IPv6 address.
std::string join_host_port(std::string_view host, std::uint16_t port);
/// Undoes join_host_port(). InvalidArgument: no port, a port outside 1..65535, unbalanced brackets, no host.
Result<HostPort> split_host_port(std::string_view text);

/// Returns the address and port of the other end of a connected TCP socket, for texts; "": it has none.
std::string peer_address(int fd);

/// Returns the address of this end of a connected TCP socket, without its port; "": it has none.
std::string local_host(int fd);

struct TcpListener {
  FileDescriptor socket;  // listening, non-blocking, close-on-exec
  std::uint16_t port = 0;
};
/// Listens on the first free port of the range. `address` is numeric. ResourceExhausted: every port is taken or is
/// reserved for privileged processes (the text names the range). InvalidArgument: this host cannot listen on `address`.
Result<TcpListener> listen_tcp(const std::string& address, PortRange ports);

/// Starts a TCP connection and does not wait for it. The socket is non-blocking, close-on-exec and has TCP_NODELAY.
/// `address` is numeric. The connection is complete when the socket is writable and SO_ERROR is 0. InvalidArgument: not
/// a numeric address; ResourceExhausted: no socket; ConnectionLost: the kernel refuses at once.
Result<FileDescriptor> start_connect_tcp(const std::string& address, std::uint16_t port);

struct UnixListener {
  FileDescriptor socket;  // listening, non-blocking, close-on-exec
  std::string address;    // "@name" (abstract) or a path
};
/// Listens on a new unix socket in `directory` (RawAgentOptions::socket_dir), or if that is "" in
/// TENSORFERRY_SOCKET_DIR. If neither is set, the socket has an abstract name, visible in this network namespace alone.
///
/// The directory must belong to the user and be closed to others (0700). It is created if it is missing, and socket
/// files that dead agents left in it are removed. The caller removes its own path when it stops (remove_unix_socket).
/// PermissionDenied: another owner, or open to others (the text has the chmod to type); InvalidArgument: not a
/// directory, or the path is too long.
Result<UnixListener> listen_unix(const std::string& directory);
/// Connects to a unix socket; the returned descriptor is non-blocking and close-on-exec. ConnectionLost: no process
/// listens there; ResourceExhausted: the listener's backlog is full, or no socket; PermissionDenied; InvalidArgument:
/// the address is too long.
Result<FileDescriptor> connect_unix(const std::string& address);
/// Unlinks the socket's path. Does nothing if the address is abstract or empty.
void remove_unix_socket(const std::string& address) noexcept;

}  // namespace tensorferry
