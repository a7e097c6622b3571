/// Hosts on a network that the tests make: a network namespace for each host, and between each two of them a path with
/// a rate, a delay, losses and cuts that may change at any time.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "tests/network/namespace.h"

namespace tensorferry::testing {

/// The properties of a path from one host to another; the way back has its own.
struct Path {
  double bits_per_second = 0;  // 0: no limit
  std::chrono::microseconds delay{0};
  double loss = 0;          // the probability that a packet is lost
  std::size_t queue = 0;    // bytes that wait for their turn; more are lost, small packets last. 0: 100 ms of the rate
  bool cut = false;         // all packets are lost, and no host is told
  std::size_t largest = 0;  // larger packets are lost, and no host is told; 0: no limit
};

struct HostOptions {
  HostOptions(const char* its_name) : name(its_name) {}  // NOLINT(google-explicit-constructor)
  HostOptions(const char* its_name, bool nat) : name(its_name), behind_nat(nat) {}
  std::string name;
  bool behind_nat = false;  // the host dials out from a public address; no packet of another connection reaches it
};

/// Packets that have travelled a path, or that were lost there.
struct Traffic {
  std::uint64_t packets = 0, bytes = 0, lost = 0;
};

/// The network. One thread of this process carries the packets. Thread-safe. Needs root: see cannot_emulate().
///
/// Host number i has the address 10.99.0.i, counted from 1. A host behind NAT has the address 192.168.i.2, and its
/// peers see it as 10.99.0.i. Packets to other addresses are lost.
class EmulatedNetwork {
 public:
  explicit EmulatedNetwork(std::vector<HostOptions> hosts, unsigned seed = 1, int mtu = 1500);
  ~EmulatedNetwork();
  EmulatedNetwork(const EmulatedNetwork&) = delete;
  EmulatedNetwork& operator=(const EmulatedNetwork&) = delete;

  [[nodiscard]] const NetworkNamespace& host(std::string_view name) const;
  /// Adds an interface to a host. No packet from another host reaches it.
  void add_unplugged_interface(std::string_view host, const char* name, const std::string& address);
  /// Returns the address of the host's own interface.
  [[nodiscard]] std::string address(std::string_view name) const;
  [[nodiscard]] std::vector<std::string> names() const;

  /// Sets the path from one host to another. Packets that are under way keep their times.
  void set_path(std::string_view from, std::string_view to, const Path& path);
  /// Sets the paths between two hosts in both directions.
  void set_between(std::string_view one, std::string_view other, const Path& path);
  [[nodiscard]] Path path(std::string_view from, std::string_view to) const;
  /// Puts a firewall in front of a host: connections to it are made on these ports alone. Packets that ask for another
  /// port are lost.
  void open_ports(std::string_view name, std::vector<std::pair<std::uint16_t, std::uint16_t>> ranges);
  /// Cuts or mends one direction; nothing else of the path changes.
  void cut(std::string_view from, std::string_view to, bool is_cut = true);
  /// Cuts or mends both directions.
  void cut_between(std::string_view one, std::string_view other, bool is_cut = true);
  [[nodiscard]] Traffic traffic(std::string_view from, std::string_view to) const;

  /// Resets the TCP connections of all hosts, except those of the port `spare`. Returns the number of ends that got
  /// the error.
  std::size_t reset_connections(std::uint16_t spare = 0);
  /// From here on packets of the TCP connections made so far are lost, and no host is told, as behind a firewall that
  /// has forgotten idle connections. New connections work, and all of the port `spare`.
  void forget_connections(std::uint16_t spare = 0);

 private:
  using Clock = std::chrono::steady_clock;
  using Bytes = std::vector<unsigned char>;
  struct Host;
  struct Packet {
    Clock::time_point due;
    Bytes bytes;
  };
  struct Line {  // a path and its packets
    Path path;
    Traffic traffic;
    Clock::time_point free_at, last_due;
    std::deque<Packet> under_way;
  };

  [[nodiscard]] std::size_t index(std::string_view name) const;
  [[nodiscard]] Line& line(std::size_t from, std::size_t to) { return lines_[from * hosts_.size() + to]; }
  [[nodiscard]] const Line& line(std::size_t from, std::size_t to) const { return lines_[from * hosts_.size() + to]; }
  using Connection = std::pair<std::uint64_t, std::uint64_t>;  // the addresses and ports of both ends, the lower first
  void choose_offload(std::size_t from);
  void run();
  void take(std::size_t from, Bytes& packet, Clock::time_point now);
  void put(Line& line, Bytes& packet, Clock::time_point now);
  Clock::time_point deliver(Clock::time_point now);

  std::vector<std::unique_ptr<Host>> hosts_;
  bool any_nat_ = false;
  std::mt19937_64 random_;
  mutable std::mutex mutex_;  // guards the members down to stop_, and random_
  bool knows_connections_ = false;
  std::uint16_t spare_ = 0;  // this and known_: used if knows_connections_
  std::set<Connection> known_;
  std::vector<Line> lines_;
  std::atomic<bool> stop_{false};
  FileDescriptor wake_;
  std::thread thread_;
};

/// Returns why this process can make no such network, or "".
std::string cannot_emulate();

}  // namespace tensorferry::testing
