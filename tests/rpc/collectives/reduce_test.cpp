#include "rpc/collectives/reduce.h"

#include <gtest/gtest.h>

#include <array>
#include <complex>
#include <limits>
#include <vector>

#include "base/bytes.h"
#include "tensorferry/plugin.h"

namespace tensorferry::collectives {
namespace {

template <class T>
std::vector<T> reduced(ReduceOp op, DType dtype, const std::vector<std::vector<T>>& inputs) {
  EXPECT_TRUE(check_reduction(op, dtype).ok());
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  std::vector<T> out(inputs[0].size());
  reduce(op, dtype, pointers, reinterpret_cast<std::byte*>(out.data()), inputs[0].size() * sizeof(T) / size_of(dtype));
  return out;
}

constexpr std::array all_dtypes{
    DType::uint8,           DType::int8,        DType::int16,         DType::int32,
    DType::int64,           DType::float16,     DType::float32,       DType::float64,
    DType::complex32,       DType::complex64,   DType::complex128,    DType::boolean,
    DType::bfloat16,        DType::float8_e5m2, DType::float8_e4m3fn, DType::float8_e5m2fnuz,
    DType::float8_e4m3fnuz, DType::uint16,      DType::uint32,        DType::uint64};

TEST(Reduce, GivesTheSameBitsWithAllInstructions) {
  constexpr std::size_t count = 5003, ranks = 3;
  for (const auto dtype : all_dtypes) {
    std::vector<Bytes> inputs(ranks, Bytes(count * size_of(dtype)));
    std::uint32_t state = 1;
    for (auto& input : inputs) {
      for (auto& byte : input) byte = static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24U);
      // Numbers below 2: the bits of a NaN are the processor's own affair.
      const auto part = is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype);
      for (std::size_t i = part - 1; is_differentiable(dtype) && i < input.size(); i += part)
        input[i] &= std::byte{0xbf};
    }
    const std::vector<const void*> pointers{inputs[0].data(), inputs[1].data(), inputs[2].data()};
    for (std::uint8_t kind = 0; kind < static_cast<std::uint8_t>(Reduction::custom); ++kind) {
      const auto reduction = static_cast<Reduction>(kind);
      const auto base = kernel_of(dtype, reduction, Instructions::base);
      if (base == nullptr) continue;
      Bytes expected(inputs[0].size()), out(inputs[0].size());
      base(pointers.data(), ranks, expected.data(), count, 0.3);
      for (std::uint8_t set = 1; set <= static_cast<std::uint8_t>(best_instructions()); ++set) {
        kernel_of(dtype, reduction, static_cast<Instructions>(set))(pointers.data(), ranks, out.data(), count, 0.3);
        EXPECT_EQ(out, expected) << name_of(dtype) << " " << name_of(reduction) << " " << int{set};
      }
    }
  }
}

TEST(Reduce, WrapsSumsOfIntegersAndTruncatesTheirAverages) {
  using Values = std::vector<std::int8_t>;
  EXPECT_EQ(reduced<std::int8_t>(Reduction::sum, DType::int8, {{100, -100}, {100, -100}}), (Values{-56, 56}));
  EXPECT_EQ(reduced<std::int8_t>(Reduction::average, DType::int8, {{3, -3}, {4, -4}}), (Values{3, -3}));
  EXPECT_EQ(reduced<std::int8_t>(Reduction::min, DType::int8, {{3, -3}, {4, -4}}), (Values{3, -4}));
  EXPECT_EQ(reduced<std::int8_t>(Reduction::bxor, DType::int8, {{3, 1}, {5, 1}}), (Values{6, 0}));
}

TEST(Reduce, AveragesIntegersOfMoreRanksThanTheyCanCount) {
  const std::vector<std::vector<std::int8_t>> inputs(256, {1, -1});  // the sums wrap to 0
  EXPECT_EQ(reduced<std::int8_t>(Reduction::average, DType::int8, inputs), (std::vector<std::int8_t>{0, 0}));
}

TEST(Reduce, AccumulatesHalvesInFloat) {
  // 2048 + 1 + 1: in float16 each sum would be rounded to 2048.
  EXPECT_EQ(reduced<std::uint16_t>(Reduction::sum, DType::float16, {{0x6800}, {0x3c00}, {0x3c00}})[0], 0x6801);
  // 256 + 1 + 1 in bfloat16.
  EXPECT_EQ(reduced<std::uint16_t>(Reduction::sum, DType::bfloat16, {{0x4380}, {0x3f80}, {0x3f80}})[0], 0x4381);
  // Subnormal, infinite and not a number.
  EXPECT_EQ(
      reduced<std::uint16_t>(Reduction::sum, DType::float16, {{0x0001, 0x7bff, 0x7c00}, {0x0001, 0x7bff, 0xfc00}}),
      (std::vector<std::uint16_t>{0x0002, 0x7c00, 0x7e00}));
}

TEST(Reduce, KeepsANaN) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto reduction : {Reduction::min, Reduction::max}) {
    const auto out = reduced<float>(reduction, DType::float32, {{nan, 1, 2}, {1, nan, 3}});
    EXPECT_TRUE(out[0] != out[0] && out[1] != out[1]);
  }
}

TEST(Reduce, MultipliesComplexNumbers) {
  using Complex = std::complex<float>;
  EXPECT_EQ(reduced<Complex>(Reduction::product, DType::complex64, {{{1, 2}}, {{3, 4}}})[0], Complex(-5, 10));
  EXPECT_EQ(reduced<Complex>(Reduction::average, DType::complex64, {{{1, 2}}, {{3, 4}}})[0], Complex(2, 3));
}

TEST(Reduce, RefusesWhatIsNotDefined) {
  EXPECT_EQ(check_reduction(Reduction::band, DType::float32).what(), "band is not defined for float32 elements");
  EXPECT_FALSE(check_reduction(Reduction::min, DType::complex64).ok());
  EXPECT_FALSE(check_reduction(Reduction::average, DType::boolean).ok());
  EXPECT_FALSE(check_reduction(Reduction::premultiplied_sum, DType::int32).ok());
  EXPECT_FALSE(check_reduction(Reduction::custom, DType::float32).ok());
}

TEST(Reduce, KeepsTheNamesOfItsKindsFromPlugins) {
  for (int kind = 0; kind <= static_cast<int>(Reduction::last); ++kind) {
    const std::string name(name_of(static_cast<Reduction>(kind)));
    const ReductionPlugin plugin(name, [](void*, const void*, std::size_t, DType) {});
    EXPECT_EQ(Plugins::of_process().check().code(), Code::invalid_argument) << name;
  }
  EXPECT_TRUE(Plugins::of_process().check().ok());
}

TEST(Reduce, CombinesByAFunctionOfTheUsers) {
  ReduceOp op(Reduction::custom);
  op.combine = [](void* sum, const void* other, std::size_t count, DType) {
    for (std::size_t i = 0; i < count; ++i) {
      static_cast<int*>(sum)[i] = 10 * static_cast<int*>(sum)[i] + static_cast<const int*>(other)[i];
    }
  };
  EXPECT_EQ(reduced<int>(op, DType::int32, {{1, 4}, {2, 5}, {3, 6}}), (std::vector<int>{123, 456}));
}

}  // namespace
}  // namespace tensorferry::collectives
