/// What two ends of a cuda_basic channel say to each other, and what a ticket holds: docs/protocol.md, "Staging GPU
/// memory through the host", is normative.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "channels/bytes.h"

namespace tensorferry::cuda_basic {

inline constexpr std::uint8_t version = 3;  // of all this

/// How bytes go.
enum class Way : std::uint8_t {
  nowhere = 0,  // the buffer is empty
  ring = 1,
  bulk = 2,
};

/// A ring for what this end sends, in the memfd that comes along.
struct Staging {};
/// Whether the other end's ring could be mapped and page-locked here.
struct Mapped {
  bool ok = false;
};
/// The sender's: this ticket never comes, but its bytes do.
struct Withdrawn {
  Way way = Way::nowhere;
  std::uint64_t first = 0;
  std::uint64_t bytes = 0;
};
/// The sender's: nothing more comes this way.
struct Broken {
  Way way = Way::nowhere;
};
using Control = std::variant<Staging, Mapped, Withdrawn, Broken>;

Bytes encode(const Control& control);
/// nullopt: nonsense.
std::optional<Control> control_of(ByteView bytes);

/// A ticket: which way the bytes come, and the number of the first chunk.
struct Place {
  Way way = Way::nowhere;
  std::uint64_t first = 0;
};
Bytes encode(const Place& place);
std::optional<Place> place_of(ByteView bytes);

}  // namespace tensorferry::cuda_basic
