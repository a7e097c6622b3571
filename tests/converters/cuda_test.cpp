#include "converters/cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <set>
#include <string>
#include <thread>

#include "converters/current_streams.h"

namespace tensorferry {
namespace {

constexpr Device first{DeviceType::cuda, 0};

cudaStream_t stream_of(const Buffer& buffer) { return static_cast<cudaStream_t>(buffer.stream); }

void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

/// Blocks a stream until open().
class Barrier {
 public:
  explicit Barrier(cudaStream_t stream) {
    check(cudaLaunchHostFunc(
        stream,
        [](void* open) {
          while (!static_cast<std::atomic<bool>*>(open)->load()) std::this_thread::yield();
        },
        &open_));
  }
  ~Barrier() {
    open();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // until then, the host function uses the flag
  }
  void open() { open_ = true; }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;

 private:
  std::atomic<bool> open_{false};
};

at::Tensor bytes_of(const c10::Storage& storage) {
  const auto options = at::TensorOptions(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
}

Converters converters_with(const std::shared_ptr<Converter>& converter) {
  Converters converters;
  converters.add(DeviceType::cuda, converter);
  return converters;
}

class CudaConverter : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
    converter = make_cuda_converter();
    ASSERT_NE(converter, nullptr);
    memory = converter->memory();
  }
  std::shared_ptr<Converter> converter;
  std::shared_ptr<Memory> memory;
};

TEST_F(CudaConverter, SendsTheTensorsOwnMemoryInTheOrderOfTheCurrentStream) {
  const auto tensor = at::arange(100, at::TensorOptions(at::kLong).device(at::kCUDA));
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto buffer = converter->to_buffer(tensor.storage(), 80, 16);
  ASSERT_TRUE(buffer.ok()) << buffer.status().text();
  EXPECT_EQ(buffer->data, static_cast<const std::byte*>(tensor.const_data_ptr()) + 80);
  EXPECT_EQ(buffer->bytes, 16U);
  EXPECT_EQ(buffer->device, first);
  EXPECT_EQ(stream_of(*buffer), stream.stream());
}

TEST_F(CudaConverter, RefusesToSendAndReceiveDuringAGraphCapture) {
  const auto tensor = at::ones({4}, at::kCUDA);
  auto received = memory->allocate(16, first);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  check(cudaStreamBeginCapture(stream.stream(), cudaStreamCaptureModeThreadLocal));
  const auto sent = converter->to_buffer(tensor.storage(), 0, 16);
  const auto storage = converter->to_storage(received);
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream.stream(), &graph));
  check(cudaGraphDestroy(graph));
  EXPECT_EQ(sent.status().code(), Code::invalid_argument);
  EXPECT_NE(sent.status().what().find("a CUDA graph is being captured on"), std::string_view::npos);
  EXPECT_EQ(storage.status().code(), Code::invalid_argument);
  EXPECT_TRUE(converter->to_buffer(tensor.storage(), 0, 16).ok());
  EXPECT_TRUE(converter->to_storage(std::move(received)).ok());
}

TEST_F(CudaConverter, AnotherThreadsCaptureContinuesDuringAReceive) {
  const auto stream = c10::cuda::getStreamFromPool();
  check(cudaStreamBeginCapture(stream.stream(), cudaStreamCaptureModeGlobal));
  std::thread([&] {
    auto buffer = memory->allocate(std::size_t{64} << 20, first);  // more than the allocator has cached
    EXPECT_NE(buffer.data, nullptr);
    EXPECT_TRUE(converter->to_storage(std::move(buffer)).ok());
  }).join();
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream.stream(), &graph));
  check(cudaGraphDestroy(graph));
}

TEST_F(CudaConverter, AReceivedStorageIsLikeTorchsOwn) {
  auto buffer = memory->allocate(400, first);
  ASSERT_NE(buffer.data, nullptr);
  const auto* const where = buffer.data;
  auto storage = converter->to_storage(std::move(buffer));
  ASSERT_TRUE(storage.ok()) << storage.status().text();
  EXPECT_EQ(storage->data(), where);
  EXPECT_TRUE(storage->resizable());
  EXPECT_EQ(storage->allocator(), c10::cuda::CUDACachingAllocator::get());
  auto tensor = bytes_of(*storage);
  tensor.fill_(3);
  tensor.record_stream(c10::cuda::getStreamFromPool().unwrap());
  tensor.resize_({100'000});
  EXPECT_EQ(tensor.slice(0, 0, 400).to(at::kLong).sum().item<std::int64_t>(), 1200);
}

TEST_F(CudaConverter, TheCurrentStreamWaitsForTheLandingStream) {
  constexpr std::size_t bytes = 1 << 20;
  auto buffer = memory->allocate(bytes, first);
  ASSERT_NE(buffer.data, nullptr);
  Barrier barrier(stream_of(buffer));
  check(cudaMemsetAsync(buffer.data, 7, bytes, stream_of(buffer)));
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto storage = converter->to_storage(std::move(buffer));
  ASSERT_TRUE(storage.ok());
  const auto sum = bytes_of(*storage).to(at::kLong).sum();
  EXPECT_FALSE(stream.query());
  barrier.open();
  EXPECT_EQ(sum.item<std::int64_t>(), 7 * static_cast<std::int64_t>(bytes));
}

TEST_F(CudaConverter, MemoryIsNotReusedWhileItsReadingStreamIsBusy) {
  constexpr std::size_t bytes = 3 << 20;
  auto buffer = memory->allocate(bytes, first);
  const auto* const where = buffer.data;
  const auto stream = c10::cuda::getStreamFromPool();
  {
    const c10::cuda::CUDAStreamGuard guard(stream);
    auto storage = converter->to_storage(std::move(buffer));
    ASSERT_TRUE(storage.ok());
    Barrier barrier(stream.stream());
    *storage = c10::Storage();
    const auto next = memory->allocate(bytes, first);
    EXPECT_NE(next.data, where);
  }
  // When the stream has finished, the memory is used again.
  bool again = false;
  std::vector<Buffer> others;
  for (int i = 0; i < 100 && !again; ++i) {
    others.push_back(memory->allocate(bytes, first));
    again = others.back().data == where;
  }
  EXPECT_TRUE(again);
}

TEST_F(CudaConverter, AnUnreadBufferIsKeptUntilItHasLanded) {
  constexpr std::size_t bytes = 5 << 20;
  auto buffer = memory->allocate(bytes, first);
  const auto* const where = buffer.data;
  Barrier barrier(stream_of(buffer));
  buffer = {};
  EXPECT_NE(memory->allocate(bytes, first).data, where);
}

TEST_F(CudaConverter, ReceivesOnAnIdleStream) {
  auto busy = memory->allocate(512, first);
  auto* const stream = busy.stream;
  Barrier barrier(stream_of(busy));
  busy = {};
  for (int i = 0; i < 100; ++i) EXPECT_NE(memory->allocate(512, first).stream, stream);
}

TEST_F(CudaConverter, BuffersHeldTogetherHaveDifferentStreams) {
  std::vector<Buffer> held;
  std::set<Stream> streams;
  for (int i = 0; i < 16; ++i) streams.insert(held.emplace_back(memory->allocate(512, first)).stream);
  EXPECT_EQ(streams.size(), 16U);
  EXPECT_TRUE(streams.contains(memory->allocate(512, first).stream));  // all 16 streams are in use
}

TEST_F(CudaConverter, ABlockFreedInItsStreamsOrderIsReusedAtOnce) {
  constexpr std::size_t bytes = 7 << 20;
  std::set<const void*> used;
  for (int i = 0; i < 100; ++i) {
    const std::array buffers{memory->allocate(bytes, first)};
    const CurrentStreams streams(converters_with(converter), buffers);  // as while a handler runs
    const auto storage = converter->to_storage(buffers[0]);
    ASSERT_TRUE(storage.ok());
    check(cudaMemsetAsync(storage->mutable_data(), i, bytes, stream_of(buffers[0])));
    used.insert(storage->data());
  }
  EXPECT_LE(used.size(), 16U);  // one block for each stream
}

TEST_F(CudaConverter, AReceiveWithoutMemoryReturnsNull) {
  EXPECT_EQ(memory->allocate(std::size_t{1} << 60, first).data, nullptr);
  EXPECT_EQ(memory->allocate(16, {DeviceType::cuda, 200}).data, nullptr);
  EXPECT_EQ(converter->to_storage({{DeviceType::cuda, 200}, nullptr, 0, nullptr, nullptr}).status().code(),
            Code::invalid_argument);
}

TEST_F(CudaConverter, AnEmptyBufferIsAnEmptyStorage) {
  const auto storage = converter->to_storage(memory->allocate(0, first));
  ASSERT_TRUE(storage.ok());
  EXPECT_EQ(storage->nbytes(), 0U);
  EXPECT_EQ(storage->device(), at::Device(at::kCUDA, 0));
}

TEST_F(CudaConverter, AResultInTheCallersMemoryIsAViewOfIt) {
  const auto out = at::zeros({64}, at::TensorOptions(at::kByte).device(at::kCUDA));
  auto buffer = converter->to_buffer(out.storage(), 0, 64);
  ASSERT_TRUE(buffer.ok());
  const auto storage = converter->to_storage(*std::move(buffer));
  ASSERT_TRUE(storage.ok());
  bytes_of(*storage).fill_(2);
  EXPECT_EQ(out.to(at::kLong).sum().item<std::int64_t>(), 128);
}

TEST_F(CudaConverter, AHandlerRunsOnTheLandingStreamsOfItsArguments) {
  const auto before = c10::cuda::getCurrentCUDAStream(0);
  const std::array buffers{Buffer{}, memory->allocate(16, first), memory->allocate(16, first)};
  {
    const CurrentStreams streams(converters_with(converter), buffers);
    EXPECT_EQ(c10::cuda::getCurrentCUDAStream(0).stream(), stream_of(buffers[1]));
  }
  EXPECT_EQ(c10::cuda::getCurrentCUDAStream(0), before);
}

}  // namespace
}  // namespace tensorferry
