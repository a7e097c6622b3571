/// Calls with tensors on a GPU, without Python. Tests the stream order of agents, channels and the converter together,
/// with memory that is used again at once. `make sanitize-gpu` runs this test under compute-sanitizer.
#include <ATen/ATen.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <utility>

#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "converters/cuda.h"
#include "converters/current_streams.h"
#include "tests/agent/agents.h"

namespace tensorferry::testing {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::int64_t mega = 1 << 20;
constexpr std::int64_t a_while = 8'000'000;  // cycles: some 5 ms

at::TensorOptions floats() { return at::TensorOptions(at::kFloat).device(at::kCUDA); }

/// Returns the built-in channels, with a cuda_ipc that maps its own process's memory, because one process has both
/// ends. CUDA allows that only for chunks.
Registry registry() {
  auto registry = Registry::built_in();
  registry.add("cuda_ipc", 1000,
               [] { return std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.within_process = true}); });
  return registry;
}

/// A caller and callee of one tensor of floats in each direction. Does the Python package's part of a call.
class Caller {
 public:
  Caller() { converters_.add(DeviceType::cuda, converter_); }

  void serve(RawAgent& agent) {
    agent.serve("add one", [this](Request request, Reply reply) {
      const CurrentStreams streams(converters_, request.arguments.buffers);
      auto x = tensor_of(std::move(request.arguments.buffers.at(0)));
      at::cuda::sleep(a_while);
      reply.send(message_of(x + 1));
    });
  }
  void prepare(RawAgentOptions& options) {
    options.registry = registry();
    options.devices = {Device{}, gpu};
    options.memory.emplace(DeviceType::cuda, converter_->memory());
  }
  Message message_of(const at::Tensor& tensor) {
    Message message;
    auto buffer = converter_->to_buffer(tensor.storage(), 0, tensor.nbytes());
    EXPECT_TRUE(buffer.ok()) << buffer.status().text();
    message.buffers.push_back(*std::move(buffer));
    message.destinations.push_back({gpu, true});
    return message;
  }
  /// Makes a tensor of the buffer, for use on the current stream.
  at::Tensor tensor_of(Buffer buffer) {
    auto storage = converter_->to_storage(std::move(buffer));
    EXPECT_TRUE(storage.ok()) << storage.status().text();
    const auto elements = static_cast<std::int64_t>(storage->nbytes() / sizeof(float));
    return at::empty({0}, floats()).set_(*std::move(storage), 0, {elements}, {1});
  }

 private:
  std::shared_ptr<Converter> converter_ = make_cuda_converter();
  Converters converters_;
};

class CudaCalls : public ::testing::TestWithParam<const char*> {};

TEST_P(CudaCalls, SurviveLongKernelsAndImmediateMemoryReuse) {
  const std::string channel = GetParam();
  if (c10::cuda::device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
  const auto* const allocator = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  if (channel == "cuda_ipc" && (allocator == nullptr || std::string_view(allocator) != "expandable_segments:True"))
    GTEST_SKIP() << "in one process cuda_ipc needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
  Caller caller;
  const auto store = std::make_shared<MemoryStore>();
  const Ways ways{.transport = "ring", .channels = channel + ",basic"};
  const auto a = join(store, "a", ways, [&](RawAgentOptions& options) { caller.prepare(options); });
  const auto b = join(store, "b", ways, [&](RawAgentOptions& options) { caller.prepare(options); });
  caller.serve(*b);
  const auto call = [&](const at::Tensor& x) {
    auto options = within(Milliseconds(60000));
    options.require = channel;
    return a->call("b", "add one", caller.message_of(x), options);
  };

  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  constexpr int calls = 40;
  std::deque<std::pair<int, Call>> in_flight;
  std::vector<at::Tensor> right;
  for (int i = 0; i < calls; ++i) {
    auto x = at::empty({mega / (1 + i % 3)}, floats());
    at::cuda::sleep(a_while);
    x.fill_(i);
    in_flight.emplace_back(i, call(x));
    x.reset();
    at::empty({mega}, floats()).fill_(-1);  // may get the memory of x, once the channel no longer reads it
    while (in_flight.size() > (i + 1 < calls ? 3 : 0)) {
      auto [sent, future] = std::move(in_flight.front());
      in_flight.pop_front();
      ASSERT_TRUE(future.wait());
      auto received = future.take();
      ASSERT_TRUE(received.ok()) << received.status().text();
      auto y = caller.tensor_of(std::move(received->buffers.at(0)));
      at::cuda::sleep(a_while);
      right.push_back((y == sent + 1).all());
      y.reset();
      at::empty({mega}, floats()).fill_(-2);
    }
  }
  ASSERT_EQ(right.size(), static_cast<std::size_t>(calls));
  EXPECT_TRUE(at::stack(right).all().item<bool>());
  EXPECT_GT(a->counters().bytes_sent[channel], 0U);
}

INSTANTIATE_TEST_SUITE_P(Channels, CudaCalls, ::testing::Values("cuda_xth", "cuda_ipc", "cuda_basic"),
                         [](const auto& channel) { return std::string(channel.param); });

}  // namespace
}  // namespace tensorferry::testing
