#include "agent/rendezvous/tcp_owner.h"

#include <netinet/in.h>

#include <array>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/text.h"

namespace tensorferry {
namespace {

std::string upper_hex(std::uint32_t value, std::size_t digits) {
  auto text = hex(value, digits);
  for (char& c : text) {
    if (c >= 'a') c = static_cast<char>(c - 'a' + 'A');
  }
  return text;
}

bool is_loopback_v4(in_addr_t address) { return (ntohl(address) >> 24) == 127; }

/// Returns whether a connection between these addresses may lie within this host: then the kernel has given both ends
/// the same address, or loopback ones. A quick answer for connections to other hosts.
bool within_host(const sockaddr_storage& ours, const sockaddr_storage& theirs) {
  if (ours.ss_family != theirs.ss_family) return false;
  if (ours.ss_family == AF_INET) {
    const auto a = reinterpret_cast<const sockaddr_in&>(ours).sin_addr.s_addr;
    const auto b = reinterpret_cast<const sockaddr_in&>(theirs).sin_addr.s_addr;
    return a == b || (is_loopback_v4(a) && is_loopback_v4(b));
  }
  if (ours.ss_family != AF_INET6) return false;
  const auto& a = reinterpret_cast<const sockaddr_in6&>(ours).sin6_addr;
  const auto& b = reinterpret_cast<const sockaddr_in6&>(theirs).sin6_addr;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace

std::string proc_net_address(const sockaddr_storage& address, bool as_v6) {
  // The kernel prints 32-bit words in host order as they lie in memory, and the port as a number.
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    const char* mapped = as_v6 ? "0000000000000000FFFF0000" : "";
    return mapped + upper_hex(v4.sin_addr.s_addr, 8) + ":" + upper_hex(ntohs(v4.sin_port), 4);
  }
  if (address.ss_family != AF_INET6) return {};
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  std::array<std::uint32_t, 4> words{};
  std::memcpy(words.data(), &v6.sin6_addr, sizeof words);
  std::string text;
  for (const auto word : words) text += upper_hex(word, 8);
  return text + ":" + upper_hex(ntohs(v6.sin6_port), 4);
}

std::optional<uid_t> uid_in_proc_net_tcp(std::string_view text, std::string_view local, std::string_view remote) {
  constexpr std::size_t local_column = 1, remote_column = 2, state_column = 3, uid_column = 7, inode_column = 9;
  while (!text.empty()) {
    auto line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    std::array<std::string_view, inode_column + 1> columns;
    for (auto& column : columns) {
      line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
      column = line.substr(0, line.find(' '));
      line.remove_prefix(column.size());
    }
    if (columns[local_column] != local || columns[remote_column] != remote) continue;
    // The kernel prints uid 0 for a socket that its process has closed or has not accepted yet. Only an established
    // socket with an inode has an owner.
    if (columns[state_column] != "01" || columns[inode_column].empty() || columns[inode_column] == "0") continue;
    uid_t uid = 0;
    const auto digits = columns[uid_column];
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), uid);
    if (error == std::errc{} && end == digits.data() + digits.size()) return uid;
  }
  return std::nullopt;
}

std::optional<uid_t> tcp_peer_uid(int fd) {
  sockaddr_storage ours{}, theirs{};
  socklen_t ours_size = sizeof ours, theirs_size = sizeof theirs;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &ours_size) != 0) return std::nullopt;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &theirs_size) != 0) return std::nullopt;
  if (!within_host(ours, theirs)) return std::nullopt;
  for (const bool v6 : {false, true}) {
    if (!v6 && ours.ss_family != AF_INET) continue;
    std::ifstream file(v6 ? "/proc/thread-self/net/tcp6" : "/proc/thread-self/net/tcp");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    // Search for the line of the peer's end: its local address is this end's remote address.
    if (auto uid = uid_in_proc_net_tcp(text, proc_net_address(theirs, v6), proc_net_address(ours, v6))) return uid;
  }
  return std::nullopt;
}

}  // namespace tensorferry
