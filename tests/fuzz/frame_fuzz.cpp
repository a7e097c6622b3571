// Fuzzes the parsers of frames. The first byte of the input chooses:
// - 0: a header with its body
// - 1: a hello
// - 2: an error reply
// - 3: the contents of a spilled buffer
// - 4, 5: a connection for calls, one for bulk data; the input sets the sizes of the pieces that are read
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "tests/fuzz/descriptors.h"
#include "tests/fuzz/record_input.h"

namespace {

using namespace tensorferry;
using fuzzing::must;
using wire::Header;

bool same(ByteView a, ByteView b) { return text_of(a) == text_of(b); }
bool inside(ByteView part, ByteView whole) {
  return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

bool same(const Header& a, const Header& b) { return same(a.encoded(), b.encoded()); }
bool same(const wire::BufferRecord& a, const wire::BufferRecord& b) {
  return a.channel == b.channel && a.source == b.source && a.destination == b.destination && a.bytes == b.bytes &&
         a.release == b.release && a.after == b.after && same(a.ticket, b.ticket) && a.parts == b.parts &&
         a.index == b.index;
}
bool same(const std::vector<wire::BufferRecord>& a, const std::vector<wire::BufferRecord>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return same(x, y); });
}

/// Checks that each of the message's buffers has one place, and that the parts of a bundle fill it.
void placed(const std::vector<wire::BufferRecord>& records) {
  std::vector<int> places(wire::BufferRecord::count(records));
  for (const auto& record : records) {
    if (record.parts.empty()) ++places.at(record.index);
    std::uint64_t end = 0;
    for (const auto& part : record.parts) {
      ++places.at(part.index);
      end = Bundle::next_part(end) + part.bytes;
    }
    must(record.parts.empty() || end == record.bytes);
  }
  must(std::all_of(places.begin(), places.end(), [](int times) { return times == 1; }));
}

Bytes encode(const std::vector<wire::BufferRecord>& records) {
  Bytes out;
  Writer writer(out);
  for (const auto& record : records) record.encode(writer);
  return out;
}

// ---- One frame

/// Encodes the extension records that this version knows.
Bytes extensions_of(const wire::Frame& frame) {
  Bytes out;
  Writer writer(out);
  const auto number = std::as_bytes(std::span(&frame.function_number, 1));
  if (!frame.function_name.empty()) wire::put_extension(writer, wire::extension::function_name, frame.function_name);
  if (frame.function_number != 0) wire::put_extension(writer, wire::extension::function_number, number);
  if (!frame.releases.empty()) {
    wire::put_extension(writer, wire::extension::releases, std::as_bytes(std::span(frame.releases)));
  }
  return out;
}

void frame(ByteView input) {
  const auto header = Header::decode(input.first(std::min(input.size(), Header::size)));
  if (!header) return must(header.status().code() == Code::protocol_error);
  auto head = *header;
  head.unused = std::to_integer<std::uint8_t>(input[7]);  // which is not read
  must(same(head.encoded(), input.first(Header::size)));

  const auto body = input.subspan(Header::size);
  const auto decoded = wire::Frame::decode(*header, body);
  if (!decoded) return must(decoded.status().code() == Code::protocol_error);
  must(decoded->buffers.size() == header->buffers && inside(decoded->payload, body));
  for (const auto& record : decoded->buffers) must(inside(record.ticket, body));
  placed(decoded->buffers);

  const auto bytes =
      wire::assemble(*header, extensions_of(*decoded), encode(decoded->buffers), ByteView(decoded->payload));
  const auto again_header = Header::decode(ByteView(bytes).first(Header::size));
  must(again_header.ok());
  const auto again = wire::Frame::decode(*again_header, ByteView(bytes).subspan(Header::size));
  must(again.ok() && same(again->buffers, decoded->buffers) && same(again->payload, decoded->payload));
  must(same(again->function_name, decoded->function_name) && again->function_number == decoded->function_number);
  must(again->releases == decoded->releases);
  auto as_before = again->header;
  as_before.length = header->length;
  as_before.extensions = header->extensions;
  must(same(as_before, *header));
}

void hello(ByteView input) {
  const auto said = wire::Hello::decode(input);
  must(said.ok() || said.status().code() == Code::protocol_error);
  fuzzing::fuzz_records<wire::Hello>(input);
  fuzzing::fuzz_records<wire::CallStatus>(input);
}

void error_reply(ByteView input) {
  const auto status = wire::decode_status(input);
  must(!status.ok());
  const auto again = wire::decode_status(wire::encode_status(status));
  must(again.code() == status.code() && again.what() == status.what().substr(0, again.what().size()));
}

void spilled(ByteView input) {
  Reader in(input);
  const auto count = in.get<std::uint32_t>();
  std::vector<wire::BufferRecord> records;
  const auto status = wire::BufferRecord::decode_all(in, count, records);
  if (!status.ok()) return must(status.code() == Code::protocol_error);
  must(records.size() == count);
  for (const auto& record : records) must(inside(record.ticket, input));
  placed(records);
  const auto bytes = encode(records);
  Reader again_in(bytes);
  std::vector<wire::BufferRecord> again;
  must(wire::BufferRecord::decode_all(again_in, count, again).ok() && again_in.empty() && same(again, records));
}

// ---- A connection

constexpr std::size_t most_memory = 1 << 16;  // a bound, because a frame may claim 2^62 bytes behind it

std::size_t open_descriptors() {
  std::error_code ignored;
  const std::filesystem::directory_iterator entries("/proc/self/fd", ignored);
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

/// Handles each frame as the bits of its call id say, and checks the frames and the bytes behind them against `sent`.
class Sink final : public FrameSink {
 public:
  Sink(ByteView sent, const std::size_t& came) : sent_(sent), came_(came) {}
  ~Sink() {
    for (const auto& landing : landings_) must(landing->completed == 1);
  }

  Result<Taken> on_frame(FrameStream& stream, const Header& header, ByteView body, Descriptors descriptors) override {
    must(at_ + Header::size + body.size() <= came_ && body.size() == header.length);
    auto head = header;
    head.unused = std::to_integer<std::uint8_t>(sent_[at_ + 7]);  // which is not read
    must(same(head.encoded(), sent_.subspan(at_, Header::size)) &&
         same(body, sent_.subspan(at_ + Header::size, body.size())));
    must(descriptors.size() == header.descriptors && stream.unclaimed() == header.trailing);
    if (held_ < (header.call >> 8 & 3)) {
      ++held_;
      return Taken::hold;
    }
    held_ = 0;
    behind_ = at_ + Header::size + body.size();
    at_ = header.trailing > sent_.size() - behind_ ? sent_.size() : behind_ + header.trailing;
    read(stream, header);
    ended_ = (header.call >> 12 & 15) >= 14;
    if ((header.call >> 12 & 15) == 15) return Status(Code::internal, "the sink wants no more");
    if ((header.call >> 12 & 15) == 14) stream.close({Code::cancelled, "closed within a frame"});
    return Taken::yes;
  }

  /// Checks that the sink has got every complete frame, and that the stream ended with ProtocolError only if the next
  /// bytes are no valid frame.
  void check_end(FrameStream::Use use, Code end) const {
    if (ended_ || at_ >= came_) return must(ended_ || end != Code::protocol_error);
    const auto left = sent_.subspan(at_, came_ - at_);
    if (left.size() < Header::size) return must(end != Code::protocol_error);
    const auto header = Header::decode(left.first(Header::size));
    if (header.ok() && header->descriptors != 0) return;  // the descriptors may be missing
    const bool none = !header.ok() || (use == FrameStream::Use::bulk && header->length != 0);
    must(none == (end == Code::protocol_error) && (none || header->length > left.size() - Header::size));
  }

 private:
  struct LandedBytes {
    Bytes memory;
    int completed = 0;
  };

  /// Reads nothing behind the frame, or all bytes, at once or in parts, or more than there are.
  void read(FrameStream& stream, const Header& header) {
    const auto how = header.call & 7;
    if (how == 0) return;
    const auto parts = how == 1 ? 1 : 1 + (header.call >> 4 & 15) * 9;  // up to more than one recvmsg takes
    for (std::uint64_t part = 0; part < parts; ++part) {
      const auto left = stream.unclaimed();
      read_one(stream, part + 1 == parts ? left : left / 3, how == 2);
    }
    if (how != 3) return;
    read_one(stream, stream.unclaimed() + 1, true);
    at_ = behind_;  // a failed read leaves no unclaimed bytes, so the next frame begins here
  }

  void read_one(FrameStream& stream, std::uint64_t bytes, bool drop) {
    const bool enough = bytes <= stream.unclaimed();
    auto landing = landings_.emplace_back(std::make_shared<LandedBytes>());
    const bool kept = !drop && bytes <= most_memory;
    if (kept) landing->memory.resize(bytes);
    const auto from = behind_;
    if (enough) behind_ = bytes > sent_.size() - behind_ ? sent_.size() : behind_ + bytes;
    Buffer destination{{}, kept ? landing->memory.data() : nullptr, bytes, nullptr, nullptr};
    stream.read(std::move(destination), [this, landing, from, bytes, kept, enough](const Status& status) {
      must(++landing->completed == 1 && (enough || !status.ok()));
      if (!status.ok()) return;
      must(from + bytes <= came_);
      if (kept) must(same(landing->memory, sent_.subspan(from, bytes)));
    });
  }

  const ByteView sent_;
  const std::size_t& came_;  // how many bytes have been written so far
  std::size_t at_ = 0;       // where the next frame begins
  std::size_t behind_ = 0;   // where the next destination's bytes begin
  std::uint64_t held_ = 0;
  bool ended_ = false;  // whether this sink has ended the stream
  std::vector<std::shared_ptr<LandedBytes>> landings_;
};

/// Writes `bytes`, with the descriptors at the first byte.
void write(int fd, ByteView bytes, std::size_t descriptors) {
  const auto written = fuzzing::send_with_descriptors(fd, bytes, descriptors);
  must(written < 0 || static_cast<std::size_t>(written) == bytes.size());  // fails only if the reader has closed
}

FrameStream::Progress drain(FrameStream& stream, FrameSink& sink) {
  auto progress = FrameStream::Progress::some;
  must(stream.begin_read());
  while (progress == FrameStream::Progress::some || progress == FrameStream::Progress::held) {
    progress = stream.read_some(sink);
  }
  stream.end_read();
  return progress;
}

/// Sends the input over a connection in pieces. Its first bytes say how the connection ends, how large each piece is,
/// and how many descriptors go with it.
void connection(ByteView input, FrameStream::Use use) {
  Reader in(input);
  const auto ending = in.get<std::uint8_t>();
  const auto plan = in.raw(std::min<std::size_t>(in.rest().size(), ending & 15));
  const auto sent = in.rest();
  int fds[2];
  must(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  FileDescriptor peer(fds[1]);
  std::size_t came = 0;
  FrameStream stream(FileDescriptor(fds[0]), true, use);
  Sink sink(sent, came);
  auto progress = FrameStream::Progress::none;
  for (std::size_t piece = 0; came < sent.size() && progress != FrameStream::Progress::closed; ++piece) {
    const auto planned = plan.empty() ? std::uint8_t{255} : std::to_integer<std::uint8_t>(plan[piece % plan.size()]);
    const std::size_t most = planned % 64 == 63 ? 4096 : planned % 64 + 1;
    const auto bytes = std::min(most, sent.size() - came);
    came += bytes;
    write(peer.get(), sent.subspan(came - bytes, bytes), planned >> 6);
    progress = drain(stream, sink);
  }
  if ((ending & 64) == 0) {
    peer.reset();
    must(drain(stream, sink) == FrameStream::Progress::closed);
  }
  stream.close({Code::cancelled, "the input is at its end"});
  const auto code = stream.status().code();
  must(code == Code::protocol_error || code == Code::connection_lost || code == Code::cancelled ||
       code == Code::internal);
  sink.check_end(use, code);
}

/// Runs a connection, and checks in every 16th run that all descriptors which came with frames are closed.
void connection_that_leaves_nothing(ByteView input, FrameStream::Use use) {
  static unsigned runs = 0;
  const bool counts = runs++ % 16 == 0;
  const auto before = counts ? open_descriptors() : 0;
  connection(input, use);
  must(!counts || open_descriptors() == before);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto input = std::as_bytes(std::span(data, size)).subspan(1);
  switch (data[0]) {
    case 0:
      frame(input);
      break;
    case 1:
      hello(input);
      break;
    case 2:
      error_reply(input);
      break;
    case 3:
      spilled(input);
      break;
    default:
      connection_that_leaves_nothing(input, data[0] % 2 == 0 ? FrameStream::Use::calls : FrameStream::Use::bulk);
  }
  return 0;
}
