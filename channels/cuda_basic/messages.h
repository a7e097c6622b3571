/// What two ends of a cuda_basic channel say to each other, and what a ticket holds: docs/protocol.md, "Staging GPU
/// memory through the host", is normative.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "channels/bytes.h"

namespace tensorferry::cuda_basic {

inline constexpr std::uint8_t version = 2;  // of all this

/// A ring for what this end sends, in the memfd that comes along.
struct Staging {};
/// Whether the other end's ring could be mapped and page-locked here.
struct Mapped {
  bool ok = false;
};
/// The receiver pulls: bytes of offers flow in the order of their requests, by ring or as bulk data.
struct Request {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  bool ring = false;
};
using Control = std::variant<Staging, Mapped, Request>;

Bytes encode(const Control& control);
/// nullopt: nonsense.
std::optional<Control> control_of(ByteView bytes);

/// A ticket: which offer, and which way its bytes will come. Offer 0 is the empty buffer, for which nothing does.
struct Opaque {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  bool ring = false;
};
Bytes encode(const Opaque& opaque);
std::optional<Opaque> opaque_of(ByteView bytes);

}  // namespace tensorferry::cuda_basic
