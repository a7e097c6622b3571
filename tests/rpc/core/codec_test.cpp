#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/core/published.h"
#include "tests/rpc/core/values.h"

namespace tensorferry {
namespace {

using testing::TreeReader;
using testing::TreeWriter;
using testing::Value;

Owner nobody() { return nullptr; }

Value value(Tag tag, std::vector<Value> children = {}) {
  Value out;
  out.tag = tag;
  out.children = std::move(children);
  return out;
}
Value integer(std::int64_t number) {
  auto out = value(Tag::integer);
  out.integer = number;
  return out;
}
Value again(std::int64_t identity) {
  auto out = value(Tag::again);
  out.integer = identity;
  return out;
}
Value string(Tag tag, std::string text) {
  auto out = value(tag);
  out.text = std::move(text);
  return out;
}
Value real(double number) {
  auto out = value(Tag::real);
  out.real = number;
  return out;
}
Value nested(Tag tag, std::size_t depth) {
  auto out = integer(7);
  for (std::size_t i = 0; i < depth; ++i) out = value(tag, {std::move(out)});
  return out;
}

/// Encodes and decodes a value. Returns nullopt if either end refuses it.
std::optional<Value> round_trip(const Value& from, std::span<const Buffer> buffers = {}) {
  Encoder out;
  if (!TreeWriter(out, buffers).write(from) || !out.status().ok()) return std::nullopt;
  const auto message = out.take();
  EXPECT_EQ(message.buffers.size(), message.destinations.size());
  Decoder in(message.payload, message.buffers);
  auto to = TreeReader(in).read();
  EXPECT_TRUE(in.finish().ok()) << in.status().text();

  Decoder skipped(message.payload, message.buffers);
  EXPECT_TRUE(skipped.skip());
  EXPECT_TRUE(skipped.finish().ok());
  return to;
}

std::size_t encoded_size(const Value& from) {
  Encoder out;
  EXPECT_TRUE(TreeWriter(out, {}).write(from));
  return out.size();
}

Status decode(const Bytes& payload, std::span<const Buffer> buffers = {}) {
  Decoder in(payload, buffers);
  TreeReader(in).read();
  return in.finish();
}

Bytes bytes(std::initializer_list<int> values) {
  Bytes out;
  for (const auto each : values) out.push_back(static_cast<std::byte>(each));
  return out;
}

TEST(Codec, LeavesRoundTrip) {
  std::vector<Value> leaves{value(Tag::none), value(Tag::true_), value(Tag::false_)};
  for (int shift = 0; shift < 64; ++shift) {
    const auto power = static_cast<std::int64_t>(std::uint64_t{1} << shift);
    for (const auto near : {-1, 0, 1}) {
      const auto number =
          static_cast<std::int64_t>(static_cast<std::uint64_t>(power) + static_cast<std::uint64_t>(near));
      leaves.push_back(integer(number));
      leaves.push_back(integer(static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(number))));
    }
  }
  for (std::int64_t number = -200; number < 200; ++number) leaves.push_back(integer(number));
  for (const auto number : {0.0, -0.0, 1.5, std::numeric_limits<double>::infinity(), std::nan("0x123"), 5e-324}) {
    leaves.push_back(real(number));
  }
  auto complex = value(Tag::complex);
  complex.real = -0.0;
  complex.imaginary = std::nan("");
  leaves.push_back(complex);
  auto big = string(Tag::big_integer, std::string("\0\0\0\0\0\0\0\0\1", 9));
  leaves.push_back(big);
  big.negative = true;
  leaves.push_back(big);
  leaves.push_back(string(Tag::device, "cuda:1"));
  for (const auto& [tag, number] : {std::pair(Tag::dtype, 15), {Tag::layout, 7}, {Tag::memory_format, 3}}) {
    leaves.push_back(integer(number));
    leaves.back().tag = tag;
  }
  leaves.push_back(value(Tag::size));
  leaves.back().sizes = {0, -1, 5, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};

  for (const auto& leaf : leaves)
    EXPECT_EQ(round_trip(leaf), leaf) << static_cast<int>(leaf.tag) << " " << leaf.integer;
  const auto all = value(Tag::list, leaves);
  EXPECT_EQ(round_trip(all), all);
}

TEST(Codec, StringsOfEveryLengthRoundTrip) {
  for (const auto tag : {Tag::text, Tag::bytes, Tag::bytearray}) {
    for (const std::size_t length : {0U, 1U, 31U, 32U, 63U, 64U, 8191U, 8192U, 8193U, 100000U}) {
      std::string text(length, 'x');
      for (std::size_t i = 0; i < length; ++i) text[i] = static_cast<char>(i * 7);
      const auto expected = value(Tag::tuple, {string(tag, text), integer(1)});
      EXPECT_EQ(round_trip(expected), expected) << length;
    }
  }
}

TEST(Codec, LongStringsTravelOutOfBandAndAreKeptAlive) {
  const std::string text(inline_limit + 1, 'a');
  const std::string shorter(inline_limit, 'b');
  int asked = 0;
  auto kept = std::make_shared<int>(1);
  const auto owner = [&]() -> Owner {
    ++asked;
    return kept;
  };
  {
    Encoder out;
    ASSERT_TRUE(out.begin_tuple(4));
    out.text(text, owner);
    out.bytes(view_of(text), owner);
    out.bytearray(view_of(text), owner);
    out.bytes(view_of(shorter), owner);
    out.end();
    EXPECT_EQ(asked, 3);
    const auto message = out.take();
    EXPECT_EQ(kept.use_count(), 4);
    ASSERT_EQ(message.buffers.size(), 3U);
    EXPECT_EQ(static_cast<const void*>(message.buffers[0].data), text.data());
    EXPECT_LT(message.payload.size(), shorter.size() + 32);

    Decoder in(message.payload, message.buffers);
    EXPECT_EQ(in.next(), Tag::tuple);
    for (std::uint32_t i = 0; i < 3; ++i) {
      in.next();
      EXPECT_EQ(in.far(), i);
      EXPECT_EQ(in.text(), text);
      EXPECT_NE(in.number(), Decoder::unnumbered);
    }
    in.next();
    EXPECT_FALSE(in.far());
    EXPECT_EQ(in.number(), Decoder::unnumbered);
    in.leave();
    EXPECT_TRUE(in.finish().ok());
  }
  EXPECT_EQ(kept.use_count(), 1);
}

TEST(Codec, SmallValuesTakeFewBytes) {
  EXPECT_EQ(encoded_size(integer(-32)), 1U);
  EXPECT_EQ(encoded_size(integer(95)), 1U);
  EXPECT_EQ(encoded_size(integer(96)), 3U);
  EXPECT_EQ(encoded_size(string(Tag::text, "weights")), 8U);
  EXPECT_EQ(encoded_size(value(Tag::tuple, {integer(1), integer(2), integer(3)})), 4U);
  EXPECT_EQ(encoded_size(value(Tag::list)), 1U);
  EXPECT_EQ(encoded_size(real(1)), 9U);
}

TEST(Codec, ContainersKeepTheirType) {
  for (const auto tag : {Tag::tuple, Tag::list, Tag::set, Tag::frozenset}) {
    for (const std::size_t count : {0U, 1U, 15U, 16U, 200U}) {
      std::vector<Value> children;
      for (std::size_t i = 0; i < count; ++i) children.push_back(integer(static_cast<std::int64_t>(i * 100)));
      const auto expected = value(tag, children);
      EXPECT_EQ(round_trip(expected), expected);
    }
  }
  const auto dict =
      value(Tag::dict, {string(Tag::text, "a"), value(Tag::list, {value(Tag::dict)}), integer(2), value(Tag::none)});
  EXPECT_EQ(round_trip(dict), dict);
  auto record = value(Tag::record, {integer(1), string(Tag::text, "x")});
  record.kind = RecordKind::dataclass;
  record.text = "module:Point";
  EXPECT_EQ(round_trip(record), record);
  record.text.clear();
  record.schema = 77;
  EXPECT_EQ(round_trip(record), record);
}

TEST(Codec, PublishedValuesFillOneFrozenBuffer) {
  std::array<std::byte, 256> block{};
  const Buffer region{Device{}, block.data(), block.size(), nullptr, nullptr};
  Encoder inside;
  inside.integer(7);
  const auto payload = inside.take().payload;
  const std::array parts{PublishedPart{0, 3}, PublishedPart{64, 0}, PublishedPart{64, 192}};
  Encoder out;
  out.published(payload, parts, region);
  out.published(payload, {}, {});
  const auto message = out.take();
  ASSERT_EQ(message.buffers.size(), 1U);
  EXPECT_EQ(message.sharing_of(0), Sharing::frozen);

  Decoder in(message.payload, message.buffers);
  ASSERT_EQ(in.next(), Tag::published);
  const auto buffers = published_buffers(in);
  ASSERT_EQ(buffers.size(), 3U);
  EXPECT_EQ(buffers[0].data, block.data());
  EXPECT_EQ(buffers[0].bytes, 3U);
  EXPECT_EQ(buffers[2].data, block.data() + 64);
  EXPECT_EQ(buffers[2].bytes, 192U);
  Decoder again(in.view(), buffers);
  EXPECT_EQ(again.next(), Tag::integer);
  EXPECT_TRUE(again.finish().ok());
  ASSERT_EQ(in.next(), Tag::published);
  EXPECT_TRUE(published_buffers(in).empty());
  EXPECT_TRUE(in.finish().ok());
}

TEST(Codec, PartsOfAPublishedValueLieInsideItsBufferWithoutOverlap) {
  std::array<std::byte, 256> block{};
  const Buffer region{Device{}, block.data(), block.size(), nullptr, nullptr};
  const std::vector<std::vector<PublishedPart>> wrong{{{0, 257}},
                                                      {{256, 1}},
                                                      {{1, 1}},
                                                      {{64, 1}, {0, 1}},
                                                      {{0, 65}, {64, 1}},
                                                      {{0, 256}, {0, 256}},
                                                      {{~std::uint64_t{63}, 128}},
                                                      {{64, ~std::uint64_t{0}}}};
  for (const auto& parts : wrong) {
    Encoder out;
    out.published({}, parts, region);
    const auto message = out.take();
    Decoder in(message.payload, message.buffers);
    EXPECT_EQ(in.next(), Tag::invalid) << parts[0].offset << ' ' << parts[0].bytes;
    EXPECT_EQ(in.status().code(), Code::protocol_error);
  }
  Encoder out;
  out.published({}, std::array{PublishedPart{0, 1}}, region);
  const auto message = out.take();
  EXPECT_EQ(Decoder(message.payload, {}).next(), Tag::invalid);  // the message came without its buffer
}

TEST(Codec, TensorsThatShareAStorageShareOneBuffer) {
  std::array<std::byte, 256> storage{};
  const Buffer buffer{Device{}, storage.data(), storage.size(), nullptr, nullptr};
  auto whole = value(Tag::tensor);
  whole.data = storage.data();
  whole.tensor.dtype = DType::float32;
  whole.tensor.sizes = {8, 8};
  ASSERT_TRUE(whole.tensor.set_contiguous());
  whole.tensor.flags = TensorLayout::requires_grad | TensorLayout::parameter;
  whole.tensor.device = {DeviceType::cuda, 3};
  auto column = whole;
  column.tensor = {};
  column.tensor.dtype = DType::complex64;
  column.tensor.sizes = {8};
  column.tensor.strides = {4};
  column.tensor.storage_offset = 1;
  column.tensor.flags = TensorLayout::conjugate | TensorLayout::negative;

  Encoder out;
  ASSERT_TRUE(TreeWriter(out, {&buffer, 1}).write(value(Tag::list, {whole, column})));
  const auto message = out.take();
  ASSERT_EQ(message.buffers.size(), 1U);
  EXPECT_EQ(message.destinations, (std::vector<Destination>{{{DeviceType::cuda, 3}}}));
  const auto expected = value(Tag::list, {whole, column, again(1), again(2)});
  EXPECT_EQ(round_trip(expected, {&buffer, 1}), expected);
}

TEST(Codec, SparseTensorsTravelAsTheirParts) {
  std::array<std::byte, 64> storage{};
  const Buffer buffer{Device{}, storage.data(), storage.size(), nullptr, nullptr};
  auto part = value(Tag::tensor);
  part.data = storage.data();
  part.tensor.dtype = DType::int64;
  part.tensor.sizes = {2, 4};
  ASSERT_TRUE(part.tensor.set_contiguous());
  auto coo = value(Tag::sparse, {part, part});
  coo.sparse.flags = SparseLayout::coalesced;
  coo.sparse.sizes = {100, 100};
  EXPECT_EQ(round_trip(coo, {&buffer, 1}), coo);
  auto csr = value(Tag::sparse, {part, part, part});
  csr.sparse.kind = SparseLayout::Kind::csr;
  csr.sparse.sizes = {100, 100};
  EXPECT_EQ(round_trip(csr, {&buffer, 1}), csr);
}

TEST(Codec, ATensorOutsideItsBufferIsNotSent) {
  std::array<std::byte, 16> storage{};
  Encoder out;
  const auto index = out.add_buffer({Device{}, storage.data(), storage.size(), nullptr, nullptr}, {});
  TensorLayout layout;
  layout.sizes = {5};
  layout.strides = {1};
  out.tensor(layout, index);
  EXPECT_EQ(out.status().code(), Code::internal);
}

TEST(Codec, ArraysRoundTripInlineAndOutOfBand) {
  for (const std::int64_t items : {0, 1, 1000, 2000}) {
    auto expected = value(Tag::array);
    expected.array = {"<f8", 8, ArrayLayout::fortran | ArrayLayout::read_only, Dims{items}};
    expected.text.assign(static_cast<std::size_t>(items) * 8, '\x5a');
    expected = value(Tag::tuple, {expected, again(1)});
    EXPECT_EQ(round_trip(expected), expected);
  }
}

TEST(Codec, PickledValuesKeepBuffersAndParts) {
  auto expected = string(Tag::pickled, std::string(20000, 'p'));
  expected.buffers = {{true, "small"}, {false, std::string(10000, 'b')}, {false, ""}};
  auto reference = value(Tag::reference);
  reference.reference = {{"ps", 5}, {5, 1}, {6, 2}, {"trainer", 6}, 8, "torch.nn.Linear"};
  expected.children = {reference, integer(3)};
  expected = value(Tag::list, {expected, again(1), again(2)});
  EXPECT_EQ(round_trip(expected), expected);
}

TEST(Codec, TheSameObjectTwiceArrivesAsOne) {
  const auto shared =
      value(Tag::tuple, {value(Tag::list, {integer(1)}), again(1), again(1), value(Tag::frozenset), again(2)});
  EXPECT_EQ(round_trip(shared), shared);

  const std::string text(inline_limit * 2, 't');
  Encoder out;
  ASSERT_TRUE(out.begin_tuple(2));
  out.text(text, nobody, &text);
  EXPECT_TRUE(out.again(&text));
  out.end();
  const auto message = out.take();
  EXPECT_EQ(message.buffers.size(), 1U);
  Decoder in(message.payload, message.buffers);
  in.next();
  in.next();
  const auto first = in.number();
  EXPECT_EQ(in.next(), Tag::again);
  EXPECT_EQ(in.referred(), first);
}

TEST(Codec, ManyIdentitiesAreTracked) {
  std::vector<int> objects(10000);
  Encoder out;
  ASSERT_TRUE(out.begin_list(objects.size() * 2));
  for (auto& object : objects) {
    ASSERT_FALSE(out.again(&object));
    out.bytearray({}, nobody, &object);
  }
  for (auto& object : objects) ASSERT_TRUE(out.again(&object));
  out.end();
  const auto message = out.take();
  Decoder in(message.payload, {});
  in.next();
  for (std::size_t i = 0; i < objects.size(); ++i) in.next();
  for (std::size_t i = 0; i < objects.size(); ++i) {
    ASSERT_EQ(in.next(), Tag::again);
    ASSERT_EQ(in.referred(), i + 1);
  }
}

TEST(Codec, ListsAndDictsButNotTuplesMayHoldThemselves) {
  const auto list = value(Tag::list, {value(Tag::dict, {integer(1), again(0), integer(2), again(1)})});
  EXPECT_EQ(round_trip(list), list);
  for (const auto tag : {Tag::tuple, Tag::set, Tag::frozenset, Tag::record}) {
    Encoder out;
    EXPECT_FALSE(TreeWriter(out, {}).write(value(tag, {value(Tag::list, {again(0)})})));
    EXPECT_EQ(out.status().code(), Code::invalid_argument);
  }
  EXPECT_TRUE(decode(bytes({0x71, 0x1a, 0x00})).ok());                        // [itself]
  EXPECT_EQ(decode(bytes({0x61, 0x1a, 0x00})).code(), Code::protocol_error);  // (itself,): a tuple is not built yet
  EXPECT_EQ(decode(bytes({0x61, 0x71, 0x1a, 0x00})).code(), Code::protocol_error);
  EXPECT_TRUE(decode(bytes({0x72, 0x60, 0x1a, 0x01})).ok());                        // [(), the same]
  EXPECT_EQ(decode(bytes({0x72, 0x1a, 0x01, 0x60})).code(), Code::protocol_error);  // a reference to a later object
}

TEST(Codec, DeepNestingEndsAtTheLimitAtBothEnds) {
  for (const auto tag : {Tag::list, Tag::tuple, Tag::set}) {
    const auto deepest = nested(tag, max_depth);
    EXPECT_EQ(round_trip(deepest), deepest);
    EXPECT_FALSE(round_trip(nested(tag, max_depth + 1)));
  }
  const Bytes hostile(1 << 20, std::byte{0x71});  // a list of a list of a list ...
  EXPECT_EQ(decode(hostile).code(), Code::protocol_error);
  Decoder in(hostile, {});
  EXPECT_FALSE(in.skip());
}

TEST(Codec, AClosedLevelCanBeReused) {
  std::vector<Value> many(max_depth * 3, value(Tag::list, {value(Tag::tuple), value(Tag::dict)}));
  const auto expected = value(Tag::list, many);
  EXPECT_EQ(round_trip(expected), expected);
}

TEST(Codec, CountsBeyondTheBytesAreRefusedBeforeAnyAllocation) {
  EXPECT_EQ(decode(bytes({0x0b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01})).code(),
            Code::protocol_error);
  EXPECT_EQ(decode(bytes({0x0d, 0xff, 0xff, 0x03, 0x00})).code(), Code::protocol_error);
  EXPECT_EQ(decode(bytes({0x0c, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f})).code(), Code::protocol_error);
  EXPECT_EQ(decode(bytes({0x08, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01})).code(),
            Code::protocol_error);
  EXPECT_EQ(decode(bytes({0x12, 0x00, 0xff, 0xff, 0xff, 0xff, 0x0f})).code(), Code::protocol_error);
  // Each list alone could be valid. Together they announce more values than there are bytes.
  Bytes many;
  for (int i = 0; i < 100; ++i) many.insert(many.end(), {std::byte{0x0b}, std::byte{0x50}});
  Decoder in(many, {});
  std::size_t announced = 0;
  while (in.next() != Tag::invalid) announced += in.count();
  EXPECT_LE(announced, many.size());
}

TEST(Codec, TwoValuesCannotShareABuffer) {
  std::array<std::byte, 64> memory{};
  const Buffer buffer{Device{}, memory.data(), memory.size(), nullptr, nullptr};
  EXPECT_TRUE(decode(bytes({0x71, 0x08, 0x01}), {&buffer, 1}).ok());
  EXPECT_EQ(decode(bytes({0x72, 0x08, 0x01, 0x08, 0x01}), {&buffer, 1}).code(), Code::protocol_error);
  EXPECT_EQ(decode(bytes({0x08, 0x03}), {&buffer, 1}).code(), Code::protocol_error);  // there is no second buffer
  const auto tensor = {0x0f, 0x06, 0x00, 0x01, 0x10, 0x00};                           // float32, 16 of them
  EXPECT_TRUE(decode(bytes(tensor), {&buffer, 1}).ok());
  EXPECT_TRUE(decode(bytes({0x72, 0x0f, 0x06, 0, 1, 0x10, 0, 0x0f, 0x00, 0, 1, 0x40, 0}), {&buffer, 1}).ok());
  EXPECT_EQ(decode(bytes({0x72, 0x0f, 0x06, 0, 1, 0x10, 0, 0x08, 0x01}), {&buffer, 1}).code(), Code::protocol_error);
  EXPECT_EQ(decode(bytes({0x72, 0x08, 0x01, 0x0f, 0x06, 0, 1, 0x10, 0}), {&buffer, 1}).code(), Code::protocol_error);
}

TEST(Codec, BytesOnAnotherDeviceAreNeverRead) {
  const Buffer buffer{{DeviceType::cuda, 0}, reinterpret_cast<std::byte*>(8), 64, nullptr, nullptr};
  EXPECT_EQ(decode(bytes({0x08, 0x01}), {&buffer, 1}).code(), Code::protocol_error);
  EXPECT_TRUE(decode(bytes({0x0f, 0x06, 0x00, 0x01, 0x10, 0x00}), {&buffer, 1}).ok());
}

TEST(Codec, HostileTensorsAreRefused) {
  std::array<std::byte, 64> memory{};
  const Buffer buffer{Device{}, memory.data(), memory.size(), nullptr, nullptr};
  for (const auto& bad : {
           bytes({0x0f, 0x06, 0x00, 0x01, 0x11, 0x00}),  // 17 float32 in 64 bytes
           bytes({0x0f, 0x0c, 0x00, 0x01, 0x10, 0x00}),  // an unknown dtype
           bytes({0x0f, 0x06, 0x10, 0x01, 0x10, 0x00}),  // an unknown flag
           bytes({0x0f, 0x06, 0x00, 0x41}),              // 65 dimensions
           bytes({0x0f, 0x06, 0x80, 0x01, 0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x00}),
           bytes({0x0f, 0x06, 0x20, 0x01, 0x01, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01, 0x00}),
           bytes({0x0f, 0x06, 0x00, 0x01, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01, 0x00}),
           bytes({0x0f, 0x06, 0x40, 0x40, 0x00, 0x01, 0x10, 0x00}),  // a device of type 64
           bytes({0x0f, 0x06, 0x40, 0x01, 0x80, 0x01, 0x10, 0x00}),  // a device of index 128
           bytes({0x0f, 0x06, 0x00, 0x01, 0x10, 0x01}),              // a second buffer
       }) {
    EXPECT_EQ(decode(bad, {&buffer, 1}).code(), Code::protocol_error);
  }
}

TEST(Codec, EveryTruncationOfAMessageFails) {
  std::array<std::byte, 64> memory{};
  const Buffer buffer{Device{}, memory.data(), memory.size(), nullptr, nullptr};
  auto tensor = value(Tag::tensor);
  tensor.data = memory.data();
  tensor.tensor.sizes = {2, 2};
  tensor.tensor.strides = {1, 2};
  tensor.tensor.storage_offset = 3;
  auto pickled = string(Tag::pickled, "stream");
  pickled.buffers = {{true, "buffer"}};
  auto reference = value(Tag::reference);
  reference.reference = {{"ps", 5}, {5, 1}, {6, 2}, {"trainer", 6}, 8, "hint"};
  auto array = value(Tag::array);
  array.array = {"<i4", 4, 0, Dims{2}};
  array.text = "12345678";
  const auto all = value(Tag::tuple, {tensor, pickled, reference, array, string(Tag::text, std::string(50, 'x')),
                                      real(1), value(Tag::dict, {integer(1000), again(1)})});
  Encoder out;
  ASSERT_TRUE(TreeWriter(out, {&buffer, 1}).write(all));
  const auto message = out.take();
  EXPECT_TRUE(decode(message.payload, message.buffers).ok());
  for (std::size_t length = 0; length < message.payload.size(); ++length) {
    const Bytes cut(message.payload.begin(), message.payload.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_EQ(decode(cut, message.buffers).code(), Code::protocol_error) << length;
    Decoder skipped(cut, message.buffers);
    EXPECT_FALSE(skipped.skip());
  }
  auto longer = message.payload;
  longer.push_back(std::byte{0});
  EXPECT_EQ(decode(longer, message.buffers).code(), Code::protocol_error);
}

TEST(Codec, RandomBytesFailOrDecodeToValuesThatEncodeAgain) {
  std::mt19937 random(11);
  std::array<std::byte, 64> memory{};
  const Buffer buffer{Device{}, memory.data(), memory.size(), nullptr, nullptr};
  int decoded = 0;
  for (int round = 0; round < 200000; ++round) {
    Bytes payload(1 + random() % 24);
    for (auto& byte : payload) byte = static_cast<std::byte>(random() % (round % 2 == 0 ? 256 : 32));
    Decoder in(payload, {&buffer, 1});
    const auto once = TreeReader(in).read();
    if (!once || in.failed()) continue;
    ++decoded;
    const auto twice = round_trip(*once, {&buffer, 1});
    ASSERT_EQ(twice, once);
  }
  EXPECT_GT(decoded, 20000);
}

TEST(Codec, ErrorsNameTheFaultAndItsOffset) {
  const auto status = decode(bytes({0x72, 0x80, 0x3e}));
  EXPECT_EQ(status.text(), "ProtocolError: a message holds a value of an unknown kind (byte 3 of 3)");
}

}  // namespace
}  // namespace tensorferry
