/// Fuzzes the descriptor, control messages and tickets of the tensorpipe channel, and the metadata of its pipes. Needs
/// no TensorPipe.
#include <cstdint>
#include <span>

#include "contrib/tensorpipe/messages.h"
#include "tests/fuzz/record_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  const auto input = std::as_bytes(std::span(data, size));
  fuzzing::fuzz_records<tp::Endpoint, tp::Control, tp::TensorpipeTicket, tp::Metadata>(input);
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{size}}) {
    const Ticket ticket{.bytes = bytes, .opaque = Bytes(input.begin(), input.end())};
    if (const auto offer = tp::offer_of(ticket)) fuzzing::must((*offer == 0) == (bytes == 0));
  }
  (void)tp::is_address(text_of(input));
  return 0;
}
