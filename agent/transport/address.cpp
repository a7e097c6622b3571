#include "agent/transport/address.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <memory>

#include "agent/transport/cluster_key.h"
#include "base/environment.h"
#include "base/text.h"

namespace tensorferry {

namespace {

constexpr int backlog = 4096;              // the kernel lowers it to net.core.somaxconn
constexpr std::time_t fresh_seconds = 60;  // a socket file younger than this may not be listening yet

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  [[nodiscard]] int family() const { return storage.ss_family; }
};

// IPv4 comes first, because a half-configured IPv6 is more common than a half-configured IPv4.
std::vector<SocketAddress> resolve(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const auto* one = found; one != nullptr; one = one->ai_next) {
    if (one->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress address;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
    addresses.push_back(address);
  }
  std::stable_partition(addresses.begin(), addresses.end(), [](const auto& a) { return a.family() == AF_INET; });
  return addresses;
}

std::string numeric(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof text);
  }
  return text;
}

bool is_loopback(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    const auto ip = ntohl(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr);
    return (ip >> 24) == 127;
  }
  if (address.family() != AF_INET6) return false;
  const auto& ip = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&ip) || (IN6_IS_ADDR_V4MAPPED(&ip) && ip.s6_addr[12] == 127);
}

std::string described(const std::vector<InterfaceAddress>& addresses) {
  std::vector<std::string> parts;
  for (const auto& one : addresses) parts.push_back(formatted("{} ({})", one.interface, one.address));
  return joined(parts, ", ");
}

// Returns the source address that the kernel would use. Connecting a datagram socket sends no packet.
Result<InterfaceAddress> address_that_reaches(const std::string& host, const std::vector<InterfaceAddress>& ours) {
  const auto targets = resolve(host, 9, 0);
  if (targets.empty()) {
    return Status(Code::not_found, formatted("the rendezvous host \"{}\" has no address: check its spelling, or the "
                                             "resolver of this host",
                                             host));
  }
  for (const auto& target : targets) {
    const FileDescriptor probe(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!probe || ::connect(probe.get(), target.get(), target.size) != 0) continue;
    SocketAddress mine;
    mine.size = sizeof mine.storage;
    if (::getsockname(probe.get(), mine.get(), &mine.size) != 0) continue;
    const auto text = numeric(mine.get());
    const auto known = std::find_if(ours.begin(), ours.end(), [&](const auto& one) { return one.address == text; });
    return known != ours.end() ? *known : InterfaceAddress{"?", text, is_loopback(mine)};
  }
  return Status(Code::not_found, formatted("no route from this host to the rendezvous host \"{}\" ({}): set "
                                           "TENSORFERRY_SOCKET_IFNAME to one of {}",
                                           host, std::strerror(errno), described(ours)));
}

std::vector<std::string_view> split_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const auto part = text.substr(0, text.find(','));
    if (!part.empty()) parts.push_back(part);
    text.remove_prefix(std::min(part.size() + 1, text.size()));
  }
  return parts;
}

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc{} || end != text.data() + text.size() || port == 0) return std::nullopt;
  return port;
}

Result<SocketAddress> numeric_address(const std::string& address, std::uint16_t port) {
  const auto found = resolve(address, port, AI_NUMERICHOST);
  if (found.empty()) return Status(Code::invalid_argument, formatted("\"{}\" is not a numeric IP address", address));
  return found.front();
}

// Listens, or leaves the reason in errno. If the user chose the port (`chosen`), SO_REUSEADDR is set before bind(), so
// that a restarted agent gets its port while connections of its predecessor linger; two listeners still collide. A port
// that the kernel picks must be entirely unused, so there the option is set after bind(): it lets a later process reuse
// that port.
FileDescriptor try_listen(const SocketAddress& address, bool chosen) {
  FileDescriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  const int one = 1;
  if (chosen) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(socket.get(), address.get(), address.size) != 0) return {};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::listen(socket.get(), backlog) != 0) return {};
  return socket;
}

std::uint16_t port_of(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (::getsockname(fd, address.get(), &address.size) != 0) return 0;
  return ntohs(address.family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port
                                            : reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

Result<SocketAddress> unix_address(const std::string& text) {
  SocketAddress address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
  un->sun_family = AF_UNIX;
  if (text.size() < 2 || text.size() >= sizeof un->sun_path) {
    return Status(Code::invalid_argument,
                  formatted("the unix socket address \"{}\" has {} bytes, at most {} fit: choose a shorter {}", text,
                            text.size(), sizeof un->sun_path - 1, environment::socket_dir.name));
  }
  std::memcpy(un->sun_path, text.data(), text.size());
  if (text.front() == '@') un->sun_path[0] = '\0';  // abstract: the length ends the name, not a zero byte
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size() + (text.front() == '@' ? 0 : 1));
  return address;
}

Status check_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return {Code::permission_denied, formatted("socket directory {}: {}", path, std::strerror(errno))};
  }
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0 || !S_ISDIR(about.st_mode)) {
    return {Code::invalid_argument, formatted("TENSORFERRY_SOCKET_DIR={} is not a directory", path)};
  }
  if (about.st_uid != ::geteuid()) {
    return {
        Code::permission_denied,
        formatted(
            "socket directory {} belongs to uid {}, not to this process's user ({}): choose a directory of this user",
            path, about.st_uid, ::geteuid())};
  }
  if ((about.st_mode & 077) != 0) {
    return {Code::permission_denied, formatted("socket directory {} is open to other users: chmod 700 {}", path, path)};
  }
  return {};
}

// Removes the socket files of dead listeners, which refuse connections. A file younger than fresh_seconds stays,
// because its listener may be between bind() and listen() and would refuse as well.
void remove_stale_sockets(const std::string& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(directory.c_str()), &::closedir);
  if (!folder) return;
  while (const auto* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with("tensorferry-") || !name.ends_with(".sock")) continue;
    const auto path = formatted("{}/{}", directory, name);
    struct stat about {};
    if (::lstat(path.c_str(), &about) != 0 || !S_ISSOCK(about.st_mode) || about.st_uid != ::geteuid()) continue;
    if (about.st_mtime + fresh_seconds > std::time(nullptr)) continue;
    const auto address = unix_address(path);
    const FileDescriptor probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!address || !probe) continue;
    if (::connect(probe.get(), address->get(), address->size) != 0 && errno == ECONNREFUSED) ::unlink(path.c_str());
  }
}

// Returns those of `left` that the hosts named in `spec` have, one of each interface.
std::vector<InterfaceAddress> addresses_of_hosts(std::string_view spec, std::vector<InterfaceAddress> left) {
  std::vector<InterfaceAddress> out;
  if (spec.starts_with('^') || spec.starts_with('=')) return out;
  for (const auto name : split_commas(spec)) {
    const auto theirs = resolve_host(std::string(name));
    const auto found = std::find_if(left.begin(), left.end(), [&](const InterfaceAddress& one) {
      return std::find(theirs.begin(), theirs.end(), one.address) != theirs.end();
    });
    if (found == left.end()) continue;
    out.push_back(*found);
    std::erase_if(left, [&](const auto& one) { return one.interface == out.back().interface; });
  }
  return out;
}

}  // namespace

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(found, &::freeifaddrs);
  std::vector<InterfaceAddress> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* one = found; one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family || (one->ifa_flags & IFF_UP) == 0) continue;
      if (family == AF_INET6 &&
          IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr)) {
        continue;
      }
      addresses.push_back({one->ifa_name, numeric(one->ifa_addr), (one->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  return addresses;
}

std::vector<std::string> resolve_host(const std::string& host) {
  std::vector<std::string> texts;
  for (const auto& address : resolve(host, 0, 0)) texts.push_back(numeric(address.get()));
  return texts;
}

bool is_loopback(const std::string& host) {
  const auto addresses = resolve(host, 0, 0);
  return !addresses.empty() && std::all_of(addresses.begin(), addresses.end(),
                                           [](const SocketAddress& address) { return is_loopback(address); });
}

std::optional<InterfaceAddress> match_interface(std::string_view spec, const std::vector<InterfaceAddress>& addresses) {
  const bool exclude = spec.starts_with('^');
  if (exclude) spec.remove_prefix(1);
  const bool whole = spec.starts_with('=');
  if (whole) spec.remove_prefix(1);
  const auto names = split_commas(spec);
  const auto fits = [whole](const InterfaceAddress& one, std::string_view name) {
    return whole ? one.interface == name : one.interface.starts_with(name);
  };
  if (exclude) {
    for (const auto& one : addresses) {
      const bool named = std::any_of(names.begin(), names.end(), [&](auto name) { return fits(one, name); });
      if (!named && !one.loopback) return one;
    }
    return std::nullopt;
  }
  for (const auto name : names) {
    for (const auto& one : addresses) {
      if (fits(one, name)) return one;
    }
  }
  return std::nullopt;
}

std::vector<InterfaceAddress> match_interfaces(std::string_view spec, const std::vector<InterfaceAddress>& addresses) {
  std::vector<InterfaceAddress> found, left = addresses;
  while (auto next = match_interface(spec, left)) {
    std::erase_if(left, [&](const auto& one) { return one.interface == next->interface; });
    found.push_back(*std::move(next));
  }
  return found;
}

Result<std::vector<InterfaceAddress>> listening_addresses(std::string_view spec, const std::string& reaches) {
  const auto wanted = std::string(spec.empty() ? environment::socket_ifname.value() : spec);
  if (!wanted.empty()) {
    const auto ours = interface_addresses();
    auto all = match_interfaces(wanted, ours);
    if (all.empty()) all = addresses_of_hosts(wanted, ours);
    if (!all.empty()) return all;
  }
  const auto one = listening_address(spec, reaches);
  if (!one) return one.status();
  return std::vector{*one};
}

Result<InterfaceAddress> listening_address(std::string_view spec, const std::string& reaches) {
  const auto ours = interface_addresses();
  const auto wanted = std::string(spec.empty() ? environment::socket_ifname.value() : spec);
  if (!wanted.empty()) {
    if (auto found = match_interface(wanted, ours)) return *found;
    return Status(Code::not_found, formatted("no network interface matches TENSORFERRY_SOCKET_IFNAME=\"{}\"; there "
                                             "are {}",
                                             wanted, described(ours)));
  }
  if (reaches.empty() || is_loopback(reaches)) {
    for (const auto& one : ours) {
      if (one.loopback) return one;
    }
    return InterfaceAddress{"lo", "127.0.0.1", true};
  }
  return address_that_reaches(reaches, ours);
}

Result<PortRange> parse_ports(std::string_view text) {
  if (text.empty()) return PortRange{};
  const auto dash = text.find('-');
  const auto first = parse_port(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : parse_port(text.substr(dash + 1));
  if (!first || !last || *last < *first) {
    return Status(
        Code::invalid_argument,
        formatted("\"{}\" is not a port or a range of ports: write \"7000\" or \"7000-7099\", from 1 to 65535", text));
  }
  return PortRange{*first, *last};
}

std::string join_host_port(std::string_view host, std::uint16_t port) {
  return host.find(':') == std::string_view::npos ? formatted("{}:{}", host, port) : formatted("[{}]:{}", host, port);
}

Result<HostPort> split_host_port(std::string_view text) {
  const auto colon = text.rfind(':');
  auto host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (brackets) host = host.substr(1, host.size() - 2);
  const auto port = colon == std::string_view::npos ? std::nullopt : parse_port(text.substr(colon + 1));
  const bool plain = host.find_first_of("[]") == std::string_view::npos;
  if (host.empty() || !port || !plain || (!brackets && host.find(':') != std::string_view::npos)) {
    return Status(Code::invalid_argument,
                  formatted("\"{}\" is not an address: write \"host:port\" or \"[ipv6]:port\"", text));
  }
  return HostPort{std::string(host), *port};
}

Result<TcpListener> listen_tcp(const std::string& address, PortRange ports) {
  const bool any = ports.first == 0;
  for (std::uint32_t port = ports.first; port <= ports.last; ++port) {
    const auto at = numeric_address(address, static_cast<std::uint16_t>(port));
    if (!at) return at.status();
    if (auto socket = try_listen(*at, !any)) {
      const auto bound = port_of(socket.get());
      return TcpListener{std::move(socket), bound};
    }
    if (errno != EADDRINUSE && errno != EACCES) {
      return Status(Code::invalid_argument,
                    formatted("cannot listen on {}: {}", join_host_port(address, static_cast<std::uint16_t>(port)),
                              std::strerror(errno)));
    }
  }
  const auto why = std::string(std::strerror(errno));
  if (any) return Status(Code::resource_exhausted, formatted("no free port on {}: {}", address, why));
  if (ports.first == ports.last) {
    return Status(Code::resource_exhausted,
                  formatted("{}: {}: choose another port, or a range", join_host_port(address, ports.first), why));
  }
  return Status(Code::resource_exhausted,
                formatted("no free port on {} in {}-{}: {}: widen the range", address, ports.first, ports.last, why));
}

Result<FileDescriptor> start_connect_tcp(const std::string& address, std::uint16_t port) {
  const auto at = numeric_address(address, port);
  if (!at) return at.status();
  FileDescriptor socket(::socket(at->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return Status(Code::resource_exhausted, formatted("socket: {}", std::strerror(errno)));
  const int one = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (::connect(socket.get(), at->get(), at->size) != 0 && errno != EINPROGRESS) {
    return Status(Code::connection_lost,
                  formatted("connecting to {}: {}", join_host_port(address, port), std::strerror(errno)));
  }
  return socket;
}

Result<UnixListener> listen_unix(const std::string& directory) {
  const auto folder = directory.empty() ? std::string(environment::socket_dir.value()) : directory;
  std::array<std::byte, 8> random{};
  fill_random(random);
  std::uint64_t unique = 0;
  std::memcpy(&unique, random.data(), sizeof unique);
  const auto name = formatted("tensorferry-{}-{}", ::getpid(), hex(unique, 16));
  if (!folder.empty()) {
    if (auto status = check_directory(folder); !status) return status;
    remove_stale_sockets(folder);
  }
  const auto text = folder.empty() ? "@" + name : formatted("{}/{}.sock", folder, name);
  const auto address = unix_address(text);
  if (!address) return address.status();
  auto socket = try_listen(*address, false);
  if (!socket) {
    return Status(Code::internal, formatted("cannot listen on the unix socket {}: {}", text, std::strerror(errno)));
  }
  return UnixListener{std::move(socket), text};
}

Result<FileDescriptor> connect_unix(const std::string& text) {
  const auto address = unix_address(text);
  if (!address) return address.status();
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return Status(Code::resource_exhausted, formatted("socket: {}", std::strerror(errno)));
  if (::connect(socket.get(), address->get(), address->size) != 0) {
    const auto code = errno == EAGAIN   ? Code::resource_exhausted  // its backlog is full: try again
                      : errno == EACCES ? Code::permission_denied
                                        : Code::connection_lost;
    return Status(code, formatted("connecting to the unix socket {}: {}", text, std::strerror(errno)));
  }
  return socket;
}

std::string peer_address(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "";
  const auto host = numeric(reinterpret_cast<const sockaddr*>(&peer));
  if (host.empty()) return "";
  // The port stands at the same place for both families.
  return join_host_port(host, ntohs(reinterpret_cast<const sockaddr_in*>(&peer)->sin_port));
}

std::string local_host(int fd) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return "";
  return numeric(reinterpret_cast<const sockaddr*>(&own));
}

void remove_unix_socket(const std::string& address) noexcept {
  if (!address.empty() && address.front() != '@') ::unlink(address.c_str());
}

}  // namespace tensorferry
