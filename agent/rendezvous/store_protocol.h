/// The wire format between a client of the built-in store and its server, behind the handshake: requests and replies in
/// turn, each a little-endian u32 length and a record of that many bytes. Pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/record.h"
#include "base/status.h"

namespace tensorferry::store_protocol {

constexpr std::size_t most_key = 1 << 10;
constexpr std::size_t most_value = 1 << 20;
constexpr std::size_t most_body = most_key + most_value + 64;
constexpr std::size_t header_bytes = sizeof(std::uint32_t);

enum class Op : std::uint8_t { set = 1, get = 2, add = 3, erase = 4, last = erase };

/// A request. Its views point into the bytes that it was parsed from; to encode it, into the caller's bytes.
struct StoreRequest {
  Op op = Op::get;
  std::string_view key{};
  ByteView value{};                // set
  std::uint32_t milliseconds = 0;  // get: how long the server may wait before it answers DeadlineExceeded
  std::int64_t amount = 0;         // add
  static constexpr std::tuple fields{&StoreRequest::op, &StoreRequest::key, &StoreRequest::value,
                                     &StoreRequest::milliseconds, &StoreRequest::amount};
  [[nodiscard]] bool valid() const {
    return op >= Op::set && !key.empty() && key.size() <= most_key && value.size() <= most_value;
  }
};

/// A reply; its view as a request's.
struct StoreReply {
  Code code = Code::ok;
  std::int64_t sum = 0;  // ok, add
  ByteView value{};      // ok, get: the value; not ok: the error's text
  static constexpr std::tuple fields{any_value(&StoreReply::code), &StoreReply::sum, &StoreReply::value};
  [[nodiscard]] bool valid() const { return code <= Code::internal && value.size() <= most_value; }
};

/// Encodes a request with its length in front. InvalidArgument: the key is empty, or the key or the value is too long.
Result<Bytes> encode(const StoreRequest& request);
/// Encodes a reply with its length in front.
Bytes encode(const StoreReply& reply);

/// Parses the length of a body; the receiver calls it before it allocates memory for the body. ProtocolError: longer
/// than most_body.
Result<std::uint32_t> parse_length(ByteView header);
/// Parses a body. ProtocolError: malformed, out of bounds, or bytes are left over.
Result<StoreRequest> parse_request(ByteView body);
Result<StoreReply> parse_reply(ByteView body);

}  // namespace tensorferry::store_protocol
