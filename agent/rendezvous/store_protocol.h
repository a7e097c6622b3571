/// The wire format between a client of the built-in store and its server, behind the handshake: requests and replies in
/// turn, each a little-endian u32 length and a body of that many bytes. Pure functions.
///
///     request  u8 op, key (varint length, bytes), then   set: value (varint length, bytes)
///                                                        get: u32 milliseconds to wait
///                                                        add: i64 amount
///     reply    u8 code, then   ok: get: the value's bytes; add: i64 sum
///                              else: error text
#pragma once

#include <cstdint>
#include <string_view>

#include "base/bytes.h"
#include "base/status.h"

namespace tensorferry::store_protocol {

constexpr std::size_t kMostKey = 1 << 10;
constexpr std::size_t kMostValue = 1 << 20;
constexpr std::size_t kMostBody = kMostKey + kMostValue + 64;
constexpr std::size_t kHeaderBytes = sizeof(std::uint32_t);

enum class Op : std::uint8_t { set = 1, get = 2, add = 3 };

/// A request. Its views point into the bytes that it was parsed from; to encode it, into the caller's bytes.
struct Request {
  Op op = Op::get;
  std::string_view key{};
  ByteView value{};                // set
  std::uint32_t milliseconds = 0;  // get: how long the server may wait before it answers DeadlineExceeded
  std::int64_t amount = 0;         // add
};

/// A reply; its views as a request's.
struct Reply {
  Code code = Code::ok;
  ByteView value{};         // ok, get
  std::int64_t sum = 0;     // ok, add
  std::string_view text{};  // not ok
};

/// Encodes a request with its length in front. InvalidArgument: the key is empty, or the key or the value is too long.
Result<Bytes> encode(const Request& request);
/// Encodes the reply to a request of this `op`, with its length in front.
Bytes encode(Op op, const Reply& reply);

/// Parses the length of a body; the receiver calls it before it allocates memory for the body. ProtocolError: longer
/// than kMostBody.
Result<std::uint32_t> parse_length(ByteView header);
/// Parses a body. ProtocolError: malformed, out of bounds, or bytes are left over.
Result<Request> parse_request(ByteView body);
Result<Reply> parse_reply(Op op, ByteView body);

}  // namespace tensorferry::store_protocol
