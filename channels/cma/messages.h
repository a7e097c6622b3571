/// What two ends of a cma channel say to each other, and what a ticket holds: docs/protocol.md, "Reading the sender's
/// memory", is normative.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "channels/bytes.h"
#include "channels/cma/process.h"

namespace tensorferry::cma {

inline constexpr std::uint8_t version = 1;  // of all this

/// Control messages.
struct Challenge {
  std::uint64_t random = 0;
};
/// The complement of the challenge stands at `address` in the memory of this process, as long as the channel is open.
struct Answer {
  Identity process;
  std::uint64_t address = 0;
};
/// The receiver could not read the buffer: send it as bulk data, under a sequence that the receiver counts up.
struct Resend {
  std::uint64_t sequence = 0;
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
};
using Control = std::variant<Challenge, Answer, Resend>;

Bytes encode(const Control& control);
/// nullopt: nonsense.
std::optional<Control> control_of(ByteView bytes);

/// A ticket: there is nothing to read, or where it stands in the sender's memory.
struct Nothing {};
struct Place {
  std::uint64_t offer = 0;
  std::uint64_t address = 0;
};
using Opaque = std::variant<Nothing, Place>;

Bytes encode(const Opaque& opaque);
std::optional<Opaque> opaque_of(ByteView bytes);

}  // namespace tensorferry::cma
