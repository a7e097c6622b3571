/// The tickets of channel basic, as docs/channels.md gives their bytes.
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace tensorferry {

/// The bytes follow the frame.
inline const Bytes appended_ticket{std::byte{1}};
/// They come on a bulk connection, under a sequence number.
inline Bytes bulk_ticket(std::uint64_t sequence) {
  Bytes ticket;
  Writer writer(ticket);
  writer.put(std::uint8_t{2});
  writer.varint(sequence);
  return ticket;
}
/// They come on bulk connections in pieces of `piece` bytes, under sequence numbers from `first` on.
inline Bytes pieces_ticket(std::uint64_t first, std::uint64_t piece) {
  Bytes ticket;
  Writer writer(ticket);
  writer.put(std::uint8_t{3});
  writer.varint(first);
  writer.varint(piece);
  return ticket;
}

}  // namespace tensorferry
