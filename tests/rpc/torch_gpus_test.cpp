/// Typed calls of C++ agents with at::Tensors on GPUs, by each channel that carries them.
#include <ATen/ATen.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <string>
#include <vector>

#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/registry.h"
#include "tensorferry/gpus.h"
#include "tests/rpc/cpp/typed_agents.h"
#include "tests/rpc/torch_rpc_pair.h"

namespace tensorferry::testing {
namespace {

constexpr std::int64_t mega = 1 << 20;
constexpr std::int64_t a_while = 8'000'000;  // cycles: some 5 ms

at::TensorOptions floats() { return at::TensorOptions(at::kFloat).device(at::kCUDA); }

/// Two agents with all GPUs, "sim" and "trainer".
class GpuAgents : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
  }
  std::shared_ptr<Agent> join_with_gpus(const std::string& name, AgentOptions options = {}) {
    options.name = name;
    options.store = store;
    options.devices = gpus();
    // One process has both ends. CUDA lets cuda_ipc map memory of the same process only for chunks.
    options.register_channels = [](Registry& registry) {
      registry.add("cuda_ipc", 1000,
                   [] { return std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.within_process = true}); });
    };
    return Agent::join(std::move(options));
  }
  const std::shared_ptr<Store> store = local_store();
};

class GpuCalls : public GpuAgents, public ::testing::WithParamInterface<const char*> {};

TEST_P(GpuCalls, OrderTensorsBehindTheWorkOfBothEnds) {
  const std::string channel = GetParam();
  const auto* const allocator = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  if (channel == "cuda_ipc" && (allocator == nullptr || std::string_view(allocator) != "expandable_segments:True"))
    GTEST_SKIP() << "in one process cuda_ipc needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
  const auto sim = join_with_gpus("sim");
  const auto trainer = join_with_gpus("trainer");
  sim->serve("add", [](const at::Tensor& x, double more) {
    at::cuda::sleep(a_while);  // on the stream that the argument arrived on
    return x + more;
  });
  const CallOptions by{.require = channel};
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  std::vector<at::Tensor> right;
  for (int i = 0; i < 20; ++i) {
    auto x = at::empty({mega / (1 + i % 3)}, floats());
    at::cuda::sleep(a_while);
    x.fill_(i);
    auto future = trainer->call_with<at::Tensor>(by, "sim", "add", x, 1.0);
    x.reset();
    at::empty({mega}, floats()).fill_(-1);  // may get the memory of x, once the channel no longer reads it
    const auto y = future.get();
    EXPECT_TRUE(y.is_cuda());
    right.push_back((y == i + 1).all());
  }
  EXPECT_TRUE(at::stack(right).all().item<bool>());
}
INSTANTIATE_TEST_SUITE_P(Channels, GpuCalls, ::testing::Values("cuda_xth", "cuda_ipc", "cuda_basic"),
                         [](const auto& channel) { return std::string(channel.param); });

TEST_F(GpuAgents, SendListsStructsAndViewsOfGpus) {
  const auto sim = join_with_gpus("sim");
  const auto trainer = join_with_gpus("trainer");
  sim->serve("sum", [](const std::map<std::string, at::Tensor>& state) {
    auto total = at::zeros({}, floats());
    for (const auto& [_, tensor] : state) total += tensor.sum();
    return total;
  });
  const auto square = at::arange(16, floats()).reshape({4, 4});
  const std::map<std::string, at::Tensor> state{
      {"rows", square.narrow(0, 1, 2)}, {"column", square.select(1, 1)}, {"host", at::ones({3})}};
  EXPECT_EQ(trainer->call<at::Tensor>("sim", "sum", state).get().item<float>(), 60.0F + 28.0F + 3.0F);
}

TEST_F(GpuAgents, LandWhereTheDeviceMapSays) {
  AgentOptions options;
  options.device_maps["sim"] = {{{DeviceType::cuda, 0}, {}}};
  const auto sim = join_with_gpus("sim");
  const auto trainer = join_with_gpus("trainer", std::move(options));
  sim->serve("where", [](const at::Tensor& x) { return x.device().str(); });
  sim->serve("same", [](const at::Tensor& x) { return x; });
  EXPECT_EQ(trainer->call<std::string>("sim", "where", at::ones({8}, floats())).get(), "cpu");
  EXPECT_TRUE(trainer->call<at::Tensor>("sim", "same", at::ones({8}, floats())).get().is_cuda());
}

TEST_F(GpuAgents, OfTorchsRpcRunItsOperatorsOnGpus) {
  AgentOptions options;
  options.devices = gpus();
  auto caller = options;
  caller.device_maps["worker1"] = options.device_maps["worker0"] = {{{DeviceType::cuda, 0}, {DeviceType::cuda, 0}}};
  TorchRpcPair agents(std::move(caller), std::move(options));
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  auto x = at::empty({mega}, floats());
  at::cuda::sleep(a_while);
  x.fill_(1);
  const auto sum = agents.sum(x, x);
  EXPECT_TRUE(sum.is_cuda());
  EXPECT_TRUE((sum == 2).all().item<bool>());
}

TEST_F(GpuAgents, NameTheDeviceThatAnAgentDoesNotHave) {
  const auto sim = join_with_gpus("sim");
  const auto host = join(store, "host");
  sim->serve("count", [](const at::Tensor& x) { return x.numel(); });
  sim->serve("plain", [](const Tensor& x) { return static_cast<std::int64_t>(x.size()); });
  const auto text =
      thrown_by<InvalidArgument>([&] { host->call<std::int64_t>("sim", "count", at::ones({8}, floats())).get(); });
  EXPECT_NE(text.find("cuda:0"), std::string::npos) << text;
  const auto trainer = join_with_gpus("trainer");
  const auto mismatch =
      thrown_by<InvalidArgument>([&] { trainer->call<std::int64_t>("sim", "plain", at::ones({8}, floats())).get(); });
  EXPECT_NE(mismatch.find("plain(tensor) -> int"), std::string::npos) << mismatch;
  EXPECT_THROW(gpus({c10::cuda::device_count()}), InvalidArgument);
}

}  // namespace
}  // namespace tensorferry::testing
