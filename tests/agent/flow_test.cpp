// Bounds on bytes in flight and on concurrent handlers. No call waits because another call or peer is slow.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "channels/completion.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

std::string what(const Status& status) { return std::string(status.what()); }

Message large(std::size_t bytes, int count = 1) {
  auto message = message_of("m");
  for (int i = 0; i < count; ++i) message.buffers.push_back(patterned(bytes));
  return message;
}

std::function<void(RawAgentOptions&)> with_bound(std::size_t bytes) {
  return [bytes](RawAgentOptions& options) { options.max_bytes_in_flight = bytes; };
}

class Flow : public ::testing::Test {
 protected:
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
};

// ---- Threads that wait

/// The buffer of every first pull lands inside the next pull, on the thread that pulls then. No bytes move.
struct Landings {
  std::mutex mutex;
  Completion kept;
  std::atomic<int> pulls{0};
};

class LandsLater final : public Channel {
 public:
  explicit LandsLater(std::shared_ptr<Landings> landings) : landings_(std::move(landings)) {}
  Offer offer(const Buffer& buffer, Sharing, Outgoing&, Completion released) override {
    complete(std::move(released), {});
    return Ticket{.bytes = buffer.bytes, .opaque = {}};
  }
  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    (void)sink.reserve(ticket.bytes);
    Completion earlier;
    {
      const std::lock_guard lock(landings_->mutex);
      std::swap(earlier, landings_->kept);
      if (!earlier) std::swap(landed, landings_->kept);
    }
    ++landings_->pulls;
    for (auto* each : {&earlier, &landed}) {
      if (*each) complete(std::move(*each), {});
    }
    complete(std::move(consumed), {});
  }
  void withdraw(const Ticket&) override {}
  void close(Status why) noexcept override {
    Completion left;
    {
      const std::lock_guard lock(landings_->mutex);
      std::swap(left, landings_->kept);
    }
    if (left) complete(std::move(left), why);
  }

 private:
  const std::shared_ptr<Landings> landings_;
};

class LandsLaterDriver final : public Driver {
 public:
  explicit LandsLaterDriver(std::shared_ptr<Landings> landings) : landings_(std::move(landings)) {}
  [[nodiscard]] std::string_view name() const override { return "lands later"; }
  [[nodiscard]] bool immediate() const override { return true; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return Bytes(); }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return std::nullopt; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair) override {
    wire.ready({});
    return std::make_unique<LandsLater>(landings_);
  }

 private:
  const std::shared_ptr<Landings> landings_;
};

TEST_F(Flow, AWaiterWakesTheOneWhoseBufferLandsInItsPull) {
  const auto landings = std::make_shared<Landings>();
  const auto with = [&](RawAgentOptions& options) {
    options.registry.add("lands later", 1000, [landings] { return std::make_unique<LandsLaterDriver>(landings); });
  };
  const auto a = join(store, "a", {}, with), b = join(store, "b", {}, with);
  b->serve("give", [](const Request&, Reply reply) { reply.send(large(10'000)); });
  ASSERT_TRUE(eventually([&] {
    const auto route = a->explain("b");
    return route.ok() && route->transport == "ring";
  }));
  std::atomic<bool> ended{false};
  std::thread first([&] {
    EXPECT_TRUE(call_sync(*a, "b", "give", {}, within(long_enough)).ok());
    ended = true;
  });
  EXPECT_TRUE(eventually([&] { return landings->pulls == 1; }));
  std::this_thread::sleep_for(milliseconds(200));  // so that the thread sleeps
  EXPECT_TRUE(call_sync(*a, "b", "give", {}, within(long_enough)).ok());
  EXPECT_TRUE(eventually([&] { return ended.load(); }));
  first.join();
}

TEST_F(Flow, AWaiterEndsWithItsCallIfTheProcessHasNoDescriptorToSpare) {
  if (under_sanitizer) GTEST_SKIP() << "sanitizers need descriptors themselves";
  const auto a = join(store, "a", {"unix", "basic"}), b = join(store, "b", {"unix", "basic"});
  serve_echo(*b);
  std::vector<Reply> kept;  // no answer comes, which would wake the waiter
  b->serve("keep", [&](const Request&, Reply reply) { kept.push_back(std::move(reply)); });
  std::atomic<bool> linked{false}, ended{false};
  a->call("b", "echo", {}, within(long_enough)).on_done([&](const Result<Received>&) { linked = true; });
  ASSERT_TRUE(eventually([&] { return linked.load(); }));
  auto call = a->call("b", "keep", {}, within(long_enough));
  ASSERT_TRUE(eventually([&] { return b->in_flight().second == 1; }));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const FileDescriptor lowest(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit none{static_cast<rlim_t>(lowest.get()), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  std::thread waiter([&] {
    call.wait();
    ended = true;
  });
  std::this_thread::sleep_for(milliseconds(200));  // so that the thread sleeps
  call.cancel();
  EXPECT_TRUE(eventually([&] { return ended.load(); }));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  waiter.join();
}

// ---- Bytes in flight

TEST_F(Flow, ASenderAtTheBoundWaitsUntilItsDeadline) {
  const auto a = join(store, "a", {}, with_bound(1'000'000));
  RawPeer lazy(store, "lazy");
  auto first = a->call("lazy", "f", large(180'000, 5));
  auto peer = lazy.accept();  // never reads
  const Since since;
  auto second = a->call("lazy", "f", large(200'000), within(milliseconds(200)));
  EXPECT_GE(since.passed(), milliseconds(200));
  EXPECT_LT(since.passed(), seconds(20));
  ASSERT_TRUE(second.done());
  const auto status = second.take().status();
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(
      what(status),
      HasSubstr("\"f\" on \"lazy\": not sent, because \"lazy\" did not read the messages that were sent to it before "
                "(1000000 bytes may be in flight)"));
  EXPECT_FALSE(first.done());
}

TEST_F(Flow, ASenderResumesWhenThePeerHasReadAndSmallCallsNeverWait) {
  const auto a = join(store, "a", {}, with_bound(250'000));
  RawPeer lazy(store, "lazy");
  auto first = a->call("lazy", "f", large(80'000, 3));
  auto peer = lazy.accept();
  std::atomic<bool> asks{false}, reads{false}, admitted{false};
  std::thread sender([&] {
    asks = true;
    (void)a->call("lazy", "f", large(80'000), within(long_enough));
    EXPECT_TRUE(reads) << "it was sent beyond the bound";
    admitted = true;
  });
  ASSERT_TRUE(eventually([&] { return asks.load(); }));
  (void)a->call("lazy", "g", message_of("no buffers"));
  EXPECT_FALSE(admitted) << "the small call waited until the large one gave up";
  reads = true;
  ASSERT_TRUE(peer.connection.read(wire::Kind::request).ok());
  (void)peer.connection.read_bytes(240'000);
  EXPECT_TRUE(eventually([&] { return admitted.load(); }));
  sender.join();
}

TEST_F(Flow, ASenderAtTheBoundFailsWhenThePeerEnds) {
  const auto a = join(store, "a", {}, with_bound(1'000'000));
  RawPeer lazy(store, "lazy");
  auto first = a->call("lazy", "f", large(180'000, 5));
  auto peer = std::make_unique<RawPeer::Accepted>(lazy.accept());
  std::thread closer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    peer.reset();
  });
  auto second = a->call("lazy", "f", large(200'000), within(long_enough));
  EXPECT_TRUE(second.wait());
  EXPECT_EQ(second.take().status().code(), Code::connection_lost);
  closer.join();
}

TEST_F(Flow, AMessageLargerThanTheBoundIsSentAlone) {
  for (const Ways& ways : {Ways{"ring", "basic"}, Ways{"ring", ""}, Ways{"tcp", "basic"}}) {
    const auto a = join(store, "a", ways, with_bound(10'000));
    const auto b = join(store, "b", ways);
    serve_echo(*b);
    for (int i = 0; i < 5; ++i) {
      const auto reply = call_sync(*a, "b", "echo", large(100'000, 3));
      ASSERT_TRUE(reply.ok()) << reply.status().text();
    }
  }
}

TEST_F(Flow, TwoAgentsThatFloodEachOtherWithNestedCallsDoNotDeadlock) {
  for (const Ways& ways : {Ways{"ring", "basic"}, Ways{"ring", ""}, Ways{"tcp", "basic"}}) {
    const auto a = join(store, "a", ways, with_bound(600'000));
    const auto b = join(store, "b", ways, with_bound(600'000));
    const auto nest = [](RawAgent& self, const std::string& other) {
      return [&self, other](const Request& request, Reply reply) {
        const int depth = std::stoi(std::string(text_of(request.arguments.payload)));
        if (depth > 0) {
          auto inner = large(300'000);
          inner.payload = bytes_of(std::to_string(depth - 1));
          const auto answer = call_sync(self, other, "nest", std::move(inner));
          if (!answer.ok()) return reply.fail(answer.status());
        }
        reply.send(large(100'000));
      };
    };
    a->serve("nest", nest(*a, "b"));
    b->serve("nest", nest(*b, "a"));
    std::atomic<int> good{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        auto& from = t % 2 == 0 ? *a : *b;
        for (int i = 0; i < 5; ++i) {
          auto message = large(300'000);
          message.payload = bytes_of("4");
          const auto reply = call_sync(from, t % 2 == 0 ? "b" : "a", "nest", std::move(message), within(long_enough));
          EXPECT_TRUE(reply.ok()) << reply.status().text();
          if (reply.ok()) ++good;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(good, 40);
    a->leave();
    b->leave();
  }
}

// ---- One slow peer

TEST_F(Flow, ACallDoesNotWaitBehindALargeTensor) {
  const auto a = join(store, "a", {"ring", "basic"});
  RawPeer lazy(store, "lazy");
  auto heavy = a->call("lazy", "heavy", large(64 << 20));
  auto peer = lazy.accept();
  auto bulk = lazy.accept();  // never reads from it
  EXPECT_EQ(bulk.hello.purpose, wire::Hello::Purpose::bulk);
  ASSERT_TRUE(peer.connection.read(wire::Kind::request).ok());
  for (int i = 0; i < 20; ++i) {
    auto light = a->call("lazy", "light", large(100'000));
    const auto request = peer.connection.read(wire::Kind::request);
    ASSERT_TRUE(request.ok());
    (void)peer.connection.read_bytes(100'000);
    ASSERT_TRUE(peer.connection.write(reply_frame(request->header.call)).ok());
    EXPECT_TRUE(light.wait(Clock().now() + long_enough));
  }
  EXPECT_FALSE(heavy.done());
}

TEST_F(Flow, APeerThatReadsNothingDoesNotDelayOthers) {
  const auto a = join(store, "a", {"ring", "basic"});
  const auto b = join(store, "b", {"ring", "basic"});
  serve_echo(*b);
  RawPeer stuck(store, "stuck");
  std::vector<Call> calls;
  for (int i = 0; i < 50; ++i) calls.push_back(a->call("stuck", "f", large(200'000)));
  auto peer = stuck.accept();
  for (int i = 0; i < 200; ++i) {
    const auto reply = call_sync(*a, "b", "echo", large(100'000), within(long_enough));
    ASSERT_TRUE(reply.ok()) << reply.status().text();
  }
}

// ---- Handlers

std::function<void(RawAgentOptions&)> with_threads(int most) {
  return [most](RawAgentOptions& options) { options.max_threads = most; };
}

TEST_F(Flow, CallsBeyondTheHandlerLimitWaitTheirTurn) {
  const auto a = join(store, "a"), b = join(store, "b", {}, with_threads(4));
  std::atomic<int> inside{0}, most{0};
  std::atomic<bool> open{false};
  b->serve("block", [&](const Request&, Reply reply) {
    most = std::max(most.load(), ++inside);
    while (!open) std::this_thread::sleep_for(milliseconds(1));
    --inside;
    reply.send({});
  });
  std::vector<Call> calls;
  for (int i = 0; i < 30; ++i) calls.push_back(a->call("b", "block", {}));
  ASSERT_TRUE(eventually([&] { return inside == 4 && b->in_flight().second == 30; }));
  open = true;
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    EXPECT_TRUE(call.take().ok()) << "none was refused";
  }
  EXPECT_EQ(most, 4);
}

TEST_F(Flow, HandlersAtTheLimitStillReachNewPeersAndGetTheirReplies) {
  const auto a = join(store, "a"), b = join(store, "b", {}, with_threads(3)), c = join(store, "c");
  serve_echo(*c);
  std::atomic<int> inside{0};
  b->serve("pass on", [&](const Request&, Reply reply) {
    ++inside;
    eventually([&] { return inside >= 3; });
    std::atomic<bool> completed{false};
    b->call("c", "echo", large(100'000)).on_done([&](const Result<Received>&) { completed = true; });
    const auto answer = call_sync(*b, "c", "echo", large(300'000), within(long_enough));
    if (!answer.ok() || !eventually([&] { return completed.load(); })) return reply.fail({Code::internal, "stuck"});
    reply.send({});
  });
  std::vector<Call> calls;
  for (int i = 0; i < 6; ++i) calls.push_back(a->call("b", "pass on", {}));
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    const auto reply = call.take();
    EXPECT_TRUE(reply.ok()) << reply.status().text();
  }
}

TEST_F(Flow, ABurstOfShortCallsIsNotRefused) {
  const auto a = join(store, "a"), b = join(store, "b", {}, with_threads(4));
  serve_echo(*b);
  std::vector<Call> calls;
  for (int i = 0; i < 3000; ++i) calls.push_back(a->call("b", "echo", {}));
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait());
    ASSERT_TRUE(call.take().ok());
  }
}

}  // namespace
}  // namespace tensorferry
