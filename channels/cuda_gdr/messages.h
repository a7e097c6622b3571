/// The control messages and tickets of the cuda_gdr channel. docs/protocol.md, "Reading a GPU's memory by a network
/// card", is normative.
#pragma once

#include <cstdint>
#include <tuple>
#include <variant>
#include <vector>

#include "base/record.h"
#include "channels/empty_buffer.h"
#include "channels/ibv/messages.h"
#include "channels/rdma/messages.h"
#include "channels/resends.h"

namespace tensorferry::cuda_gdr {

/// From the sender: the buffer of a busy ticket can be read now. Not `ok`: its GPU has failed, and the buffer never
/// comes.
struct SourceReady {
  static constexpr std::uint8_t tag = 5;
  std::uint64_t id = 0;  // the ticket's offer
  bool ok = false;
  static constexpr std::tuple fields{varint(&SourceReady::id), &SourceReady::ok};
};
/// From the sender: the busy ticket of an offer that was announced never comes.
struct SourceWithdrawn {
  static constexpr std::uint8_t tag = 6;
  std::uint64_t id = 0;
  static constexpr std::tuple fields{varint(&SourceWithdrawn::id)};
};
/// A nonce in the sender's GPU memory, for the receiver to read.
struct GpuProbe {
  static constexpr std::uint8_t tag = 7;
  std::uint64_t nonce = 0;
  std::uint64_t address = 0;
  std::vector<rdma::PortKey> keys;
  static constexpr std::tuple fields{&GpuProbe::nonce, &GpuProbe::address, at_most(&GpuProbe::keys, rdma::most_ports)};
};
using Control = std::variant<rdma::ConnectPorts, rdma::PortsConnected, Resend, rdma::PortLost, SourceReady,
                             SourceWithdrawn, GpuProbe>;

/// A source whose stream has not reached the buffer yet: SourceReady says when it has.
struct BusySource : ibv::KeyedSource {
  static constexpr std::uint8_t tag = 2;
};
using CudaGdrTicket = std::variant<EmptyBuffer, ibv::KeyedSource, BusySource>;

}  // namespace tensorferry::cuda_gdr
