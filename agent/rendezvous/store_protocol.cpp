#include "agent/rendezvous/store_protocol.h"

#include <cstring>

#include "base/text.h"

namespace tensorferry::store_protocol {

namespace {

Status malformed(std::string_view what) {
  return {Code::protocol_error, formatted("the {} of the store is malformed", what)};
}

Bytes framed(const auto& message) {
  Bytes bytes(header_bytes);
  Writer out(bytes);
  write(out, message);
  const auto length = static_cast<std::uint32_t>(bytes.size() - header_bytes);
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

}  // namespace

Result<Bytes> encode(const StoreRequest& request) {
  if (!request.valid()) {
    return Status(Code::invalid_argument,
                  formatted("the store takes keys of 1 to {} bytes and values of up to {}, not {} and {}", most_key,
                            most_value, request.key.size(), request.value.size()));
  }
  return framed(request);
}

Bytes encode(const StoreReply& reply) { return framed(reply); }

Result<std::uint32_t> parse_length(ByteView header) {
  Reader in(header);
  const auto length = in.get<std::uint32_t>();
  if (in.failed() || !in.empty()) return malformed("header");
  if (length > most_body) {
    return Status(Code::protocol_error,
                  formatted("a message of the store has {} bytes, and at most {} are allowed", length, most_body));
  }
  return length;
}

Result<StoreRequest> parse_request(ByteView body) {
  const auto request = decode<StoreRequest>(body);
  if (!request) return malformed("request");
  return *request;
}

Result<StoreReply> parse_reply(ByteView body) {
  const auto reply = decode<StoreReply>(body);
  if (!reply) return malformed("reply");
  return *reply;
}

}  // namespace tensorferry::store_protocol
