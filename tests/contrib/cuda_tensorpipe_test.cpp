#include <gtest/gtest.h>

#include "contrib/tensorpipe/tensorpipe_channel.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

constexpr Device gpu{DeviceType::cuda, 0};

/// In one process, TensorPipe uses its own cuda_xth channel. cuda_tensorpipe_process_test.cpp tests two processes.
struct TensorpipeGpuFixture {
  static constexpr auto name = "tensorpipe";
  static Drivers drivers() { return {make_tensorpipe_driver(), make_tensorpipe_driver()}; }
  static Traits traits() { return {.same_process = true, .missing = why_no_cuda(1)}; }
  static DevicePair devices() { return {gpu, gpu}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
};

TEST(TensorpipeGpu, MemoryThatCannotBeExportedIsRefused) {
  if (auto missing = why_no_cuda(1); !missing.empty()) GTEST_SKIP() << missing;
  const auto driver = make_tensorpipe_driver();
  const auto memory = cuda_memory(0, CudaKind::chunks);  // like torch's expandable segments
  WirePair pair(*driver, *driver, {gpu, gpu}, *memory, *memory);
  Letter letter(*pair.a);
  EXPECT_FALSE(letter.offer(memory->filled(1000, 1)));
  EXPECT_NE(letter.refusal.find("expandable segments"), std::string::npos) << letter.refusal;
}

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(TensorpipeGpuFixture);
