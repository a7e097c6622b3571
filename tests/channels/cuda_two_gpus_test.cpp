#include <gtest/gtest.h>

#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/cuda_xth/cuda_xth_channel.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

constexpr DevicePair two_gpus{{DeviceType::cuda, 0}, {DeviceType::cuda, 1}};

struct CudaXthTwoFixture {
  static constexpr auto name = "cuda_xth";
  static Drivers drivers() { return {std::make_unique<CudaXthDriver>(), std::make_unique<CudaXthDriver>()}; }
  static Traits traits() { return {.same_process = true, .missing = why_no_cuda(2)}; }
  static DevicePair devices() { return two_gpus; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

struct CudaBasicTwoFixture {
  static constexpr auto name = "cuda_basic";
  static Drivers drivers() { return {std::make_unique<CudaBasicDriver>()}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(2)}; }
  static DevicePair devices() { return two_gpus; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

/// Memory as torch's expandable segments have it, which one process can map twice.
struct CudaIpcChunksTwoFixture {
  static constexpr auto name = "cuda_ipc";
  static Drivers drivers() { return {std::make_unique<CudaIpcDriver>(cuda_ipc::Options{.within_process = true})}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(2)}; }
  static DevicePair devices() { return two_gpus; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return cuda_memory(device.index, CudaKind::chunks); }
};

/// cudaMalloc's memory, between processes.
struct CudaIpcTwoFixture {
  static constexpr auto name = "cuda_ipc";
  static Drivers drivers() { return {std::make_unique<CudaIpcDriver>()}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(2)}; }
  static DevicePair devices() { return two_gpus; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CudaXthTwoFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicTwoFixture);
INSTANTIATE_CHANNEL_SUITE(CudaIpcChunksTwoFixture);
INSTANTIATE_CHANNEL_PROCESS_SUITE(CudaIpcTwoFixture);
