#include "tensorferry/converter.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>

#include <string>

#include "tensorferry/torch.h"
#include "tests/rpc/cpp/typed_agents.h"
#include "tests/rpc/toy_device.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::HasSubstr;

/// Changes what the converter does, for a test.
enum class Fault { none, throws, other_sizes };
Fault fault = Fault::none;

at::Tensor to_host(const at::Tensor& tensor) {
  if (fault == Fault::throws) throw std::runtime_error("the toy is broken");
  if (fault == Fault::other_sizes) return at::ones({1});
  return from_toy(tensor);
}

const ConverterPlugin toy(at::kPrivateUse1,
                          {.to_host = to_host, .from_host = [](const at::Tensor& host, at::Device device) {
                             return to_toy(host, device.index());
                           }});

struct RegisteredConverter : TypedAgents {
  RegisteredConverter() {
    sim->serve("same", [](const at::Tensor& tensor) { return tensor; });
    sim->serve("device", [](const at::Tensor& tensor) { return tensor.device().str(); });
    sim->serve("sum", [](const TensorOf<float>& host) {
      float sum = 0;
      for (const auto each : host.elements()) sum += each;
      return sum;
    });
  }
  void TearDown() override { fault = Fault::none; }
};

TEST_F(RegisteredConverter, TensorsArriveOnTheDeviceOfTheSameTypeAndIndex) {
  const auto host = at::arange(6, at::kFloat).reshape({2, 3});
  const auto there = to_toy(host, 2);
  EXPECT_EQ(trainer->call<std::string>("sim", "device", there).get(), "privateuseone:2");
  const auto got = trainer->call<at::Tensor>("sim", "same", there).get();
  EXPECT_EQ(got.device(), there.device());
  EXPECT_FALSE(got.requires_grad());
  EXPECT_TRUE(at::equal(from_toy(got), host));
  const auto empty = trainer->call<at::Tensor>("sim", "same", to_toy(at::ones({0, 3}), 0)).get();
  EXPECT_EQ(empty.device().str(), "privateuseone:0");
  EXPECT_EQ(empty.sizes(), at::IntArrayRef({0, 3}));
}

TEST_F(RegisteredConverter, AReceiverWithoutTorchGetsHostMemory) {
  EXPECT_EQ(trainer->call<float>("sim", "sum", to_toy(at::ones({5}), 0)).get(), 5);
}

TEST_F(RegisteredConverter, WhatAConverterThrowsFailsTheCallWithItsText) {
  fault = Fault::throws;
  const auto thrown = thrown_by<InvalidArgument>([&] { trainer->call("sim", "same", to_toy(at::ones({2}), 1)); });
  EXPECT_THAT(thrown, HasSubstr("the converter between privateuseone:1 and cpu failed: the toy is broken"));
}

TEST_F(RegisteredConverter, AConverterThatChangesTheSizesIsRefused) {
  fault = Fault::other_sizes;
  const auto thrown = thrown_by<InvalidArgument>([&] { trainer->call("sim", "same", to_toy(at::ones({2}), 1)); });
  EXPECT_THAT(thrown, HasSubstr("returned no strided tensor there with the same sizes and dtype"));
}

TEST_F(RegisteredConverter, ADeviceTypeWithoutAConverterIsRefused) {
  const auto thrown = thrown_by<InvalidArgument>([&] { trainer->call("sim", "same", at::ones({2}, at::kMeta)); });
  EXPECT_THAT(thrown, HasSubstr("device meta"));
}

TEST(ConverterPlugins, DeviceTypesOfTheLibrarysOwnAndSecondConvertersAreRefused) {
  {
    const ConverterPlugin cpu(at::kCPU, {});
    EXPECT_THAT(Plugins::of_process().check().text(), HasSubstr("\"converter cpu\" of this program has a name of"));
  }
  const ConverterPlugin again(at::kPrivateUse1, {});
  EXPECT_THAT(Plugins::of_process().check().text(), HasSubstr("\"converter privateuseone\" is registered twice"));
}

TEST_F(TypedAgents, AnAgentDoesNotStartIfANameIsRegisteredTwice) {
  const ReductionPlugin one("owl", [](void*, const void*, std::size_t, DType) {});
  EXPECT_EQ(registered_reduction("owl").kind, Reduction::custom);
  EXPECT_THAT(thrown_by<InvalidArgument>([] { registered_reduction("crow"); }), HasSubstr("owl"));
  EXPECT_THAT(thrown_by<InvalidArgument>([] { load_plugin("/nonexistent.so"); }), HasSubstr("cannot load"));
  const ReductionPlugin two("owl", [](void*, const void*, std::size_t, DType) {});
  const auto thrown = thrown_by<InvalidArgument>([&] { join(store, "late"); });
  EXPECT_THAT(thrown, HasSubstr("\"reduction owl\" is registered twice in this process"));
}

}  // namespace
