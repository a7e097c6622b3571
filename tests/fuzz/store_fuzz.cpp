// Fuzzes the parsers of the store's server (requests) and clients (replies). The first byte of the input chooses:
// - 0: a request
// - 1: a reply
// - else: the length in front of a request or reply

#include <cstdint>
#include <span>

#include "agent/rendezvous/store_protocol.h"
#include "tests/fuzz/record_input.h"

using namespace tensorferry;
using namespace tensorferry::store_protocol;
using fuzzing::must;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const ByteView input = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] > 3) {
    const auto length = parse_length(input);
    must(!length.ok() || *length <= most_body);
    return 0;
  }
  data[0] % 2 == 0 ? fuzzing::fuzz_records<StoreRequest>(input) : fuzzing::fuzz_records<StoreReply>(input);
  const auto request = parse_request(input);
  if (data[0] % 2 != 0 || !request) return 0;
  const auto bytes = encode(*request);
  must(bytes.ok() && *parse_length(ByteView(*bytes).first(header_bytes)) == bytes->size() - header_bytes);
  return 0;
}
