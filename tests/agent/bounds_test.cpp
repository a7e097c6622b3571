// The bounds that an agent keeps against its peers: queued calls, replies that the caller does not take, turns.
#include <gmock/gmock.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "agent/calls/credits.h"
#include "agent/calls/incoming_calls.h"
#include "agent/pool/fair_queue.h"
#include "channels/host_memory.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"
#include "tests/base/manual_clock.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// ---- The parts alone

TEST(FairQueues, ServeTheirSendersInTurn) {
  FairQueue<int> queue;
  const int a = 0, b = 0;
  for (const int item : {1, 2, 3}) queue.push(&a, int(item));
  for (const int item : {11, 12}) queue.push(&b, int(item));
  std::vector<int> order;
  while (queue.ready() != 0) order.push_back(queue.pop());
  EXPECT_EQ(order, (std::vector<int>{1, 11, 2, 12, 3}));
  EXPECT_TRUE(queue.empty());
}

TEST(FairQueues, PassPausedSendersOver) {
  FairQueue<int> queue;
  const int a = 0, b = 0;
  queue.push(&a, 1);
  queue.pause(&a);
  queue.pause(&a);
  queue.push(&a, 2);
  queue.push(&b, 11);
  EXPECT_TRUE(queue.paused(&a));
  EXPECT_EQ(queue.ready(), 1U);
  EXPECT_EQ(queue.pop(), 11);
  queue.resume(&a);
  EXPECT_EQ(queue.ready(), 0U) << "paused twice";
  EXPECT_EQ(queue.take_if([](const void*, int item) { return item == 2; }), std::list<int>{2});
  queue.resume(&a);
  EXPECT_EQ(queue.ready(), 1U);
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_TRUE(queue.empty());
  EXPECT_FALSE(queue.paused(&a));
}

TEST(CreditsOfALink, GoInTheOrderOfAsking) {
  Credits credits(100);
  ASSERT_TRUE(credits.try_acquire(60));
  std::atomic<bool> large{false};
  std::thread waiting([&] {
    EXPECT_TRUE(credits.wait(90, std::nullopt));
    large = true;
  });
  ASSERT_TRUE(eventually([&] { return !credits.try_acquire(10) || (credits.release(10), false); }))
      << "small messages do not overtake a large one that waits";
  EXPECT_FALSE(large);
  credits.release(60);
  EXPECT_TRUE(eventually([&] { return large.load(); }));
  waiting.join();
  EXPECT_TRUE(credits.try_acquire(10));
}

TEST(CreditsOfALink, LetThoseBehindPassWhenAWaitHasTimedOut) {
  Credits credits(100);
  ASSERT_TRUE(credits.try_acquire(60));
  std::thread small;
  std::atomic<bool> got{false};
  EXPECT_FALSE(credits.wait(90, Clock().now() + milliseconds(50)));
  std::thread large([&] { EXPECT_FALSE(credits.wait(90, Clock().now() + seconds(2))); });
  ASSERT_TRUE(eventually([&] { return !credits.try_acquire(10) || (credits.release(10), false); }));
  small = std::thread([&] { got = credits.wait(30, Clock().now() + seconds(20)); });
  large.join();
  small.join();
  EXPECT_TRUE(got);
}

TEST(CreditsOfALink, GiveAMessageAboveTheBoundItsTurn) {
  Credits credits(100);
  EXPECT_TRUE(credits.try_acquire(1000));
  EXPECT_FALSE(credits.try_acquire(1));
  credits.release(1000);
  EXPECT_TRUE(credits.try_acquire(1));
  EXPECT_FALSE(credits.try_acquire(1000));
  credits.close();
  EXPECT_TRUE(credits.wait(1000, std::nullopt));
}

TEST(QueuesOfIncomingCalls, CountCallsAndBytesUntilTheyStart) {
  IncomingCalls calls({3, 100});
  const auto begin = [&](std::uint64_t id, std::size_t bytes) { return calls.begin(id, std::nullopt, 0, bytes); };
  auto first = begin(1, 1000);
  ASSERT_TRUE(first.ok()) << "alone, it may have more bytes than the bound";
  EXPECT_EQ(begin(1, 0).status().code(), Code::protocol_error);
  EXPECT_THAT(std::string(begin(2, 1).status().what()), HasSubstr("max_queued_bytes"));
  calls.start(**first);
  auto second = begin(2, 60);
  ASSERT_TRUE(second.ok());
  EXPECT_TRUE(calls.count(**second, 1000).ok()) << "alone";
  EXPECT_TRUE(calls.count(**second, 60).ok());
  EXPECT_FALSE(begin(3, 60).ok());
  ASSERT_TRUE(begin(3, 40).ok());
  ASSERT_TRUE(begin(4, 0).ok());
  EXPECT_THAT(std::string(begin(5, 0).status().what()), HasSubstr("max_queued_calls"));
  EXPECT_EQ(calls.count(**second, 61).code(), Code::resource_exhausted);
  calls.end(2, **second);
  EXPECT_TRUE(begin(5, 60).ok()) << "a call that ended before it started counts no more";
  calls.end(1, **first);
  EXPECT_FALSE(begin(6, 0).ok()) << "a call that had started did not count";
}

TEST(QueuesOfIncomingCalls, HoldSoManyThatAreNotAnsweredAndNoMore) {
  IncomingCalls calls({1, 0});
  const auto begin = [&](std::uint64_t id) { return calls.begin(id, std::nullopt, 0, 0); };
  for (std::uint64_t id = 1; id <= IncomingCalls::most_open; ++id) {
    const auto call = begin(id);
    ASSERT_TRUE(call.ok()) << id;
    calls.start(**call);
  }
  EXPECT_EQ(begin(IncomingCalls::most_open + 1).status().code(), Code::resource_exhausted);
}

// ---- Two agents

class Bounds : public ::testing::TestWithParam<Ways> {
 protected:
  void TearDown() override {  // a handler may still block, because it outlives its agent's leaving
    open = true;
    ASSERT_TRUE(eventually([&] { return left == inside; }));
  }
  std::shared_ptr<RawAgent> join_with(const std::string& name, const std::function<void(RawAgentOptions&)>& change) {
    auto agent = join(store, name, GetParam(), change);
    agent->serve("block", [this](const Request&, Reply reply) {
      ++inside;
      while (!open) std::this_thread::sleep_for(milliseconds(1));
      reply.send({});
      ++left;
    });
    serve_echo(*agent);
    return agent;
  }
  std::atomic<bool> open{false};
  std::atomic<int> inside{0}, left{0};
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
};

INSTANTIATE_TEST_SUITE_P(Over, Bounds,
                         ::testing::Values(Ways{"ring", "basic"}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}),
                         [](const auto& tested) { return name_of(tested.param); });

Message large(std::size_t bytes) { return {{}, {patterned(bytes)}, {}, {}}; }

TEST_P(Bounds, CallsBeyondTheQueueAreRefusedAndTheOthersRun) {
  const auto a = join(store, "a", GetParam());
  const auto b = join_with("b", [](RawAgentOptions& options) {
    options.max_threads = 2;
    options.max_queued_calls = 10;
  });
  std::vector<Call> running, queued, refused;
  for (int i = 0; i < 2; ++i) running.push_back(a->call("b", "block", {}));
  ASSERT_TRUE(eventually([&] { return inside == 2; }));
  for (int i = 0; i < 10; ++i) queued.push_back(a->call("b", "echo", {}));
  ASSERT_TRUE(eventually([&] { return b->in_flight().second == 12; }));
  for (int i = 0; i < 5; ++i) refused.push_back(a->call("b", "echo", large(100'000)));
  for (auto& call : refused) {
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    const auto status = call.take().status();
    EXPECT_EQ(status.code(), Code::resource_exhausted);
    EXPECT_THAT(std::string(status.what()), HasSubstr("\"b\" is busy: 10 calls of this agent wait there"));
  }
  open = true;
  for (auto* calls : {&running, &queued}) {
    for (auto& call : *calls) {
      ASSERT_TRUE(call.wait(Clock().now() + long_enough));
      EXPECT_TRUE(call.take().ok());
    }
  }
  EXPECT_TRUE(call_sync(*a, "b", "echo", large(100'000)).ok()) << "the refused calls' bytes were read and dropped";
}

TEST_P(Bounds, BytesBeyondTheQueueAreRefused) {
  const auto a = join(store, "a", GetParam());
  const auto b = join_with("b", [](RawAgentOptions& options) {
    options.max_threads = 2;
    options.max_queued_bytes = 1'000'000;
  });
  std::vector<Call> running, all;
  for (int i = 0; i < 2; ++i) running.push_back(a->call("b", "block", {}));
  ASSERT_TRUE(eventually([&] { return inside == 2; }));
  for (int i = 0; i < 20; ++i) all.push_back(a->call("b", "echo", large(100'000)));
  ASSERT_TRUE(eventually(
      [&] { return std::count_if(all.begin(), all.end(), [](const Call& call) { return call.done(); }) == 10; }));
  open = true;
  int good = 0;
  for (auto& call : all) {
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    const auto reply = call.take();
    good += reply.ok() ? 1 : 0;
    if (!reply.ok()) {
      EXPECT_THAT(std::string(reply.status().what()), HasSubstr("max_queued_bytes"));
    }
  }
  EXPECT_EQ(good, 10);
}

/// Memory for received buffers that knows the largest one.
class MeasuringMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    std::size_t known = largest;
    while (bytes > known && !largest.compare_exchange_weak(known, bytes)) {
    }
    return memory_.allocate(bytes, device);
  }
  std::atomic<std::size_t> largest{0};

 private:
  HostMemory memory_;
};

// A payload of 100 KB does not fit a frame, so a buffer brings it, and the records of the message's buffers.
TEST_P(Bounds, OfARefusedRequestWithALongPayloadNoBufferIsReceived) {
  const auto memory = std::make_shared<MeasuringMemory>();
  const auto a = join(store, "a", GetParam());
  const auto b = join_with("b", [&](RawAgentOptions& options) {
    options.max_threads = 2;
    options.max_queued_bytes = 1'000'000;
    options.memory[DeviceType::cpu] = memory;
  });
  const auto long_and_large = [] {
    auto message = large(900'000);
    message.payload.resize(100'000);
    return message;
  };
  std::vector<Call> calls;
  for (int i = 0; i < 2; ++i) calls.push_back(a->call("b", "block", {}));
  ASSERT_TRUE(eventually([&] { return inside == 2; }));
  calls.push_back(a->call("b", "echo", large(200'000)));
  ASSERT_TRUE(eventually([&] { return b->in_flight().second == 3; }));
  for (int i = 0; i < 3; ++i) {
    const auto status = call_sync(*a, "b", "echo", long_and_large()).status();
    EXPECT_EQ(status.code(), Code::resource_exhausted);
    EXPECT_THAT(std::string(status.what()), HasSubstr("\"b\" is busy: "));
    EXPECT_THAT(std::string(status.what()), HasSubstr("max_queued_bytes"));
  }
  EXPECT_LT(memory->largest, 900'000U);
  open = true;
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    EXPECT_TRUE(call.take().ok());
  }
  const auto reply = call_sync(*a, "b", "echo", long_and_large());
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(reply->payload.size(), 100'000U);
  ASSERT_EQ(reply->buffers.size(), 1U);
  EXPECT_TRUE(same_bytes(reply->buffers[0], patterned(900'000)));
}

TEST_P(Bounds, AQueuedCallThatExpiresIsAnsweredWithoutRunningAndLeavesTheQueue) {
  const auto time = ManualClock::make();
  const auto timed = [&](RawAgentOptions& options) {
    options.surroundings.clock = time->clock();
    options.heartbeat = std::chrono::hours(1);
    options.max_threads = 2;
    options.max_queued_calls = 4;
  };
  const auto a = join(store, "a", GetParam(), timed), b = join_with("b", timed);
  std::atomic<int> ran{0};
  b->serve("count", [&](const Request&, Reply reply) {
    ++ran;
    reply.send({});
  });
  std::vector<Call> running;
  for (int i = 0; i < 2; ++i) running.push_back(a->call("b", "block", {}, within(std::chrono::hours(1000))));
  const auto in_steps_of = [&](milliseconds step, const auto& holds) {
    return eventually([&] {
      time->advance(step);
      return holds();
    });
  };
  ASSERT_TRUE(in_steps_of(milliseconds(1), [&] { return inside == 2; }));
  for (int round = 0; round < 3; ++round) {
    std::vector<Call> expiring;
    for (int i = 0; i < 4; ++i) expiring.push_back(a->call("b", "count", {}, within(seconds(1))));
    EXPECT_TRUE(eventually([&] { return b->in_flight().second == 6; })) << "the queue is full";
    for (auto& call : expiring) {
      ASSERT_TRUE(in_steps_of(milliseconds(50), [&] { return call.done(); }));
      EXPECT_EQ(call.take().status().code(), Code::deadline_exceeded) << round;
    }
    EXPECT_TRUE(in_steps_of(milliseconds(50), [&] { return b->in_flight().second == 2; }))
        << "while all handlers block";
  }
  EXPECT_EQ(ran, 0);
  open = true;  // before the agents leave, because their time stands
  EXPECT_TRUE(eventually([&] { return left == inside; }));
}

TEST_P(Bounds, ManyOrderedCallsRefusedByAFullAgentDoNotRecurse) {
  const auto a = join(store, "a", GetParam());
  // A sanitizer's frames are larger, and under its slowness so many calls would take longer than a link may be silent.
  constexpr int queue = under_sanitizer ? 4000 : 20'000;
  const auto b = join_with("b", [](RawAgentOptions& options) { options.max_queued_calls = queue; });
  RawCallOptions options;
  options.order = 1;
  std::vector<Call> ordered;
  ordered.push_back(a->call("b", "block", {}, options));
  for (int i = 0; i < queue + queue / 4; ++i) ordered.push_back(a->call("b", "echo", {}, options));
  EXPECT_TRUE(ordered.back().wait(Clock().now() + seconds(60)));
  EXPECT_EQ(ordered.back().take().status().code(), Code::resource_exhausted);
  open = true;
  for (auto& call : ordered) ASSERT_TRUE(call.wait());
  EXPECT_TRUE(ordered[1].take().ok());
}

TEST_P(Bounds, APeerWithManyCallsDoesNotDelayAnother) {
  const auto a = join(store, "a", GetParam()), c = join(store, "c", GetParam());
  const auto b = join_with("b", [](RawAgentOptions& options) { options.max_threads = 2; });
  b->serve("slow", [](const Request&, Reply reply) {
    std::this_thread::sleep_for(milliseconds(5));
    reply.send({});
  });
  std::vector<Call> many;
  for (int i = 0; i < 500; ++i) many.push_back(a->call("b", "slow", {}));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(call_sync(*c, "b", "slow", {}).ok());
  EXPECT_FALSE(many.back().done()) << "the calls of the other peer wait still";
  for (auto& call : many) ASSERT_TRUE(call.wait());
}

TEST_P(Bounds, TwoAgentsThatFloodEachOtherWithLargeCallsAndRepliesEnd) {
  const auto narrow = [](RawAgentOptions& options) {
    options.max_threads = 4;
    options.max_bytes_in_flight = 2'000'000;
  };
  const auto a = join_with("a", narrow), b = join_with("b", narrow);
  const auto flood = [&](RawAgent& from, const char* to) {
    for (int round = 0; round < rounds(1000); ++round) {
      std::vector<Call> calls;
      for (const std::size_t bytes : {100U, 100'000U, 1'500'000U, 300'000U, 3'000'000U})
        calls.push_back(from.call(to, "echo", large(bytes)));
      for (auto& call : calls) {
        ASSERT_TRUE(call.wait());
        const auto reply = call.take();
        ASSERT_TRUE(reply.ok()) << reply.status().text();
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] { flood(*a, "b"); });
    threads.emplace_back([&] { flood(*b, "a"); });
  }
  for (auto& thread : threads) thread.join();
}

// ---- A peer that does not read

TEST_P(Bounds, ALargeCallIsNotOvertakenForEver) {
  const auto narrow = [](RawAgentOptions& options) { options.max_bytes_in_flight = 1'000'000; };
  const auto a = join_with("a", narrow), b = join_with("b", {});
  std::atomic<bool> over{false};
  std::vector<std::thread> small;
  for (int i = 0; i < 4; ++i) {
    small.emplace_back([&] {
      while (!over) EXPECT_TRUE(call_sync(*a, "b", "echo", large(300'000)).ok());
    });
  }
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(call_sync(*a, "b", "echo", large(1'000'000), within(long_enough)).ok());
  over = true;
  for (auto& thread : small) thread.join();
}

/// A client that sends requests and reads no replies until it is told to.
class LazyClients : public ::testing::TestWithParam<bool> {
 protected:
  std::shared_ptr<RawAgent> join_with(const std::function<void(RawAgentOptions&)>& change) {
    return join(store, "server", {GetParam() ? "unix" : "tcp", "basic"}, change);
  }
  /// Sends the requests of `function` from `first` to before `last` in one thread, which blocks with the socket.
  static std::thread send(RawConnection& client, std::string_view function, int first, int last) {
    return std::thread([&client, function, first, last] {
      for (int id = first; id < last; ++id) {
        const auto frame = request_frame(static_cast<std::uint64_t>(id), function);
        if (!write_all(client.fd(), frame, deadline_after(seconds(60)))) return;
      }
    });
  }
  /// Waits until `count` has not changed for half a second.
  static void settle(const std::function<std::size_t()>& count) {
    for (auto before = count();; before = count()) {
      std::this_thread::sleep_for(milliseconds(500));
      if (count() == before) return;
    }
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
};

INSTANTIATE_TEST_SUITE_P(Over, LazyClients, ::testing::Bool(),
                         [](const auto& tested) { return tested.param ? "unix" : "tcp"; });

std::size_t resident() {
  std::ifstream statm("/proc/self/statm");
  std::size_t size = 0, pages = 0;
  statm >> size >> pages;
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

TEST_P(LazyClients, AreServedUpToABoundAndFromThereWhenTheyRead) {
  constexpr int requests = 6000;
  constexpr std::size_t reply_bytes = 40'000;
  const auto server = join_with({});
  std::atomic<std::size_t> ran{0};
  server->serve("f", [&](const Request&, Reply reply) {
    ++ran;
    reply.send({Bytes(reply_bytes), {}, {}, {}});
  });
  auto client = raw_dial(store, "server", raw_hello("client"), GetParam());
  const auto before = resident();
  auto sending = send(client, "f", 1, requests + 1);
  settle([&] { return ran.load(); });
  EXPECT_LT(ran, 3500U) << "64 MiB of replies, what the socket holds, and what ran at that moment";
  // A sanitizer keeps freed memory for a while, and shadows of it.
  const std::size_t most = std::size_t{under_sanitizer ? 800U : 200U} << 20;
  EXPECT_LT(resident() - std::min(before, resident()), most);
  std::size_t replies = 0;
  while (replies < requests) {
    const auto reply = client.read(wire::Kind::reply);
    ASSERT_TRUE(reply.ok()) << reply.status().text() << " after " << replies;
    ++replies;
  }
  sending.join();
  EXPECT_EQ(ran, static_cast<std::size_t>(requests));
}

TEST_P(LazyClients, GetNoMoreHandlersWhileTheyDoNotTakeTheirTensors) {
  constexpr int requests = 400;
  constexpr std::size_t reply_bytes = 200'000;
  const auto server = join_with([](RawAgentOptions& options) {
    options.max_threads = 4;
    options.max_bytes_in_flight = 4'000'000;
  });
  std::atomic<std::size_t> ran{0};
  server->serve("f", [&](const Request&, Reply reply) {
    ++ran;
    reply.send(large(reply_bytes));
  });
  serve_echo(*server);
  auto client = raw_dial(store, "server", raw_hello("client"), GetParam());
  auto sending = send(client, "f", 1, requests + 1);
  settle([&] { return ran.load(); });
  EXPECT_LT(ran, 100U) << "4 MB, what the socket holds, and what ran at that moment";
  EXPECT_TRUE(eventually([&] { return server->in_flight().second == requests - ran; })) << "the others wait";
  const auto other = join(store, "other", {GetParam() ? "unix" : "tcp", "basic"});
  EXPECT_TRUE(call_sync(*other, "server", "echo", {}, within(long_enough)).ok()) << "other peers are served";
  for (int replies = 0; replies < requests; ++replies) {
    const auto reply = client.read(wire::Kind::reply);
    ASSERT_TRUE(reply.ok()) << reply.status().text() << " after " << replies;
    (void)client.read_bytes(reply->header.trailing);
  }
  sending.join();
}

TEST_P(LazyClients, ThatEndLeaveNothingBehind) {
  const auto server = join_with([](RawAgentOptions& options) { options.max_bytes_in_flight = 1'000'000; });
  server->serve("f", [&](const Request&, Reply reply) { reply.send({Bytes(40'000), {patterned(100'000)}, {}, {}}); });
  {
    auto client = raw_dial(store, "server", raw_hello("client"), GetParam());
    auto sending = send(client, "f", 1, 2000);
    settle([&] { return server->in_flight().second; });
    ::shutdown(client.fd(), SHUT_RDWR);
    sending.join();
  }
  EXPECT_TRUE(eventually([&] { return server->in_flight().second == 0; })) << server->in_flight().second;
}

TEST(LateReplies, AreReadAlthoughNoCallIsInFlight) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {"unix", "basic"});
  RawPeer slow(store, "slow");
  std::vector<Call> calls;
  for (int i = 0; i < 100; ++i) calls.push_back(a->call("slow", "f", {}));
  auto peer = slow.accept();
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 100; ++i) {
    const auto request = peer.connection.read(wire::Kind::request);
    ASSERT_TRUE(request.ok()) << request.status().text();
    ids.push_back(request->header.call);
  }
  for (auto& call : calls) call.cancel();
  const std::string payload(40'000, 'x');
  for (const auto id : ids) ASSERT_TRUE(peer.connection.write(reply_frame(id, {}, 0, 0, payload)).ok());
}

// ---- The thread that reads, and the reactor

/// Memory for received buffers whose allocation waits at a gate.
class GatedMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    waiting = true;
    while (!open) std::this_thread::sleep_for(milliseconds(10));
    auto owner = std::make_shared<Bytes>(bytes);
    return {device, owner->data(), bytes, nullptr, owner};
  }
  std::atomic<bool> waiting{false}, open{false};
};

/// Fails to allocate so many bytes, once.
class FailingMemory final : public Memory {
 public:
  explicit FailingMemory(std::size_t least) : least_(least) {}
  Buffer allocate(std::size_t bytes, Device device) override {
    if (bytes >= least_ && armed.exchange(false)) return {device, nullptr, bytes, nullptr, nullptr};
    return memory_.allocate(bytes, device);
  }
  std::atomic<bool> armed{true};

 private:
  const std::size_t least_;
  HostMemory memory_;
};

// A buffer brings the payload and the records. If it is lost, the receiver does not know the tickets of the others.
TEST_P(Bounds, AMessageWhoseRecordsCannotBeReceivedEndsItsLinkAndTheNextOneGoesOn) {
  const auto a = join(store, "a", GetParam());
  const auto memory = std::make_shared<FailingMemory>(100'000);
  const auto b = join_with("b", [&](RawAgentOptions& options) { options.memory[DeviceType::cpu] = memory; });
  auto message = large(1 << 20);
  message.payload.resize(100'000);
  const auto reply = call_sync(*a, "b", "echo", message, within(long_enough));
  EXPECT_FALSE(memory->armed);
  // The callee's answer may come before the end of the link.
  const auto code = reply.status().code();
  EXPECT_TRUE(code == Code::connection_lost || code == Code::resource_exhausted) << reply.status().text();
  EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0; }));
  EXPECT_TRUE(eventually([&] { return call_sync(*a, "b", "echo", {}, within(long_enough)).ok(); }));
  for (int i = 0; i < 3; ++i) {
    const auto next = call_sync(*a, "b", "echo", message, within(long_enough));
    ASSERT_TRUE(next.ok()) << next.status().text();
    EXPECT_TRUE(same_bytes(next->buffers.at(0), message.buffers.at(0)));
  }
}

/// Returns the clock ticks that this process's pool threads have used.
long pool_ticks() {
  long ticks = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "stat");
    std::string line;
    std::getline(file, line);
    if (line.find("(tf-pool)") == std::string::npos) continue;
    std::istringstream fields(line.substr(line.rfind(')') + 2));
    std::string skipped;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    long user = 0, system = 0;
    fields >> user >> system;
    ticks += user + system;
  }
  return ticks;
}

TEST(Readers, ThatAreHeldUpInAFrameMakeNoOtherThreadSpin) {
  const auto store = std::make_shared<MemoryStore>();
  const auto memory = std::make_shared<GatedMemory>();
  const auto server = join(store, "server", {"unix", "basic"},
                           [&](RawAgentOptions& options) { options.memory[DeviceType::cpu] = memory; });
  serve_echo(*server);
  auto client = raw_dial(store, "server", raw_hello("client"));
  ASSERT_TRUE(client.write(request_frame(1, "echo", record_frame(100'000, appended_ticket), 1, 100'000)).ok());
  ASSERT_TRUE(eventually([&] { return memory->waiting.load(); }));
  ASSERT_TRUE(client.write(Bytes(100'000)).ok());
  ASSERT_TRUE(client.write(request_frame(2, "echo")).ok());
  const auto before = pool_ticks();
  std::this_thread::sleep_for(seconds(2));
  EXPECT_LE(pool_ticks() - before, ::sysconf(_SC_CLK_TCK) / 2) << "of 2 s, which a thread that spins would use";
  memory->open = true;
  for (int i = 0; i < 2; ++i) {
    const auto reply = client.read(wire::Kind::reply);
    ASSERT_TRUE(reply.ok()) << "the stream is read again: " << reply.status().text();
    (void)client.read_bytes(reply->header.trailing);
  }
}

TEST(Reactors, DropNoMemoryOfTheProgram) {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a", {"unix", "basic"}), b = join(store, "b", {"unix", "basic"});
  serve_echo(*b);
  ASSERT_TRUE(call_sync(*a, "b", "echo", {}).ok());
  std::atomic<int> dropped{0}, by_reactor{0};
  const auto owned = [&](std::size_t bytes) {
    auto memory = std::make_shared<Bytes>(bytes);
    const std::shared_ptr<void> owner(memory.get(), [&, memory](void*) {
      std::array<char, 16> name{};
      ::pthread_getname_np(::pthread_self(), name.data(), name.size());
      by_reactor += std::string_view(name.data()) == "tf-reactor" ? 1 : 0;
      ++dropped;
    });
    return Message{{}, {{{}, memory->data(), bytes, nullptr, owner}}, {}, {}};
  };
  int made = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<Call> calls;
    for (int i = 0; i < 5; ++i, ++made) calls.push_back(a->call("b", "echo", owned(5000)));  // few bytes: not flushed
    std::this_thread::sleep_for(milliseconds(5));
    for (auto& call : calls) ASSERT_TRUE(call.wait());
  }
  EXPECT_TRUE(eventually([&] { return dropped == made; })) << dropped << " of " << made;
  EXPECT_EQ(by_reactor, 0) << "of " << made;
}

}  // namespace
}  // namespace tensorferry
