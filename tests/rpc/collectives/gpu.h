/// Memory and a stream of a GPU, and CUDA graphs, for the tests of groups on GPUs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "channels/cuda/device.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::testing {

inline bool is_emulated() { return conformance::driver_function<void (*)()>("emulatedFail") != nullptr; }

/// Device memory and a stream of one rank. Copies are in the stream's order.
///
/// The memory is one allocation, made before any operation: to allocate and to free, the driver waits for the streams
/// of the process, here those of all ranks, and meanwhile lets none enqueue what another one waits for.
class Gpu {
 public:
  explicit Gpu(int d, std::size_t bytes = 0) : device(d) {
    const cuda::DeviceGuard here(device);
    EXPECT_TRUE(here.status().ok());
    EXPECT_EQ(cuda::api()->stream_create(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    if (bytes != 0) {
      EXPECT_EQ(cuda::api()->mem_alloc(&slab_, bytes), CUDA_SUCCESS);
    }
    end_ = slab_ + bytes;
    next_ = slab_;
  }
  ~Gpu() {
    synchronize();
    const cuda::DeviceGuard here(device);
    if (slab_ != 0) cuda::api()->mem_free(slab_);
    cuda::api()->stream_destroy(stream);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  /// `offset`: from a multiple of 16 bytes.
  std::span<std::byte> allocate(std::size_t bytes, std::size_t offset = 0) {
    const auto out = next_ + offset;
    next_ = (out + bytes + 15) / 16 * 16;
    EXPECT_LE(next_, end_);
    return {reinterpret_cast<std::byte*>(out), bytes};  // NOLINT(performance-no-int-to-ptr)
  }
  /// Nothing that was allocated is used any more.
  void forget() {
    synchronize();
    next_ = slab_;
  }
  std::span<std::byte> put(std::span<const std::byte> bytes, std::size_t offset = 0) {
    const auto out = allocate(bytes.size(), offset);
    copy(out.data(), bytes);
    return out;
  }
  std::vector<std::byte> get(std::span<const std::byte> from) {
    std::vector<std::byte> out(from.size());
    copy(out.data(), from);
    synchronize();
    return out;
  }
  void copy(std::byte* to, std::span<const std::byte> from) {
    const cuda::DeviceGuard here(device);
    if (from.empty()) return;
    const auto result =
        cuda::api()->memcpy_async(cuda::address_of(to), cuda::address_of(from.data()), from.size(), stream);
    EXPECT_EQ(result, CUDA_SUCCESS) << cuda::name_of(result);
  }
  void synchronize() const {
    const cuda::DeviceGuard here(device);
    while (cuda::api()->stream_query(stream) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
  }

  const int device;
  CUstream stream = nullptr;

 private:
  CUdeviceptr slab_ = 0, next_ = 0, end_ = 0;
};

/// A CUDA graph of what `body` enqueues on the stream of a GPU.
class CapturedGraph {
 public:
  CapturedGraph(Gpu& gpu, const std::function<void()>& body) : gpu_(gpu) {
    const cuda::DeviceGuard here(gpu.device);
    const auto begin = conformance::driver_function<decltype(&::cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
    const auto end = conformance::driver_function<decltype(&::cuStreamEndCapture)>("cuStreamEndCapture");
    const auto make =
        conformance::driver_function<decltype(&::cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags");
    EXPECT_EQ(begin(gpu.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    body();
    EXPECT_EQ(end(gpu.stream, &graph_), CUDA_SUCCESS);
    if (graph_ != nullptr) {
      EXPECT_EQ(make(&executable_, graph_, 0), CUDA_SUCCESS);
    }
  }
  ~CapturedGraph() {
    gpu_.synchronize();
    const cuda::DeviceGuard here(gpu_.device);
    if (executable_ != nullptr) {
      conformance::driver_function<decltype(&::cuGraphExecDestroy)>("cuGraphExecDestroy")(executable_);
    }
    if (graph_ != nullptr) conformance::driver_function<decltype(&::cuGraphDestroy)>("cuGraphDestroy")(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  void launch() {
    const cuda::DeviceGuard here(gpu_.device);
    const auto function = conformance::driver_function<decltype(&::cuGraphLaunch)>("cuGraphLaunch");
    EXPECT_EQ(function(executable_, gpu_.stream), CUDA_SUCCESS);
  }

 private:
  Gpu& gpu_;
  CUgraph graph_ = nullptr;
  CUgraphExec executable_ = nullptr;
};

}  // namespace tensorferry::testing
