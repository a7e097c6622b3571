#include "rpc/tensor.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>

#include "converters/cpu.h"

namespace tensorferry {
namespace {

struct TensorRecords : ::testing::Test {
  TensorRecords() { converters.add(DeviceType::cpu, std::make_shared<CpuConverter>(memory)); }

  /// Returns a message with `tensors`. Notes them first if `noted`.
  Message written(const std::vector<at::Tensor>& tensors, bool noted = true) {
    Encoder out;
    TensorWriter writer(converters, out);
    if (noted) {
      for (const auto& tensor : tensors) writer.note(tensor);
      writer.prepare();
    }
    for (const auto& tensor : tensors) {
      const auto status = writer.write(tensor, false);
      EXPECT_TRUE(status.ok()) << status.text();
    }
    EXPECT_TRUE(out.status().ok()) << out.status().text();
    return out.take();
  }

  /// Returns copies of the message's buffers, as a receiver has them.
  std::vector<Buffer> delivered(const Message& message) {
    std::vector<Buffer> buffers;
    for (const auto& source : message.buffers) {
      auto buffer = memory->allocate(source.bytes, Device{});
      if (source.bytes != 0) std::memcpy(buffer.data, source.data, source.bytes);
      buffers.push_back(std::move(buffer));
    }
    return buffers;
  }

  std::vector<at::Tensor> read(const Message& message, std::size_t count) {
    const auto buffers = delivered(message);
    Decoder in(message.payload, buffers);
    TensorReader reader(converters, buffers);
    std::vector<at::Tensor> tensors;
    while (tensors.size() < count) {
      auto tensor = reader.read(in, in.next());
      EXPECT_TRUE(tensor.ok()) << tensor.status().text();
      if (!tensor.ok()) break;
      tensors.push_back(*std::move(tensor));
    }
    EXPECT_TRUE(in.finish().ok());
    return tensors;
  }

  at::Tensor there_and_back(const at::Tensor& tensor) { return read(written({tensor}), 1).at(0); }

  /// Expects that `tensor` is refused and that the writer has written nothing. Returns the refusal's text.
  std::string refusal(const at::Tensor& tensor) {
    Encoder out;
    const auto before = out.size();
    TensorWriter writer(converters, out);
    writer.note(tensor);
    writer.prepare();
    const auto status = writer.write(tensor, false);
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_EQ(out.size(), before);
    return std::string(status.what());
  }

  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();
  Converters converters;
};

TEST_F(TensorRecords, AViewWithoutGapsIsSentWithoutACopy) {
  const auto matrix = at::randn({10, 8});
  for (const auto& view : {matrix, matrix.slice(0, 2, 5), matrix.t(), matrix.select(0, 3)}) {
    const auto message = written({view});
    ASSERT_EQ(message.buffers.size(), 1U);
    EXPECT_EQ(message.buffers[0].data, static_cast<const std::byte*>(view.const_data_ptr()));
    EXPECT_EQ(message.buffers[0].bytes, view.nbytes());
    const auto got = there_and_back(view);
    EXPECT_TRUE(got.equal(view));
    EXPECT_EQ(got.strides(), view.strides());
  }
}

TEST_F(TensorRecords, AViewWithGapsIsMadeContiguousOnce) {
  const auto matrix = at::randn({100, 100});
  const auto column = matrix.select(1, 7);
  Encoder out;
  TensorWriter writer(converters, out);
  writer.note(column);
  EXPECT_EQ(writer.copying(), 400U);
  writer.prepare();
  ASSERT_TRUE(writer.write(column, false).ok());
  const auto message = out.take();
  ASSERT_EQ(message.buffers.size(), 1U);
  EXPECT_EQ(message.buffers[0].bytes, 400U);
  EXPECT_TRUE(read(message, 1)[0].equal(column));
  EXPECT_TRUE(read(written({column}, false), 1)[0].equal(column));
}

TEST_F(TensorRecords, AnExpandedViewSendsEachElementOnce) {
  const auto scalar = at::full({}, 3.5).expand({1000, 1000});
  const auto message = written({scalar});
  EXPECT_EQ(message.buffers[0].bytes, 4U);
  const auto got = read(message, 1)[0];
  EXPECT_EQ(got.sizes(), scalar.sizes());
  EXPECT_TRUE(got.eq(3.5).all().item<bool>());
}

TEST_F(TensorRecords, OverlappingViewsShareAndAdjacentViewsDoNot) {
  const auto base = at::arange(100, at::kInt);
  const std::vector<at::Tensor> tensors{base.slice(0, 30, 60).slice(0, 0, 30, 2), base.slice(0, 0, 40),
                                        base.slice(0, 39, 70), base.slice(0, 70, 100)};
  const auto message = written(tensors);
  EXPECT_EQ(message.buffers.size(), 2U);
  const auto got = read(message, tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(got[i].equal(tensors[i])) << i;
  got[1][39] = -1;
  EXPECT_EQ(got[2][0].item<int>(), -1);
  got[2][1] = -2;
  EXPECT_EQ(got[0][5].item<int>(), -2);
  EXPECT_FALSE(got[3].is_alias_of(got[2]));
}

TEST_F(TensorRecords, WithoutANoteEachTensorIsSentAlone) {
  const auto base = at::arange(100, at::kInt);
  const auto message = written({base, base.slice(0, 0, 50)}, false);
  EXPECT_EQ(message.buffers.size(), 2U);
}

TEST_F(TensorRecords, RandomViewsOfOneStorageArriveEqual) {
  std::mt19937 random(7);
  const auto pick = [&](std::int64_t below) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(below));
  };
  const auto base = at::arange(200, at::kShort);
  for (int round = 0; round < 300; ++round) {
    std::vector<at::Tensor> tensors;
    for (auto count = 1 + pick(6); count != 0; --count) {
      std::vector<std::int64_t> sizes, strides;
      for (auto dims = pick(4); dims != 0; --dims) {
        sizes.push_back(pick(5));
        strides.push_back(pick(9));
      }
      tensors.push_back(base.as_strided(sizes, strides, pick(50)));
    }
    const auto got = read(written(tensors), tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) ASSERT_TRUE(got[i].equal(tensors[i])) << round;
  }
}

TEST_F(TensorRecords, SparseTensorsTravelAsParts) {
  const auto dense = at::eye(4);
  for (const auto& sparse :
       {dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr({2, 2})}) {
    const auto got = there_and_back(sparse);
    EXPECT_EQ(got.layout(), sparse.layout());
    EXPECT_TRUE(got.to_dense().equal(dense));
  }
}

TEST_F(TensorRecords, AnUnsendableTensorIsRefusedWithAReasonAndWritesNothing) {
  EXPECT_THAT(refusal(at::Tensor()), ::testing::HasSubstr("undefined"));
  EXPECT_THAT(refusal(at::empty({2}, at::kMeta)), ::testing::HasSubstr("device meta"));
  EXPECT_THAT(refusal(at::_empty_affine_quantized({2}, at::TensorOptions(at::kQInt8), 0.1, 0)),
              ::testing::HasSubstr("torch.qint8"));
  auto freed = at::ones({3});
  freed.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
  EXPECT_THAT(refusal(freed), ::testing::HasSubstr("freed"));
  converters = {};
  EXPECT_THAT(refusal(at::ones({3})), ::testing::HasSubstr("device cpu"));
}

/// Returns a message with a sparse tensor of `parts` that claims to have `layout`.
Message sparse_message(const Converters& converters, const SparseLayout& layout, const std::vector<at::Tensor>& parts) {
  Encoder out;
  TensorWriter writer(converters, out);
  EXPECT_TRUE(out.begin_sparse(layout));
  for (const auto& part : parts) EXPECT_TRUE(writer.write(part, false).ok());
  out.end();
  return out.take();
}

TEST_F(TensorRecords, SparseTensorsWithMismatchedPartsAreProtocolErrors) {
  using Kind = SparseLayout::Kind;
  const auto indices = [](std::vector<std::int64_t> values) { return at::tensor(values, at::kLong); };
  const auto values = at::ones({2});
  const std::vector<std::pair<SparseLayout, std::vector<at::Tensor>>> wrong{
      {{Kind::coo, 0, {3, 3}}, {indices({0, 1, 0, 7}).view({2, 2}), values}},                        // outside
      {{Kind::coo, 0, {3, 3}}, {indices({0, 1, 0, -1}).view({2, 2}), values}},                       // negative
      {{Kind::coo, 0, {3, 3}}, {indices({0, 1}), values}},                                           // not a matrix
      {{Kind::coo, 0, {3, 3}}, {at::ones({2, 2}), values}},                                          // not integers
      {{Kind::coo, SparseLayout::coalesced, {3, 3}}, {indices({1, 0, 1, 0}).view({2, 2}), values}},  // unsorted
      {{Kind::coo, 0, {1LL << 62, 1LL << 62}}, {indices({0, 1, 0, 1}).view({2, 2}), values}},
      {{Kind::coo, SparseLayout::requires_grad, {3, 3}}, {indices({0, 1, 0, 1}).view({2, 2}), at::ones({2}, at::kInt)}},
      {{Kind::csr, 0, {3, 3}}, {indices({0, 1, 2, 9}), indices({0, 1}), values}},
      {{Kind::csr, 0, {3, 3}}, {indices({0, 1, 2, 2}), indices({0, 99}), values}},
      {{Kind::csr, 0, {3, 3}}, {indices({0, 1, 2, 2}), indices({0, 1}), at::ones({5})}},
      {{Kind::csc, 0, {3}}, {indices({0, 1, 2, 2}), indices({0, 1}), values}},
      {{Kind::bsr, 0, {3, 3}}, {indices({0, 1, 2, 2}), indices({0, 1}), values}},
      {{Kind::bsc, 0, {}}, {indices({}), indices({}), values}},
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    const auto message = sparse_message(converters, wrong[i].first, wrong[i].second);
    const auto buffers = delivered(message);
    Decoder in(message.payload, buffers);
    TensorReader reader(converters, buffers);
    const auto tag = in.next();
    ASSERT_EQ(tag, Tag::sparse) << i;
    EXPECT_EQ(reader.read(in, tag).status().code(), Code::protocol_error) << i;
  }
}

TEST_F(TensorRecords, TheIndicesOfASparseTensorStayAsTheyWereValidated) {
  // torch trusts indices that were validated once, and the sender may still write the memory that they came in.
  const auto dense = at::eye(4);
  for (const auto& sent : {dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr({2, 2}),
                           dense.to_sparse_bsc({2, 2})}) {
    const auto message = written({sent});
    const auto buffers = delivered(message);
    Decoder in(message.payload, buffers);
    TensorReader reader(converters, buffers);
    const auto got = reader.read(in, in.next());
    ASSERT_TRUE(got.ok()) << got.status().text();
    const auto& values = buffers.back();
    for (const auto& buffer : buffers) {
      if (buffer.data != values.data) std::memset(buffer.data, 0x7f, buffer.bytes);  // the indices, as the sender may
    }
    EXPECT_TRUE(got->to_dense().equal(dense)) << sent.layout();
  }
}

TEST_F(TensorRecords, ASparseTensorHasNoMoreIndicesThanItsBufferHolds) {
  // Validating 2^40 indices that are one number of 8 bytes would take hours.
  const auto many = std::int64_t{1} << 40;
  const auto indices = at::zeros({1, 1}, at::kLong).expand({1, many});
  const auto values = at::ones({1}).expand({many});
  Encoder out;
  TensorWriter writer(converters, out);
  ASSERT_TRUE(out.begin_sparse({SparseLayout::Kind::coo, 0, {3}}));
  ASSERT_TRUE(writer.write(indices, false).ok() && writer.write(values, false).ok());
  out.end();
  const auto message = out.take();
  const auto buffers = delivered(message);
  Decoder in(message.payload, buffers);
  TensorReader reader(converters, buffers);
  EXPECT_EQ(reader.read(in, in.next()).status().code(), Code::protocol_error);

  const auto expanded = at::zeros({1, 1}, at::kLong).expand({1, 3});
  const auto sparse = at::sparse_coo_tensor(expanded, at::ones({3}), {3});
  EXPECT_TRUE(there_and_back(sparse).to_dense().equal(sparse.to_dense()));
}

TEST_F(TensorRecords, ASparseTensorWithANonTensorPartIsAProtocolError) {
  Encoder out;
  ASSERT_TRUE(out.begin_sparse({SparseLayout::Kind::coo, 0, {3, 3}}));
  out.integer(1);
  out.integer(2);
  out.end();
  const auto message = out.take();
  Decoder in(message.payload, {});
  TensorReader reader(converters, {});
  EXPECT_EQ(reader.read(in, in.next()).status().code(), Code::protocol_error);
}

TEST_F(TensorRecords, BuffersOnDevicesWithoutAConverterAreRefused) {
  const auto message = written({at::ones({4})});
  auto buffers = delivered(message);
  buffers[0].device = {DeviceType::cuda, 0};
  Decoder in(message.payload, buffers);
  TensorReader reader(converters, buffers);
  EXPECT_THAT(std::string(reader.read(in, in.next()).status().what()), ::testing::HasSubstr("cuda:0"));
}

TEST_F(TensorRecords, RequiresGradSurvivesAsALeaf) {
  const auto leaf = at::ones({3}).set_requires_grad(true);
  const auto got = there_and_back(leaf);
  EXPECT_TRUE(got.requires_grad());
  EXPECT_TRUE(got.is_leaf());
}

TEST(DTypes, HaveTorchsNumbers) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::Undefined); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    const auto dtype = dtype_of(type);
    EXPECT_EQ(dtype.has_value(), !at::isQIntType(type)) << c10::toString(type);
    if (!dtype) continue;
    EXPECT_EQ(size_of(*dtype), at::elementSize(type)) << c10::toString(type);
    EXPECT_EQ(name_of(*dtype), c10::getDtypeNames(type).first);
    EXPECT_EQ(scalar_type_of(*dtype), type);
    EXPECT_EQ(is_complex(*dtype), at::isComplexType(type)) << c10::toString(type);
  }
  EXPECT_EQ(scalar_type_of(static_cast<DType>(200)), std::nullopt);
}

}  // namespace
}  // namespace tensorferry
