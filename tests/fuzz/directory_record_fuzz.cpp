// Fuzzes the parser of records from a store that strangers can write. The first byte of the input chooses:
// - 0: bytes of a stranger, read with a cluster key
// - 2: a record that the input fills
// - else: bytes of a stranger, read without a key

#include <cstdint>
#include <span>

#include "agent/rendezvous/record.h"
#include "tests/fuzz/record_input.h"

using namespace tensorferry;
using fuzzing::must;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Key key = Key::random();
  if (size == 0) return 0;
  const ByteView input = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] == 0) {
    must(!decode_record(input, key, "job/rec/n/agent/1").ok());
    return 0;
  }
  Reader in(input);
  fuzzing::RecordInput made(in);
  const auto record =
      data[0] == 2 ? Result<Record>(made.make<Record>()) : decode_record(input, Key(), "job/rec/n/agent/1");
  if (!record) return 0;
  const auto again = decode_record(encode_record(*record, key, "job/rec/n/agent/1"), key, "job/rec/n/agent/1");
  must(again.ok() == made.valid() && (!again || *again == *record));
  must(!again || (check_name(again->name).ok() && again->tcp_addresses.size() <= Record::most_addresses));
  return 0;
}
