/// What the CUDA driver says of the device memory at an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "channels/channel.h"
#include "channels/cuda/api.h"

namespace tensorferry::cuda {

/// An allocation, or one physical piece of memory that is mapped by the virtual memory API.
struct GpuAllocation {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  std::uint64_t memory = 0;  // the driver's number of the physical memory, which it gives no other memory
  bool chunk = false;        // physical memory mapped by the virtual memory API, as torch's expandable segments are
  bool handle = false;       // cudaMalloc's memory, which IPC handles can export
  bool fabric = false;       // can be exported by fabric handles alone
};

/// Returns the allocation that contains `address`, or a Refusal if the driver knows none. Call inside DeviceGuard.
std::variant<GpuAllocation, Refusal> allocation_at(CUdeviceptr address);

}  // namespace tensorferry::cuda
