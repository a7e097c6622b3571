#include "channels/xth/ticket.h"

namespace tensorferry::xth {

Ticket ticket_of(std::size_t bytes, const Place& place) {
  Ticket ticket{.bytes = bytes, .opaque = {}, .acknowledge = true};
  Writer out(ticket.opaque);
  out.put(place.end[0]);
  out.put(place.end[1]);
  out.varint(place.number);
  return ticket;
}

std::optional<Place> place_of(const Ticket& ticket) {
  Reader in(ticket.opaque);
  Place place{};
  place.end[0] = in.get<std::uint64_t>();
  place.end[1] = in.get<std::uint64_t>();
  place.number = in.varint();
  if (in.failed() || !in.empty()) return std::nullopt;
  return place;
}

}  // namespace tensorferry::xth
