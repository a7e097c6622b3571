#include "rpc/core/layout.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace tensorferry {
namespace {

constexpr auto huge = std::numeric_limits<std::int64_t>::max();

TensorLayout layout(std::initializer_list<std::int64_t> sizes, std::initializer_list<std::int64_t> strides,
                    std::int64_t offset = 0, DType dtype = DType::float32) {
  TensorLayout out;
  out.dtype = dtype;
  out.sizes = sizes;
  out.strides = strides;
  out.storage_offset = offset;
  return out;
}

/// Checks every element, the slow way.
bool every_element_is_inside(const TensorLayout& tensor, std::uint64_t bytes) {
  const auto item = static_cast<std::int64_t>(size_of(tensor.dtype));
  std::vector<std::int64_t> at(tensor.sizes.size(), 0);
  for (const auto size : tensor.sizes) {
    if (size == 0) return true;
  }
  for (;;) {
    auto element = tensor.storage_offset;
    for (std::size_t i = 0; i < at.size(); ++i) element += at[i] * tensor.strides[i];
    if (element < 0 || (element + 1) * item > static_cast<std::int64_t>(bytes)) return false;
    std::size_t dim = 0;
    while (dim < at.size() && ++at[dim] == tensor.sizes[dim]) at[dim++] = 0;
    if (dim == at.size()) return true;
  }
}

TEST(TensorLayout, IsValidOnlyIfEveryElementLiesInTheBuffer) {
  std::mt19937 random(7);
  const auto pick = [&](int most) { return static_cast<std::int64_t>(random() % (most + 1)); };
  int valid = 0;
  for (int round = 0; round < 20000; ++round) {
    TensorLayout tensor;
    tensor.dtype = round % 2 == 0 ? DType::uint8 : DType::complex64;
    bool empty = false;
    for (auto dims = pick(3); dims > 0; --dims) {
      tensor.sizes.push_back(pick(4));
      tensor.strides.push_back(pick(6));
      empty |= tensor.sizes[tensor.sizes.size() - 1] == 0;
    }
    tensor.storage_offset = empty ? 0 : pick(5);
    const auto bytes = static_cast<std::uint64_t>(pick(40)) * size_of(tensor.dtype);
    const bool inside = every_element_is_inside(tensor, bytes);
    ASSERT_EQ(validate(tensor, bytes).ok(), inside) << validate(tensor, bytes).text();
    valid += inside;
  }
  EXPECT_GT(valid, 5000);
  EXPECT_LT(valid, 18000);
}

TEST(TensorLayout, AcceptsTheLayoutsOfTorch) {
  EXPECT_TRUE(validate(layout({}, {}), 4).ok());                          // a scalar
  EXPECT_TRUE(validate(layout({0}, {1}), 0).ok());                        // empty
  EXPECT_TRUE(validate(layout({3, 0, 5}, {5, 5, 1}), 0).ok());            // empty in the middle
  EXPECT_TRUE(validate(layout({2, 3}, {1, 2}), 24).ok());                 // transposed
  EXPECT_TRUE(validate(layout({1000000}, {0}), 4).ok());                  // expanded
  EXPECT_TRUE(validate(layout({2, 3, 4, 5}, {60, 1, 15, 3}), 480).ok());  // channels-last
  EXPECT_TRUE(validate(layout({1}, {huge}), 4).ok());                     // a stride that is never taken
  EXPECT_TRUE(validate(layout({0}, {1}, 25), 100).ok());                  // an empty view at a storage's end
}

TEST(TensorLayout, RefusesNumbersThatOverflow) {
  for (const auto& bad : {
           layout({-1}, {1}),
           layout({2}, {-1}, 5),
           layout({2}, {1}, -1),
           layout({std::numeric_limits<std::int64_t>::min()}, {1}),
           layout({huge}, {huge}),
           layout({huge}, {0}),  // 2^63 elements of 4 bytes in one
           layout({std::int64_t{1} << 32, std::int64_t{1} << 32}, {0, 0}),
           layout({0, huge, huge}, {0, 0, 0}),  // no elements, and strides that overflow
           layout({3}, {huge / 2 + 1}),
           layout({2, 2, 2}, {huge / 2, huge / 2, huge / 2}),
           layout({2}, {1}, huge),
           layout({2}, {huge}, huge),
           layout({0}, {1}, huge),  // a wild pointer, though no element is read
           layout({1}, {1}, huge / 4 + 1),
           layout({2, 2}, {1}),
           layout({2}, {1, 1}),
       }) {
    EXPECT_EQ(validate(bad, 1024).code(), Code::protocol_error);
    EXPECT_FALSE(validate(bad, std::numeric_limits<std::uint64_t>::max()).ok());
  }
}

TEST(TensorLayout, RefusesFlagsThatDoNotFitTheDtype) {
  const auto flagged = [](DType dtype, int flags) {
    auto out = layout({1}, {1}, 0, dtype);
    out.flags = static_cast<std::uint8_t>(flags);
    return validate(out, 64).ok();
  };
  EXPECT_TRUE(flagged(DType::complex64, TensorLayout::conjugate | TensorLayout::negative));
  EXPECT_FALSE(flagged(DType::float32, TensorLayout::conjugate));
  EXPECT_TRUE(flagged(DType::float32, TensorLayout::negative | TensorLayout::requires_grad | TensorLayout::parameter));
  EXPECT_TRUE(flagged(DType::int64, TensorLayout::parameter));
  EXPECT_FALSE(flagged(DType::int64, TensorLayout::requires_grad));
  EXPECT_FALSE(flagged(DType::boolean, TensorLayout::negative));
  EXPECT_FALSE(flagged(DType::float32, 0x10));
  EXPECT_FALSE(flagged(static_cast<DType>(12), 0));  // quantised
  EXPECT_FALSE(flagged(static_cast<DType>(255), 0));
}

TEST(TensorLayout, RecognisesRowMajorOrder) {
  TensorLayout tensor;
  tensor.sizes = {2, 3, 4};
  ASSERT_TRUE(tensor.set_contiguous());
  EXPECT_EQ(tensor.strides, (Dims{12, 4, 1}));
  EXPECT_TRUE(tensor.is_contiguous());
  tensor.strides = {12, 1, 3};
  EXPECT_FALSE(tensor.is_contiguous());
  tensor.sizes = {0, 3};
  ASSERT_TRUE(tensor.set_contiguous());
  EXPECT_EQ(tensor.strides, (Dims{3, 1}));
  tensor.sizes = {huge, huge, 1};
  EXPECT_FALSE(tensor.set_contiguous());
}

TEST(ArrayLayout, AcceptsPlainTypesWithExactlyTheirBytes) {
  const auto with = [](std::string dtype, std::uint32_t item, Dims sizes, std::uint64_t bytes, std::uint8_t flags = 0) {
    return validate(ArrayLayout{std::move(dtype), item, flags, sizes}, bytes).ok();
  };
  EXPECT_TRUE(with("<f8", 8, {2, 3}, 48));
  EXPECT_FALSE(with("<f8", 8, {2, 3}, 47));
  EXPECT_FALSE(with("<f8", 8, {2, 3}, 56));
  EXPECT_TRUE(with("|b1", 1, {}, 1, ArrayLayout::scalar));
  EXPECT_FALSE(with("|b1", 1, {1}, 1, ArrayLayout::scalar));
  EXPECT_TRUE(with(">U5", 20, {0}, 0));
  EXPECT_TRUE(with("|V24", 24, {2}, 48));
  EXPECT_TRUE(with("<M8[ns]", 8, {1}, 8));
  EXPECT_TRUE(with("<m8[25us]", 8, {1}, 8));
  EXPECT_TRUE(with("<M8", 8, {1}, 8));
  EXPECT_TRUE(with("<f8", 8, {1}, 8, ArrayLayout::fortran | ArrayLayout::read_only));
  EXPECT_FALSE(with("<f8", 8, {1}, 8, 8));
  for (const char* bad : {"|O", "|O8", "O", "", "<f", "f8", "<f8,<i4", "<M9", "<M8[", "<M8[]", "<M8[n-s]", "<f8 ",
                          "<x8", "<f99999999999", "<i8[ns]"}) {
    EXPECT_FALSE(with(bad, 8, {1}, 8)) << bad;
  }
  EXPECT_FALSE(with("<f8", 8, {-1}, 8));
  EXPECT_FALSE(with("<f8", 0x7fffffff, {huge}, 8));
  EXPECT_FALSE(with("<f8", 8, {huge, huge}, 8));
}

TEST(ArrayLayout, RefusesElementsWithoutBytesOrOfAnotherSizeThanTheDtypeSays) {
  for (const char* dtype : {"|S0", "<U0", "|V0", "|S00", "<f0", "|b0"}) {
    EXPECT_FALSE(validate(ArrayLayout{dtype, 0, 0, {7}}, 0).ok()) << dtype;
    EXPECT_FALSE(validate(ArrayLayout{dtype, 0, 0, {0}}, 0).ok()) << dtype;
    EXPECT_FALSE(validate(ArrayLayout{dtype, 1, 0, {7}}, 7).ok()) << dtype;
  }
  EXPECT_FALSE(validate(ArrayLayout{"<f8", 0, 0, {7}}, 0).ok());
  EXPECT_FALSE(validate(ArrayLayout{"<f8", 4, 0, {7}}, 28).ok());
  EXPECT_FALSE(validate(ArrayLayout{"<U5", 5, 0, {7}}, 35).ok());
  EXPECT_FALSE(validate(ArrayLayout{"<M8[ns]", 16, 0, {1}}, 16).ok());
  EXPECT_TRUE(validate(ArrayLayout{"<c16", 16, 0, {2}}, 32).ok());
}

TEST(DType, NumbersAreFixed) {
  EXPECT_EQ(static_cast<int>(DType::bfloat16), 15);
  EXPECT_EQ(static_cast<int>(DType::float8_e8m0fnu), 44);
  for (int i = 0; i < 256; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(name_of(dtype) != "?", size_of(dtype) != 0) << i;
  }
  EXPECT_TRUE(is_differentiable(DType::complex32));
  EXPECT_FALSE(is_differentiable(DType::boolean));
  EXPECT_FALSE(is_differentiable(static_cast<DType>(12)));
}

}  // namespace
}  // namespace tensorferry
