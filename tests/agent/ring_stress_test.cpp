// A stream of calls between two agents, on one core, on two and on all. Think times are random, and handlers may block.
// Callers cancel, complete by callback, or wait for many calls. Every call has a deadline of 5 s; none may reach it.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Placement {
  int cores;  // 0: all cores
  int callers;
};
void PrintTo(const Placement& placement, std::ostream* out) {
  *out << placement.cores << " cores, " << placement.callers << " callers";
}

/// Pins this thread, and the threads that it starts, to the first `cores` cores that it may use.
class Pinned {
 public:
  explicit Pinned(int cores) {
    ::sched_getaffinity(0, sizeof before_, &before_);
    if (cores == 0) return;
    cpu_set_t few;
    CPU_ZERO(&few);
    for (int cpu = 0; cpu < CPU_SETSIZE && cores > 0; ++cpu) {
      if (!CPU_ISSET(cpu, &before_)) continue;
      CPU_SET(cpu, &few);
      --cores;
    }
    ::sched_setaffinity(0, sizeof few, &few);
  }
  ~Pinned() { ::sched_setaffinity(0, sizeof before_, &before_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  cpu_set_t before_{};
};

class RingStress : public ::testing::TestWithParam<Placement> {
 protected:
  /// Calls in one of the ways of programs, chosen at random. Counts the calls with a wrong result.
  void call_somehow(RawAgent& from, const std::string& to, std::mt19937& random) {
    const auto options = within(long_enough);
    const auto text = std::to_string(random());
    const auto expect = [&](Result<Received> reply) {
      ++calls;
      if (!reply.ok())
        ADD_FAILURE() << reply.status().text();
      else if (text_of(reply->payload) != text)
        ADD_FAILURE() << "another call's answer";
    };
    switch (random() % 16) {
      case 0: {  // completes by a callback
        ++open;
        from.call(to, "echo", message_of(text), options).on_done([this, text](const Result<Received>& reply) {
          if (!reply.ok() || text_of(reply->payload) != text) ++wrong;
          ++calls;
          --open;
        });
        break;
      }
      case 1: {  // many at once
        std::vector<Call> many;
        for (int i = 0; i < 40; ++i) many.push_back(from.call(to, "echo", message_of(text), options));
        while (!many.empty()) {
          if (!many.back().wait()) ADD_FAILURE() << "wait() ended early";
          expect(many.back().take());
          many.pop_back();
        }
        break;
      }
      case 2: {  // cancelled at a random moment
        auto call = from.call(to, random() % 2 == 0 ? "echo" : "block", message_of(text), options);
        if (random() % 2 == 0) std::this_thread::sleep_for(microseconds(random() % 50));
        call.cancel();
        if (!call.wait()) ADD_FAILURE() << "wait() ended early";
        ++calls;
        break;
      }
      case 3:
        return expect(call_sync(from, to, "block", message_of(text), options));
      case 4:
        return expect(call_sync(from, to, "nested", message_of(text), options));
      case 5: {  // perhaps too long for a slot, or for the ring
        auto message = message_of(text);
        message.buffers = {patterned(1 + random() % 6000)};
        return expect(call_sync(from, to, "echo", std::move(message), options));
      }
      default:
        return expect(call_sync(from, to, "echo", message_of(text), options));
    }
  }

  std::atomic<int> calls{0}, open{0}, wrong{0};
};

INSTANTIATE_TEST_SUITE_P(Of, RingStress,
                         ::testing::Values(Placement{1, 1}, Placement{1, 16}, Placement{2, 1}, Placement{2, 8},
                                           Placement{0, 1}, Placement{0, 64}),
                         [](const auto& tested) {
                           return std::to_string(tested.param.cores) + "Cores" + std::to_string(tested.param.callers) +
                                  "Callers";
                         });

TEST_P(RingStress, NoCallNeedsItsDeadline) {
  const Pinned pinned(GetParam().cores);
  const std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  const auto a = join(store, "a"), b = join(store, "b");
  for (const auto& [agent, other] : {std::pair(a.get(), "b"), std::pair(b.get(), "a")}) {
    serve_echo(*agent);
    agent->serve("block", [](Request request, Reply reply) {
      std::this_thread::sleep_for(microseconds(200 + request.arguments.payload.size() * 200));
      reply.send({std::move(request.arguments.payload), {}, {}, {}});
    });
    agent->serve("nested", [agent, other](Request request, Reply reply) {
      auto answer =
          call_sync(*agent, other, "echo", {std::move(request.arguments.payload), {}, {}, {}}, within(long_enough));
      if (!answer.ok()) return reply.fail(answer.status());
      reply.send({std::move(answer->payload), {}, {}, {}});
    });
  }
  ASSERT_EQ(a->explain("b")->transport == "ring" || eventually([&] { return a->explain("b")->transport == "ring"; }),
            true);
  const int all = rounds(1'000'000);
  std::vector<std::thread> callers;
  for (int i = 0; i < GetParam().callers; ++i) {
    callers.emplace_back([&, i] {
      std::mt19937 random(static_cast<unsigned>(i));
      while (calls < all && !HasFailure()) {
        call_somehow(i % 4 == 3 ? *b : *a, i % 4 == 3 ? "a" : "b", random);
        if (random() % 4 == 0) std::this_thread::sleep_for(microseconds(random() % 100));
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_TRUE(eventually([&] { return open == 0; }));
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(eventually([&] { return a->in_flight() == std::pair(std::size_t{0}, std::size_t{0}); }));
  EXPECT_TRUE(eventually([&] { return b->in_flight() == std::pair(std::size_t{0}, std::size_t{0}); }));
}

}  // namespace
}  // namespace tensorferry
