/// Fuzzes the messages between the members of a group.
#include <cstdint>
#include <span>

#include "rpc/collectives/messages.h"
#include "tests/fuzz/record_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  fuzzing::fuzz_records<collectives::GroupMessage, collectives::Formed, collectives::Decision, collectives::Progress,
                        collectives::TellAll, collectives::Told>(std::as_bytes(std::span(data, size)));
  return 0;
}
