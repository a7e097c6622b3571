// Typed reading of values from Python peers and from hostile ones: an object that occurs twice, keyword arguments,
// packed arguments.
#include <array>

#include "agent/agent.h"
#include "rpc/core/encoder.h"
#include "rpc/core/envelope.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Returns a reply that contains the one value that `write` writes.
template <class Write>
Received reply_of(Write write) {
  Encoder out;
  begin_reply(out, ReplyKind::value);
  write(out);
  EXPECT_TRUE(out.status().ok()) << out.status().text();
  auto message = out.take();
  return {std::move(message.payload), std::move(message.buffers)};
}

template <class T>
T read(const Received& message) {
  detail::Reading reading(message, nullptr);
  reading.expect_result("f", "peer", &Value<T>::name);
  EXPECT_EQ(reading.reply(), ReplyKind::value);
  ValueReader in(reading);
  T value = Value<T>::read(in);
  reading.finish();
  return value;
}

template <class T>
T through(const T& value) {
  return read<T>(reply_of([&](Encoder& out) {
    ValueWriter writer(out, nullptr);
    Value<T>::write(writer, value);
  }));
}

TEST(Values, RoundTrip) {
  EXPECT_EQ(through(std::string(100'000, 'x')), std::string(100'000, 'x'));
  const std::vector<std::byte> bytes(50'000, std::byte{7});
  EXPECT_EQ(through(bytes), bytes);
  EXPECT_EQ(through(std::uint64_t{1} << 63), std::uint64_t{1} << 63);
  EXPECT_EQ(through(INT64_MIN), INT64_MIN);
  EXPECT_EQ(through(std::complex<double>(1, -2)), std::complex<double>(1, -2));
  EXPECT_EQ(through(std::array<int, 3>{1, 2, 3}), (std::array<int, 3>{1, 2, 3}));
  EXPECT_EQ(through(std::pair<int, std::string>(1, "x")), (std::pair<int, std::string>(1, "x")));
  const std::unordered_map<int, std::vector<bool>> map{{1, {true, false}}, {2, {}}};
  EXPECT_EQ(through(map), map);
  EXPECT_EQ(through(std::optional<std::string>()), std::nullopt);
}

TEST(Values, OfNumpyAreTensors) {
  const std::array<float, 6> elements{1, 2, 3, 4, 5, 6};
  ArrayLayout layout;
  layout.dtype = "<f4";
  layout.item_bytes = 4;
  layout.sizes = {2, 3};
  const auto array = [&](Encoder& out) {
    out.array(layout, std::as_bytes(std::span(elements)), [] { return Owner(); });
  };
  const auto rows = read<TensorOf<float>>(reply_of(array));
  EXPECT_THAT(rows.elements(), ElementsAre(1, 2, 3, 4, 5, 6));
  layout.flags = ArrayLayout::fortran;
  const auto columns = read<Tensor>(reply_of(array));
  EXPECT_THAT(columns.contiguous().elements<float>(), ElementsAre(1, 3, 5, 2, 4, 6));
  layout.dtype = ">f4";
  EXPECT_THROW(read<Tensor>(reply_of(array)), InvalidArgument);
}

TEST(Values, ThatOccurTwiceAreReadTwice) {
  const int shared = 0;
  const auto twice = reply_of([&](Encoder& out) {
    out.begin_tuple(3);
    out.begin_list(2, &shared);
    out.integer(1);
    out.integer(2);
    out.end();
    EXPECT_TRUE(out.again(&shared));
    out.text("end");
    out.end();
  });
  using Out = std::tuple<std::vector<int>, std::vector<int>, std::string>;
  EXPECT_EQ(read<Out>(twice), Out({1, 2}, {1, 2}, "end"));

  const int inner = 0, outer = 0;
  const auto nested = reply_of([&](Encoder& out) {
    out.begin_list(3);
    out.begin_list(2, &outer);
    out.begin_list(1, &inner);
    out.text("x");
    out.end();
    out.again(&inner);
    out.end();
    out.again(&outer);
    out.begin_list(1);
    out.again(&inner);
    out.end();
    out.end();
  });
  using Deep = std::vector<std::vector<std::vector<std::string>>>;
  EXPECT_EQ(read<Deep>(nested), (Deep{{{"x"}, {"x"}}, {{"x"}, {"x"}}, {{"x"}}}));
}

TEST(Values, ThatExpandWithoutBoundAreRefused) {
  // 60 lists, of which each contains the list before it twice.
  const auto bomb = reply_of([](Encoder& out) {
    std::array<int, 60> lists{};
    out.begin_list(lists.size());
    out.begin_list(1, &lists[0]);
    out.integer(1);
    out.end();
    for (std::size_t i = 1; i < lists.size(); ++i) {
      out.begin_list(2, &lists[i]);
      out.again(&lists[i - 1]);
      out.again(&lists[i - 1]);
      out.end();
    }
    out.end();
  });
  struct Tree {
    std::vector<Tree> inside;
  };
  struct Walk {
    static std::size_t read(ValueReader& in, std::size_t depth) {  // NOLINT(misc-no-recursion)
      if (depth > 100) return 0;
      std::size_t sum = 0;
      for (auto left = in.begin_sequence(); left != 0; --left) {
        if (in.reading().peek() == Tag::integer) {
          sum += static_cast<std::size_t>(in.integer());
        } else {
          sum += read(in, depth + 1);
        }
      }
      in.leave();
      return sum;
    }
  };
  detail::Reading reading(bomb, nullptr);
  reading.reply();
  ValueReader in(reading);
  EXPECT_THAT(thrown_by<InvalidArgument>([&] { Walk::read(in, 0); }), HasSubstr("too many times"));
}

TEST(Values, ThatAreInvalidNameTheOffset) {
  auto broken = reply_of([](Encoder& out) { out.text("hello"); });
  broken.payload.resize(broken.payload.size() - 1);
  EXPECT_THROW(read<std::string>(broken), ProtocolError);
  auto longer = reply_of([](Encoder& out) { out.text("hello"); });
  longer.payload.push_back(std::byte{0});
  EXPECT_THROW(read<std::string>(longer), ProtocolError);
}

/// Requests that a peer sends below the typed calls.
class Requests : public TypedAgents {
 protected:
  Requests() {
    RawAgentOptions options;
    options.name = "raw";
    options.store = store;
    raw = detail::value_or_throw(RawAgent::join(std::move(options)));
    sim->serve("minus", [](int a, int b, std::optional<int> c) { return a - b - c.value_or(0); }, {"a", "b", "c"});
  }
  template <class Write>
  Result<Received> request(Write write) {
    Encoder out;
    write(out);
    auto call = raw->call("sim", "minus", out.take());
    call.wait();
    return call.take();
  }
  Result<Received> by_keyword(std::vector<int> positional, std::vector<std::pair<std::string, int>> keywords) {
    return request([&](Encoder& out) {
      begin_request(out, positional.size());
      for (const auto value : positional) out.integer(value);
      begin_keywords(out, keywords.size());
      for (const auto& [name, value] : keywords) {
        out.raw_text(name);
        out.integer(value);
      }
    });
  }
  static int value(const Result<Received>& reply) {
    EXPECT_TRUE(reply.ok()) << reply.status().text();
    return reply.ok() ? read<int>(*reply) : 0;
  }

  std::shared_ptr<RawAgent> raw;
};

TEST_F(Requests, TakeArgumentsByKeyword) {
  EXPECT_EQ(value(by_keyword({5}, {{"b", 2}})), 3);
  EXPECT_EQ(value(by_keyword({}, {{"b", 2}, {"a", 10}})), 8);
  EXPECT_EQ(value(by_keyword({}, {{"c", 1}, {"b", 2}, {"a", 10}})), 7);
  const auto twice = by_keyword({1, 2}, {{"a", 1}});
  EXPECT_THAT(twice.status().text(), HasSubstr("called with (int, int, a=int)"));
  EXPECT_THAT(by_keyword({1, 2}, {{"d", 1}}).status().text(), HasSubstr("called with (int, int, d=int)"));
}

TEST_F(Requests, ReferToEarlierArgumentsByKeyword) {
  sim->serve("lengths", [](const std::vector<int>& a, const std::vector<int>& b) { return a.size() * 10 + b.size(); },
             {"a", "b"});
  const int shared = 0;
  Encoder out;
  begin_request(out, 0);
  begin_keywords(out, 2);
  out.raw_text("b");
  out.begin_list(2, &shared);
  out.integer(1);
  out.integer(2);
  out.end();
  out.raw_text("a");
  out.again(&shared);
  auto call = raw->call("sim", "lengths", out.take());
  call.wait();
  EXPECT_EQ(value(call.take()), 22);
}

TEST_F(Requests, ThatOnlyPythonCanReadAreRefused) {
  const auto packed = request([](Encoder& out) {
    begin_packed_request(out);
    out.none();
  });
  EXPECT_EQ(packed.status().code(), Code::invalid_argument);
  EXPECT_THAT(packed.status().text(), HasSubstr("only Python can read"));
}

TEST_F(Requests, ThatAreInvalidAreRefused) {
  const auto garbage = request([](Encoder& out) { out.raw_u8(0xff); });
  EXPECT_EQ(garbage.status().code(), Code::protocol_error);
  const auto cut = request([](Encoder& out) {
    begin_request(out, 3);
    out.integer(1);
  });
  EXPECT_FALSE(cut.ok());
}

}  // namespace
