#include "tensorferry/tensor.h"

#include <cstring>

#include "tensorferry/dlpack.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HostTensor, TakesOverAVector) {
  std::vector<float> values{1, 2, 3, 4, 5, 6};
  const auto* memory = values.data();
  const auto tensor = Tensor::from_vector(std::move(values), {2, 3});
  EXPECT_EQ(tensor.data<float>(), memory);
  EXPECT_THAT(tensor.shape(), ElementsAre(2, 3));
  EXPECT_THAT(tensor.strides(), ElementsAre(3, 1));
  EXPECT_EQ(tensor.size(), 6U);
  EXPECT_EQ(tensor.bytes(), 24U);
  EXPECT_EQ(tensor.text(), "float32 tensor [2, 3]");
}

TEST(HostTensor, KeepsTheOwnerOfItsMemory) {
  auto owner = std::make_shared<std::vector<int>>(std::vector<int>{1, 2, 3});
  std::weak_ptr<void> watched = owner;
  auto tensor = Tensor::from_memory(owner->data(), {3}, DType::int32, owner);
  owner.reset();
  EXPECT_THAT(tensor.elements<std::int32_t>(), ElementsAre(1, 2, 3));
  tensor = {};
  EXPECT_TRUE(watched.expired());
}

TEST(HostTensor, ChecksTheTypeOfEachRead) {
  const auto tensor = Tensor::scalar(1.5);
  EXPECT_EQ(tensor.item<double>(), 1.5);
  EXPECT_THAT(thrown_by<InvalidArgument>([&] { (void)tensor.data<float>(); }),
              HasSubstr("float64 tensor [] is read as float32"));
  EXPECT_THROW((void)TensorOf<float>(tensor), InvalidArgument);
  EXPECT_THROW((void)Tensor::empty({2}, DType::float32).item<float>(), InvalidArgument);
}

TEST(HostTensor, RefusesImpossibleShapes) {
  EXPECT_THROW((void)Tensor::empty({-1}, DType::float32), InvalidArgument);
  EXPECT_THROW((void)Tensor::empty({INT64_MAX, INT64_MAX}, DType::uint8), InvalidArgument);
  EXPECT_THROW((void)Tensor::from_vector(std::vector<int>{1, 2, 3}, {2}), InvalidArgument);
  int memory = 0;
  EXPECT_THROW((void)Tensor::from_memory(&memory, {1}, DType::int32, nullptr, {1, 1}), InvalidArgument);
  EXPECT_THROW((void)Tensor::from_memory(&memory, {1}, DType::int32, nullptr, {-1}), InvalidArgument);
  EXPECT_THROW((void)Tensor::from_memory(nullptr, {1}, DType::int32, nullptr), InvalidArgument);
  EXPECT_EQ(Tensor::empty({0, 5}, DType::float32).size(), 0U);
}

TEST(HostTensor, IsMadeContiguousByItsStrides) {
  const auto whole = Tensor::from_vector(std::vector<int>{1, 2, 3, 4, 5, 6}, {2, 3});
  const auto column = Tensor::from_memory(whole.data<int>() + 1, {2}, DType::int32, whole.owner(), {3});
  EXPECT_FALSE(column.is_contiguous());
  EXPECT_THROW((void)column.elements<int>(), InvalidArgument);
  EXPECT_THAT(column.contiguous().elements<int>(), ElementsAre(2, 5));
  const auto turned = Tensor::from_memory(whole.raw(), {3, 2}, DType::int32, whole.owner(), {1, 3});
  EXPECT_THAT(turned.contiguous().elements<int>(), ElementsAre(1, 4, 2, 5, 3, 6));
  EXPECT_THAT(whole.reshape({3, 2}).shape(), ElementsAre(3, 2));
  EXPECT_THROW((void)whole.reshape({4}), InvalidArgument);
}

TEST_F(TypedAgents, CarryTensorsOfAllLayouts) {
  sim->serve("echo", [](Tensor tensor) { return tensor; });
  const auto echo = [&](const Tensor& tensor) { return trainer->call<Tensor>("sim", "echo", tensor).get(); };
  const auto whole = Tensor::from_vector(std::vector<int>{1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_THAT(echo(whole).elements<int>(), ElementsAre(1, 2, 3, 4, 5, 6));
  const auto turned = Tensor::from_memory(whole.raw(), {3, 2}, DType::int32, whole.owner(), {1, 3});
  EXPECT_THAT(echo(turned).contiguous().elements<int>(), ElementsAre(1, 4, 2, 5, 3, 6));
  const auto column = Tensor::from_memory(whole.data<int>() + 1, {2}, DType::int32, whole.owner(), {3});
  EXPECT_THAT(echo(column).elements<int>(), ElementsAre(2, 5));
  const auto repeated = Tensor::from_memory(whole.raw(), {3, 2}, DType::int32, whole.owner(), {0, 1});
  EXPECT_THAT(echo(repeated).contiguous().elements<int>(), ElementsAre(1, 2, 1, 2, 1, 2));
  EXPECT_EQ(echo(Tensor()).size(), 0U);
  EXPECT_THAT(echo(Tensor::empty({3, 0}, DType::bfloat16)).shape(), ElementsAre(3, 0));
  EXPECT_TRUE(echo(Tensor::scalar(true)).item<bool>());
}

TEST(DLPack, ExportsAndImportsMemory) {
  const auto tensor = Tensor::from_vector(std::vector<float>{1, 2, 3, 4}, {2, 2});
  auto* out = to_dlpack(tensor);
  EXPECT_EQ(out->dl_tensor.data, tensor.raw());
  EXPECT_EQ(out->dl_tensor.ndim, 2);
  EXPECT_EQ(out->dl_tensor.dtype.code, dlpack::floating);
  EXPECT_EQ(out->dl_tensor.dtype.bits, 32);
  EXPECT_EQ(out->dl_tensor.device.device_type, dlpack::cpu);
  const auto in = from_dlpack(out);
  EXPECT_EQ(in.raw(), tensor.raw());
  EXPECT_THAT(in.elements<float>(), ElementsAre(1, 2, 3, 4));
}

int deleted = 0;

TEST(DLPack, IsTakenOverOnceEvenIfItIsRefused) {
  std::int64_t shape[] = {2};
  float data[] = {0, 7, 8};
  dlpack::ManagedTensor managed{{data, {dlpack::cpu, 0}, 1, {dlpack::floating, 32, 1}, shape, nullptr, sizeof(float)},
                                nullptr,
                                [](dlpack::ManagedTensor*) { ++deleted; }};
  deleted = 0;
  {
    const auto tensor = from_dlpack(&managed);
    const auto copy = tensor;  // NOLINT(performance-unnecessary-copy-initialization): it holds the memory too
    EXPECT_THAT(copy.elements<float>(), ElementsAre(7, 8));
    EXPECT_EQ(deleted, 0);
  }
  EXPECT_EQ(deleted, 1);
  managed.dl_tensor.dtype.lanes = 4;
  EXPECT_THROW(from_dlpack(&managed), InvalidArgument);
  EXPECT_EQ(deleted, 2);
  managed.dl_tensor.dtype = {dlpack::floating, 32, 1};
  managed.dl_tensor.device = {99, 0};
  EXPECT_THROW(from_dlpack(&managed), InvalidArgument);
  EXPECT_THROW(from_dlpack(nullptr), InvalidArgument);
}

TEST(HostTensor, CopiesTheElementsOfAnother) {
  const auto rows = Tensor::from_vector<int>({1, 2, 3, 4, 5, 6}, {2, 3});
  std::vector<int> memory(6);
  const auto columns = Tensor::from_memory(memory.data(), {2, 3}, DType::int32, nullptr, {1, 2});
  columns.copy_from(rows);
  EXPECT_THAT(memory, ElementsAre(1, 4, 2, 5, 3, 6));
  const auto back = Tensor::empty({2, 3}, DType::int32);
  back.copy_from(columns);
  EXPECT_THAT(back.elements<int>(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THROW(columns.copy_from(rows.reshape({3, 2})), InvalidArgument);
  EXPECT_THROW(columns.copy_from(Tensor::empty({2, 3}, DType::float32)), InvalidArgument);
}

}  // namespace
