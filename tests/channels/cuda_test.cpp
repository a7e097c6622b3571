#include <gtest/gtest.h>

#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/cuda_xth/cuda_xth_channel.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

constexpr Device cpu{};
constexpr Device gpu{DeviceType::cuda, 0};

struct CudaXthFixture {
  static constexpr auto name = "cuda_xth";
  static Drivers drivers() { return {std::make_unique<CudaXthDriver>(), std::make_unique<CudaXthDriver>()}; }
  static Traits traits() { return {.same_process = true, .missing = why_no_cuda(1)}; }
  static DevicePair devices() { return {gpu, gpu}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

struct CudaBasicFixture {
  static constexpr auto name = "cuda_basic";
  static Drivers drivers() { return {std::make_unique<CudaBasicDriver>()}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(1)}; }
  static DevicePair devices() { return {gpu, gpu}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

struct CudaBasicToCpuFixture : CudaBasicFixture {
  static DevicePair devices() { return {gpu, cpu}; }
};

struct CudaBasicFromCpuFixture : CudaBasicFixture {
  static DevicePair devices() { return {cpu, gpu}; }
};

/// Memory as torch's expandable segments have it, which one process can map twice.
struct CudaIpcChunksFixture {
  static constexpr auto name = "cuda_ipc";
  static Drivers drivers() { return {std::make_unique<CudaIpcDriver>(cuda_ipc::Options{.within_process = true})}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(1)}; }
  static DevicePair devices() { return {gpu, gpu}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return cuda_memory(device.index, CudaKind::chunks); }
};

/// cudaMalloc's memory, between processes.
struct CudaIpcFixture {
  static constexpr auto name = "cuda_ipc";
  static Drivers drivers() { return {std::make_unique<CudaIpcDriver>()}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(1)}; }
  static DevicePair devices() { return {gpu, gpu}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CudaXthFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicToCpuFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicFromCpuFixture);
INSTANTIATE_CHANNEL_SUITE(CudaIpcChunksFixture);
INSTANTIATE_CHANNEL_PROCESS_SUITE(CudaIpcFixture);
