#include "base/record.h"

#include <gtest/gtest.h>

namespace tensorferry {
namespace {

enum class Colour : std::uint8_t { red, green, blue, last = blue };
enum class Open : std::uint16_t { known = 1 };

struct Point {
  std::uint8_t x = 0;
  std::int32_t y = 0;
  static constexpr std::tuple fields{&Point::x, &Point::y};
  bool operator==(const Point&) const = default;
};

struct Everything {
  static constexpr std::uint8_t tag = 7;
  std::uint32_t number = 0;
  std::uint32_t small = 0;
  bool flag = false;
  Colour colour = Colour::red;
  Open open{};
  std::string text;
  Bytes bytes;
  std::array<std::uint16_t, 2> pair{};
  std::array<std::byte, 2> raw{};
  Point point;
  std::vector<Point> points;
  std::string tail;
  static constexpr std::tuple fields{&Everything::number,
                                     varint(&Everything::small),
                                     &Everything::flag,
                                     &Everything::colour,
                                     any_value(&Everything::open),
                                     at_most(&Everything::text, 4),
                                     &Everything::bytes,
                                     &Everything::pair,
                                     &Everything::raw,
                                     &Everything::point,
                                     at_most(&Everything::points, 2),
                                     rest(&Everything::tail)};
  bool operator==(const Everything&) const = default;
};

Everything everything() {
  return {.number = 0x04030201,
          .small = 300,
          .flag = true,
          .colour = Colour::blue,
          .open = Open{0x0908},
          .text = "text",
          .bytes = {std::byte{0xfe}},
          .pair = {1, 2},
          .raw = {std::byte{3}, std::byte{4}},
          .point = {5, -1},
          .points = {{6, 0}},
          .tail = "end"};
}

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes bytes;
  for (const auto value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

TEST(Record, EachFieldTravelsByItsTypeInOrder) {
  EXPECT_EQ(encode(everything()),
            bytes_of({7, 1, 2, 3, 4, 0xac, 2,    1,    2,    8,    9, 4, 't', 'e', 'x', 't', 1,   0xfe, 1,
                      0, 2, 0, 3, 4, 5,    0xff, 0xff, 0xff, 0xff, 1, 6, 0,   0,   0,   0,   'e', 'n',  'd'}));
}

TEST(Record, ReadingUndoesWriting) { EXPECT_EQ(decode<Everything>(encode(everything())), everything()); }

TEST(Record, AnEarlyEndIsRefused) {
  const auto bytes = encode(everything());
  const auto fixed = bytes.size() - everything().tail.size();
  for (std::size_t kept = 0; kept < fixed; ++kept) {
    EXPECT_FALSE(decode<Everything>(ByteView(bytes).first(kept))) << kept;
  }
  EXPECT_EQ(decode<Everything>(ByteView(bytes).first(fixed))->tail, "");
}

TEST(Record, BytesBehindARecordAreRefusedByDecodeAndLeftByRead) {
  auto bytes = encode(Point{1, 2});
  bytes.push_back(std::byte{3});
  EXPECT_FALSE(decode<Point>(bytes));
  Reader in(bytes);
  EXPECT_EQ(read<Point>(in), (Point{1, 2}));
  EXPECT_FALSE(in.failed());
  EXPECT_EQ(in.rest().size(), 1U);
}

TEST(Record, ValuesOutOfBoundsAreRefused) {
  const auto refused = [](std::size_t at, int value) {
    auto bytes = encode(everything());
    bytes[at] = static_cast<std::byte>(value);
    return !decode<Everything>(bytes);
  };
  EXPECT_TRUE(refused(0, 8));  // tag
  EXPECT_TRUE(refused(7, 2));  // flag
  EXPECT_TRUE(refused(8, static_cast<int>(Colour::last) + 1));
  EXPECT_FALSE(refused(9, 0xff));  // any value
  EXPECT_TRUE(refused(29, 3));     // number of points

  auto longer = everything();
  longer.points.resize(3);
  EXPECT_FALSE(decode<Everything>(encode(longer)));
}

struct Byte {
  std::uint8_t value = 0;
  static constexpr std::tuple fields{varint(&Byte::value)};
};
TEST(Record, AVarintThatItsMemberCannotHoldIsRefused) {
  EXPECT_EQ(decode<Byte>(bytes_of({0xff, 1}))->value, 255);
  EXPECT_FALSE(decode<Byte>(bytes_of({0x80, 2})));
}

struct Long {
  std::string text;
  static constexpr std::tuple fields{&Long::text};
};
struct Short {
  std::string text;
  static constexpr std::tuple fields{at_most(&Short::text, 4)};
};
TEST(Record, ATextIsCutByTheWriterAndRefusedByTheReader) {
  EXPECT_EQ(decode<Short>(encode(Short{"texts"}))->text, "text");
  EXPECT_FALSE(decode<Short>(encode(Long{"texts"})));
}

struct List {
  std::vector<std::uint64_t> numbers;
  static constexpr std::tuple fields{&List::numbers};
};
TEST(Record, ACountThatTheBytesCannotHoldIsRefusedBeforeMemoryIsTaken) {
  Bytes bytes;
  Writer out(bytes);
  out.varint(std::uint64_t{1} << 60);
  out.put(std::uint64_t{1});
  EXPECT_FALSE(decode<List>(bytes));
}

struct View {
  std::string_view text;
  ByteView bytes;
  static constexpr std::tuple fields{&View::text, rest(&View::bytes)};
};
TEST(Record, ViewsPointIntoTheBytesThatWereRead) {
  const auto bytes = encode(View{"text", view_of("rest")});
  const auto view = decode<View>(bytes);
  ASSERT_TRUE(view);
  EXPECT_EQ(view->text, "text");
  EXPECT_EQ(view->bytes.data(), bytes.data() + 5);
}

struct Nothing {
  static constexpr std::uint8_t tag = 0;
};
struct Even {
  static constexpr std::uint8_t tag = 2;
  std::uint8_t number = 0;
  static constexpr std::tuple fields{&Even::number};
  [[nodiscard]] bool valid() const { return number % 2 == 0; }
};
using Message = std::variant<Nothing, Even>;

TEST(Record, TheTagNamesTheAlternative) {
  EXPECT_EQ(encode(Message(Even{4})), bytes_of({2, 4}));
  EXPECT_EQ(encode(Even{4}), bytes_of({2, 4}));
  EXPECT_EQ(std::get<Even>(*decode<Message>(bytes_of({2, 4}))).number, 4);
  EXPECT_TRUE(std::holds_alternative<Nothing>(*decode<Message>(bytes_of({0}))));
}

TEST(Record, AMalformedMessageIsRefused) {
  EXPECT_FALSE(decode<Message>(bytes_of({})));
  EXPECT_FALSE(decode<Message>(bytes_of({1})));     // an unknown tag
  EXPECT_FALSE(decode<Message>(bytes_of({0, 0})));  // longer than the alternative
  EXPECT_FALSE(decode<Message>(bytes_of({2})));     // shorter
  EXPECT_FALSE(decode<Message>(bytes_of({2, 3})));  // not valid()
}

}  // namespace
}  // namespace tensorferry
