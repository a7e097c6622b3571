/// Fuzzes the descriptors, control messages and tickets of the cuda channels. Needs no GPU.
#include <cstdint>
#include <span>

#include "channels/cuda_basic/messages.h"
#include "channels/cuda_ipc/messages.h"
#include "tests/fuzz/record_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  fuzzing::fuzz_records<cuda_ipc::CudaIpcDescriptor, cuda_ipc::Control, cuda_ipc::CudaIpcTicket,
                        cuda_basic::CudaBasicDescriptor, cuda_basic::Control, cuda_basic::CudaBasicTicket>(
      std::as_bytes(std::span(data, size)));
  return 0;
}
