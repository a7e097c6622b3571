/// Encodes and decodes frames, the messages between two agents. docs/protocol.md is normative; this file and frame.cpp
/// are its only implementation.
///
/// A frame is a fixed header and a body of `length` bytes: extension records, buffer records, payload. `trailing` bytes
/// of buffers may follow it on the same connection.
///
/// Everything here is plain data without locks. Decoding a peer's bytes fails with ProtocolError, and never throws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/record.h"
#include "base/status.h"
#include "channels/bundle.h"
#include "channels/channel.h"

namespace tensorferry {

template <>
inline constexpr std::tuple fields_of<Device>{any_value(&Device::type), &Device::index};

}  // namespace tensorferry

namespace tensorferry::wire {

inline constexpr std::uint16_t version_min = 1;
inline constexpr std::uint16_t version_max = 1;

enum class Kind : std::uint8_t {
  hello = 1,  // the first frame of each direction, after the proofs
  request = 2,
  reply = 3,
  cancel = 4,   // caller: the reply to `call` will be discarded
  release = 5,  // only releases (extension 3), if no other frame went in that direction
  control = 6,  // a message of a channel, or of a device pair's negotiation
  ping = 7,
  pong = 8,
  goodbye = 9,     // the sender leaves on purpose and sends nothing after this
  bulk = 10,       // on a bulk connection: one buffer follows
  ring = 11,       // memory for the calls of one direction: offered, accepted, declined (if both have feature::ring)
  want_bulk = 12,  // the sender, which did not dial the link's connection, wants a bulk connection for its own data
  status = 13,     // caller: how far has `call` come? callee: a CallStatus (if both have feature::status)
  go = 14,         // a connection is in use from now on; see Hello::connection
};

namespace feature {
inline constexpr std::uint32_t ring = 1;          // maps rings that peers of the same user offer on a unix socket
inline constexpr std::uint32_t bundles = 2;       // reads bundles: buffer records that stand for several buffers
inline constexpr std::uint32_t several_bulk = 4;  // accepts several bulk connections of one direction
inline constexpr std::uint32_t status = 8;        // answers status frames
inline constexpr std::uint32_t pieces = 16;       // puts a buffer of `basic` together from pieces
/// From the dialler of a connection for calls: the two agents have several networks in common, and the dialler spreads
/// the bulk connections over them.
inline constexpr std::uint32_t several_networks = 32;
}  // namespace feature

namespace flag {
inline constexpr std::uint8_t error = 1;    // reply: the payload is a Status
inline constexpr std::uint8_t spilled = 2;  // the one buffer holds a u32 count, the buffer records and the payload
}  // namespace flag

/// Lies in memory as it travels. Two of its fields have a name for each kind that they mean something else in.
struct Header {
  static constexpr std::size_t size = 40;
  static constexpr std::uint32_t max_length = 64 * 1024;

  Kind kind{};
  std::uint8_t flags = 0;
  std::uint16_t buffers = 0;     // buffer records in the body
  std::uint16_t extensions = 0;  // bytes of extension records at the body's start
  std::uint8_t descriptors = 0;  // file descriptors that come with the frame (unix sockets)
  std::uint8_t unused = 0;
  std::uint32_t length = 0;    // bytes of body
  std::uint32_t function = 0;  // request: the callee's number of the function; 0: named by an extension record
  union {
    std::uint64_t call =
        0;  // request, reply, cancel, status: the caller's id of the call; the callee only sends it back
    std::uint64_t control;     // control: its number in its direction, from 1
    std::uint64_t sequence;    // bulk: the number that the buffer's ticket names
    std::uint64_t connection;  // go: the number of the link's connection for calls
  };
  std::uint32_t remaining_ms = 0;  // request: milliseconds until the deadline, rounded up; 0: none
  union {
    std::uint32_t order = 0;  // request: order key; 0: unordered
    std::uint32_t channel;    // bulk: the channel's code
  };
  std::uint64_t trailing = 0;  // bytes of buffers behind the frame

  /// Returns the bytes that travel.
  [[nodiscard]] ByteView encoded() const { return std::as_bytes(std::span(this, 1)); }
  /// Fails with ProtocolError if no frame can have this kind, length, number of extension bytes or of trailing bytes.
  static Result<Header> decode(ByteView bytes);
  /// Sets the number of descriptors in an encoded frame to 0.
  static void forget_descriptors(Bytes& frame);
};
static_assert(sizeof(Header) == Header::size && std::is_trivially_copyable_v<Header>);
static_assert(offsetof(Header, length) == 8 && offsetof(Header, call) == 16 && offsetof(Header, trailing) == 32);

/// Extension records: u16 id, u16 length, bytes. Unknown ids are skipped.
namespace extension {
inline constexpr std::uint16_t function_name = 1;    // request: the function's name, if the caller has no number for it
inline constexpr std::uint16_t function_number = 2;  // reply: u32, the number of the function that the request named
inline constexpr std::uint16_t releases = 3;         // any: u64 release ids that the sender acknowledges
inline constexpr std::uint16_t placement = 4;        // request: the devices on which tensors of the reply shall land
}  // namespace extension

/// Appends one extension record to `out`.
void put_extension(Writer& out, std::uint16_t id, ByteView bytes);

/// In a `placement` extension: stands for every device that a tensor may leave from.
inline constexpr Device any_device{static_cast<DeviceType>(0xff), 0};
inline constexpr std::size_t most_placements = 64;
Bytes encode_placement(const std::vector<std::pair<Device, Device>>& placement);

/// Describes how one buffer of a message travels, or one bundle: several host buffers that lie in one.
struct BufferRecord {
  static constexpr std::uint8_t inline_channel = 0xff;  // the bytes follow the record, in the frame
  static constexpr std::size_t size = 32;               // without the ticket or the inline bytes

  std::uint8_t channel = inline_channel;  // index in the sender's list of channels (Hello)
  Device source;                          // the sender's device
  Device destination;                     // the receiver's device
  std::uint64_t bytes = 0;
  std::uint64_t release = 0;  // the id by which the receiver acknowledges; 0: no acknowledgement is wanted
  ControlId after = 0;        // the receiver must have handled this control message first; 0: none
  ByteView ticket;            // or the inline bytes

  struct Part {
    std::uint32_t index = 0;  // among the message's buffers; counts up within a bundle
    std::uint64_t bytes = 0;  // never 0
    bool operator==(const Part&) const = default;
  };
  std::vector<Part> parts;  // a bundle's buffers, one after the other (channels/bundle.h); empty: an ordinary buffer
  std::uint32_t index = 0;  // an ordinary buffer's, in the message; not encoded: in order, the indices without a bundle

  /// Returns the bytes of the message's buffers in this record, without a bundle's padding.
  [[nodiscard]] std::uint64_t net_bytes() const;
  void encode(Writer& out) const;
  /// Reads `count` records into `records`; they are views into the bytes that `in` reads. On success the records name
  /// each buffer of the message once, and the parts of each bundle lie in it. Otherwise fails with ProtocolError.
  static Status decode_all(Reader& in, std::size_t count, std::vector<BufferRecord>& records);
  /// Returns how many buffers the message has.
  static std::size_t count(const std::vector<BufferRecord>& records);
};

/// Returns the bytes that a message counts for: its payload and its buffers, each with at least what the receiver keeps
/// for a buffer until it has landed. The greatest number if there are more, because a peer may claim any sizes.
std::uint64_t message_bytes(std::size_t payload, const std::vector<BufferRecord>& buffers);

/// A decoded frame: views into its body.
struct Frame {
  Header header;
  ByteView function_name;
  std::uint32_t function_number = 0;
  std::vector<std::uint64_t> releases;
  std::vector<std::pair<Device, Device>> placement;  // from, to; `any_device` stands for all devices
  std::vector<BufferRecord> buffers;
  ByteView payload;

  /// Decodes `body`, which must outlive the frame. Fails with ProtocolError.
  static Result<Frame> decode(const Header& header, ByteView body);
};

/// The payload of a hello: the sender's identity, devices, channels and features.
struct Hello {
  /// What the connection carries: the calls of both directions, or bulk data, which the dialler sends (bulk), or the
  /// acceptor (bulk_back).
  enum class Purpose : std::uint8_t { calls = 1, bulk = 2, bulk_back = 3 };
  static constexpr std::size_t most = 64;  // devices, channels, endpoints of a channel

  Purpose purpose = Purpose::calls;
  std::string name;
  std::int32_t rank = -1;
  std::uint64_t incarnation = 0;
  std::uint64_t expected = 0;  // from the dialler: the incarnation that it means to reach; from the acceptor: 0
  struct Endpoint {            // a channel's descriptor for one device
    Device device;
    Bytes descriptor;
    static constexpr std::tuple fields{&Endpoint::device, &Endpoint::descriptor};
  };
  struct Driver {
    std::string name;
    std::vector<Endpoint> endpoints;
    static constexpr std::tuple fields{&Driver::name, at_most(&Driver::endpoints, most)};
  };
  std::vector<Device> devices;
  std::vector<Driver> drivers;
  std::uint32_t features = 0;
  /// From the dialler: the number of the last connection for calls that it has used with this peer, 0: none; a bulk
  /// connection belongs to the link of that one. From the acceptor: 0. The agent with the lower incarnation decides
  /// which connection carries the calls, and numbers them from 1 in its `go` frames.
  std::uint64_t connection = 0;
  static constexpr std::tuple fields{any_value(&Hello::purpose),
                                     &Hello::name,
                                     &Hello::rank,
                                     &Hello::incarnation,
                                     &Hello::expected,
                                     at_most(&Hello::devices, most),
                                     at_most(&Hello::drivers, most),
                                     &Hello::features,
                                     &Hello::connection};

  /// Fails with ProtocolError. Skips bytes that a later version may append.
  static Result<Hello> decode(ByteView bytes);
};

/// How far a request has come at the callee: the payload of the callee's status frame.
struct CallStatus {
  enum class Stage : std::uint8_t {
    unknown = 0,   // it has not been received, or has been answered
    arriving = 1,  // received, but its buffers have not all landed
    ordered = 2,   // waits for an earlier request of its order key
    queued = 3,    // waits for a handler's thread
    running = 4,
    last = running,
  };
  Stage stage = Stage::unknown;
  std::uint64_t received_us = 0;      // microseconds since it was received
  std::uint64_t started_us = 0;       // microseconds since its handler began
  std::uint32_t busy_at_arrival = 0;  // handlers that ran when it had arrived; 0: few
  std::uint32_t busy = 0;             // handlers that run now
  std::uint32_t handlers = 0;         // that may run at once
  std::uint32_t waiting = 0;          // requests that wait for a handler now
  static constexpr std::tuple fields{&CallStatus::stage,           &CallStatus::received_us, &CallStatus::started_us,
                                     &CallStatus::busy_at_arrival, &CallStatus::busy,        &CallStatus::handlers,
                                     &CallStatus::waiting};
};

/// Encodes the payload of an error reply. Cuts the text to 32 KiB.
Bytes encode_status(const Status& status);
/// Returns the decoded error, or a ProtocolError if the payload cannot be read.
Status decode_status(ByteView payload);

/// Returns one frame of header, extensions, records and payload, ready to send. Sets `extensions` and `length` of the
/// header, and takes its other fields as they are.
Bytes assemble(Header header, ByteView extensions, ByteView records, ByteView payload);

}  // namespace tensorferry::wire
