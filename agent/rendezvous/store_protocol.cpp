#include "agent/rendezvous/store_protocol.h"

#include <cstring>

#include "base/text.h"

namespace tensorferry::store_protocol {

namespace {

Status malformed(std::string_view what) {
  return {Code::protocol_error, formatted("the {} of the store is malformed", what)};
}

Bytes begin() { return Bytes(kHeaderBytes); }

Bytes finish(Bytes bytes) {
  const auto length = static_cast<std::uint32_t>(bytes.size() - kHeaderBytes);
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

}  // namespace

Result<Bytes> encode(const Request& request) {
  if (request.key.empty() || request.key.size() > kMostKey || request.value.size() > kMostValue) {
    return Status(Code::invalid_argument,
                  formatted("the store takes keys of 1 to {} bytes and values of up to {}, not {} and {}", kMostKey,
                            kMostValue, request.key.size(), request.value.size()));
  }
  auto bytes = begin();
  Writer out(bytes);
  out.put(static_cast<std::uint8_t>(request.op));
  out.sized(request.key);
  switch (request.op) {
    case Op::set:
      out.sized(request.value);
      break;
    case Op::get:
      out.put(request.milliseconds);
      break;
    case Op::add:
      out.put(request.amount);
      break;
  }
  return finish(std::move(bytes));
}

Bytes encode(Op op, const Reply& reply) {
  auto bytes = begin();
  Writer out(bytes);
  out.put(static_cast<std::uint8_t>(reply.code));
  if (reply.code != Code::ok) {
    out.raw(view_of(reply.text));
  } else if (op == Op::get) {
    out.raw(reply.value);
  } else if (op == Op::add) {
    out.put(reply.sum);
  }
  return finish(std::move(bytes));
}

Result<std::uint32_t> parse_length(ByteView header) {
  Reader in(header);
  const auto length = in.get<std::uint32_t>();
  if (in.failed() || !in.empty()) return malformed("header");
  if (length > kMostBody) {
    return Status(Code::protocol_error,
                  formatted("a message of the store has {} bytes, and at most {} are allowed", length, kMostBody));
  }
  return length;
}

Result<Request> parse_request(ByteView body) {
  Reader in(body);
  Request request;
  const auto op = in.get<std::uint8_t>();
  if (op < static_cast<std::uint8_t>(Op::set) || op > static_cast<std::uint8_t>(Op::add)) return malformed("request");
  request.op = static_cast<Op>(op);
  request.key = in.text();
  switch (request.op) {
    case Op::set:
      request.value = in.sized();
      break;
    case Op::get:
      request.milliseconds = in.get<std::uint32_t>();
      break;
    case Op::add:
      request.amount = in.get<std::int64_t>();
      break;
  }
  if (in.failed() || !in.empty() || request.key.empty() || request.key.size() > kMostKey ||
      request.value.size() > kMostValue) {
    return malformed("request");
  }
  return request;
}

Result<Reply> parse_reply(Op op, ByteView body) {
  Reader in(body);
  Reply reply;
  const auto code = in.get<std::uint8_t>();
  if (in.failed() || code > static_cast<std::uint8_t>(Code::internal)) return malformed("reply");
  reply.code = static_cast<Code>(code);
  if (reply.code != Code::ok) {
    reply.text = text_of(in.rest());
    return reply;
  }
  if (op == Op::get) {
    reply.value = in.rest();
    if (reply.value.size() > kMostValue) return malformed("reply");
    return reply;
  }
  if (op == Op::add) reply.sum = in.get<std::int64_t>();
  if (in.failed() || !in.empty()) return malformed("reply");
  return reply;
}

}  // namespace tensorferry::store_protocol
