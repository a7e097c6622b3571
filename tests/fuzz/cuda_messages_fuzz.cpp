/// Fuzzes the parsers of control messages and tickets of the cuda channels. A parsed message survives encoding and
/// parsing. Needs no GPU.
#include <cstdint>
#include <cstdlib>

#include "channels/cuda_basic/messages.h"
#include "channels/cuda_ipc/messages.h"

namespace tensorferry {
namespace {

/// Checks that a parsed message survives encoding and parsing. The input's bytes may differ from the encoded ones,
/// because a varint has several encodings.
template <class Parse>
void round_trip(ByteView input, Parse parse) {
  const auto once = parse(input);
  if (!once) return;
  const auto written = encode(*once);
  const auto twice = parse(written);
  if (!twice || encode(*twice) != written) std::abort();
}

}  // namespace
}  // namespace tensorferry

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  const auto input = std::as_bytes(std::span(data, size));
  round_trip(input, cuda_ipc::control_of);
  round_trip(input, cuda_ipc::place_of);
  round_trip(input, cuda_basic::control_of);
  round_trip(input, cuda_basic::place_of);
  if (const auto place = cuda_ipc::place_of(input); place && place->offset + place->bytes < place->offset) std::abort();
  return 0;
}
