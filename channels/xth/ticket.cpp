#include "channels/xth/ticket.h"

namespace tensorferry::xth {

Ticket ticket_of(std::size_t bytes, const XthTicket& parsed) {
  Ticket ticket{.bytes = bytes, .opaque = {}, .acknowledge = true};
  Writer out(ticket.opaque);
  out.put(parsed.end[0]);
  out.put(parsed.end[1]);
  out.varint(parsed.number);
  return ticket;
}

std::optional<XthTicket> parse_ticket(const Ticket& ticket) {
  Reader in(ticket.opaque);
  XthTicket parsed{};
  parsed.end[0] = in.get<std::uint64_t>();
  parsed.end[1] = in.get<std::uint64_t>();
  parsed.number = in.varint();
  if (in.failed() || !in.empty()) return std::nullopt;
  return parsed;
}

}  // namespace tensorferry::xth
