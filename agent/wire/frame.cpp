#include "agent/wire/frame.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace tensorferry::wire {
namespace {

Status malformed(std::string what) { return {Code::protocol_error, "malformed frame: " + std::move(what)}; }

constexpr std::uint64_t most_bytes = std::uint64_t{1} << 62;  // keeps sums from overflowing
constexpr std::uint8_t bundle = 1;                            // form of a buffer record
constexpr std::uint64_t most_in_bundles = 1U << 30;           // largest index of a bundled buffer in a message

}  // namespace

void Header::forget_descriptors(Bytes& frame) { frame[offsetof(Header, descriptors)] = std::byte{0}; }

Result<Header> Header::decode(ByteView bytes) {
  if (bytes.size() < size) return malformed("shorter than a header");
  Header header;
  std::memcpy(&header, bytes.data(), size);
  header.unused = 0;
  const auto kind = static_cast<int>(header.kind);
  if (kind < static_cast<int>(Kind::hello) || kind > static_cast<int>(Kind::go)) {
    return malformed("unknown kind " + std::to_string(kind));
  }
  if (header.length > max_length) {
    return malformed("body of " + std::to_string(header.length) + " bytes, at most " + std::to_string(max_length));
  }
  if (header.extensions > header.length) return malformed("extension records longer than the body");
  const bool message = header.kind == Kind::request || header.kind == Kind::reply;
  if (header.trailing != 0 && header.kind != Kind::bulk && !(message && header.buffers != 0)) {
    return malformed("bytes follow a frame that carries no buffers");
  }
  if (header.trailing >= most_bytes) return malformed("2^62 bytes or more follow it");
  return header;
}

void put_extension(Writer& out, std::uint16_t id, ByteView bytes) {
  out.put(id);
  out.put(static_cast<std::uint16_t>(bytes.size()));
  out.raw(bytes);
}

Bytes encode_placement(const std::vector<std::pair<Device, Device>>& placement) {
  Bytes out;
  Writer writer(out);
  for (const auto& [from, to] : placement) {
    write(writer, from);
    write(writer, to);
  }
  return out;
}

void BufferRecord::encode(Writer& out) const {
  out.put(channel);
  write(out, source);
  write(out, destination);
  out.put(static_cast<std::uint8_t>(parts.empty() ? 0 : bundle));
  out.put(static_cast<std::uint16_t>(channel == inline_channel ? 0 : ticket.size()));
  out.put(bytes);
  out.put(release);
  out.put(after);
  out.raw(ticket);
  if (parts.empty()) return;
  out.varint(parts.size());
  std::uint32_t next = 0;
  for (const auto& part : parts) {
    out.varint(part.index - next);
    out.varint(part.bytes);
    next = part.index + 1;
  }
}

std::uint64_t BufferRecord::net_bytes() const {
  if (parts.empty()) return bytes;
  return std::accumulate(parts.begin(), parts.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Part& part) { return sum + part.bytes; });
}

std::size_t BufferRecord::count(const std::vector<BufferRecord>& records) {
  return std::accumulate(records.begin(), records.end(), std::size_t{0}, [](std::size_t sum, const auto& record) {
    return sum + std::max<std::size_t>(1, record.parts.size());
  });
}

std::uint64_t message_bytes(std::size_t payload, const std::vector<BufferRecord>& buffers) {
  // The sink, the ticket and the pull of a buffer take memory until it has landed, also if it is empty.
  const std::uint64_t least = 512;
  std::uint64_t sum = payload;
  for (const auto& record : buffers) sum += std::min(std::max(record.bytes, least), ~std::uint64_t{0} - sum);
  return sum;
}

namespace {

Status read_extensions(Reader in, Frame& frame) {
  while (!in.empty()) {
    const auto id = in.get<std::uint16_t>();
    const auto length = in.get<std::uint16_t>();
    const auto bytes = in.raw(length);
    if (in.failed()) return malformed("an extension record ends outside its frame");
    Reader record(bytes);
    if (id == extension::function_name) frame.function_name = bytes;
    if (id == extension::function_number) frame.function_number = record.get<std::uint32_t>();
    if (id == extension::releases) {
      frame.releases.reserve(bytes.size() / 8);
      for (std::size_t i = 0; i < bytes.size() / 8; ++i) frame.releases.push_back(record.get<std::uint64_t>());
    }
    if (id == extension::placement) {
      if (bytes.size() % 4 != 0 || bytes.size() / 4 > most_placements) return malformed("a placement of an odd length");
      for (std::size_t i = 0; i < bytes.size() / 4; ++i) {
        const auto from = read<Device>(record);
        frame.placement.emplace_back(from, read<Device>(record));
      }
    }
    if (record.failed()) return malformed("extension record " + std::to_string(id) + " is too short");
  }
  return {};
}

/// Reads the parts of a bundle. Their sizes determine their offsets, and the size that the bundle must have.
Status read_parts(Reader& in, BufferRecord& record) {
  const auto count = in.count(2);
  if (in.failed() || count == 0) return malformed("a bundle of no buffers");
  if (record.channel == BufferRecord::inline_channel || record.source != Device() || record.destination != Device()) {
    return malformed("a bundle is inline, or not in host memory");
  }
  record.parts.reserve(count);
  std::uint64_t next = 0, end = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto gap = in.varint();
    const auto bytes = in.varint();
    end = Bundle::next_part(end) + bytes;
    if (gap > most_in_bundles || bytes == 0 || bytes > record.bytes || end > record.bytes) break;
    record.parts.push_back({static_cast<std::uint32_t>(next + gap), bytes});
    next += gap + 1;
    if (next > most_in_bundles) break;
  }
  if (in.failed() || record.parts.size() != count || end != record.bytes) {
    return malformed("the buffers of a bundle do not lie in it");
  }
  return {};
}

/// Gives the ordinary buffers, in order, the indices in the message that no bundle takes.
Status place(std::vector<BufferRecord>& records) {
  std::vector<bool> taken(BufferRecord::count(records));
  for (const auto& record : records) {
    for (const auto& part : record.parts) {
      if (part.index >= taken.size() || taken[part.index])
        return malformed("a bundle names a buffer of another bundle, or a buffer that the message does not have");
      taken[part.index] = true;
    }
  }
  std::uint32_t next = 0;
  for (auto& record : records) {
    if (!record.parts.empty()) continue;
    while (taken[next]) ++next;
    record.index = next++;
  }
  return {};
}

Result<BufferRecord> read_record(Reader& in) {
  BufferRecord record;
  record.channel = in.get<std::uint8_t>();
  record.source = read<Device>(in);
  record.destination = read<Device>(in);
  const auto form = in.get<std::uint8_t>();
  const auto ticket = in.get<std::uint16_t>();
  record.bytes = in.get<std::uint64_t>();
  record.release = in.get<std::uint64_t>();
  record.after = in.get<std::uint64_t>();
  record.ticket = in.raw(record.channel == BufferRecord::inline_channel ? record.bytes : ticket);
  if (in.failed()) return malformed("a buffer record ends outside its frame");
  if (record.bytes >= most_bytes) return malformed("a buffer of 2^62 bytes or more");
  if (form > bundle) return malformed("a buffer record of an unknown form");
  if (form == bundle) {
    if (auto status = read_parts(in, record); !status) return status;
  }
  return record;
}

}  // namespace

Status BufferRecord::decode_all(Reader& in, std::size_t count, std::vector<BufferRecord>& records) {
  if (count > in.rest().size() / size) return malformed("it names more buffers than fit its body");
  records.reserve(count);
  bool bundles = false;
  for (std::size_t i = 0; i < count; ++i) {
    auto record = read_record(in);
    if (!record) return record.status();
    record->index = static_cast<std::uint32_t>(i);
    bundles = bundles || !record->parts.empty();
    records.push_back(*std::move(record));
  }
  return bundles ? place(records) : Status();
}

Result<Frame> Frame::decode(const Header& header, ByteView body) {
  if (body.size() != header.length) return malformed("the body has another length than the header says");
  Frame frame;
  frame.header = header;
  if (auto status = read_extensions(Reader(body.first(header.extensions)), frame); !status) return status;
  Reader in(body.subspan(header.extensions));
  if (auto status = BufferRecord::decode_all(in, header.buffers, frame.buffers); !status) return status;
  if ((header.flags & flag::spilled) != 0 && (frame.buffers.size() != 1 || !frame.buffers.front().parts.empty())) {
    return malformed("a spilled frame must have exactly one buffer");
  }
  if ((header.flags & flag::spilled) != 0 && frame.buffers.front().destination != Device()) {
    return malformed("the buffer with the rest of the frame is for " + text_of(frame.buffers.front().destination));
  }
  frame.payload = in.rest();
  return frame;
}

Result<Hello> Hello::decode(ByteView bytes) {
  Reader in(bytes);
  auto hello = read<Hello>(in);  // a later version may append more bytes
  if (in.failed()) return malformed("the hello is truncated, or has too many devices or channels");
  if (hello.purpose < Hello::Purpose::calls || hello.purpose > Hello::Purpose::bulk_back) {
    return malformed("the hello has the unknown purpose " + std::to_string(static_cast<int>(hello.purpose)));
  }
  if (hello.name.empty() || hello.incarnation == 0) return malformed("the hello has no name or no incarnation");
  return hello;
}

Bytes encode_status(const Status& status) {
  Bytes out;
  Writer writer(out);
  writer.put(status.code());
  // Cuts the text, so that the error reply fits a frame.
  writer.sized(status.what().substr(0, 32 * 1024));
  return out;
}

Status decode_status(ByteView payload) {
  Reader in(payload);
  const auto code = in.get<std::uint8_t>();
  std::string what(in.text());
  if (in.failed() || code == 0 || code >= code_count) {
    return {Code::protocol_error, "an error reply that cannot be read"};
  }
  return {static_cast<Code>(code), std::move(what)};
}

Bytes assemble(Header header, ByteView extensions, ByteView records, ByteView payload) {
  header.extensions = static_cast<std::uint16_t>(extensions.size());
  header.length = static_cast<std::uint32_t>(extensions.size() + records.size() + payload.size());
  Bytes out;
  out.reserve(Header::size + header.length);
  const auto head = header.encoded();
  out.insert(out.end(), head.begin(), head.end());
  out.insert(out.end(), extensions.begin(), extensions.end());
  out.insert(out.end(), records.begin(), records.end());
  out.insert(out.end(), payload.begin(), payload.end());
  return out;
}

}  // namespace tensorferry::wire
