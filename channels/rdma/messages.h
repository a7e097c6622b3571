/// The descriptor of the channels over RDMA cards, the control messages by which two ends connect queue pairs, and the
/// keys of memory in tickets. docs/protocol.md,
/// "Reading by a network card", is normative.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "base/record.h"
#include "channels/rdma/cards.h"

namespace tensorferry::rdma {

/// The ports of one driver that take part. Each has an index, which stays the same for the life of the driver.
inline constexpr std::size_t most_ports = 16;

/// A port, as a peer needs it to tell whether it reaches it.
struct PortAddress {
  std::uint8_t kind = 0;  // a GidKind
  Gid gid{};
  static constexpr std::tuple fields{&PortAddress::kind, &PortAddress::gid};
  [[nodiscard]] bool valid() const { return kind <= static_cast<std::uint8_t>(GidKind::roce_v2); }
  bool operator==(const PortAddress&) const = default;
};

/// A channel's descriptor: the usable ports of the process, in the order of their indices. Its tag is the version of
/// the records of ibv and cuda_gdr.
struct PortList {
  static constexpr std::uint8_t tag = 2;
  std::vector<PortAddress> ports;
  static constexpr std::tuple fields{at_most(&PortList::ports, most_ports)};
};

/// A queue pair that waits to be connected.
struct OfferedPort {
  std::uint8_t index = 0;
  PortAddress port;
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;
  std::uint32_t queue_pair = 0;
  std::uint32_t first_packet = 0;
  static constexpr std::tuple fields{&OfferedPort::index, &OfferedPort::port,       &OfferedPort::lid,
                                     &OfferedPort::mtu,   &OfferedPort::queue_pair, &OfferedPort::first_packet};
  [[nodiscard]] bool valid() const {
    return index < most_ports && mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 && queue_pair < 1U << 24 &&
           first_packet < 1U << 24;
  }
};

/// Offers queue pairs for one attempt to connect. Attempts count up from 1; either end begins one. `challenge` is
/// random.
struct ConnectPorts {
  static constexpr std::uint8_t tag = 1;
  std::uint32_t attempt = 0;
  std::uint64_t challenge = 0;
  std::vector<OfferedPort> ports;
  static constexpr std::tuple fields{&ConnectPorts::attempt, &ConnectPorts::challenge,
                                     at_most(&ConnectPorts::ports, most_ports)};
};

/// The key by which memory is read through one port.
struct PortKey {
  std::uint8_t port = 0;  // the sender's index
  std::uint32_t key = 0;
  static constexpr std::tuple fields{&PortKey::port, &PortKey::key};
  [[nodiscard]] bool valid() const { return port < most_ports; }
};

/// Says that the sender's queue pairs of this attempt are connected, and that the complement of the receiver's
/// challenge can be read at `address`.
struct PortsConnected {
  static constexpr std::uint8_t tag = 2;
  std::uint32_t attempt = 0;
  std::uint64_t address = 0;
  std::vector<PortKey> keys;
  static constexpr std::tuple fields{&PortsConnected::attempt, &PortsConnected::address,
                                     at_most(&PortsConnected::keys, most_ports)};
};

/// Says that the sender's queue pair on this port, which it made in this attempt, carries nothing any more.
struct PortLost {
  static constexpr std::uint8_t tag = 4;
  std::uint32_t attempt = 0;
  std::uint8_t port = 0;  // the sender's index
  static constexpr std::tuple fields{&PortLost::attempt, &PortLost::port};
  [[nodiscard]] bool valid() const { return port < most_ports; }
};

}  // namespace tensorferry::rdma
