/// The contents of a ticket of a channel within one process (xth, cuda_xth).
#pragma once

#include <cstdint>
#include <optional>

#include "channels/channel.h"
#include "channels/xth/directory.h"

namespace tensorferry::xth {

/// Names an offer: the id of its channel end, and its number there.
struct Place {
  Id end;
  std::uint64_t number;
};

Ticket ticket_of(std::size_t bytes, const Place& place);
/// Returns nullopt if the ticket is malformed.
std::optional<Place> place_of(const Ticket& ticket);

}  // namespace tensorferry::xth
