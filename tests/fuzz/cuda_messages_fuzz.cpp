/// Fuzzes the parsers of descriptors, control messages and tickets of the cuda channels. A parsed message survives
/// encoding and parsing. Needs no GPU.
#include <cstdint>
#include <cstdlib>

#include "channels/cuda_basic/messages.h"
#include "channels/cuda_ipc/messages.h"

namespace tensorferry {
namespace {

/// Checks that a parsed message survives encoding and parsing. The input's bytes may differ from the encoded ones,
/// because a varint has several encodings.
template <class Message>
void round_trip(ByteView input) {
  const auto once = decode<Message>(input);
  if (!once) return;
  const auto written = encode(*once);
  const auto twice = decode<Message>(written);
  if (!twice || encode(*twice) != written) std::abort();
}

}  // namespace
}  // namespace tensorferry

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  const auto input = std::as_bytes(std::span(data, size));
  round_trip<cuda_ipc::CudaIpcDescriptor>(input);
  round_trip<cuda_ipc::Control>(input);
  round_trip<cuda_ipc::CudaIpcTicket>(input);
  round_trip<cuda_basic::CudaBasicDescriptor>(input);
  round_trip<cuda_basic::Control>(input);
  round_trip<cuda_basic::CudaBasicTicket>(input);
  if (const auto parsed = decode<cuda_ipc::CudaIpcTicket>(input);
      parsed && parsed->offset + parsed->bytes < parsed->offset)
    std::abort();
  return 0;
}
