/// The fixtures of the cuda channels for a pair of GPUs. One end is on the first GPU, the other one on GPU `other`: the
/// first (0) or the second (1).
#pragma once

#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/cuda_xth/cuda_xth_channel.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

template <int other>
struct OnGpus {
  static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, other}}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(other + 1)}; }
};

template <int other>
struct CudaXth : OnGpus<other> {
  static constexpr auto name = "cuda_xth";
  static Drivers drivers() { return {std::make_unique<CudaXthDriver>(), std::make_unique<CudaXthDriver>()}; }
  static Traits traits() { return {.same_process = true, .missing = why_no_cuda(other + 1)}; }
};

/// cuda_xth with memory like torch's expandable segments, to which peer access gives no access.
template <int other>
struct CudaXthChunks : CudaXth<other> {
  static std::unique_ptr<DeviceMemory> memory(Device device) { return cuda_memory(device.index, CudaKind::chunks); }
};

template <int other>
struct CudaBasic : OnGpus<other> {
  static constexpr auto name = "cuda_basic";
  static Drivers drivers() { return {std::make_unique<CudaBasicDriver>()}; }
};

/// cuda_ipc with memory like torch's expandable segments. One process can map it twice, so both ends can be in one
/// process.
template <int other>
struct CudaIpcChunks : OnGpus<other> {
  static constexpr auto name = "cuda_ipc";
  static Drivers drivers() {
    return {std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.within_process = true})};
  }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return cuda_memory(device.index, CudaKind::chunks); }
};

/// cuda_ipc between processes, with memory from cudaMalloc.
template <int other>
struct CudaIpc : OnGpus<other> {
  static constexpr auto name = "cuda_ipc";
  static Drivers drivers() { return {std::make_unique<CudaIpcDriver>()}; }
};

}  // namespace tensorferry::conformance
