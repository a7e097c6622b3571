#include "tests/network/emulated_network.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

namespace tensorferry::testing {
namespace {

constexpr std::size_t header = sizeof(PacketHeader);
constexpr std::size_t largest_packet = header + (1 << 16);
constexpr std::size_t smallest_queue = std::size_t{64} << 10;
// Small packets are lost last, as by a router with fair queues. Otherwise the time of small calls would depend on luck.
constexpr std::size_t small_packet = 1200;
constexpr double offload_from = 200e6;  // bit/s; on slower paths a packet of 64 KB would take milliseconds

std::uint32_t parse_address(const std::string& text) {
  in_addr address{};
  if (::inet_pton(AF_INET, text.c_str(), &address) != 1) throw std::invalid_argument(text);
  return address.s_addr;
}

/// Replaces a word that an internet checksum covers (RFC 1624).
void adjust(std::uint16_t& checksum, std::uint32_t before, std::uint32_t after) {
  std::uint32_t sum = static_cast<std::uint16_t>(~checksum);
  for (const auto word : {~before & 0xffff, (~before >> 16) & 0xffff, after & 0xffff, after >> 16}) sum += word;
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  checksum = static_cast<std::uint16_t>(~sum);
}

/// The headers of an IPv4 packet. Copies, because packets are not aligned.
struct Headers {
  explicit Headers(std::vector<unsigned char>& packet) : bytes(packet) {
    if (bytes.size() < header + sizeof ip) return;
    std::memcpy(&ip, bytes.data() + header, sizeof ip);
    at_tcp = header + ip.ihl * std::size_t{4};
    is_ip = ip.version == 4;
    is_tcp = is_ip && ip.protocol == IPPROTO_TCP && bytes.size() >= at_tcp + sizeof tcp;
    if (is_tcp) std::memcpy(&tcp, bytes.data() + at_tcp, sizeof tcp);
  }
  /// Returns the addresses and ports of both ends.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> connection() const {
    return std::minmax((std::uint64_t{ip.saddr} << 16) | tcp.source, (std::uint64_t{ip.daddr} << 16) | tcp.dest);
  }
  void replace(std::uint32_t& address, std::uint32_t by) {
    adjust(ip.check, address, by);
    adjust(tcp.check, address, by);
    address = by;
    std::memcpy(bytes.data() + header, &ip, sizeof ip);
    std::memcpy(bytes.data() + at_tcp, &tcp, sizeof tcp);
  }
  std::vector<unsigned char>& bytes;
  std::size_t at_tcp = 0;
  bool is_ip = false, is_tcp = false;
  iphdr ip{};
  tcphdr tcp{};
};

/// Returns the bytes that a packet has on the wire: one that is not cut to the MTU yet gets its headers back.
std::size_t wire_bytes(const std::vector<unsigned char>& packet) {
  PacketHeader about;
  std::memcpy(&about, packet.data(), sizeof about);
  const auto bytes = packet.size() - header;
  if (about.segmentation == 0 || about.segment_bytes == 0) return bytes;
  return bytes + (bytes - about.header_bytes) / about.segment_bytes * about.header_bytes;
}

/// A connection of a host behind NAT: its port, and the peer's address and port.
std::uint64_t flow_of(std::uint32_t peer, std::uint16_t peer_port, std::uint16_t port) {
  return (std::uint64_t{peer} << 32) | (std::uint64_t{peer_port} << 16) | port;
}

}  // namespace

struct EmulatedNetwork::Host {
  Host(HostOptions with, std::size_t number, int mtu)
      : options(std::move(with)),
        address(options.behind_nat ? "192.168." + std::to_string(number) + ".2" : public_address(number)),
        seen_as(parse_address(public_address(number))),
        own(parse_address(address)),
        space(address, mtu) {}
  static std::string public_address(std::size_t number) { return "10.99.0." + std::to_string(number); }

  HostOptions options;
  std::string address;
  std::uint32_t seen_as, own;
  NetworkNamespace space;
  bool has_firewall = false;
  std::vector<std::pair<std::uint16_t, std::uint16_t>> ports;  // that it lets through, if there is one
  std::unordered_set<std::uint64_t> dialled;                   // through NAT; used by the network's thread alone
};

EmulatedNetwork::EmulatedNetwork(std::vector<HostOptions> hosts, unsigned seed, int mtu)
    : random_(seed), wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  for (auto& options : hosts) {
    any_nat_ = any_nat_ || options.behind_nat;
    hosts_.push_back(std::make_unique<Host>(std::move(options), hosts_.size() + 1, mtu));
  }
  lines_.resize(hosts_.size() * hosts_.size());
  for (std::size_t i = 0; i < hosts_.size(); ++i) choose_offload(i);
  thread_ = std::thread([this] { run(); });
}

EmulatedNetwork::~EmulatedNetwork() {
  stop_ = true;
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
}

std::size_t EmulatedNetwork::index(std::string_view name) const {
  for (std::size_t i = 0; i < hosts_.size(); ++i)
    if (hosts_[i]->options.name == name) return i;
  throw std::invalid_argument("no host " + std::string(name));
}

const NetworkNamespace& EmulatedNetwork::host(std::string_view name) const { return hosts_[index(name)]->space; }
void EmulatedNetwork::add_unplugged_interface(std::string_view host, const char* name, const std::string& address) {
  hosts_[index(host)]->space.add_unplugged_interface(name, address);
}

std::string EmulatedNetwork::address(std::string_view name) const { return hosts_[index(name)]->address; }

std::vector<std::string> EmulatedNetwork::names() const {
  std::vector<std::string> names;
  for (const auto& host : hosts_) names.push_back(host->options.name);
  return names;
}

void EmulatedNetwork::set_path(std::string_view from, std::string_view to, const Path& path) {
  const std::lock_guard lock(mutex_);
  line(index(from), index(to)).path = path;
  choose_offload(index(from));
}

void EmulatedNetwork::set_between(std::string_view one, std::string_view other, const Path& path) {
  set_path(one, other, path);
  set_path(other, one, path);
}

Path EmulatedNetwork::path(std::string_view from, std::string_view to) const {
  const std::lock_guard lock(mutex_);
  return line(index(from), index(to)).path;
}

void EmulatedNetwork::open_ports(std::string_view name, std::vector<std::pair<std::uint16_t, std::uint16_t>> ranges) {
  const std::lock_guard lock(mutex_);
  auto& host = *hosts_[index(name)];
  host.has_firewall = true;
  host.ports = std::move(ranges);
}

void EmulatedNetwork::cut(std::string_view from, std::string_view to, bool is_cut) {
  const std::lock_guard lock(mutex_);
  line(index(from), index(to)).path.cut = is_cut;
}

void EmulatedNetwork::cut_between(std::string_view one, std::string_view other, bool is_cut) {
  cut(one, other, is_cut);
  cut(other, one, is_cut);
}

Traffic EmulatedNetwork::traffic(std::string_view from, std::string_view to) const {
  const std::lock_guard lock(mutex_);
  return line(index(from), index(to)).traffic;
}

std::size_t EmulatedNetwork::reset_connections(std::uint16_t spare) {
  std::size_t count = 0;
  for (const auto& host : hosts_) count += host->space.reset_connections(spare);
  return count;
}

void EmulatedNetwork::forget_connections(std::uint16_t spare) {
  const std::lock_guard lock(mutex_);
  knows_connections_ = true;
  spare_ = htons(spare);
  known_.clear();
}

/// Losses hit packets of the MTU's size, a slow path sends such packets in turns, and NAT needs their checksums. So
/// only fast paths without losses get larger ones.
void EmulatedNetwork::choose_offload(std::size_t from) {
  bool fast = !any_nat_;
  for (std::size_t to = 0; to < hosts_.size(); ++to) {
    const auto& path = line(from, to).path;
    fast = fast && path.loss == 0 && path.largest == 0 &&
           (path.bits_per_second == 0 || path.bits_per_second >= offload_from);
  }
  hosts_[from]->space.set_offload(fast);
}

void EmulatedNetwork::run() {
  ::prctl(PR_SET_TIMERSLACK, 1);
  const FileDescriptor events(::epoll_create1(EPOLL_CLOEXEC));
  const auto watch = [&](int fd, std::size_t number) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = number;
    ::epoll_ctl(events.get(), EPOLL_CTL_ADD, fd, &event);
  };
  for (std::size_t i = 0; i < hosts_.size(); ++i) watch(hosts_[i]->space.tun(), i);
  watch(wake_.get(), hosts_.size());

  Bytes buffer(largest_packet);
  auto next = Clock::time_point::max();
  while (!stop_) {
    timespec wait{};
    if (next != Clock::time_point::max()) {
      const auto left = std::chrono::nanoseconds(std::max(next - Clock::now(), Clock::duration::zero())).count();
      wait = {left / 1'000'000'000, left % 1'000'000'000};
    }
    std::array<epoll_event, 8> ready;
    const auto count = ::epoll_pwait2(events.get(), ready.data(), ready.size(),
                                      next == Clock::time_point::max() ? nullptr : &wait, nullptr);
    for (int i = 0; i < count; ++i) {
      const auto from = ready[static_cast<std::size_t>(i)].data.u64;
      if (from == hosts_.size()) continue;
      for (int packets = 0; packets < 64; ++packets) {
        const auto got = ::read(hosts_[from]->space.tun(), buffer.data(), buffer.size());
        if (got <= static_cast<ssize_t>(header)) break;
        Bytes packet(buffer.begin(), buffer.begin() + got);
        take(from, packet, Clock::now());
      }
    }
    next = deliver(Clock::now());
  }
}

/// Finds the path of a packet, and translates its addresses if there is NAT.
void EmulatedNetwork::take(std::size_t from, Bytes& packet, Clock::time_point now) {
  Headers headers(packet);
  if (!headers.is_ip) return;
  if (hosts_[from]->options.behind_nat) {
    if (!headers.is_tcp || headers.ip.saddr != hosts_[from]->own) return;
    hosts_[from]->dialled.insert(flow_of(headers.ip.daddr, headers.tcp.dest, headers.tcp.source));
    headers.replace(headers.ip.saddr, hosts_[from]->seen_as);
  }
  const auto found =
      std::find_if(hosts_.begin(), hosts_.end(), [&](const auto& host) { return host->seen_as == headers.ip.daddr; });
  if (found == hosts_.end()) return;
  auto& host = **found;
  const auto connection = headers.connection();
  if (host.options.behind_nat) {
    if (!headers.is_tcp || !host.dialled.contains(flow_of(headers.ip.saddr, headers.tcp.source, headers.tcp.dest)))
      return;
    headers.replace(headers.ip.daddr, host.own);
  }
  const std::lock_guard lock(mutex_);
  const bool is_first = headers.is_tcp && headers.tcp.syn && !headers.tcp.ack;
  const auto port = ntohs(headers.tcp.dest);
  if (is_first && host.has_firewall && std::none_of(host.ports.begin(), host.ports.end(), [&](const auto& range) {
        return range.first <= port && port <= range.second;
      }))
    return;
  if (knows_connections_ && headers.is_tcp && headers.tcp.source != spare_ && headers.tcp.dest != spare_) {
    if (is_first) known_.insert(connection);
    if (!known_.contains(connection)) return;
  }
  put(line(from, static_cast<std::size_t>(found - hosts_.begin())), packet, now);
}

/// Gives a packet its time, or loses it. Packets stay in order if the delay becomes shorter.
void EmulatedNetwork::put(Line& line, Bytes& packet, Clock::time_point now) {
  const auto& path = line.path;
  const auto bytes = wire_bytes(packet);
  const bool lost = path.cut || (path.largest != 0 && packet.size() - header > path.largest) ||
                    (path.loss > 0 && std::uniform_real_distribution<>()(random_) < path.loss);
  auto sent = now;
  bool full = false;
  if (path.bits_per_second > 0) {
    const auto seconds_for = [&](double amount) {
      return std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(amount * 8 / path.bits_per_second));
    };
    const auto begin = std::max(now, line.free_at);
    const auto room =
        path.queue != 0 ? static_cast<double>(path.queue) : std::max(path.bits_per_second / 80, double{smallest_queue});
    sent = begin + seconds_for(static_cast<double>(bytes));
    full = sent - now > seconds_for(bytes <= small_packet ? room * 1.25 : room);
    if (!full) line.free_at = sent;
  }
  if (lost || full) {
    ++line.traffic.lost;
    return;
  }
  ++line.traffic.packets;
  line.traffic.bytes += bytes;
  line.last_due = std::max(line.last_due, sent + path.delay);
  line.under_way.push_back({line.last_due, std::move(packet)});
}

/// Delivers the packets whose time has come. Returns the time of the next one.
EmulatedNetwork::Clock::time_point EmulatedNetwork::deliver(Clock::time_point now) {
  auto next = Clock::time_point::max();
  std::vector<std::pair<std::size_t, Bytes>> due;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      auto& line = lines_[i];
      while (!line.under_way.empty() && line.under_way.front().due <= now) {
        const bool cut = line.path.cut;  // a cut loses what is under way too
        if (!cut) due.emplace_back(i % hosts_.size(), std::move(line.under_way.front().bytes));
        line.traffic.lost += cut ? 1 : 0;
        line.under_way.pop_front();
      }
      if (!line.under_way.empty()) next = std::min(next, line.under_way.front().due);
    }
  }
  for (const auto& [to, packet] : due) {
    // A write fails only if the host's interface is down, and the packet is lost there as on a wire.
    static_cast<void>(!::write(hosts_[to]->space.tun(), packet.data(), packet.size()));
  }
  return next;
}

std::string cannot_emulate() {
  if (::geteuid() != 0) return "network namespaces and TUN devices need root";
  try {
    const NetworkNamespace probe("10.99.0.1", 1500);
    static_cast<void>(probe.reset_connections());
    return "";
  } catch (const std::exception& error) {
    return std::string("no network namespace with a TUN device: ") + error.what();
  }
}

}  // namespace tensorferry::testing
