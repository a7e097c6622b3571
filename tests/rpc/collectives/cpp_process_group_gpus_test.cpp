/// Process groups of C++ programs (tensorferry/c10d.h) on tensors of two GPUs, with a rank for each thread.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tensorferry/c10d.h"
#include "tensorferry/gpus.h"

namespace tensorferry::testing {
namespace {

constexpr int ranks = 2;

void all_reduce(const ProcessGroupPointer& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions now;
  now.asyncOp = false;
  group->allreduce(tensors, now)->wait();
}

TEST(CppProcessGroupOnGpus, ReducesInACudaGraphToo) {
  if (c10::cuda::device_count() < ranks) GTEST_SKIP() << "needs two GPUs";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<void>> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.push_back(std::async(std::launch::async, [=] {
      const auto device = static_cast<c10::DeviceIndex>(rank);
      const c10::cuda::CUDAGuard here(device);
      AgentOptions options;
      options.devices = gpus();
      const auto group = make_process_group(store, rank, ranks, {}, std::move(options));
      const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromPool(false, device));
      const auto tensor = at::full({1000}, rank + 1, at::TensorOptions(at::kFloat).device(at::kCUDA, device));
      all_reduce(group, tensor);
      EXPECT_TRUE((tensor == 3).all().item<bool>());
      at::cuda::CUDAGraph graph;
      graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      all_reduce(group, tensor);
      graph.capture_end();
      graph.replay();
      graph.replay();
      EXPECT_TRUE((tensor == 12).all().item<bool>());
      group->shutdown();
    }));
  }
  for (auto& one : running) one.get();
}

}  // namespace
}  // namespace tensorferry::testing
