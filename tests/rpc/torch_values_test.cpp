#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/ones.h>

#include <string>
#include <vector>

#include "tensorferry/torch.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;

TEST_F(TypedAgents, CarryTensorsOfTorch) {
  sim->serve("scale", [](const at::Tensor& tensor, double by) { return tensor * by; });
  const auto tensor = at::arange(6, at::kFloat).reshape({2, 3});
  const auto scaled = trainer->call<at::Tensor>("sim", "scale", tensor, 2.0).get();
  EXPECT_TRUE(at::equal(scaled, tensor * 2));
  EXPECT_TRUE(at::equal(trainer->call<at::Tensor>("sim", "scale", tensor.t(), 1.0).get(), tensor.t()));
  EXPECT_TRUE(
      at::equal(trainer->call<at::Tensor>("sim", "scale", tensor.select(1, 1), 1.0).get(), tensor.select(1, 1)));
  EXPECT_THROW((trainer->call<at::Tensor>("sim", "scale", at::Tensor(), 1.0)), InvalidArgument);
}

TEST_F(TypedAgents, CarrySparseTensorsAndGradsOfTorch) {
  sim->serve("same", [](const at::Tensor& tensor) { return tensor; });
  const auto sparse = at::eye(3, at::kFloat).to_sparse();
  const auto came = trainer->call<at::Tensor>("sim", "same", sparse).get();
  EXPECT_TRUE(came.is_sparse());
  EXPECT_TRUE(at::equal(came.to_dense(), at::eye(3)));
  const auto leaf = at::ones({2}).requires_grad_(true);
  EXPECT_TRUE(trainer->call<at::Tensor>("sim", "same", leaf).get().requires_grad());
}

TEST_F(TypedAgents, GiveTensorsOfOneBufferOneStorage) {
  sim->serve("halves", [](const at::Tensor& whole) { return std::vector<at::Tensor>{whole, whole}; });
  const auto got = trainer->call<std::vector<at::Tensor>>("sim", "halves", at::ones({4})).get();
  ASSERT_EQ(got.size(), 2U);
  EXPECT_TRUE(at::equal(got[0], got[1]));
}

TEST_F(TypedAgents, RefuseTorchTensorsThatCannotBeSentByNamingThem) {
  const auto nested = thrown_by<InvalidArgument>([&] { trainer->call("sim", "same", at::Tensor()); });
  EXPECT_NE(nested.find("undefined"), std::string::npos) << nested;
  const auto meta = thrown_by<InvalidArgument>([&] { trainer->call("sim", "same", at::ones({2}, at::kMeta)); });
  EXPECT_NE(meta.find("device meta"), std::string::npos) << meta;
}

TEST_F(TypedAgents, RefuseDeviceMapsThatAreNotOneToOne) {
  const Device first{DeviceType::cuda, 0}, second{DeviceType::cuda, 1};
  AgentOptions options;
  options.name = "mapped";
  options.store = store;
  options.device_maps["sim"] = {{first, second}, {{}, second}};
  const auto text = thrown_by<InvalidArgument>([&] { Agent::join(options); });
  EXPECT_NE(text.find("cuda:0 to cuda:1 and cpu to cuda:1 cannot both be"), std::string::npos) << text;
}

TEST(TorchTensors, ShareTheirMemory) {
  auto tensor = at::ones({4}, at::kDouble);
  const auto ours = from_torch(tensor);
  EXPECT_EQ(ours.raw(), tensor.data_ptr());
  auto theirs = to_torch(ours);
  EXPECT_EQ(theirs.data_ptr(), tensor.data_ptr());
  tensor = at::Tensor();
  theirs.add_(1);
  EXPECT_EQ(ours.elements<double>()[3], 2.0);
}

}  // namespace
