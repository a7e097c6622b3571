/// Whose a TCP connection within this host is: what SO_PEERCRED says of a unix socket.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace tensorferry {

/// The uid of the process that holds the other end of a connected socket, both ends of which are in this network
/// namespace. Reads /proc/net/tcp, which takes time on a host with very many connections. nullopt: not there (closed
/// already, or not of this host).
std::optional<uid_t> tcp_peer_uid(int fd);

/// The uid in the line of a /proc/net/tcp (or tcp6) text whose local and remote address are these, as the kernel
/// prints them ("0100007F:1F90"). The text is the kernel's: it is not checked beyond its columns.
std::optional<uid_t> uid_in_proc_net_tcp(std::string_view text, std::string_view local, std::string_view remote);

/// As the kernel prints an address in those files; `as_v6` gives an IPv4 one as it stands in tcp6.
std::string proc_net_address(const sockaddr_storage& address, bool as_v6);

}  // namespace tensorferry
