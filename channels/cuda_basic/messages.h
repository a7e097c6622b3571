/// The descriptor, control messages and ticket of the cuda_basic channel. docs/protocol.md, "Staging GPU memory through
/// the host", is normative.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "base/bytes.h"
#include "base/record.h"
#include "channels/channel.h"
#include "include/tensorferry/device.h"

namespace tensorferry::cuda_basic {

/// The channel's descriptor. Its tag is the version of these records.
struct CudaBasicDescriptor {
  static constexpr std::uint8_t tag = 6;
  DeviceType type = DeviceType::cpu;
  static constexpr std::tuple fields{any_value(&CudaBasicDescriptor::type)};
};

/// How a buffer's bytes travel.
enum class FlowKind : std::uint8_t {
  nowhere = 0,  // the buffer is empty: no bytes travel
  ring = 1,
  bulk = 2,
  later = 3,    // the sender's memory is busy: Announced will say how
  carried = 4,  // as `bulk`, but a ChunkOffer says of each chunk how it travels
  last = carried,
};

/// From the sender: passes the memfd of the ring for the buffers that this end sends.
struct Staging {
  static constexpr std::uint8_t tag = 1;
};
/// From the receiver: says whether it has mapped and page-locked the ring (on the CPU: only mapped it).
struct Mapped {
  static constexpr std::uint8_t tag = 2;
  bool ok = false;
  static constexpr std::tuple fields{&Mapped::ok};
};
/// From the sender: this ticket never arrives, but its bytes do (`later`: its announcement does).
struct Withdrawn {
  static constexpr std::uint8_t tag = 3;
  FlowKind kind = FlowKind::nowhere;
  std::uint64_t first = 0;  // as in the ticket
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{&Withdrawn::kind, varint(&Withdrawn::first), varint(&Withdrawn::bytes)};
  [[nodiscard]] bool valid() const { return kind != FlowKind::nowhere && bytes != 0; }
};
/// From the sender: no more bytes arrive this way.
struct Broken {
  static constexpr std::uint8_t tag = 4;
  FlowKind kind = FlowKind::nowhere;
  static constexpr std::tuple fields{&Broken::kind};
  [[nodiscard]] bool valid() const { return kind == FlowKind::ring || kind == FlowKind::bulk; }
};
/// From the sender: the ring is no longer used. All its buffers have arrived.
struct Unstaged {
  static constexpr std::uint8_t tag = 5;
};
/// From the sender: the buffer of the ticket {later, id} is no longer busy, and travels now. The rest is what its
/// ticket would have said otherwise.
struct Announced {
  static constexpr std::uint8_t tag = 6;
  std::uint64_t id = 0;
  FlowKind kind = FlowKind::bulk;
  std::uint64_t first = 0;
  static constexpr std::tuple fields{varint(&Announced::id), &Announced::kind, varint(&Announced::first)};
  [[nodiscard]] bool valid() const { return kind != FlowKind::nowhere && kind != FlowKind::later; }
};
/// From the sender: the chunk of this number, of a buffer of FlowKind::carried, can be fetched now.
struct ChunkOffer {
  static constexpr std::uint8_t tag = 7;
  std::uint64_t number = 0;
  std::string carrier;  // the channel that carries it (Wire::carrier); empty: it comes as bulk data
  Bytes ticket;         // the carrier's ticket
  static constexpr std::tuple fields{varint(&ChunkOffer::number), at_most(&ChunkOffer::carrier, 64),
                                     &ChunkOffer::ticket};
  [[nodiscard]] bool valid() const { return ticket.size() <= Ticket::max_bytes; }
};
/// From the receiver: the source of that chunk is no longer read.
struct ChunkRead {
  static constexpr std::uint8_t tag = 8;
  std::uint64_t number = 0;
  static constexpr std::tuple fields{varint(&ChunkRead::number)};
};
using Control = std::variant<Staging, Mapped, Withdrawn, Broken, Unstaged, Announced, ChunkOffer, ChunkRead>;

/// The content of a ticket: the way of the bytes, and the number of the buffer's first chunk. Chunks count from 1. 0:
/// the bytes never come, because the sender's GPU has failed. Of FlowKind::later, `first` is the buffer's id, which is
/// unique among the sender's tickets of this kind.
struct CudaBasicTicket {
  FlowKind kind = FlowKind::nowhere;
  std::uint64_t first = 0;
  static constexpr std::tuple fields{&CudaBasicTicket::kind, varint(&CudaBasicTicket::first)};
};

}  // namespace tensorferry::cuda_basic
