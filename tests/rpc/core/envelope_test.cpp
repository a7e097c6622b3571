#include "rpc/core/envelope.h"

#include <gtest/gtest.h>

#include "rpc/core/exception.h"

namespace tensorferry {
namespace {

TEST(FunctionName, RoundTripsInParts) {
  const auto python = python_function("package.module", "Class.method");
  EXPECT_EQ(python, "py:package.module:Class.method");
  auto parsed = parse_function(python);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->kind, FunctionKind::python);
  EXPECT_EQ(parsed->scope, "package.module");
  EXPECT_EQ(parsed->name, "Class.method");

  parsed = parse_function("op:aten::add.Tensor");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->kind, FunctionKind::torch_operator);
  EXPECT_EQ(parsed->scope, "aten");
  EXPECT_EQ(parsed->name, "add.Tensor");

  parsed = parse_function("tf:ref");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->kind, FunctionKind::internal);
  EXPECT_EQ(parsed->name, "ref");

  parsed = parse_function("step");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->kind, FunctionKind::served);
  EXPECT_EQ(parsed->name, "step");
}

TEST(FunctionName, HalfANameIsRefused) {
  for (const char* bad : {"", "py:", "py:module", "py::name", "py:module:", "op:", "op:aten", "op:aten:add", "op:::add",
                          "op:aten::", "tf:"}) {
    EXPECT_FALSE(parse_function(bad)) << bad;
  }
}

TEST(Request, ArgumentsKeepTheirPositions) {
  const Creation creation{{11, 12, 15}, {13, 14, 16}};
  for (const auto& expected : {std::optional<Creation>(), std::optional(creation)}) {
    Encoder out;
    begin_request(out, 2, expected);
    out.integer(1);
    out.text("two");
    begin_keywords(out, 1);
    out.raw_text("three");
    out.real(3);
    const auto message = out.take();

    Decoder in(message.payload, message.buffers);
    const auto head = read_request(in);
    EXPECT_EQ(head.creation, expected);
    ASSERT_EQ(head.positional, 2U);
    EXPECT_EQ(in.next(), Tag::integer);
    EXPECT_EQ(in.next(), Tag::text);
    ASSERT_EQ(read_keywords(in), 1U);
    EXPECT_EQ(in.raw_text(), "three");
    EXPECT_EQ(in.next(), Tag::real);
    EXPECT_TRUE(in.finish().ok());
  }
}

TEST(Request, ItsCallNumberIsRead) {
  for (const bool packed : {false, true}) {
    Encoder out;
    if (packed) {
      begin_packed_request(out, Creation{{1, 2}, {1, 3}}, 5000);
      out.none();
    } else {
      begin_request(out, 0, Creation{{1, 2}, {1, 3}}, 5000);
      begin_keywords(out, 0);
    }
    const auto message = out.take();
    Decoder in(message.payload, message.buffers);
    const auto head = read_request(in);
    EXPECT_EQ(head.call, 5000U);
    EXPECT_EQ(head.packed, packed);
    EXPECT_TRUE(head.creation);
    if (packed) {
      EXPECT_EQ(in.next(), Tag::none);
    } else {
      EXPECT_EQ(read_keywords(in), 0U);
    }
    EXPECT_TRUE(in.finish().ok());
  }
}

TEST(Request, SaysWhetherItsCallerSetTheDeadline) {
  for (const bool timed : {false, true}) {
    for (const bool packed : {false, true}) {
      Encoder out;
      if (packed) {
        begin_packed_request(out, {}, 0, timed);
      } else {
        begin_request(out, 0, {}, 0, timed);
      }
      const auto message = out.take();
      Decoder in(message.payload, message.buffers);
      const auto head = read_request(in);
      EXPECT_FALSE(in.failed());
      EXPECT_EQ(head.timed, timed);
      EXPECT_EQ(head.packed, packed);
    }
  }
}

TEST(Fetch, RoundTrips) {
  const Fetch expected{7, {8, 9, 10}, {11, 12, 13}, 300};
  Encoder out;
  out.raw(expected);
  const auto message = out.take();
  Decoder in(message.payload, message.buffers);
  EXPECT_EQ(read_fetch(in), expected);
  EXPECT_TRUE(in.finish().ok());
}

TEST(Request, AnnouncingMoreArgumentsThanItHoldsFails) {
  Encoder out;
  begin_request(out, 1000);
  const auto message = out.take();
  Decoder in(message.payload, {});
  EXPECT_EQ(read_request(in).positional, 0U);
  EXPECT_EQ(in.next(), Tag::invalid);
  EXPECT_EQ(in.finish().code(), Code::protocol_error);
}

TEST(Request, UnknownKindsFail) {
  const Bytes payload(8, std::byte{17});
  Decoder request(payload, {});
  read_request(request);
  EXPECT_TRUE(request.failed());
  Decoder reply(payload, {});
  read_reply(reply);
  EXPECT_TRUE(reply.failed());
}

TEST(RemoteException, RoundTrips) {
  const RemoteException expected{"builtins",           "ValueError", "wrong \xed\xa0\x80",
                                 "File x\n  line y\n", "trainer3",   true};
  Encoder out;
  begin_reply(out, ReplyKind::exception);
  write_exception(out, expected);
  out.begin_pickled(view_of("pickle"), nullptr, {}, 0);
  out.end();
  const auto message = out.take();

  Decoder in(message.payload, message.buffers);
  EXPECT_EQ(read_reply(in), ReplyKind::exception);
  EXPECT_EQ(read_exception(in), expected);
  EXPECT_EQ(in.next(), Tag::pickled);
  in.leave();
  EXPECT_TRUE(in.finish().ok());
}

TEST(RemoteException, LongTextsAreCutBetweenCharacters) {
  std::string text;
  while (text.size() < longest_text * 2) text += "x\xc3\xa4";  // 3 bytes, cut inside at both ends
  Encoder out;
  write_exception(out, {"m", "E", text, text, "p", false});
  const auto message = out.take();
  Decoder in(message.payload, {});
  const auto cut = read_exception(in);
  EXPECT_LE(cut.text.size(), longest_text);
  EXPECT_GT(cut.text.size(), longest_text - 4);
  EXPECT_TRUE(text.starts_with(cut.text));
  EXPECT_NE(cut.text.back(), '\xc3');
  EXPECT_LE(cut.traceback.size(), longest_text);
  EXPECT_TRUE(text.ends_with(cut.traceback));
  EXPECT_NE(cut.traceback.front(), '\xa4');
}

TEST(RemoteException, NamesTheErrorThePlaceAndTheAgent) {
  const RemoteException plain{"builtins", "ValueError", "no rows", "File a\n  line b", "trainer3", false};
  EXPECT_EQ(plain.describe(), "ValueError: no rows (raised on trainer3)\n  File a\n    line b");
  const RemoteException own{"jobs.errors", "Full", "", "", "ps", false};
  EXPECT_EQ(own.describe(), "jobs.errors.Full (raised on ps)");
}

}  // namespace
}  // namespace tensorferry
