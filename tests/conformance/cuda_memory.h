/// Device memory for the conformance suite, allocated through the CUDA driver API alone (no runtime, no torch).
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <memory>
#include <string>

#include "channels/buffer.h"
#include "tests/conformance/device_memory.h"

namespace tensorferry::conformance {

/// How a slab of memory is allocated:
/// - `malloc`: one allocation, as by cudaMalloc;
/// - `chunks`: reserved addresses with chunks of physical memory mapped into them, as in torch's expandable segments.
enum class CudaKind { malloc, chunks };

/// Returns memory of GPU `device`. It cuts buffers from slabs and has a stream of its own. A freed buffer's memory is
/// overwritten in the stream's order, then used again.
std::unique_ptr<DeviceMemory> cuda_memory(int device, CudaKind kind = CudaKind::malloc);

/// Returns cpu_memory() for a CPU, else cuda_memory().
std::unique_ptr<DeviceMemory> memory_of(Device device);

/// Returns why this machine cannot provide `devices` GPUs, or "" if it can. Asks the driver in a child process, so that
/// this process may still fork before it uses CUDA.
std::string why_no_cuda(int devices);

/// Returns how many bytes of GPU 0 are free.
std::size_t free_bytes();

/// Returns a function of the driver that the channels do not use; null if the driver lacks it.
template <class Function>
Function driver_function(const char* name) {
  return reinterpret_cast<Function>(::dlsym(::dlopen("libcuda.so.1", RTLD_NOW), name));
}

}  // namespace tensorferry::conformance
