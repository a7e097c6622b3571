#include "base/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace tensorferry {
namespace {

TEST(Text, PutsEachValueInItsPlace) {
  const std::string peer = "worker1";
  EXPECT_EQ(formatted("\"{}\" sent {} of {} bytes", peer, 3, std::string_view("7")), "\"worker1\" sent 3 of 7 bytes");
  EXPECT_EQ(formatted("nothing to put in"), "nothing to put in");
  EXPECT_EQ(formatted("{}{}", "", 'x'), "x");
}

TEST(Text, WritesIntegersOfEverySizeAsNumbers) {
  EXPECT_EQ(formatted("{}", std::uint8_t{65}), "65");
  EXPECT_EQ(formatted("{}", std::int8_t{-5}), "-5");
  EXPECT_EQ(formatted("{} {}", std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::uint64_t>::max()),
            "-9223372036854775808 18446744073709551615");
  EXPECT_EQ(formatted("{} {}", true, false), "true false");
}

TEST(Text, DoesNotExpandPlacesInValues) { EXPECT_EQ(formatted("{} {}", "{}", "last"), "{} last"); }

TEST(Text, PadsHexadecimalNumbers) {
  EXPECT_EQ(hex(0), "0");
  EXPECT_EQ(hex(0xBEEF), "beef");
  EXPECT_EQ(hex(0xBEEF, 8), "0000beef");
  EXPECT_EQ(hex(std::numeric_limits<std::uint64_t>::max(), 4), "ffffffffffffffff");
}

TEST(Text, RoundsToDecimals) {
  EXPECT_EQ(fixed(12.34, 1), "12.3");
  EXPECT_EQ(fixed(1023.99, 0), "1024");
  EXPECT_EQ(fixed(std::numeric_limits<double>::max(), 2).size(), 312U);
}

TEST(Text, JoinsARange) {
  EXPECT_EQ(joined(std::vector<std::string>{"a", "b", "c"}, ", "), "a, b, c");
  EXPECT_EQ(joined(std::vector<std::int64_t>{2, -1}, "x"), "2x-1");
  EXPECT_EQ(joined(std::vector<int>{}, ", "), "");
}

}  // namespace
}  // namespace tensorferry
