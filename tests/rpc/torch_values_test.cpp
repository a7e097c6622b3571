#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>

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
