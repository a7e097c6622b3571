/// What a ticket of a channel within one process holds.
#pragma once

#include <cstdint>
#include <optional>

#include "channels/channel.h"
#include "channels/xth/directory.h"

namespace tensorferry::xth {

/// Which offer of which channel end.
struct Place {
  Id end;
  std::uint64_t number;
};

Ticket ticket_of(std::size_t bytes, const Place& place);
/// nullopt: nonsense.
std::optional<Place> place_of(const Ticket& ticket);

}  // namespace tensorferry::xth
