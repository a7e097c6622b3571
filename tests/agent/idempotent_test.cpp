// Idempotent calls: sent again when their connection is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "agent/transport/address.h"
#include "agent/transport/network.h"
#include "agent/transport/socket_port.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/sockets.h"
#include "tests/base/manual_clock.h"

namespace tensorferry::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

RawCallOptions idempotent(Milliseconds timeout) {
  auto options = within(timeout);
  options.idempotent = true;
  return options;
}

std::string text_of(const Received& received) { return std::string(tensorferry::text_of(received.payload)); }

/// Serves "count", which counts its runs by payload and echoes, and "hold", which does so when `held` becomes false or
/// its caller cancels.
class Counting {
 public:
  void serve(RawAgent& agent) {
    agent.serve("count", [this](Request request, Reply reply) {
      count(request);
      reply.send({std::move(request.arguments.payload), std::move(request.arguments.buffers), {}, {}});
    });
    agent.serve("hold", [this](Request request, Reply reply) {
      count(request);
      eventually([&] { return !held || reply.cancelled(); });
      if (reply.cancelled()) ++cancelled;
      reply.send({std::move(request.arguments.payload), {}, {}, {}});
    });
  }
  std::map<std::string, int> runs() {
    const std::lock_guard lock(mutex_);
    return runs_;
  }
  std::atomic<bool> held{true};
  std::atomic<int> cancelled{0};

 private:
  void count(const Request& request) {
    const std::lock_guard lock(mutex_);
    ++runs_[text_of(request.arguments)];
  }
  std::mutex mutex_;
  std::map<std::string, int> runs_;
};

enum class Cut : std::uint8_t { before, after };

/// Dials by TCP. Its connections end before or after their agent writes for the time that follows `writes` others.
class CutDials final : public Network {
 public:
  explicit CutDials(int writes, Cut cut) : writes_(writes), cut_(cut) {}
  Result<std::vector<std::string>> listen(std::function<void(std::unique_ptr<StreamPort>)>) override {
    return std::vector<std::string>();
  }
  void stop_listening() override {}
  Result<std::unique_ptr<StreamPort>> start_connect(const std::string& address) override {
    const auto where = split_host_port(address);
    auto socket = start_connect_tcp(where->host, where->port);
    if (!socket) return socket.status();
    return std::unique_ptr<StreamPort>(std::make_unique<Port>(std::move(*socket), *this));
  }

 private:
  class Port final : public SocketPort {
   public:
    Port(FileDescriptor socket, CutDials& by) : SocketPort(std::move(socket), false), by_(by) {}
    std::ptrdiff_t write(std::span<iovec> from, std::span<const FileDescriptor> descriptors) override {
      const bool last = by_.writes_-- == 0;
      if (last && by_.cut_ == Cut::before) shutdown();
      const auto written = SocketPort::write(from, descriptors);
      if (last && by_.cut_ == Cut::after) shutdown();
      return written;
    }

   private:
    CutDials& by_;
  };
  std::atomic<int> writes_;
  const Cut cut_;
};

class IdempotentCalls : public ::testing::TestWithParam<Ways> {
 protected:
  IdempotentCalls() { counting.serve(*b); }

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  Counting counting;
  std::shared_ptr<RawAgent> a = join(store, "a", GetParam()), b = join(store, "b", GetParam());
};

TEST_P(IdempotentCalls, RunAndAnswerWhileConnectionsEndAtRandom) {
  std::atomic<int> calls{0}, callers_left{3};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      const std::shared_ptr<void> left(nullptr, [&](void*) { --callers_left; });
      for (unsigned i = 0; i < 200; ++i) {
        auto message = message_of(std::to_string(caller) + "." + std::to_string(i));
        const auto name = text_of({message.payload, {}});
        if (i % 10 == 0) message.buffers = {patterned(300'000, i)};
        const auto sent = message.buffers;
        const auto reply = call_sync(*a, "b", "count", std::move(message), idempotent(seconds(60)));
        ASSERT_TRUE(reply.ok()) << name << ": " << reply.status().text();
        EXPECT_EQ(text_of(*reply), name);
        ASSERT_EQ(reply->buffers.size(), sent.size());
        EXPECT_TRUE(sent.empty() || same_bytes(reply->buffers[0], sent[0]));
        ++calls;
      }
    });
  }
  for (int cut = 0; callers_left != 0; ++cut) {
    const int before = calls;
    sever_connections();
    EXPECT_TRUE(eventually([&] { return calls > before || callers_left == 0; }, seconds(30))) << "after cut " << cut;
    std::this_thread::sleep_for(Milliseconds(cut % 7));
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(counting.runs().size(), 600U);
}

TEST(IdempotentCall, IsMadeThoughTheFirstConnectionToItsPeerEndsAtAnyWrite) {
  const auto store = std::make_shared<MemoryStore>();
  Counting counting;
  const auto earlier = join(store, "earlier", {"tcp", "basic"});
  counting.serve(*earlier);
  for (int each = 0; each < 24; ++each) {
    const bool to_later = each >= 12;  // then the caller decides which connection carries the calls
    const auto name = "a" + std::to_string(each);
    const auto a = join(store, name, {"tcp", "basic"}, [&](RawAgentOptions& options) {
      options.surroundings.network =
          std::make_shared<CutDials>(each % 12 / 2, each % 2 == 0 ? Cut::before : Cut::after);
    });
    const auto later = join(store, "later", {"tcp", "basic"});
    counting.serve(*later);
    const auto reply =
        call_sync(*a, to_later ? "later" : "earlier", "count", message_of(name), idempotent(seconds(60)));
    EXPECT_TRUE(reply.ok()) << each << ": " << reply.status().text();
    EXPECT_GE(counting.runs()[name], 1);
  }
}

TEST_P(IdempotentCalls, RunAgainAfterEachLossOfTheirConnection) {
  auto call = a->call("b", "hold", message_of("one"), idempotent(long_enough));
  for (int cut = 0; cut < 3; ++cut) {
    ASSERT_TRUE(eventually([&] { return counting.runs()["one"] > cut; })) << "the call comes again";
    sever_connections();
    EXPECT_TRUE(eventually([&] { return counting.cancelled > cut; })) << "nobody waits for the earlier execution";
  }
  ASSERT_TRUE(eventually([&] { return counting.runs()["one"] > 3; }));
  EXPECT_FALSE(call.done());
  counting.held = false;
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto reply = call.take();
  ASSERT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(text_of(*reply), "one");
  EXPECT_TRUE(eventually([&] { return b->in_flight().second == 0; }));
}

TEST_P(IdempotentCalls, FailWhenTheirCalleeIsRestarted) {
  auto call = a->call("b", "hold", message_of("one"), idempotent(long_enough));
  ASSERT_TRUE(eventually([&] { return b->in_flight().second == 1; }));
  b->leave();
  Counting next;
  const auto restarted = join(store, "b", GetParam());
  next.serve(*restarted);
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  EXPECT_EQ(call.take().status().code(), Code::connection_lost);
  EXPECT_TRUE(call_sync(*a, "b", "count", message_of("two"), idempotent(long_enough)).ok());
  EXPECT_EQ(next.runs(), (std::map<std::string, int>{{"two", 1}})) << "the next incarnation does not run the call";
}

TEST_P(IdempotentCalls, CancelReachesTheExecutionOverTheNextLink) {
  auto call = a->call("b", "hold", message_of("one"), idempotent(long_enough));
  ASSERT_TRUE(eventually([&] { return counting.runs()["one"] == 1; }));
  sever_connections();
  ASSERT_TRUE(eventually([&] { return counting.runs()["one"] >= 2; }));
  call.cancel();
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  EXPECT_EQ(call.take().status().code(), Code::cancelled);
  EXPECT_TRUE(eventually([&] { return counting.cancelled == counting.runs()["one"]; }));
}

TEST_P(IdempotentCalls, KeepTheirDeadline) {
  const auto time = ManualClock::make();
  const auto timed =
      join(store, "timed", GetParam(), [&](RawAgentOptions& options) { options.surroundings.clock = time->clock(); });
  auto call = timed->call("b", "hold", message_of("one"), idempotent(std::chrono::hours(10)));
  const auto in_steps_of = [&](Clock::duration step, const auto& holds) {
    return eventually([&] {
      time->advance(step);
      return holds();
    });
  };
  // Dialling has time-outs, so time passes as fast as for b.
  ASSERT_TRUE(in_steps_of(Milliseconds(1), [&] { return counting.runs()["one"] == 1; }));
  sever_connections();
  ASSERT_TRUE(in_steps_of(Milliseconds(1), [&] { return counting.runs()["one"] >= 2; })) << "the call comes again";
  time->advance(std::chrono::hours(9));
  EXPECT_FALSE(call.done());
  ASSERT_TRUE(in_steps_of(std::chrono::minutes(1), [&] { return call.done(); }));
  EXPECT_EQ(call.take().status().code(), Code::deadline_exceeded);
}

TEST_P(IdempotentCalls, HandTheErrorsOfTheirFunctionOn) {
  std::atomic<int> runs{0};
  b->serve("fail", [&](const Request&, Reply reply) {
    ++runs;
    reply.fail({Code::connection_lost, "a call of the function's own failed"});
  });
  const auto reply = call_sync(*a, "b", "fail", {}, idempotent(long_enough));
  EXPECT_EQ(reply.status().code(), Code::connection_lost);
  EXPECT_THAT(std::string(reply.status().what()), HasSubstr("function's own"));
  EXPECT_EQ(runs, 1) << "an error that the callee answered is an answer";
}

TEST_P(IdempotentCalls, HaveNoOrderKey) {
  auto options = idempotent(long_enough);
  options.order = 1;
  EXPECT_EQ(call_sync(*a, "b", "count", {}, options).status().code(), Code::invalid_argument);
}

TEST_P(IdempotentCalls, WakeAWaiterAfterAnotherOneHasTimedOut) {
  auto call = a->call("b", "hold", message_of("one"), idempotent(seconds(60)));
  std::atomic<bool> woken{false};
  std::thread waiter([&] { woken = call.wait(Clock().now() + long_enough); });
  EXPECT_FALSE(call.wait(Clock().now() + Milliseconds(200)));
  counting.held = false;
  EXPECT_TRUE(eventually([&] { return woken.load(); }));
  waiter.join();
  EXPECT_TRUE(call.done());
}

TEST_P(IdempotentCalls, SentAgainKeepNoDescriptorsOfLostLinks) {
  auto call = a->call("b", "hold", message_of("one"), idempotent(seconds(60)));
  const auto received = [&] { return b->counters().calls_served + b->in_flight().second; };
  std::size_t descriptors = 0;
  for (unsigned cut = 0; cut < 8; ++cut) {
    ASSERT_TRUE(eventually([&] { return received() > cut; })) << "the call comes again";
    if (cut == 3) {
      std::this_thread::sleep_for(Milliseconds(100));  // so that all of the lost links but one have gone
      descriptors = open_descriptors();
    }
    sever_connections();
  }
  ASSERT_TRUE(eventually([&] { return received() > 8; }));
  // If both agents dial at the last cut, two connections stay. Five links that stay are ten descriptors or more.
  EXPECT_TRUE(eventually([&] { return open_descriptors() <= descriptors + 4; }))
      << open_descriptors() << " descriptors are open, and after three cuts there were " << descriptors;
  counting.held = false;
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  EXPECT_TRUE(call.take().ok());
}

INSTANTIATE_TEST_SUITE_P(Over, IdempotentCalls, ::testing::Values(Ways{}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}),
                         [](const auto& one) { return name_of(one.param); });

}  // namespace
}  // namespace tensorferry::testing
