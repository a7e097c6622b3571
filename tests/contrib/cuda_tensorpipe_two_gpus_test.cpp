#include <gtest/gtest.h>

#include "contrib/tensorpipe/tensorpipe_channel.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

struct TensorpipeTwoGpusFixture {
  static constexpr auto name = "tensorpipe";
  static Drivers drivers() { return {make_tensorpipe_driver(), make_tensorpipe_driver()}; }
  static Traits traits() { return {.same_process = true, .missing = why_no_cuda(2)}; }
  static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, 1}}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(TensorpipeTwoGpusFixture);
