/// The contents of a ticket of a channel within one process (xth, cuda_xth).
#pragma once

#include <cstdint>
#include <optional>

#include "channels/channel.h"
#include "channels/xth/directory.h"

namespace tensorferry::xth {

/// Names an offer: the id of its channel end, and its number there.
struct XthTicket {
  Id end;
  std::uint64_t number;
};

Ticket ticket_of(std::size_t bytes, const XthTicket& parsed);
/// Returns nullopt if the ticket is malformed.
std::optional<XthTicket> parse_ticket(const Ticket& ticket);

}  // namespace tensorferry::xth
