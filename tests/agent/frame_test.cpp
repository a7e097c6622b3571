#include "agent/wire/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

namespace tensorferry::wire {
namespace {

using ::testing::HasSubstr;

std::string what(const Status& status) { return std::string(status.what()); }

Bytes encoded(const Header& header) {
  const auto bytes = header.encoded();
  return {bytes.begin(), bytes.end()};
}

Result<Header> again(const Header& header) { return Header::decode(encoded(header)); }

/// Returns `frame` as a receiver reads it: the header, then the rest by the header's lengths.
Result<Frame> arrived(const Bytes& frame) {
  const auto header = Header::decode(ByteView(frame).first(Header::size));
  if (!header) return header.status();
  return Frame::decode(*header, ByteView(frame).subspan(Header::size));
}

Bytes record_bytes(const BufferRecord& record) {
  Bytes bytes;
  Writer writer(bytes);
  record.encode(writer);
  return bytes;
}

Hello a_hello() {
  Hello hello;
  hello.purpose = Hello::Purpose::bulk;
  hello.name = "trainer0";
  hello.rank = 7;
  hello.incarnation = 0x1122334455667788;
  hello.expected = 9;
  hello.devices = {{}, {DeviceType::cuda, 3}};
  hello.drivers = {{"shm", {{{}, Bytes(3, std::byte{1})}, {{DeviceType::cuda, 3}, {}}}}, {"basic", {}}};
  return hello;
}

// ---- Headers

TEST(Header, RoundTripsFieldByField) {
  Header header;
  header.kind = Kind::request;
  header.flags = flag::spilled;
  header.buffers = 0xfedc;
  header.extensions = 1000;
  header.descriptors = 200;
  header.length = Header::max_length;
  header.function = 0xdeadbeef;
  header.call = 0xfedcba9876543210;
  header.remaining_ms = std::numeric_limits<std::uint32_t>::max();
  header.order = 0x80000001;
  header.trailing = std::uint64_t{1} << 40;
  const auto read = again(header);
  ASSERT_TRUE(read.ok()) << read.status().text();
  EXPECT_EQ(encoded(*read), encoded(header));
  EXPECT_EQ(read->kind, Kind::request);
  EXPECT_EQ(read->flags, flag::spilled);
  EXPECT_EQ(read->buffers, 0xfedc);
  EXPECT_EQ(read->extensions, 1000);
  EXPECT_EQ(read->descriptors, 200);
  EXPECT_EQ(read->length, Header::max_length);
  EXPECT_EQ(read->function, 0xdeadbeefU);
  EXPECT_EQ(read->call, 0xfedcba9876543210U);
  EXPECT_EQ(read->remaining_ms, 0xffffffffU);
  EXPECT_EQ(read->order, 0x80000001U);
  EXPECT_EQ(read->trailing, std::uint64_t{1} << 40);
}

TEST(Header, IsLittleEndianAndOfFixedSize) {
  Header header;
  header.kind = Kind::reply;
  header.call = 0x0102030405060708;
  const auto bytes = encoded(header);
  ASSERT_EQ(bytes.size(), 40U);
  EXPECT_EQ(bytes[0], std::byte{3});
  for (unsigned i = 0; i < 8; ++i) EXPECT_EQ(bytes[16 + i], static_cast<std::byte>(8 - i));
}

TEST(Header, OfAnyOtherLengthIsRefused) {
  Header header;
  header.kind = Kind::ping;
  const auto bytes = encoded(header);
  for (std::size_t size = 0; size < Header::size; ++size) {
    EXPECT_EQ(Header::decode(ByteView(bytes).first(size)).status().code(), Code::protocol_error) << size;
  }
}

TEST(Header, OfAnUnknownKindIsRefused) {
  Header header;
  for (const int kind : {0, 15, 16, 127, 128, 255}) {
    header.kind = static_cast<Kind>(kind);
    EXPECT_THAT(what(again(header).status()), HasSubstr("unknown kind " + std::to_string(kind)));
  }
}

TEST(CallStatus, IsReadAsItWasWrittenAndRefusedIfItIsShortOrOfAnUnknownStage) {
  CallStatus status;
  status.stage = CallStatus::Stage::running;
  status.received_us = 7;
  status.started_us = 5;
  status.busy_at_arrival = status.handlers = 64;
  status.busy = 3;
  status.waiting = 2;
  auto bytes = encode(status);
  const auto read = decode<CallStatus>(bytes);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(encode(*read), bytes);
  EXPECT_EQ(read->busy_at_arrival, 64U);
  EXPECT_FALSE(decode<CallStatus>(ByteView(bytes).first(bytes.size() - 1)).has_value());
  bytes[0] = std::byte{5};
  EXPECT_FALSE(decode<CallStatus>(bytes).has_value());
}

TEST(Header, WithABodyBeyondTheBoundIsRefused) {
  Header header;
  header.kind = Kind::request;
  header.length = Header::max_length;
  EXPECT_TRUE(again(header).ok());
  for (const std::uint32_t length : {Header::max_length + 1, 0x80000000U, 0xffffffffU}) {
    header.length = length;
    EXPECT_EQ(again(header).status().code(), Code::protocol_error) << length;
  }
}

TEST(Header, WithExtensionsBeyondItsBodyIsRefused) {
  Header header;
  header.kind = Kind::request;
  header.length = 10;
  header.extensions = 10;
  EXPECT_TRUE(again(header).ok());
  header.extensions = 11;
  EXPECT_EQ(again(header).status().code(), Code::protocol_error);
}

TEST(Header, AllowsBytesBehindAFrameOnlyIfTheKindHasBuffers) {
  Header header;
  header.trailing = 1;
  for (const auto kind : {Kind::request, Kind::reply}) {
    header.kind = kind;
    header.buffers = 1;
    EXPECT_TRUE(again(header).ok());
    header.buffers = 0;
    EXPECT_EQ(again(header).status().code(), Code::protocol_error) << "no buffer that they could be of";
  }
  header.kind = Kind::bulk;
  EXPECT_TRUE(again(header).ok());
  for (const auto kind :
       {Kind::hello, Kind::cancel, Kind::release, Kind::control, Kind::ping, Kind::pong, Kind::goodbye}) {
    header.kind = kind;
    EXPECT_EQ(again(header).status().code(), Code::protocol_error) << static_cast<int>(kind);
  }
}

TEST(Header, WithMoreBytesBehindItThanABufferCanHaveIsRefused) {
  Header header;
  header.buffers = 1;
  for (const auto kind : {Kind::request, Kind::reply, Kind::bulk}) {
    header.kind = kind;
    header.trailing = (std::uint64_t{1} << 62) - 1;
    EXPECT_TRUE(again(header).ok());
    for (const auto trailing : {std::uint64_t{1} << 62, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
      header.trailing = trailing;
      EXPECT_EQ(again(header).status().code(), Code::protocol_error) << trailing;
    }
  }
}

// ---- Frames

TEST(Frame, RoundTripsWithExtensionsRecordsAndPayload) {
  Bytes extensions;
  Writer writer(extensions);
  const std::uint32_t number = 77;
  const std::vector<std::uint64_t> releases{1, 1ULL << 40, 3};
  put_extension(writer, extension::function_name, view_of("step"));
  put_extension(writer, extension::function_number, std::as_bytes(std::span(&number, 1)));
  put_extension(writer, extension::releases, std::as_bytes(std::span(releases)));
  BufferRecord inside, outside;
  inside.bytes = 3;
  inside.ticket = view_of("abc");
  outside.channel = 4;
  outside.source = {DeviceType::cuda, 1};
  outside.destination = {DeviceType::cuda, 255};
  outside.bytes = std::uint64_t{1} << 33;
  outside.release = 12;
  outside.after = 13;
  outside.ticket = view_of("a ticket");
  auto records = record_bytes(inside);
  const auto second = record_bytes(outside);
  records.insert(records.end(), second.begin(), second.end());
  Header header;
  header.kind = Kind::request;
  header.buffers = 2;
  const auto bytes = assemble(header, extensions, records, view_of("payload"));

  const auto frame = arrived(bytes);
  ASSERT_TRUE(frame.ok()) << frame.status().text();
  EXPECT_EQ(text_of(frame->function_name), "step");
  EXPECT_EQ(frame->function_number, 77U);
  EXPECT_EQ(frame->releases, releases);
  EXPECT_EQ(text_of(frame->payload), "payload");
  ASSERT_EQ(frame->buffers.size(), 2U);
  EXPECT_EQ(text_of(frame->buffers[0].ticket), "abc");
  const auto& read = frame->buffers[1];
  EXPECT_EQ(read.channel, 4);
  EXPECT_EQ(read.source, outside.source);
  EXPECT_EQ(read.destination, outside.destination);
  EXPECT_EQ(read.bytes, outside.bytes);
  EXPECT_EQ(read.release, 12U);
  EXPECT_EQ(read.after, 13U);
  EXPECT_EQ(text_of(read.ticket), "a ticket");
}

TEST(Frame, CarriesThePlacementOfTheReply) {
  const std::vector<std::pair<Device, Device>> placement{{any_device, {DeviceType::cuda, 3}},
                                                         {{DeviceType::cuda, 1}, {}}};
  Header header;
  header.kind = Kind::request;
  const auto with = [&header](const Bytes& record) {
    Bytes extensions;
    Writer writer(extensions);
    put_extension(writer, extension::placement, record);
    return assemble(header, extensions, {}, {});
  };
  auto record = encode_placement(placement);
  const auto bytes = with(record);
  const auto frame = arrived(bytes);
  ASSERT_TRUE(frame.ok()) << frame.status().text();
  EXPECT_EQ(frame->placement, placement);

  record.pop_back();
  const auto odd = with(record);
  EXPECT_EQ(arrived(odd).status().code(), Code::protocol_error);
  const auto long_one = with(Bytes(4 * (most_placements + 1)));
  EXPECT_EQ(arrived(long_one).status().code(), Code::protocol_error);
}

TEST(Frame, SkipsUnknownExtensions) {
  Bytes extensions;
  Writer writer(extensions);
  put_extension(writer, 999, view_of("of a later version"));
  put_extension(writer, extension::function_name, view_of("f"));
  put_extension(writer, 0xffff, {});
  Header header;
  header.kind = Kind::request;
  const auto bytes = assemble(header, extensions, {}, view_of("p"));
  const auto frame = arrived(bytes);
  ASSERT_TRUE(frame.ok()) << frame.status().text();
  EXPECT_EQ(text_of(frame->function_name), "f");
  EXPECT_EQ(text_of(frame->payload), "p");
}

TEST(Frame, TruncatedAnywhereIsRefusedOrShorter) {
  Bytes extensions;
  Writer writer(extensions);
  put_extension(writer, extension::function_name, view_of("name"));
  BufferRecord record;
  record.bytes = 5;
  record.ticket = view_of("12345");
  Header header;
  header.kind = Kind::request;
  header.buffers = 1;
  const auto whole = assemble(header, extensions, record_bytes(record), {});
  for (std::size_t cut = 0; cut < whole.size() - Header::size; ++cut) {
    auto shorter = *Header::decode(ByteView(whole).first(Header::size));
    shorter.length = static_cast<std::uint32_t>(cut);
    shorter.extensions = std::min<std::uint16_t>(shorter.extensions, static_cast<std::uint16_t>(cut));
    EXPECT_FALSE(Frame::decode(shorter, ByteView(whole).subspan(Header::size, cut)).ok()) << cut;
  }
}

TEST(Frame, WithAnExtensionTooShortForItsKindIsRefused) {
  Header header;
  header.kind = Kind::reply;
  Bytes extensions;
  Writer writer(extensions);
  put_extension(writer, extension::function_number, view_of("abc"));
  EXPECT_FALSE(arrived(assemble(header, extensions, {}, {})).ok());
}

TEST(Frame, IgnoresIncompleteReleaseIds) {
  Header header;
  header.kind = Kind::release;
  Bytes extensions;
  Writer writer(extensions);
  put_extension(writer, extension::releases, view_of("12345678abc"));
  const auto bytes = assemble(header, extensions, {}, {});
  const auto frame = arrived(bytes);
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->releases.size(), 1U);
}

TEST(Frame, OfMoreBuffersThanFitIsRefusedBeforeMemoryIsReserved) {
  Header header;
  header.kind = Kind::request;
  header.buffers = 0xffff;
  EXPECT_THAT(what(arrived(assemble(header, {}, {}, Bytes(1000))).status()), HasSubstr("more buffers"));
}

TEST(Frame, WithAnInlineBufferOutOfBoundsIsRefused) {
  for (const auto size : {std::uint64_t{6}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    BufferRecord record;
    record.bytes = size;
    record.ticket = view_of("12345");
    Header header;
    header.kind = Kind::request;
    header.buffers = 1;
    EXPECT_FALSE(arrived(assemble(header, {}, record_bytes(record), {})).ok()) << size;
  }
  BufferRecord huge;
  huge.channel = 0;
  huge.bytes = (std::uint64_t{1} << 62) + 1;
  Header header;
  header.kind = Kind::request;
  header.buffers = 1;
  EXPECT_FALSE(arrived(assemble(header, {}, record_bytes(huge), {})).ok());
}

/// Returns a request with these records.
Bytes frame_of(const std::vector<BufferRecord>& records) {
  Bytes bytes;
  Writer writer(bytes);
  for (const auto& record : records) record.encode(writer);
  Header header;
  header.kind = Kind::request;
  header.buffers = static_cast<std::uint16_t>(records.size());
  return assemble(header, {}, bytes, view_of("payload"));
}

BufferRecord bundle_of(std::uint64_t bytes, std::vector<BufferRecord::Part> parts) {
  BufferRecord record;
  record.channel = 0;
  record.bytes = bytes;
  record.ticket = view_of("ticket");
  record.parts = std::move(parts);
  return record;
}

TEST(Frame, WithBundlesIndexesEachBuffer) {
  auto alone = bundle_of(9, {});
  const auto bytes = frame_of({bundle_of(64 + 5, {{1, 3}, {4, 5}}), alone, bundle_of(7, {{3, 7}}), alone, alone});
  const auto frame = arrived(bytes);
  ASSERT_TRUE(frame.ok()) << frame.status().text();
  ASSERT_EQ(frame->buffers.size(), 5U);
  EXPECT_EQ(BufferRecord::count(frame->buffers), 6U);
  EXPECT_EQ(frame->buffers[0].parts, (std::vector<BufferRecord::Part>{{1, 3}, {4, 5}}));
  EXPECT_EQ(frame->buffers[0].net_bytes(), 8U);
  EXPECT_EQ(text_of(frame->buffers[0].ticket), "ticket");
  EXPECT_EQ(frame->buffers[1].index, 0U);
  EXPECT_EQ(frame->buffers[2].parts, (std::vector<BufferRecord::Part>{{3, 7}}));
  EXPECT_EQ(frame->buffers[3].index, 2U);
  EXPECT_EQ(frame->buffers[4].index, 5U);
  EXPECT_EQ(text_of(frame->payload), "payload");
}

TEST(Frame, WithABundleThatDoesNotMatchItsBuffersIsRefused) {
  const auto refused = [](const std::vector<BufferRecord>& records) { return !arrived(frame_of(records)).ok(); };
  EXPECT_TRUE(refused({bundle_of(8, {{0, 3}, {1, 5}})})) << "not at multiples of 64";
  EXPECT_TRUE(refused({bundle_of(70, {{0, 3}, {1, 5}})})) << "longer than its buffers";
  EXPECT_TRUE(refused({bundle_of(68, {{0, 3}, {1, 5}})})) << "shorter";
  EXPECT_TRUE(refused({bundle_of(64, {{0, 3}, {1, 0}})})) << "an empty buffer";
  EXPECT_TRUE(refused({bundle_of(69, {{0, ~std::uint64_t{0} - 60}, {1, 5}})})) << "sizes that wrap around";
  EXPECT_TRUE(refused({bundle_of(69, {{0, 3}, {2, 5}})})) << "a buffer that the message does not have";
  EXPECT_TRUE(refused({bundle_of(69, {{0, 3}, {0x7fffffff, 5}})})) << "one far beyond";
  EXPECT_TRUE(refused({bundle_of(69, {{0, 3}, {1, 5}}), bundle_of(3, {{1, 3}})})) << "a buffer in two bundles";
  auto inside = bundle_of(3, {{0, 3}});
  inside.channel = BufferRecord::inline_channel;
  inside.ticket = view_of("abc");
  EXPECT_TRUE(refused({inside})) << "inside the frame";
  for (auto BufferRecord::*device : {&BufferRecord::source, &BufferRecord::destination}) {
    auto elsewhere = bundle_of(3, {{0, 3}});
    elsewhere.*device = {DeviceType::cuda, 0};
    EXPECT_TRUE(refused({elsewhere})) << "on a GPU";
  }
  auto none = frame_of({bundle_of(3, {})});
  none[Header::size + 5] = std::byte{1};
  EXPECT_FALSE(arrived(none).ok()) << "of a count that is not there";
  none[Header::size + 5] = std::byte{2};
  EXPECT_FALSE(arrived(none).ok()) << "of an unknown form";
}

TEST(Frame, ThatIsSpilledHasOneBuffer) {
  Header header;
  header.kind = Kind::request;
  header.flags = flag::spilled;
  BufferRecord record;
  record.channel = 0;
  EXPECT_FALSE(arrived(assemble(header, {}, {}, {})).ok());
  header.buffers = 1;
  auto records = record_bytes(record);
  EXPECT_TRUE(arrived(assemble(header, {}, records, {})).ok());
  header.buffers = 2;
  const auto second = records;
  records.insert(records.end(), second.begin(), second.end());
  EXPECT_FALSE(arrived(assemble(header, {}, records, {})).ok());
}

// ---- Hellos

TEST(Hello, RoundTripsFieldByField) {
  const auto hello = a_hello();
  const auto read = Hello::decode(encode(hello));
  ASSERT_TRUE(read.ok()) << read.status().text();
  EXPECT_EQ(encode(*read), encode(hello));
  EXPECT_EQ(read->purpose, Hello::Purpose::bulk);
  EXPECT_EQ(read->name, "trainer0");
  EXPECT_EQ(read->rank, 7);
  EXPECT_EQ(read->incarnation, hello.incarnation);
  EXPECT_EQ(read->expected, 9U);
  EXPECT_EQ(read->devices, hello.devices);
  ASSERT_EQ(read->drivers.size(), 2U);
  EXPECT_EQ(read->drivers[0].name, "shm");
  ASSERT_EQ(read->drivers[0].endpoints.size(), 2U);
  EXPECT_EQ(read->drivers[0].endpoints[0].descriptor, Bytes(3, std::byte{1}));
  EXPECT_EQ(read->drivers[0].endpoints[1].device, (Device{DeviceType::cuda, 3}));
}

TEST(Hello, TruncatedAnywhereIsRefused) {
  const auto whole = encode(a_hello());
  for (std::size_t cut = 0; cut < whole.size(); ++cut)
    EXPECT_FALSE(Hello::decode(ByteView(whole).first(cut)).ok()) << cut;
}

TEST(Hello, OfALaterVersionIsReadUpToTheKnownFields) {
  auto longer = encode(a_hello());
  longer.resize(longer.size() + 100, std::byte{7});
  EXPECT_TRUE(Hello::decode(longer).ok());
}

TEST(Hello, OfAnUnknownPurposeOrWithoutANameOrIncarnationIsRefused) {
  auto hello = a_hello();
  hello.purpose = static_cast<Hello::Purpose>(5);
  EXPECT_FALSE(Hello::decode(encode(hello)).ok());
  hello = a_hello();
  hello.name.clear();
  EXPECT_FALSE(Hello::decode(encode(hello)).ok());
  hello = a_hello();
  hello.incarnation = 0;
  EXPECT_FALSE(Hello::decode(encode(hello)).ok());
}

TEST(Hello, OfTooManyDevicesOrChannelsIsRefused) {
  auto hello = a_hello();
  hello.devices.assign(64, {});
  EXPECT_TRUE(Hello::decode(encode(hello)).ok());
  hello.devices.assign(65, {});
  EXPECT_FALSE(Hello::decode(encode(hello)).ok());
  hello = a_hello();
  hello.drivers.assign(65, {"x", {}});
  EXPECT_FALSE(Hello::decode(encode(hello)).ok());
  hello = a_hello();
  hello.drivers[0].endpoints.assign(65, {});
  EXPECT_FALSE(Hello::decode(encode(hello)).ok());
}

// ---- Errors

TEST(ErrorReply, RoundTrips) {
  const Status status(Code::resource_exhausted, "all handlers are busy");
  const auto read = decode_status(encode_status(status));
  EXPECT_EQ(read.code(), Code::resource_exhausted);
  EXPECT_EQ(read.what(), "all handlers are busy");
}

TEST(ErrorReply, OfAnyLengthFitsAFrame) {
  const Status status(Code::remote_error, std::string(1 << 20, 'x'));
  EXPECT_LT(encode_status(status).size(), Header::max_length / 2 + 100);
}

TEST(ErrorReply, ThatCannotBeReadIsStillAnError) {
  for (const auto* bytes : {"", "\x01", "\x7f\x01x", "\x01\x05x"}) {
    EXPECT_EQ(decode_status(view_of(bytes)).code(), Code::protocol_error);
  }
  const char okay[] = {0, 0};  // an error with the code ok
  EXPECT_EQ(decode_status(view_of({okay, 2})).code(), Code::protocol_error);
}

}  // namespace
}  // namespace tensorferry::wire
