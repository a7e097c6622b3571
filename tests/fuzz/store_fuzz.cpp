// Fuzzes the parsers of the store's server (requests) and clients (replies). The first byte of the input chooses:
// - 0: a request
// - 1: a reply
// - else: the length in front of a request or reply

#include <cstdint>
#include <cstdlib>

#include "agent/rendezvous/store_protocol.h"

using namespace tensorferry;
using namespace tensorferry::store_protocol;

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

bool same(ByteView a, ByteView b) { return text_of(a) == text_of(b); }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const ByteView input = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] == 0) {
    const auto request = parse_request(input);
    if (!request) return 0;
    const auto bytes = encode(*request);
    check(bytes.ok() && *parse_length(ByteView(*bytes).first(kHeaderBytes)) == bytes->size() - kHeaderBytes);
    const auto again = parse_request(ByteView(*bytes).subspan(kHeaderBytes));
    check(again.ok() && again->op == request->op && again->key == request->key && same(again->value, request->value) &&
          again->milliseconds == request->milliseconds && again->amount == request->amount);
  } else if (data[0] == 1) {
    const auto reply = parse_reply(input);
    if (!reply) return 0;
    const auto bytes = encode(*reply);
    const auto again = parse_reply(ByteView(bytes).subspan(kHeaderBytes));
    check(again.ok() && again->code == reply->code && again->sum == reply->sum && same(again->value, reply->value));
  } else {
    const auto length = parse_length(input);
    check(!length.ok() || *length <= kMostBody);
  }
  return 0;
}
