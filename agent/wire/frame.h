/// Frames: what travels between two agents, as bytes and nothing else. docs/protocol.md is normative; this file and
/// frame.cpp are its only implementation.
///
/// A frame is a fixed header, then `length` bytes of body: extension records, buffer records, payload. `trailing` bytes
/// of buffers may follow it on the same connection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "channels/bundle.h"
#include "channels/bytes.h"
#include "channels/channel.h"
#include "channels/status.h"

namespace tensorferry::wire {

inline constexpr std::uint16_t version_min = 1;
inline constexpr std::uint16_t version_max = 1;

enum class Kind : std::uint8_t {
  hello = 1,  // the first frame each way, after the proofs
  request = 2,
  reply = 3,
  cancel = 4,   // caller: the reply to `call` will be discarded
  release = 5,  // tickets whose source is read no more, where no other frame went that way
  control = 6,  // of a channel, or of a device pair's negotiation
  ping = 7,
  pong = 8,
  goodbye = 9,  // the sender leaves on purpose; nothing of its will follow
  bulk = 10,    // on a bulk connection: one buffer follows
  ring = 11,    // memory for the calls of one direction: offered, accepted, declined (where both have feature::ring)
};

namespace feature {
inline constexpr std::uint32_t ring = 1;       // maps what peers of its user offer on a unix socket
inline constexpr std::uint32_t bundles = 2;    // reads buffer records that stand for several buffers
inline constexpr std::uint32_t templates = 4;  // keeps payloads, and reads what differs from them
}  // namespace feature

namespace flag {
inline constexpr std::uint8_t error = 1;    // reply: the payload is a Status
inline constexpr std::uint8_t spilled = 2;  // the one buffer holds a u32 count, the buffer records and the payload
}  // namespace flag

struct Header {
  static constexpr std::size_t size = 40;
  static constexpr std::uint32_t max_length = 64 * 1024;
  static constexpr std::size_t function_at = 12;  // where `function` stands

  Kind kind{};
  std::uint8_t flags = 0;
  std::uint16_t buffers = 0;     // buffer records in the body
  std::uint16_t extensions = 0;  // bytes of extension records at the body's start
  std::uint8_t descriptors = 0;  // file descriptors that come with the frame (unix sockets)
  std::uint32_t length = 0;      // bytes of body
  std::uint32_t function = 0;    // request: the callee's number for it; 0: named by an extension record
  std::uint64_t call = 0;  // the caller's id of the call: opaque to the callee, which sends it back. bulk: sequence
  std::uint32_t remaining_ms = 0;  // request: time left until the deadline; 0: none
  std::uint32_t order = 0;         // request: order key; 0: unordered. bulk: channel slot
  std::uint64_t trailing = 0;      // bytes of buffers behind the frame

  void encode(std::byte* out) const;
  /// Fails with ProtocolError where no frame can look like this: kind, length, extension bytes, trailing bytes.
  static Result<Header> decode(ByteView bytes);
  /// Makes an encoded frame say that it comes without descriptors.
  static void forget_descriptors(Bytes& frame);
};

/// Extension records: u16 id, u16 length, bytes. Unknown ids are skipped.
namespace extension {
inline constexpr std::uint16_t function_name = 1;    // request: the function, where the caller has no number for it
inline constexpr std::uint16_t function_number = 2;  // reply: u32, the number of the function that was named
inline constexpr std::uint16_t releases = 3;         // any: u64 ticket ids whose source is read no more
inline constexpr std::uint16_t placement = 4;        // request: where tensors of the reply shall land
inline constexpr std::uint16_t keep = 5;         // u16, u64: keep the payload under that number, and say so by that id
inline constexpr std::uint16_t differences = 6;  // u16: the payload is what differs from the one of that number
}  // namespace extension

void put_extension(Writer& out, std::uint16_t id, ByteView bytes);

/// What a payload has to do with those of other frames; agent/templates.h.
struct Template {
  enum class Use : std::uint8_t { none, keep, differences };
  Use use = Use::none;
  std::uint16_t number = 0;
  std::uint64_t release = 0;  // keep: the sender's id for the acknowledgement

  bool operator==(const Template&) const = default;
  /// Writes its extension record; nothing for `none`.
  void encode(Writer& out) const;
};

/// In an extension of id `placement`: wherever a tensor leaves from.
inline constexpr Device any_device{static_cast<DeviceType>(0xff), 0};
inline constexpr std::size_t most_placements = 64;
Bytes encode_placement(const std::vector<std::pair<Device, Device>>& placement);

/// How one buffer of a message travels, or several of the host's that lie in one (a bundle).
struct BufferRecord {
  static constexpr std::uint8_t inline_channel = 0xff;  // the bytes stand right behind the record, in the frame
  static constexpr std::size_t size = 32;               // without the ticket or the inline bytes

  std::uint8_t channel = inline_channel;  // index in the sender's list of channels (Hello)
  Device source;                          // the sender's device
  Device destination;                     // the receiver's device
  std::uint64_t bytes = 0;
  std::uint64_t release = 0;  // the sender's id for the acknowledgement; 0: none is wanted
  ControlId after = 0;
  ByteView ticket;  // or the inline bytes

  struct Part {
    std::uint32_t index = 0;  // among the message's buffers; counts up within a bundle
    std::uint64_t bytes = 0;  // never 0
    bool operator==(const Part&) const = default;
  };
  std::vector<Part> parts;  // of a bundle, one behind the other (channels/bundle.h); none: an ordinary buffer
  std::uint32_t index = 0;  // of an ordinary buffer among the message's; not encoded: the places that no bundle takes

  /// Bytes that the message's buffers have of it.
  [[nodiscard]] std::uint64_t net_bytes() const;
  void encode(Writer& out) const;
  /// Reads `count` records; views into what `in` reads. What succeeds names each of the message's buffers once, and the
  /// parts of a bundle lie in it.
  static Status decode_all(Reader& in, std::size_t count, std::vector<BufferRecord>& records);
  /// How many buffers the message has.
  static std::size_t count(const std::vector<BufferRecord>& records);
};

/// A frame whose body is at hand; views into it.
struct Frame {
  Header header;
  ByteView function_name;
  std::uint32_t function_number = 0;
  std::vector<std::uint64_t> releases;
  std::vector<std::pair<Device, Device>> placement;  // from, to; `any_device` stands for all
  Template as;
  std::vector<BufferRecord> buffers;
  ByteView payload;

  /// `body` must outlive the frame.
  static Result<Frame> decode(const Header& header, ByteView body);
};

/// Who speaks, and what it can do: the body of a hello's payload.
struct Hello {
  enum class Purpose : std::uint8_t { calls = 1, bulk = 2 };

  Purpose purpose = Purpose::calls;
  std::string name;
  std::int32_t rank = -1;
  std::uint64_t incarnation = 0;
  std::uint64_t expected = 0;  // dialler: the incarnation it means to reach; 0 from the acceptor
  struct Endpoint {            // a channel's descriptor for one device
    Device device;
    Bytes descriptor;
  };
  struct Driver {
    std::string name;
    std::vector<Endpoint> endpoints;
  };
  std::vector<Driver> drivers;
  std::vector<Device> devices;
  std::uint32_t features = 0;

  [[nodiscard]] Bytes encode() const;
  static Result<Hello> decode(ByteView bytes);
};

/// The payload of an error reply.
Bytes encode_status(const Status& status);
Status decode_status(ByteView payload);

/// One frame of header, extensions, records and payload, ready to send (`trailing` and counts as given in `header`).
Bytes assemble(Header header, ByteView extensions, ByteView records, ByteView payload);

}  // namespace tensorferry::wire
