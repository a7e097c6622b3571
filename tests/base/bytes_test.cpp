#include "base/bytes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>

namespace tensorferry {
namespace {

TEST(Bytes, WrittenValuesAreReadBack) {
  Bytes bytes;
  Writer out(bytes);
  out.put(std::uint8_t{1});
  out.put(std::int64_t{-2});
  out.put(3.5);
  out.varint(1000);
  out.sized("text");
  out.sized("");
  out.raw(view_of("raw"));

  Reader in(bytes);
  EXPECT_EQ(in.get<std::uint8_t>(), 1);
  EXPECT_EQ(in.get<std::int64_t>(), -2);
  EXPECT_EQ(in.get<double>(), 3.5);
  EXPECT_EQ(in.varint(), 1000u);
  EXPECT_EQ(in.text(), "text");
  EXPECT_EQ(in.text(), "");
  EXPECT_EQ(text_of(in.rest()), "raw");
  EXPECT_EQ(text_of(in.raw(3)), "raw");
  EXPECT_TRUE(in.empty());
  EXPECT_FALSE(in.failed());
}

TEST(Bytes, NumbersAreLittleEndian) {
  Bytes bytes;
  Writer(bytes).put(std::uint32_t{0x01020304});
  EXPECT_EQ(text_of(bytes), "\x04\x03\x02\x01");
}

TEST(Bytes, VarintsOfEveryLengthRoundTrip) {
  for (int shift = 0; shift < 64; ++shift) {
    for (std::uint64_t value : {std::uint64_t{1} << shift, (std::uint64_t{1} << shift) - 1}) {
      Bytes bytes;
      Writer(bytes).varint(value);
      Reader in(bytes);
      EXPECT_EQ(in.varint(), value);
      EXPECT_TRUE(in.empty() && !in.failed());
    }
  }
  Bytes largest;
  Writer(largest).varint(std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(largest.size(), 10u);
  EXPECT_EQ(Reader(largest).varint(), std::numeric_limits<std::uint64_t>::max());
}

TEST(Bytes, AVarintOfMoreThan64BitsFails) {
  for (const auto* text :
       {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"}) {
    Reader in(view_of(text));
    EXPECT_EQ(in.varint(), 0u);
    EXPECT_TRUE(in.failed());
  }
}

TEST(Bytes, AReadPastTheEndFailsAllLaterReads) {
  Bytes bytes(3);
  Reader in(bytes);
  EXPECT_EQ(in.get<std::uint32_t>(), 0u);
  EXPECT_TRUE(in.failed());
  EXPECT_EQ(in.get<std::uint8_t>(), 0u);
  EXPECT_TRUE(in.rest().empty());
}

TEST(Bytes, ALengthBeyondTheEndYieldsNothing) {
  Bytes bytes;
  Writer out(bytes);
  out.varint(std::numeric_limits<std::uint64_t>::max());
  out.raw(view_of("short"));
  Reader in(bytes);
  EXPECT_EQ(in.text(), "");
  EXPECT_TRUE(in.failed());
}

TEST(Bytes, ACountBeyondTheRemainingBytesFails) {
  Bytes bytes;
  Writer out(bytes);
  out.varint(3);
  out.raw(Bytes(23));
  Reader fits(bytes);
  EXPECT_EQ(fits.count(7), 3u);
  Reader does_not(bytes);
  EXPECT_EQ(does_not.count(8), 0u);
  EXPECT_TRUE(does_not.failed());
}

TEST(Bytes, GarbageIsReadWithinItsBounds) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    Bytes bytes(random() % 40);
    for (auto& byte : bytes) byte = std::byte(random());
    Reader in(bytes);
    for (int i = 0; i < 20; ++i) {
      switch (random() % 4) {
        case 0:
          (void)in.get<std::uint64_t>();
          break;
        case 1:
          (void)in.varint();
          break;
        case 2:
          (void)in.sized();
          break;
        default:
          (void)in.count(4);
          break;
      }
      ASSERT_LE(in.rest().size(), bytes.size());
    }
  }
}

}  // namespace
}  // namespace tensorferry
