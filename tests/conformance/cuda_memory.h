/// Device memory for the conformance suite, by the driver alone.
#pragma once

#include <memory>
#include <string>

#include "channels/buffer.h"
#include "tests/conformance/device_memory.h"

namespace tensorferry::conformance {

/// Where its memory comes from: one allocation by cudaMalloc's way, or addresses into which chunks of physical memory
/// are mapped, as torch's expandable segments are.
enum class CudaKind { malloc, chunks };

/// Buffers are cut from slabs; each memory has a stream of its own. What is freed is overwritten in the stream's order
/// and used again.
std::unique_ptr<DeviceMemory> cuda_memory(int device, CudaKind kind = CudaKind::malloc);

/// The CPU's for a CPU device, else cuda_memory().
std::unique_ptr<DeviceMemory> memory_of(Device device);

/// Why `devices` GPUs cannot be used here; "" where they can. Asks in a child of its own, so that this process may
/// still fork before it uses CUDA.
std::string why_no_cuda(int devices);

}  // namespace tensorferry::conformance
