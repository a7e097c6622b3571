/// Fuzzes the parsers of the tensorpipe channel: descriptors, control messages, tickets, and the metadata of pipes. A
/// parsed message survives encoding and parsing. Needs no TensorPipe.
#include <cstdint>
#include <cstdlib>

#include "contrib/tensorpipe/messages.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  const auto input = std::as_bytes(std::span(data, size));
  if (const auto once = decode<tp::Control>(input)) {
    const auto written = encode(*once);
    const auto twice = decode<tp::Control>(written);
    if (!twice || encode(*twice) != written) std::abort();
  }
  if (const auto endpoint = decode<tp::Endpoint>(input);
      endpoint && encode(*endpoint) != Bytes(input.begin(), input.end()))
    std::abort();
  if (const auto once = decode<tp::Metadata>(input); once && decode<tp::Metadata>(encode(*once))->offer != once->offer)
    std::abort();
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{size}}) {
    const Ticket ticket{.bytes = bytes, .opaque = Bytes(input.begin(), input.end())};
    if (const auto offer = tp::offer_of(ticket); offer && (*offer == 0) != (bytes == 0)) std::abort();
  }
  (void)tp::is_address(text_of(input));
  return 0;
}
