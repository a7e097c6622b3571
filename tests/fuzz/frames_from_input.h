/// Makes frames from a fuzzer's input, as from a peer that mostly keeps to the protocol. The input chooses among valid
/// kinds, existing functions and well-formed tickets. Besides its records, a frame has at most one deliberate error.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "agent/wire/frame.h"
#include "base/bytes.h"

namespace tensorferry::fuzzing {

inline std::uint64_t size_from(Reader& in) {
  constexpr std::array<std::uint64_t, 8> sizes{4096,   5000,    70'000,     300'000,
                                               10'000, 1 << 21, 1ULL << 40, (1ULL << 62) - 1};
  const auto choice = in.get<std::uint8_t>();
  return choice < 248 ? choice : sizes[choice - 248U];
}

inline constexpr std::uint8_t basic = 2;  // its index among the agent's channels: mail, xth, basic
inline constexpr Device gpu{DeviceType::cuda, 0};

/// Returns a call id that either side may use. The agent's ids are slots with generations; a link's first is 1 << 32.
inline std::uint64_t call_from(Reader& in) {
  const auto choice = in.get<std::uint8_t>();
  return (choice & 0x80) != 0 ? std::uint64_t{choice & 7U} : std::uint64_t{1U + (choice >> 6)} << 32 | (choice & 7U);
}

/// Turns a record into that of a bundle. Mostly its parts add up to the bundle and name buffers of the message.
inline void bundle_from(Reader& in, wire::BufferRecord& record) {
  const auto choice = in.get<std::uint8_t>();
  std::uint64_t end = 0;
  std::uint32_t index = choice >> 7;
  for (unsigned left = choice % 4U + 1; left > 0; --left) {
    const std::uint64_t bytes = in.get<std::uint8_t>() + ((choice & 0x40) != 0 ? 0U : 1U);
    end = Bundle::next_part(end) + bytes;
    record.parts.push_back({index, bytes});
    index += 1U + ((choice & 0x20) != 0 ? in.get<std::uint8_t>() : 0U);
  }
  record.bytes = (choice & 0x10) != 0 ? record.bytes : end;
}

/// Writes a buffer record. Returns how many bytes an honest peer would send behind the frame for it.
inline std::uint64_t put_record(Reader& in, Bytes& out, bool in_spill) {
  constexpr std::array<std::uint8_t, 8> channels{0, 1, 2, 3, 0xff, 0xff, 0xff, 77};
  const auto form = in.get<std::uint8_t>();
  wire::BufferRecord record;
  record.channel = channels[form % channels.size()];
  record.bytes = size_from(in);
  record.release = form >> 6;
  const auto way = in.get<std::uint8_t>();
  record.destination = way >> 4 == 15 ? gpu : Device();
  record.source = way >> 4 == 14 ? gpu : Device();
  record.after = way >> 4 == 13 ? in.get<std::uint8_t>() : 0;
  Bytes ticket;
  Writer writer(ticket);
  switch (way % 8) {
    case 0:
    case 1:
      writer.put(std::uint8_t{1});  // basic: the bytes are behind the frame
      break;
    case 2:
      writer.put(std::uint8_t{2});  // basic: the bytes are on the bulk connection
      writer.varint(in.get<std::uint8_t>() % 4);
      break;
    case 3:
      writer.put(std::uint8_t{0});
      break;
    case 4:
      writer.put(std::uint32_t{in.get<std::uint8_t>() % 4U});  // a ticket of the channel mail
      break;
    default:
      writer.raw(in.raw(std::min<std::size_t>(in.get<std::uint8_t>() % 64, in.rest().size())));
  }
  if (record.channel == wire::BufferRecord::inline_channel) {
    const auto cut = way % 8 == 7 ? 1U : 0U;  // the buffer ends outside of its bytes
    record.bytes = std::min<std::uint64_t>(record.bytes, 5000);
    ticket.resize(record.bytes - std::min<std::uint64_t>(cut, record.bytes));
  }
  record.ticket = ticket;
  if (way % 8 == 6 || way % 8 == 1) bundle_from(in, record);
  Writer records(out);
  record.encode(records);
  const bool appended = !in_spill && record.channel != wire::BufferRecord::inline_channel && way % 8 < 2;
  return appended ? std::min<std::uint64_t>(record.bytes, 300'000) : 0;
}

inline Bytes extensions_from(Reader& in, std::uint8_t choice) {
  constexpr std::array<std::string_view, 7> names{"echo", "later", "wait", "back", "nothing", "", "echo"};
  Bytes out;
  Writer writer(out);
  if ((choice & 1) != 0) {
    wire::put_extension(writer, wire::extension::function_name, view_of(names[in.get<std::uint8_t>() % names.size()]));
  }
  if ((choice & 2) != 0) {
    const std::array<std::uint64_t, 3> releases{1, 2, in.get<std::uint8_t>()};
    wire::put_extension(writer, wire::extension::releases, std::as_bytes(std::span(releases)));
  }
  if ((choice & 4) != 0) {
    const std::uint32_t number = in.get<std::uint8_t>() % 8U;
    wire::put_extension(writer, wire::extension::function_number, std::as_bytes(std::span(&number, 1)));
  }
  if ((choice & 8) != 0) wire::put_extension(writer, in.get<std::uint8_t>(), in.sized());
  return out;
}

/// Returns a payload. That of a control frame begins with an operation and the code of a channel, mostly valid ones.
inline Bytes payload_from(Reader& in, wire::Kind kind) {
  Bytes out;
  Writer writer(out);
  if (kind == wire::Kind::control) {
    const auto choice = in.get<std::uint8_t>();
    writer.put(static_cast<std::uint8_t>(choice % 6));
    writer.put(static_cast<std::uint32_t>(choice >> 6) << 24 | ((choice & 0x30) == 0x30 ? 0x100U : 0U));
  }
  writer.raw(in.raw(std::min<std::size_t>(in.get<std::uint8_t>(), in.rest().size())));
  return out;
}

/// A frame under construction, and the bytes behind it.
struct FrameBuilder {
  wire::Header header;
  Bytes extensions, records, payload, behind;
  unsigned count = 0;  // the number of records

  [[nodiscard]] Bytes assemble() {
    auto bytes = wire::assemble(header, extensions, records, payload);
    bytes.insert(bytes.end(), behind.begin(), behind.end());
    return bytes;
  }
};

/// Moves records and payload into one buffer, inside the frame or behind it.
inline void spill(FrameBuilder& builder, bool in_frame, Device destination, bool miscounted) {
  Bytes body;
  Writer writer(body);
  writer.put(builder.count + (miscounted ? 1U : 0U));
  writer.raw(builder.records);
  writer.raw(builder.payload);
  builder.records.clear();
  builder.payload.clear();
  const Bytes appended{std::byte{1}};
  wire::BufferRecord record;
  record.channel = in_frame ? wire::BufferRecord::inline_channel : basic;
  record.bytes = body.size();
  record.ticket = in_frame ? ByteView(body) : ByteView(appended);
  record.destination = destination;
  Writer records(builder.records);
  record.encode(records);
  builder.count = 1;
  builder.header.flags |= wire::flag::spilled;
  if (!in_frame) builder.behind = std::move(body);
}

struct Sent {
  Bytes bytes;
  std::size_t descriptors = 0;
};

/// Returns a frame of `kind`, mostly well-formed. `controls` counts the control frames so far.
inline Sent frame_from(Reader& in, wire::Kind kind, std::uint64_t& controls) {
  const auto form = in.get<std::uint8_t>();
  const auto lie = (form & 0xc0) == 0xc0 ? in.get<std::uint8_t>() % 16 : 0;
  const bool message = kind == wire::Kind::request || kind == wire::Kind::reply;
  FrameBuilder builder;
  auto& header = builder.header;
  header.kind = kind;
  builder.extensions = extensions_from(in, form & 15);
  header.call = kind == wire::Kind::control ? ++controls : call_from(in);
  if (kind == wire::Kind::request) {
    header.function = (form & 1) != 0 ? 0 : in.get<std::uint8_t>() % 8;
    header.order = in.get<std::uint8_t>() % 3;
    header.remaining_ms = lie == 1 ? 1 : 0;
  }
  if (kind == wire::Kind::reply && lie == 2) header.flags = wire::flag::error;
  if (message) builder.count = in.get<std::uint8_t>() % 5U;
  const bool spilled = message && (form & 0x30) == 0x30;
  std::uint64_t behind = 0;
  for (unsigned i = 0; i < builder.count; ++i) behind += put_record(in, builder.records, spilled);
  builder.behind.resize(behind);
  builder.payload = payload_from(in, kind);
  if (spilled) spill(builder, (form & 1) != 0, lie == 3 ? gpu : Device(), lie == 4);
  if (kind == wire::Kind::bulk) {
    builder.behind.resize(size_from(in) % 5000);
    builder.payload.clear();
    header.sequence = in.get<std::uint8_t>() % 4;
    header.channel = lie == 5 ? 0U : std::uint32_t{basic} << 24;
  }
  header.trailing = builder.behind.size() + (lie == 6 ? 1 : 0);
  if (lie == 7 && !builder.behind.empty()) builder.behind.pop_back();
  header.buffers = static_cast<std::uint16_t>(builder.count + (lie == 8 ? 1U : 0U));
  if (lie == 9 || kind == wire::Kind::control) header.descriptors = in.get<std::uint8_t>() % 4;
  if (lie == 11) header.call = in.get<std::uint64_t>();
  return {builder.assemble(), lie == 10 ? 0U : header.descriptors};
}

}  // namespace tensorferry::fuzzing
