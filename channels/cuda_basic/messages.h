/// The control messages and the ticket of the cuda_basic channel. docs/protocol.md, "Staging GPU memory through the
/// host", is normative.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "base/bytes.h"

namespace tensorferry::cuda_basic {

inline constexpr std::uint8_t version = 3;  // of the messages and the ticket

/// How a buffer's bytes travel.
enum class FlowKind : std::uint8_t {
  nowhere = 0,  // the buffer is empty: no bytes travel
  ring = 1,
  bulk = 2,
};

/// From the sender: passes the memfd of the ring for the buffers that this end sends.
struct Staging {};
/// From the receiver: says whether it has mapped and page-locked the ring (on the CPU: only mapped it).
struct Mapped {
  bool ok = false;
};
/// From the sender: this ticket never arrives, but its bytes do.
struct Withdrawn {
  FlowKind kind = FlowKind::nowhere;
  std::uint64_t first = 0;
  std::uint64_t bytes = 0;
};
/// From the sender: no more bytes arrive this way.
struct Broken {
  FlowKind kind = FlowKind::nowhere;
};
using Control = std::variant<Staging, Mapped, Withdrawn, Broken>;

Bytes encode(const Control& control);
/// Parses a control message; returns nullopt if it is malformed.
std::optional<Control> control_of(ByteView bytes);

/// The content of a ticket: the way of the bytes, and the number of the buffer's first chunk.
struct CudaBasicTicket {
  FlowKind kind = FlowKind::nowhere;
  std::uint64_t first = 0;
};
Bytes encode(const CudaBasicTicket& parsed);
/// Parses a ticket; returns nullopt if it is malformed.
std::optional<CudaBasicTicket> parse_ticket(ByteView bytes);

}  // namespace tensorferry::cuda_basic
