// Fuzzes the parser of records from a store that strangers can write. If the first byte is 0, the reader has a cluster
// key, else none.

#include <cstdint>
#include <cstdlib>

#include "agent/rendezvous/record.h"

using namespace tensorferry;

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Key key = Key::random();
  if (size == 0) return 0;
  const ByteView input = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] == 0) {
    check(!decode_record(input, key, "n/agent", 1).ok());
    return 0;
  }
  const auto record = decode_record(input, Key(), "n/agent", 1);
  if (!record) return 0;
  check(check_name(record->name).ok() && record->tcp_addresses.size() <= Record::kMostAddresses);
  const auto again = decode_record(encode_record(*record, key, "n/agent", 1), key, "n/agent", 1);
  check(again.ok() && *again == *record);
  return 0;
}
