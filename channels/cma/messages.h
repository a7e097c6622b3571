/// The control messages and tickets of the cma channel. docs/protocol.md, "Reading the sender's memory", is normative.
/// The functions are pure: any thread may call them.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "base/bytes.h"
#include "channels/cma/process.h"

namespace tensorferry::cma {

inline constexpr std::uint8_t version = 1;  // of these messages and tickets, and of the channel's descriptor

/// Control messages.
struct Challenge {
  std::uint64_t random = 0;
};
/// Says that the complement of the challenge stands at `address` in the memory of `process`, while the channel is open.
struct WordAddress {
  Identity process;
  std::uint64_t address = 0;
};
/// Asks the sender for a buffer as bulk data: the receiver could not read it. The receiver counts `sequence` up.
struct Resend {
  std::uint64_t sequence = 0;
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
};
using Control = std::variant<Challenge, WordAddress, Resend>;

Bytes encode(const Control& control);
/// Decodes a control message. Returns nullopt if it is malformed.
std::optional<Control> control_of(ByteView bytes);

/// A ticket: an empty buffer, or the place of the buffer in the sender's memory.
struct Nothing {};
struct SourceAddress {
  std::uint64_t offer = 0;
  std::uint64_t address = 0;
};
using Opaque = std::variant<Nothing, SourceAddress>;

Bytes encode(const Opaque& opaque);
/// Decodes a ticket. Returns nullopt if it is malformed.
std::optional<Opaque> opaque_of(ByteView bytes);

}  // namespace tensorferry::cma
