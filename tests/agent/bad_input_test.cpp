// Invalid bytes from strangers and hostile peers. Each costs the sender its connection and the log one line, and no
// other agent notices.
#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <thread>

#include "agent/buffers/bulk_reads.h"
#include "base/log.h"
#include "tests/agent/agents.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"
#include "tests/base/manual_clock.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

Bytes noise(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Bytes raw_header(const std::function<void(wire::Header&)>& change, std::size_t body = 0) {
  wire::Header header;
  header.kind = wire::Kind::request;
  change(header);
  const auto head = header.encoded();
  Bytes bytes(head.begin(), head.end());
  bytes.resize(wire::Header::size + body);
  return bytes;
}

Bytes joined(std::initializer_list<Bytes> parts) {
  Bytes all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Returns a request whose records and payload are in its only buffer, an inline one.
Bytes spilled(const Bytes& body) {
  auto frame = request_frame(1, "echo", record_frame(body.size(), body, wire::BufferRecord::inline_channel), 1);
  frame[1] = static_cast<std::byte>(wire::flag::spilled);
  return frame;
}

Bytes spill_of(std::uint32_t count, const Bytes& records) {
  Bytes body(sizeof count);
  std::memcpy(body.data(), &count, sizeof count);
  return joined({body, records});
}

Bytes control_frame(std::uint64_t id, std::uint8_t operation, std::uint32_t code, std::string_view text = {}) {
  Bytes payload;
  Writer writer(payload);
  writer.put(operation);
  writer.put(code);
  writer.raw(view_of(text));
  wire::Header header;
  header.kind = wire::Kind::control;
  header.call = id;
  return wire::assemble(header, {}, {}, payload);
}

/// The target of the invalid bytes, and two other agents. Meanwhile "third" calls the target and "other", and no such
/// call may fail.
class BadInput : public ::testing::Test {
 protected:
  BadInput() {
    for (auto* agent : {target.get(), other.get()}) serve_echo(*agent);
    target->serve("hang", [](const Request&, Reply reply) { eventually([&] { return reply.cancelled(); }); });
    target->on_peer_lost([this](const PeerInfo& peer, const Status&) { lost_ += peer.name.starts_with("hostile"); });
    for (const char* peer : {"target", "other"}) {
      callers_.emplace_back([this, peer] {
        for (unsigned i = 0; !enough_; ++i) {
          auto message = message_of("x");
          if (i % 3 == 0) message.buffers = {patterned(i % 9 == 0 ? 300'000 : 20'000, i)};
          const auto reply = call_sync(*third, peer, "echo", message, within(long_enough));
          const bool good =
              reply.ok() && (message.buffers.empty() || same_bytes(reply->buffers.at(0), message.buffers[0]));
          ++(good ? answered_ : failed_);
        }
      });
    }
  }
  ~BadInput() override {
    const int before = answered_;
    EXPECT_TRUE(eventually([&] { return answered_ > before + 2; })) << "calls continue";
    enough_ = true;
    for (auto& caller : callers_) caller.join();
    EXPECT_EQ(failed_, 0);
    EXPECT_TRUE(eventually([&] { return target->in_flight().second == 0; }));
  }

  static void capture_log() {
    log_rate::forget();  // each case expects its own line
    ::testing::internal::CaptureStderr();
  }

  /// Waits until the connection has ended, and returns the lines that the target has logged until then.
  static std::vector<std::string> log_until_ended(RawConnection& connection) {
    const bool ended = connection.ended();
    std::istringstream log(::testing::internal::GetCapturedStderr());
    EXPECT_TRUE(ended);
    std::vector<std::string> lines;
    for (std::string line; std::getline(log, line);) lines.push_back(line);
    return lines;
  }

  /// Expects that the target turns away a stranger that sends `bytes`, and logs one line with `why`. If `then_closes`,
  /// the stranger closes its writing half afterwards.
  void expect_turned_away(const std::string& name, const Bytes& bytes, const std::string& why,
                          bool then_closes = false) {
    for (const bool by_unix : {true, false}) {
      SCOPED_TRACE(name + (by_unix ? " unix" : " tcp"));
      capture_log();
      auto stranger = raw_connect(record_of(store, "target"), by_unix);
      EXPECT_TRUE(stranger.write(bytes).ok());
      if (then_closes) stranger.half_close();
      const auto lines = log_until_ended(stranger);
      ASSERT_EQ(lines.size(), 1U);
      EXPECT_THAT(lines[0], HasSubstr("refused a connection: transport=" + std::string(by_unix ? "unix" : "tcp")));
      EXPECT_THAT(lines[0], HasSubstr(why));
    }
  }

  /// Expects that the target loses a peer that sends `bytes` after a valid handshake, and logs one line with `why`. If
  /// `then_closes`, the peer closes its writing half afterwards.
  void expect_lost(const std::string& name, const Bytes& bytes, const std::string& why,
                   wire::Hello hello = raw_hello(""), bool then_closes = false) {
    for (const bool by_unix : {true, false}) {
      SCOPED_TRACE(name + (by_unix ? " unix" : " tcp"));
      hello.name = "hostile" + std::to_string(++hostile_);
      capture_log();
      auto calls = hello;
      calls.purpose = wire::Hello::Purpose::calls;
      auto peer = raw_dial(store, "target", calls, by_unix);
      std::optional<RawConnection> behind;  // the connection for calls of a bulk connection
      if (hello.purpose != calls.purpose) {
        behind.emplace(std::exchange(peer, RawConnection(FileDescriptor())));
        EXPECT_TRUE(behind->write(plain_frame(wire::Kind::ping)).ok() && behind->read(wire::Kind::pong).ok());
        peer = raw_dial(store, "target", hello, by_unix);
      }
      EXPECT_TRUE(peer.write(bytes).ok());
      if (then_closes) peer.half_close();
      EXPECT_TRUE(eventually([&] { return lost_ == hostile_; }));
      auto lines = log_until_ended(peer);
      // raw_dial() may have dialled twice.
      std::erase_if(lines,
                    [](const std::string& line) { return line.find("refused a connection") != std::string::npos; });
      EXPECT_EQ(lines.size(), 1U) << ::testing::PrintToString(lines);
      if (lines.empty()) continue;
      EXPECT_THAT(lines[0], HasSubstr("peer=" + hello.name + " connection lost: "));
      EXPECT_THAT(lines[0], HasSubstr(why));
    }
  }

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> target = join(store, "target"), other = join(store, "other"), third = join(store, "third");

 private:
  std::vector<std::thread> callers_;
  std::atomic<bool> enough_{false};
  std::atomic<int> answered_{0}, failed_{0};
  std::atomic<int> lost_{0};  // hostile peers that the target has lost; counted after the line in the log
  int hostile_ = 0;
};

// ---- Strangers

TEST_F(BadInput, BeforeTheHandshakeEndsTheConnectionUnparsed) {
  expect_turned_away("noise", noise(5000), "does not speak the tensorferry protocol");
  expect_turned_away("http", bytes_of("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0 (x86_64)\r\n\r\n"),
                     "does not speak");
  expect_turned_away("half", noise(20), "the connection ended during the handshake", true);
  Preamble other_version;
  other_version.version_min = other_version.version_max = 9;
  const auto later = other_version.encode();
  expect_turned_away("version", Bytes(later.begin(), later.end()),
                     "speaks versions 9 to 9 of the protocol, this side 1 to 1");
  other_version.version_min = 10;
  const auto empty = other_version.encode();
  expect_turned_away("no version", Bytes(empty.begin(), empty.end()), "range of versions is empty: 10 to 9");
  const auto good = Preamble{}.encode();
  expect_turned_away("half a greeting", Bytes(good.begin(), good.end()), "", true);
}

TEST_F(BadInput, WithoutTheKeyEndsTheConnectionUnparsed) {
  const std::string right = "the key of the keeper";
  const auto keeper = join(store, "keeper", {"tcp", ""}, [&](RawAgentOptions& options) { options.key = right; });
  const auto record = record_of(store, "keeper", *Key::from_text(right));
  const auto wrong = Key::random();
  const Key none;
  for (const auto* key : {&wrong, &none}) {
    capture_log();
    auto stranger = raw_connect(record, false);
    const auto agreed = handshake_as_dialler(stranger.fd(), raw_terms(*key, true), deadline_after(long_enough));
    EXPECT_EQ(agreed.status().code(), Code::unauthenticated);
    stranger.half_close();
    const auto lines = log_until_ended(stranger);
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_THAT(lines[0], HasSubstr("Unauthenticated"));
  }
  // A stranger that sends on all the same.
  capture_log();
  auto stranger = raw_connect(record, false);
  DiallerHandshake handshake(raw_terms(wrong, true));
  ASSERT_TRUE(stranger.write(handshake.hello()).ok());
  (void)stranger.read_bytes(DiallerHandshake::answer_bytes);
  ASSERT_TRUE(stranger.write(noise(sizeof(Digest))).ok());
  ASSERT_TRUE(stranger.write(hello_frame(raw_hello("spy"))).ok());
  const auto lines = log_until_ended(stranger);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines[0], HasSubstr("Unauthenticated: the peer has another cluster key than this process"));
  EXPECT_TRUE(stranger.ended());
}

TEST_F(BadInput, InsteadOfTheHelloEndsTheConnection) {
  const auto send = [&](const std::string& name, const Bytes& bytes, const std::string& why, bool then_closes = false) {
    SCOPED_TRACE(name);
    capture_log();
    auto connection = raw_connect(record_of(store, "target"), true);
    const Key none;
    ASSERT_TRUE(handshake_as_dialler(connection.fd(), raw_terms(none, false), deadline_after(long_enough)).ok());
    ASSERT_TRUE(connection.write(bytes).ok());
    if (then_closes) connection.half_close();
    const auto lines = log_until_ended(connection);
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_THAT(lines[0], HasSubstr("refused a connection"));
    EXPECT_THAT(lines[0], HasSubstr(why));
  };
  const auto hello = [](const std::function<void(wire::Hello&)>& change) {
    auto changed = raw_hello("x");
    change(changed);
    return hello_frame(changed);
  };
  send("noise", Bytes(100, std::byte{0xff}), "malformed frame: unknown kind 255");
  send("a request", request_frame(1, "echo"), "the first frame is not a hello");
  send("half a header", Bytes(10), "the connection ended during the handshake", true);
  send("half a hello", raw_header([](auto& h) { h.kind = wire::Kind::hello, h.length = 1000; }, 10),
       "the connection ended during the handshake", true);
  send("4 GB", raw_header([](auto& h) { h.kind = wire::Kind::hello, h.length = 0xffffffff; }),
       "body of 4294967295 bytes");
  send("garbage inside", raw_header([](auto& h) { h.kind = wire::Kind::hello, h.length = 200; }, 200),
       "malformed frame");
  send("no name", hello([](auto& h) { h.name.clear(); }), "no name");
  send("two lines", hello([](auto& h) { h.name = "x\ntensorferry warning: all is well"; }), "name");
  send("a long name", hello([](auto& h) { h.name = std::string(256, 'x'); }), "name");
  send("no incarnation", hello([](auto& h) { h.incarnation = 0; }), "incarnation");
  send("another purpose", hello([](auto& h) { h.purpose = static_cast<wire::Hello::Purpose>(9); }),
       "unknown purpose 9");
  send("for an earlier incarnation", hello([](auto& h) { h.expected = 12345; }),
       "expects an earlier incarnation of this agent");
}

TEST_F(BadInput, OfThreeHundredSlowDiallersNeitherBlocksOthersNorLeaks) {
  // Its time stands while they hold their places, so that no time-out helps the others.
  const auto time = ManualClock::make();
  const auto slow = join(store, "slow", {"unix", "basic"},
                         [&](RawAgentOptions& options) { options.surroundings.clock = time->clock(); });
  serve_echo(*slow);
  const auto record = record_of(store, "slow");
  const auto come_and_go = [&] {
    std::vector<RawConnection> strangers;
    for (int i = 0; i < 300; ++i) {
      strangers.push_back(raw_connect(record, i % 2 == 0));
      ASSERT_TRUE(strangers.back().write(Bytes(1, std::byte{'T'})).ok());
    }
    const auto late = join(store, "late"), by_tcp = join(store, "later", {"tcp", ""});
    EXPECT_TRUE(call_sync(*late, "slow", "echo", message_of("x"), within(long_enough)).ok());
    EXPECT_TRUE(call_sync(*by_tcp, "slow", "echo", message_of("x"), within(long_enough)).ok());
    const auto is_cut_off = [&] {
      time->advance(seconds(1));
      return strangers.front().ended(milliseconds(0));
    };
    EXPECT_TRUE(eventually(is_cut_off)) << "the time-out of a handshake is 10 s";
  };
  capture_log();
  come_and_go();
  std::this_thread::sleep_for(milliseconds(100));
  const auto before = open_descriptors();
  come_and_go();
  EXPECT_TRUE(eventually([&] { return open_descriptors() <= before; })) << open_descriptors() << " after " << before;
  (void)::testing::internal::GetCapturedStderr();  // one line for each stranger
}

TEST_F(BadInput, OfASilentDiallerEndsAtTheHandshakeTimeout) {
  const auto time = ManualClock::make();
  const auto patient = join(store, "patient", {"unix", "basic"},
                            [&](RawAgentOptions& options) { options.surroundings.clock = time->clock(); });
  const auto start = time->now();
  auto stranger = raw_connect(record_of(store, "patient"), true);
  time->await_alarm(start + seconds(10), start + seconds(10));  // this user's process needs no proof
  time->advance(milliseconds(9999));
  EXPECT_FALSE(stranger.ended(milliseconds(0)));
  time->advance(milliseconds(1));
  EXPECT_TRUE(stranger.ended());
}

// ---- Peers

TEST_F(BadInput, InFramesEndsTheLink) {
  expect_lost("noise", Bytes(5000, std::byte{0xee}), "malformed frame: unknown kind 238");
  expect_lost("half a header", Bytes(20, std::byte{2}), "in the middle of a frame", raw_hello(""), true);
  expect_lost("half a frame", raw_header([](auto& h) { h.length = 1000; }, 500), "in the middle of a frame",
              raw_hello(""), true);
  expect_lost("half a buffer",
              joined({request_frame(1, "echo", record_frame(10'000, appended_ticket), 1, 10'000), Bytes(5000)}),
              "in the middle of a frame", raw_hello(""), true);
  expect_lost("2^63 bytes behind", raw_header([](auto& h) { h.trailing = std::uint64_t{1} << 63, h.buffers = 1; }),
              "2^62 bytes or more");
  expect_lost("a body of 4 GB", raw_header([](auto& h) { h.length = 0xffffffff; }), "body of 4294967295 bytes");
  expect_lost("kind 0", raw_header([](auto& h) { h.kind = static_cast<wire::Kind>(0); }), "unknown kind 0");
  expect_lost("extensions outside", raw_header([](auto& h) { h.length = 4, h.extensions = 5; }, 4),
              "extension records longer");
  expect_lost("descriptors that did not arrive", raw_header([](auto& h) { h.descriptors = 3; }),
              "file descriptors that did not arrive");
  expect_lost("a second hello", hello_frame(raw_hello("again")), "not allowed on an open connection");
  expect_lost("bulk on a connection for calls",
              raw_header([](auto& h) { h.kind = wire::Kind::bulk, h.trailing = 10; }, 10), "a bulk frame");
  expect_lost("a second `go`", plain_frame(wire::Kind::go, 5), "not allowed on an open connection");
  expect_lost("a wish for what it dials itself", plain_frame(wire::Kind::want_bulk), "wants one from this side");
}

TEST_F(BadInput, InRequestsEndsTheLink) {
  expect_lost("an unknown number", raw_header([](auto& h) { h.function = 4711; }),
              "function number 4711, which was never assigned");
  expect_lost("no function", raw_header([](auto&) {}), "a request names no function");
  expect_lost("the same id twice", joined({request_frame(7, "hang"), request_frame(7, "hang")}),
              "the id of another request that is still open");
  expect_lost("more buffers than fit", raw_header([](auto& h) { h.buffers = 0xffff, h.length = 100; }, 100),
              "more buffers than fit");
  const auto one = [](const Bytes& record, std::uint64_t trailing = 0) {
    return request_frame(1, "echo", record, 1, trailing);
  };
  expect_lost("an unknown channel", one(record_frame(10, noise(8), 7)), "a channel that does not reach");
  expect_lost("no ticket", one(record_frame(10, {})), "ticket");
  expect_lost("noise for a ticket", one(record_frame(10, noise(40))), "ticket");
  expect_lost("an inline buffer that ends outside",
              one(record_frame(1 << 20, noise(8), wire::BufferRecord::inline_channel)), "ends outside its frame");
  expect_lost("too few bytes behind", joined({one(record_frame(100, appended_ticket), 99), Bytes(99)}),
              "fewer bytes follow the frame");
  expect_lost("too many bytes behind", joined({one(record_frame(100, appended_ticket), 101), Bytes(101)}),
              "more bytes follow the frame");
  expect_lost("bytes behind that no buffer has",
              joined({one(record_frame(3, noise(3), wire::BufferRecord::inline_channel), 50), Bytes(50)}),
              "more bytes follow");
  expect_lost("two tickets name the same bytes",
              request_frame(1, "echo", joined({record_frame(10, bulk_ticket(1)), record_frame(10, bulk_ticket(1))}), 2),
              "two tickets name the same bulk bytes");
  auto gpu = record_frame(10, appended_ticket);
  gpu[1] = std::byte{1};
  expect_lost("a device that no agent has", joined({one(gpu, 10), Bytes(10)}), "a channel that does not reach");
}

TEST_F(BadInput, InBodiesReadAsBuffersEndsTheLink) {
  expect_lost("no count", spilled({}), "too short to hold the rest");
  expect_lost("more records than there are", spilled(spill_of(1000, Bytes(64))), "more buffers than fit");
  expect_lost("4 billion records", spilled(spill_of(0xffffffff, Bytes(64))), "more buffers than fit");
  expect_lost("half a record", spilled(spill_of(1, Bytes(40, std::byte{0xff}))), "ends outside its frame");
  expect_lost("bytes behind, which cannot be told apart", spilled(spill_of(1, record_frame(10, appended_ticket))),
              "but the frame has none");
  expect_lost("an unknown channel", spilled(spill_of(1, record_frame(10, noise(4), 9))),
              "a channel that does not reach");
}

TEST_F(BadInput, InDevicesOfHostReadBytesEndsTheLink) {
  const auto for_device = [](Bytes record) {
    record[3] = std::byte{1};  // the destination's type: cuda
    return record;
  };
  const auto inside = for_device(record_frame(3, noise(3), wire::BufferRecord::inline_channel));
  expect_lost("inside a frame", request_frame(1, "echo", inside, 1), "inside a frame");
  expect_lost("inside a spilled body", spilled(spill_of(1, inside)), "inside a frame");
  const auto body = spill_of(0, {});
  auto frame =
      request_frame(1, "echo", for_device(record_frame(body.size(), body, wire::BufferRecord::inline_channel)), 1);
  frame[1] = static_cast<std::byte>(wire::flag::spilled);
  expect_lost("a spilled body", frame, "the rest of the frame is for");
}

TEST_F(BadInput, InTheDeviceOfAReplyLeavesTheCallersMemoryUnchanged) {
  RawPeer peer(store, "elsewhere");
  RawCallOptions options;
  options.into = {patterned(100, 1)};
  options.into[0].device = {DeviceType::cuda, 0};
  const auto before = patterned(100, 1);
  auto call = third->call("elsewhere", "f", {}, options);
  auto accepted = peer.accept();
  const auto request = accepted.connection.read(wire::Kind::request);
  ASSERT_TRUE(request.ok());
  const auto reply =
      reply_frame(request->header.call, record_frame(100, noise(100), wire::BufferRecord::inline_channel), 1);
  ASSERT_TRUE(accepted.connection.write(reply).ok());
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto received = call.take();
  ASSERT_TRUE(received.ok()) << received.status().text();
  EXPECT_EQ(received->buffers.at(0).device, Device());
  EXPECT_NE(received->buffers.at(0).data, options.into[0].data);
  EXPECT_TRUE(same_bytes(options.into[0], before)) << "cuda memory is not the host's to write";
}

TEST_F(BadInput, InControlFramesEndsTheLink) {
  expect_lost("nothing", plain_frame(wire::Kind::control, 1), "the control frame names no channel");
  expect_lost("out of order", control_frame(5, 4, 0), "out of order");
  expect_lost("again", joined({control_frame(1, 1, 0), control_frame(1, 1, 0)}), "out of order");
  expect_lost("an unknown channel", control_frame(1, 4, 9U << 24), "a channel that does not reach");
  expect_lost("devices that no agent has", control_frame(1, 1, 1U << 20 | 200U << 12 | 1U << 8 | 7U), "does not reach");
  expect_lost("an unknown operation", control_frame(1, 77, 0), "unknown operation");
}

TEST_F(BadInput, OfMoreWithdrawalsThanAnAgentKeepsEndsTheLink) {
  Bytes withdrawals;
  for (std::uint64_t id = 1; id <= BulkReads::most_dropping + 1; ++id) {
    Bytes dropped;
    Writer writer(dropped);
    writer.varint(id);
    writer.varint(1);  // byte, which never comes
    const auto frame = control_frame(id, 4, 0, text_of(dropped));
    withdrawals.insert(withdrawals.end(), frame.begin(), frame.end());
  }
  expect_lost("withdrawals", withdrawals, "let fewer large messages be under way");
}

TEST_F(BadInput, OnABulkConnectionEndsTheLink) {
  auto bulk = raw_hello("");
  bulk.purpose = wire::Hello::Purpose::bulk;
  expect_lost("noise", Bytes(1000, std::byte{0xdd}), "unknown kind", bulk);
  expect_lost("a request", request_frame(1, "echo"), "a body on a bulk connection", bulk);
  expect_lost("an unknown channel",
              raw_header([](auto& h) { h.kind = wire::Kind::bulk, h.order = 5U << 24, h.trailing = 5; }, 5),
              "does not reach", bulk);
}

TEST_F(BadInput, InTheSizeOfBulkBytesEndsTheLink) {
  auto calls = raw_dial(store, "target", raw_hello("liar", 9));
  auto hello = raw_hello("liar", 9);
  hello.purpose = wire::Hello::Purpose::bulk;
  auto bulk = raw_dial(store, "target", hello);
  ASSERT_TRUE(calls.write(request_frame(1, "echo", record_frame(1000, bulk_ticket(1)), 1)).ok());
  ASSERT_TRUE(
      bulk.write(raw_header([](auto& h) { h.kind = wire::Kind::bulk, h.call = 1, h.trailing = 999; }, 999)).ok());
  EXPECT_TRUE(calls.ended());
  EXPECT_TRUE(bulk.ended());
}

TEST_F(BadInput, InTicketsOfEveryChannelEndsInAnErrorOrTheLink) {
  const auto post = join(store, "post", {}, [](RawAgentOptions& options) { options.registry = with_mail(); });
  serve_echo(*post);
  for (std::uint8_t channel = 0; channel < 3; ++channel) {
    for (unsigned seed = 0; seed < 100; ++seed) {
      auto hello = raw_hello("prober" + std::to_string(channel) + "." + std::to_string(seed), seed + 1);
      hello.drivers.clear();
      auto connection = raw_connect(record_of(store, "post"), true);
      const Key none;
      ASSERT_TRUE(handshake_as_dialler(connection.fd(), raw_terms(none, false), deadline_after(long_enough)).ok());
      const auto theirs = wire::Hello::decode(connection.read(wire::Kind::hello)->body);
      hello.drivers = theirs->drivers;  // with the target's own descriptors, so that each channel reaches
      ASSERT_TRUE(connection.write(joined({hello_frame(hello), go_frame(raw_number)})).ok());
      auto ticket = noise(seed % 40, seed);
      if (seed % 2 == 0 && !ticket.empty()) ticket[0] = static_cast<std::byte>(seed % 4);
      ASSERT_TRUE(connection.write(request_frame(1, "echo", record_frame(seed, ticket, channel), 1)).ok());
      (void)connection.write(
          control_frame(1, 4, static_cast<std::uint32_t>(channel) << 24, text_of(noise(seed, seed))));
      connection.half_close();
      EXPECT_TRUE(connection.ended());
    }
  }
  EXPECT_TRUE(call_sync(*other, "post", "echo", message_of("x")).ok());
}

// ---- Callees

TEST_F(BadInput, InRepliesFailsOnlyTheCallsToThatPeer) {
  const auto answer = [&](const std::string& name, const std::function<Bytes(std::uint64_t)>& reply,
                          const std::string& why, Code code) {
    SCOPED_TRACE(name);
    RawPeer hostile(store, "hostile " + name);
    RawCallOptions options;
    options.into = {patterned(100)};
    auto call = third->call("hostile " + name, "f", {}, options);
    auto peer = hostile.accept();
    const auto request = peer.connection.read(wire::Kind::request);
    ASSERT_TRUE(request.ok());
    ASSERT_TRUE(peer.connection.write(reply(request->header.call)).ok());
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    const auto status = call.take().status();
    EXPECT_EQ(status.code(), code) << status.text();
    EXPECT_THAT(std::string(status.what()), HasSubstr(why));
  };
  const auto with = [](const Bytes& record, std::uint64_t trailing = 0) {
    return [=](std::uint64_t id) { return joined({reply_frame(id, record, 1, trailing), Bytes(trailing)}); };
  };
  constexpr auto broken = Code::protocol_error;
  answer(
      "noise", [](auto) { return Bytes(500, std::byte{0xcc}); }, "unknown kind 204", broken);
  answer("ticket", with(record_frame(100, noise(30))), "ticket", broken);
  answer("channel", with(record_frame(100, noise(30), 9)), "does not reach", broken);
  answer("few", with(record_frame(100, appended_ticket), 50), "fewer bytes", broken);
  answer("many", with(record_frame(100, appended_ticket), 150), "more bytes", broken);
  answer(
      "bulk twice",
      [](auto id) {
        return reply_frame(id, joined({record_frame(9, bulk_ticket(1)), record_frame(9, bulk_ticket(1))}), 2);
      },
      "two tickets", broken);
  answer(
      "twice",
      [](auto id) {
        return joined({reply_frame(id, record_frame(100, bulk_ticket(1)), 1), reply_frame(id)});
      },
      "a second reply to one call arrived", broken);
  answer(
      "error",
      [](auto id) {
        auto frame = reply_frame(id, {}, 0, 0, "\xff garbage");
        frame[1] = static_cast<std::byte>(wire::flag::error);
        return frame;
      },
      "an error reply that cannot be read", broken);
  answer(
      "others",
      [](auto id) {
        return joined({reply_frame(id + 1), reply_frame(id ^ (1ULL << 32)), reply_frame(0), reply_frame(id)});
      },
      "", Code::ok);
}

}  // namespace
}  // namespace tensorferry
