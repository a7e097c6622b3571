#include "agent/transport/tcp_owner.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/file_descriptor.h"
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

/// Copies the address to `words` in network order, and returns the port.
__be16 diag_address(const sockaddr_storage& from, __be32* words) {
  if (from.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(from);
    words[0] = v4.sin_addr.s_addr;
    return v4.sin_port;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(from);
  std::memcpy(words, &v6.sin6_addr, sizeof v6.sin6_addr);
  return v6.sin6_port;
}

/// What the kernel says of one socket.
struct SockDiagAnswer {
  bool answered = false;  // false: this kernel, or a filter of system calls, has no sock_diag(7)
  std::optional<uid_t> uid;
};

/// Asks sock_diag(7) for the socket with these addresses: one look-up, however many connections the host has.
SockDiagAnswer ask_sock_diag(const sockaddr_storage& local, const sockaddr_storage& remote) {
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = static_cast<__u8>(local.ss_family);
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0U;
  auto& id = question.request.id;
  id.idiag_sport = diag_address(local, id.idiag_src);
  id.idiag_dport = diag_address(remote, id.idiag_dst);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

  const FileDescriptor socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!socket || ::send(socket.get(), &question, sizeof question, 0) != sizeof question) return {};
  alignas(nlmsghdr) std::array<std::byte, 4096> bytes;
  ssize_t got = 0;
  do {
    got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
  } while (got < 0 && errno == EINTR);
  nlmsghdr header{};
  if (got < static_cast<ssize_t>(sizeof header)) return {};
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto* const body = bytes.data() + NLMSG_HDRLEN;
  if (header.nlmsg_type == NLMSG_ERROR && got >= static_cast<ssize_t>(NLMSG_HDRLEN + sizeof(nlmsgerr))) {
    nlmsgerr error{};
    std::memcpy(&error, body, sizeof error);
    return {.answered = error.error == -ENOENT, .uid = std::nullopt};
  }
  inet_diag_msg answer{};
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY || got < static_cast<ssize_t>(NLMSG_HDRLEN + sizeof answer)) return {};
  std::memcpy(&answer, body, sizeof answer);
  const bool held = answer.idiag_state == TCP_ESTABLISHED && answer.idiag_inode != 0;
  return {.answered = true, .uid = held ? std::optional<uid_t>(answer.idiag_uid) : std::nullopt};
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
  // The peer's end has this end's remote address as its local one.
  if (const auto asked = ask_sock_diag(theirs, ours); asked.answered) return asked.uid;
  for (const bool v6 : {false, true}) {
    if (!v6 && ours.ss_family != AF_INET) continue;
    std::ifstream file(v6 ? "/proc/thread-self/net/tcp6" : "/proc/thread-self/net/tcp");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    if (auto uid = uid_in_proc_net_tcp(text, proc_net_address(theirs, v6), proc_net_address(ours, v6))) return uid;
  }
  return std::nullopt;
}

}  // namespace tensorferry
