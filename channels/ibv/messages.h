/// The control messages and tickets of the ibv channel. docs/protocol.md, "Reading by a network card", is
/// normative.
#pragma once

#include <cstdint>
#include <tuple>
#include <variant>
#include <vector>

#include "base/record.h"
#include "channels/empty_buffer.h"
#include "channels/rdma/messages.h"
#include "channels/resends.h"

namespace tensorferry::ibv {

/// Control messages.
using Control = std::variant<rdma::ConnectPorts, rdma::PortsConnected, Resend, rdma::PortLost>;

/// The place of a buffer in the sender's memory, with the key for each port through which it may be read.
struct KeyedSource {
  static constexpr std::uint8_t tag = 1;
  std::uint64_t offer = 0;
  std::uint64_t address = 0;
  std::vector<rdma::PortKey> keys;
  static constexpr std::tuple fields{varint(&KeyedSource::offer), &KeyedSource::address,
                                     at_most(&KeyedSource::keys, rdma::most_ports)};
};
/// Memory of the sender that the receiver reaches by one-sided transfers. Travels in messages of the layers above.
struct KeyedMemory {
  static constexpr std::uint8_t tag = 1;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  bool write = false;  // the receiver may write it
  std::vector<rdma::PortKey> keys;
  static constexpr std::tuple fields{&KeyedMemory::address, &KeyedMemory::bytes, &KeyedMemory::write,
                                     at_most(&KeyedMemory::keys, rdma::most_ports)};
};

/// A ticket.
using IbvTicket = std::variant<EmptyBuffer, KeyedSource>;

}  // namespace tensorferry::ibv
