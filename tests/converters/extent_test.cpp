#include "converters/extent.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace tensorferry {
namespace {

using Numbers = std::vector<std::int64_t>;

TEST(Extent, OfRowMajorColumnMajorAndPermutedIsGapless) {
  for (const auto& [sizes, strides] : std::vector<std::pair<Numbers, Numbers>>{
           {{}, {}}, {{5}, {1}}, {{3, 4}, {4, 1}}, {{3, 4}, {1, 3}}, {{2, 3, 4, 5}, {60, 1, 15, 3}}}) {
    std::int64_t elements = 1;
    for (const auto size : sizes) elements *= size;
    const auto extent = extent_of(sizes, strides);
    EXPECT_TRUE(extent.gapless);
    EXPECT_EQ(extent.span, elements);
  }
}

TEST(Extent, OfAColumnHasGaps) {
  const auto extent = extent_of(Numbers{100}, Numbers{7});
  EXPECT_FALSE(extent.gapless);
  EXPECT_EQ(extent.span, 99 * 7 + 1);
}

TEST(Extent, OfNoElementsIsEmptyForAnyStrides) {
  const auto extent = extent_of(Numbers{3, 0, 1 << 30}, Numbers{1 << 30, 1 << 30, 1 << 30});
  EXPECT_TRUE(extent.gapless);
  EXPECT_EQ(extent.span, 0);
}

TEST(Extent, StridesOfDimensionsOfSizeOneDoNotCount) {
  const auto extent = extent_of(Numbers{1, 6, 1}, Numbers{1000, 1, 999});
  EXPECT_TRUE(extent.gapless);
  EXPECT_EQ(extent.span, 6);
}

TEST(Extent, OfAnExpandedElementIsOneElement) {
  const auto extent = extent_of(Numbers{1000, 3}, Numbers{0, 1});
  EXPECT_TRUE(extent.gapless);
  EXPECT_EQ(extent.span, 3);
}

TEST(Extent, SlidingWindowsOverlapWithoutGaps) {
  EXPECT_TRUE(extent_of(Numbers{10, 4}, Numbers{3, 1}).gapless);
  EXPECT_EQ(extent_of(Numbers{10, 4}, Numbers{3, 1}).span, 31);
  EXPECT_FALSE(extent_of(Numbers{10, 2}, Numbers{3, 1}).gapless);
}

TEST(Extent, NeverCallsAViewWithGapsGapless) {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    Numbers sizes, strides;
    std::set<std::int64_t> elements{0};
    for (auto dims = random() % 4; dims != 0; --dims) {
      sizes.push_back(static_cast<std::int64_t>(random() % 4 + 1));
      strides.push_back(static_cast<std::int64_t>(random() % 8));
      std::set<std::int64_t> more;
      for (const auto at : elements) {
        for (std::int64_t i = 0; i < sizes.back(); ++i) more.insert(at + i * strides.back());
      }
      elements = more;
    }
    const auto extent = extent_of(sizes, strides);
    EXPECT_EQ(extent.span, *elements.rbegin() + 1);
    if (extent.gapless) {
      EXPECT_EQ(static_cast<std::int64_t>(elements.size()), extent.span);
    }
  }
}

}  // namespace
}  // namespace tensorferry
