/// Finds the user at the other end of a TCP connection within this host, as SO_PEERCRED does for unix sockets.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace tensorferry {

/// Returns the uid of the process that holds the other end of a connected socket, if both ends are in this network
/// namespace and the connection is established at both. Asks sock_diag(7); a kernel without it prints its table of TCP
/// sockets, in which a connection may be missing while others come and go.
///
/// nullopt: the other end is on another host, or has closed; or it is in a listener's queue, because its process has
/// not accepted it yet. So a dialler asks after the first bytes of the acceptor have come.
std::optional<uid_t> tcp_peer_uid(int fd);

/// Returns the uid in the line of a /proc/net/tcp (or tcp6) text that has these local and remote addresses, as the
/// kernel prints them ("0100007F:1F90"), is established and has an inode. Trusts the text, which is the kernel's, and
/// checks only its columns.
std::optional<uid_t> uid_in_proc_net_tcp(std::string_view text, std::string_view local, std::string_view remote);

/// Formats an address as the kernel prints it in those files. `as_v6` formats an IPv4 address as tcp6 shows it.
std::string proc_net_address(const sockaddr_storage& address, bool as_v6);

}  // namespace tensorferry
