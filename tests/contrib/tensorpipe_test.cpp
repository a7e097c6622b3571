#include <gtest/gtest.h>
#include <tensorpipe/tensorpipe.h>

#include <array>
#include <future>
#include <random>

#include "contrib/tensorpipe/meeting.h"
#include "contrib/tensorpipe/messages.h"
#include "contrib/tensorpipe/tensorpipe_channel.h"
#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

struct TensorpipeFixture {
  static constexpr auto name = "tensorpipe";
  static Drivers drivers() { return {make_tensorpipe_driver(), make_tensorpipe_driver()}; }
  static Traits traits() { return {}; }
};

namespace {

using tp::PipeMeeting;

TEST(TensorpipeMessages, RoundTrip) {
  const auto hello = decode<tp::Control>(encode(tp::PipeHello{{1, 2}, "host"}));
  ASSERT_TRUE(hello);
  EXPECT_EQ(std::get<tp::PipeHello>(*hello).secret, (tp::Secret{1, 2}));
  EXPECT_EQ(std::get<tp::PipeHello>(*hello).host, "host");
  const auto listening = decode<tp::Control>(encode(tp::Listening{"127.0.0.1:1"}));
  ASSERT_TRUE(listening);
  EXPECT_EQ(std::get<tp::Listening>(*listening).address, "127.0.0.1:1");
  const auto request = decode<tp::Control>(encode(tp::PipeRequest{300, 4000}));
  ASSERT_TRUE(request);
  EXPECT_EQ(std::get<tp::PipeRequest>(*request).offer, 300u);
  EXPECT_EQ(std::get<tp::PipeRequest>(*request).bytes, 4000u);
  EXPECT_EQ(decode<tp::Metadata>(encode(tp::Metadata{12345}))->offer, 12345u);
}

TEST(TensorpipeMessages, InvalidBytesAreRefused) {
  for (const auto& control : {tp::Control(tp::PipeHello{{1, 2}, "host"}), tp::Control(tp::Listening{"127.0.0.1:1"}),
                              tp::Control(tp::PipeRequest{1, 2})}) {
    auto bytes = encode(control);
    for (std::size_t kept = 0; kept < bytes.size(); ++kept)
      EXPECT_FALSE(decode<tp::Control>(ByteView(bytes).first(kept)));
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode<tp::Control>(bytes));
  }
  Bytes listening;
  Writer out(listening);
  out.put(tp::Listening::tag);
  out.sized(std::string(257, 'x'));
  EXPECT_FALSE(decode<tp::Control>(listening));
  EXPECT_FALSE(decode<tp::Metadata>({}));
  EXPECT_FALSE(decode<tp::Metadata>(encode(tp::TensorpipeTicket{1, 1})));
  EXPECT_FALSE(tp::offer_of(Ticket{.bytes = 5, .opaque = encode(tp::TensorpipeTicket{1, 6})}));
  EXPECT_FALSE(tp::offer_of(Ticket{.bytes = 0, .opaque = encode(tp::TensorpipeTicket{1, 0})}));
  EXPECT_FALSE(tp::offer_of(Ticket{.bytes = 5, .opaque = encode(tp::TensorpipeTicket{0, 5})}));
}

TEST(TensorpipeMessages, AnAddressIsAnIpAddressAndAPort) {
  for (const auto* good : {"127.0.0.1:80", "[::1]:65535", "[fd00::12]:1"}) EXPECT_TRUE(tp::is_address(good)) << good;
  for (const auto* bad : {"", ":", "80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:+1",
                          "127.0.0.1:80 ", "::1:80", "[::1:80", "[]:80", "localhost:80", "uv://127.0.0.1:80"}) {
    EXPECT_FALSE(tp::is_address(bad)) << bad;
  }
  EXPECT_FALSE(tp::is_address(std::string("127.0.0.1\0x:80", 14)));
}

/// A wire that keeps the control messages of a meeting instead of sending them.
class Post final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors) override {
    const std::lock_guard lock(mutex_);
    sent_.push_back(std::move(message));
    changed_.notify_all();
    return sent_.size();
  }
  void read(Buffer, Completion) override {}
  void send_bulk(std::uint64_t, Buffer, Completion) override {}
  void receive_bulk(std::uint64_t, Buffer, Completion) override {}
  void ready(Status) override {}
  [[nodiscard]] std::string_view peer() const override { return "peer"; }

  /// Waits for the message with this number, counted from 0, which must be of type `Message`, and returns it.
  template <class Message>
  Message sent(std::size_t number) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [&] { return sent_.size() > number; })) throw std::runtime_error("nothing");
    return std::get<Message>(*decode<tp::Control>(sent_[number]));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Bytes> sent_;
};

/// One end of a meeting. The test hands the other end's messages to it, or makes messages up.
struct Party {
  Post post;
  std::shared_ptr<WireUse> use = std::make_shared<WireUse>(post);
  std::shared_ptr<std::promise<Result<PipeMeeting::Pipe>>> promise =
      std::make_shared<std::promise<Result<PipeMeeting::Pipe>>>();
  std::future<Result<PipeMeeting::Pipe>> met = promise->get_future();
  std::shared_ptr<PipeMeeting> meeting = std::make_shared<PipeMeeting>(
      use, DeviceType::cpu, "peer", true,
      [promise = promise](Result<PipeMeeting::Pipe> result) { promise->set_value(std::move(result)); });
  Party() { meeting->begin(); }
  ~Party() {
    meeting->close();
    use->end();
  }
  Party(const Party&) = delete;
  Party& operator=(const Party&) = delete;

  tp::PipeHello hello() { return post.sent<tp::PipeHello>(0); }
  /// Waits for the meeting to end and returns its status.
  Status failure() {
    if (met.wait_for(patience) != std::future_status::ready) return {Code::internal, "nothing came of it"};
    return met.get().status();
  }
};

/// Two ends that have exchanged hellos: `listens` and `dials`.
struct Parties {
  Party one, other;
  const bool ordered = one.hello().secret > other.hello().secret;
  Party& listens = ordered ? one : other;
  Party& dials = ordered ? other : one;
  Parties() {
    listens.meeting->hear(dials.hello());
    dials.meeting->hear(listens.hello());
  }
};

/// TensorPipe in a process that is not an end of the link.
struct Stranger {
  tensorpipe::Context context;
  Stranger() {
    context.registerTransport(0, "uv", tensorpipe::transport::uv::create());
    context.registerChannel(0, "basic", tensorpipe::channel::basic::create());
  }
  static void say(tensorpipe::Pipe& pipe, std::string what) {
    tensorpipe::Message message;
    message.metadata = std::move(what);
    pipe.write(std::move(message), [](const tensorpipe::Error&) {});
  }
};

TEST(TensorpipeMeeting, TheTwoEndsOfALinkConnect) {
  Parties both;
  both.dials.meeting->hear(both.listens.post.sent<tp::Listening>(1));
  EXPECT_TRUE(both.dials.failure().ok());
  EXPECT_TRUE(both.listens.failure().ok());
}

TEST(TensorpipeMeeting, OtherDiallersAreRefused) {
  Parties both;
  const auto listening = both.listens.post.sent<tp::Listening>(1);
  EXPECT_TRUE(listening.address.starts_with("127.0.0.1:")) << listening.address;
  Stranger stranger;
  std::vector<std::shared_ptr<tensorpipe::Pipe>> pipes;
  for (const auto& said : {std::string(), tp::text_of(tp::Secret{3, 4}), tp::text_of(both.dials.hello().secret)}) {
    pipes.push_back(stranger.context.connect("uv://" + listening.address));
    Stranger::say(*pipes.back(), said);
    const auto refused = std::make_shared<std::promise<bool>>();
    pipes.back()->readDescriptor(
        [refused](const tensorpipe::Error& error, const tensorpipe::Descriptor&) { refused->set_value(error); });
    EXPECT_TRUE(refused->get_future().get());
  }
  pipes.push_back(stranger.context.connect("uv://" + listening.address));  // this pipe stays silent
  both.dials.meeting->hear(listening);
  EXPECT_TRUE(both.dials.failure().ok());
  EXPECT_TRUE(both.listens.failure().ok());
}

TEST(TensorpipeMeeting, AnotherProcessAtTheAddressIsRefused) {
  Parties both;
  Stranger stranger;
  const auto listener = stranger.context.listen({"uv://127.0.0.1"});
  std::shared_ptr<tensorpipe::Pipe> dialled;
  listener->accept([&](const tensorpipe::Error&, std::shared_ptr<tensorpipe::Pipe> pipe) {
    dialled = std::move(pipe);
    Stranger::say(*dialled, tp::text_of(both.listens.hello().secret));
  });
  both.dials.meeting->hear(tp::Listening{listener->address("uv")});
  const auto failure = both.dials.failure();
  EXPECT_EQ(failure.code(), Code::channel_unavailable);
  EXPECT_NE(failure.what().find("is not"), std::string_view::npos) << failure.text();
  stranger.context.join();
}

TEST(TensorpipeMeeting, AnUnusedAddressIsReported) {
  Parties both;
  both.dials.meeting->hear(tp::Listening{"127.0.0.1:1"});
  const auto failure = both.dials.failure();
  EXPECT_EQ(failure.code(), Code::channel_unavailable);
  EXPECT_NE(failure.what().find("127.0.0.1:1"), std::string_view::npos) << failure.text();
}

TEST(TensorpipeMeeting, OnlyAddressesAreDialled) {
  Parties both;
  both.dials.meeting->hear(tp::Listening{"example.com:80"});
  EXPECT_EQ(both.dials.failure().code(), Code::protocol_error);
}

TEST(TensorpipeMeeting, AReflectedSecretIsRefused) {
  Party alone;
  alone.meeting->hear(alone.hello());
  EXPECT_EQ(alone.failure().code(), Code::protocol_error);
}

class Tensorpipe : public testing::Test {
 protected:
  std::unique_ptr<Driver> driver = make_tensorpipe_driver();
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{*driver, *driver, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;
};

TEST_F(Tensorpipe, TicketsArePulledInAnyOrder) {
  b.behave({.on_message = [this](Arrivals& arrivals) {
    for (auto at = arrivals.rbegin(); at != arrivals.rend(); ++at) b.pull(*at);
  }});
  Letter letter(a);
  for (std::uint32_t i = 0; i < 8; ++i) ASSERT_TRUE(letter.offer(memory->filled(100'000 + i, i))) << letter.refusal;
  letter.send();
  const auto arrivals = b.receive();
  ASSERT_EQ(arrivals.size(), 8u);
  for (std::uint32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(arrivals[i]->landed.wait_name(), "Ok");
    EXPECT_TRUE(memory->holds(arrivals[i]->buffer, i));
  }
}

TEST_F(Tensorpipe, OtherChannelsCarryUntilThePipeIsConnected) {
  auto [mine, theirs] = connected_sockets();
  WireEnd lonely("nobody", *driver, {}, *memory, std::move(mine));  // no peer answers this end
  Letter letter(lonely);
  letter.only_channel = false;
  EXPECT_FALSE(letter.offer(memory->filled(1000, 1)));
  EXPECT_NE(letter.refusal.find("pipe is not connected yet"), std::string::npos);
  letter.only_channel = true;
  EXPECT_TRUE(letter.offer(memory->filled(1000, 1)));
}

TEST_F(Tensorpipe, EndsOnTwoHostsConnectAtAReachableAddress) {
  const auto distant = make_tensorpipe_driver({.loopback = false});
  WirePair hosts(*distant, *distant, {}, *memory, *memory);
  const auto released = hosts.a->send(memory->filled(1 << 20, 1));
  const auto arrivals = hosts.b->receive();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(arrivals.front()->buffer, 1));
  EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_F(Tensorpipe, AGpuAndACpuAreNotConnected) {
  const auto mine = std::get<Bytes>(driver->descriptor({}));
  const auto theirs = encode(tp::Endpoint{DeviceType::cuda, {1, 2}});
  const auto refusal = driver->reaches(mine, theirs);
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->reason.find("GPU"), std::string::npos);
}

TEST_F(Tensorpipe, AnAgentHasNoPipeToItself) {
  const auto mine = std::get<Bytes>(driver->descriptor({}));
  const auto refusal = driver->reaches(mine, mine);
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->reason.find("itself"), std::string::npos);
  EXPECT_FALSE(driver->reaches(mine, std::get<Bytes>(make_tensorpipe_driver()->descriptor({}))));
}

}  // namespace
}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(TensorpipeFixture);
