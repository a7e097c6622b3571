#include <gtest/gtest.h>

#include "contrib/tensorpipe/tensorpipe_channel.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

/// Between processes, TensorPipe uses its own cuda_ipc channel if it can, else its cuda_basic.
struct TensorpipeGpuFixture {
  static constexpr auto name = "tensorpipe";
  static Drivers drivers() { return {make_tensorpipe_driver()}; }
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(1)}; }
  static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, 0}}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

struct TensorpipeTwoGpusFixture : TensorpipeGpuFixture {
  static Traits traits() { return {.forks = false, .missing = why_no_cuda(2)}; }
  static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, 1}}; }
};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ChannelSuite);  // cuda_tensorpipe_test.cpp instantiates it

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_PROCESS_SUITE(TensorpipeGpuFixture);
INSTANTIATE_CHANNEL_PROCESS_SUITE(TensorpipeTwoGpusFixture);
