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
  round_trip(input, cuda_ipc::parse_ticket);
  round_trip(input, cuda_basic::control_of);
  round_trip(input, cuda_basic::parse_ticket);
  if (const auto parsed = cuda_ipc::parse_ticket(input); parsed && parsed->offset + parsed->bytes < parsed->offset)
    std::abort();
  return 0;
}
