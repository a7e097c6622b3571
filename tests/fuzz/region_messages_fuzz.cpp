/// Fuzzes the messages of regions and published versions.
#include <cstdint>
#include <span>

#include "rpc/regions/messages.h"
#include "tests/fuzz/record_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  fuzzing::fuzz_records<regions::RegionMessage, regions::VersionMessage, regions::Attend, regions::RegionGrant,
                        regions::Subscribed, regions::Acquired, regions::Changes>(std::as_bytes(std::span(data, size)));
  return 0;
}
