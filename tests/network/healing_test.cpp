/// Cuts, resets, NAT, slow paths and a dead store: what agents get over. Each test prints what happened, line by line.
///
/// TENSORFERRY_SOAK=1 takes the full sizes and times: cuts of up to 120 s, 10,000 calls, and 60 MB. Otherwise cuts,
/// heartbeats and peer_timeout take a tenth of the time.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <ostream>
#include <random>
#include <set>
#include <thread>

#include "tests/network/steady_calls.h"

namespace tensorferry::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t megabyte = 1 << 20;

void serve_here(Agent& agent) {
  agent.serve("echo", [](Tensor tensor) { return tensor; });
}

// ---- Cuts

struct Cut {
  int seconds;       // in soak
  bool there, back;  // which directions are cut
};
std::string name_of(const Cut& cut) {
  return std::to_string(cut.seconds) + "s" + (cut.there && cut.back ? "" : cut.there ? "_there" : "_back");
}

void PrintTo(const Cut& cut, std::ostream* out) { *out << name_of(cut); }

class Cuts : public NetworkTest, public ::testing::WithParamInterface<Cut> {
 protected:
  void cut(bool is_cut) const {
    if (GetParam().there) network->cut("a", "b", is_cut);
    if (GetParam().back) network->cut("b", "a", is_cut);
  }
  // A session outlives a silence of less than peer_timeout, its connections one of less than three heartbeats.
  const milliseconds second = is_soak ? 1000ms : 100ms;
  const milliseconds how_long = GetParam().seconds * second;
  const milliseconds heartbeat = 5 * second;
  const bool is_survived = how_long < 60 * second;
};

INSTANTIATE_TEST_SUITE_P(Of, Cuts,
                         ::testing::Values(Cut{5, true, true}, Cut{5, true, false}, Cut{5, false, true},
                                           Cut{30, true, true}, Cut{30, true, false}, Cut{30, false, true},
                                           Cut{120, true, true}),
                         [](const auto& tested) { return name_of(tested.param); });

TEST_P(Cuts, LoseNoCallThatWasNotWrittenAndNoReference) {
  peer_timeout = (is_survived && !is_soak ? 300 : 60) * second;  // a stall of a busy machine is part of the silence
  open({"a", "b"});
  set_paths({.bits_per_second = 200e6, .delay = 1ms});
  const auto b = start("b", heartbeat);
  const auto a = join("a", heartbeat);
  const auto object = a->call<Object>("b", "make").get();
  SteadyCalls calls(*a, "b", how_long + 60s);
  auto tensor = a->call_with<std::int64_t>(within(how_long + 60s), "b", "count bytes",
                                           std::vector{patterned_tensor(64 * megabyte)});
  std::this_thread::sleep_for(500ms);
  cut(true);
  const auto begin = Clock::now();
  std::this_thread::sleep_for(how_long);
  cut(false);
  const auto end = Clock::now();
  // After a short cut that moment is still to come.
  const auto given_up = begin + 3 * heartbeat + 500ms;
  EXPECT_TRUE(calls.answers_after(given_up, 10s + std::max(0ms, between(end, given_up))))
      << "no later call was answered";
  std::printf("    %lld ms after the end of the cut a call was answered, or 10 s were over\n",
              static_cast<long long>(between(end, Clock::now()).count()));
  EXPECT_TRUE(calls.answers_after(end, 10s));
  // A call that may have been written when the connection was given up may fail at once. Later ones wait.
  for (const auto& each : calls.stop()) {
    if (each.error.empty() || !is_survived) continue;
    EXPECT_THAT(each.error, ::testing::StartsWith("ConnectionLost"))
        << "made " << between(begin, each.made).count() << " ms after the cut";
    EXPECT_LT(between(begin, each.made), 3 * heartbeat + 500ms) << each.error;
    EXPECT_LT(between(each.made, each.ended), 3 * heartbeat + 20s) << each.error;
  }
  const auto tensor_came = attempt("the 64 MB tensor that was under way", [&] { tensor.get(); });
  EXPECT_TRUE(tensor_came || std::string(tensor_came.message()).find("ConnectionLost") != std::string::npos);
  // The owner keeps the object for the caller's hold, and frees it when the caller counts as dead there.
  const int holds = is_survived ? 1 : 0;
  EXPECT_TRUE(eventually([&] { return a->call<int>("b", "alive").get() == holds; }));
  EXPECT_EQ(attempt("the reference from before the cut", [&] { object.call<int>("add", 1).get(); }), is_survived);
  EXPECT_EQ(attempt("a new reference", [&] { a->call<Object>("b", "make").get().call<int>("add", 1).get(); }),
            is_survived);
  calls.expect_each_ran_once();
}

TEST_F(NetworkTest, ACallWaitsWithinItsDeadlineForAPeerThatCannotBeReached) {
  open({"a", "b"});
  const auto b = start("b");
  const auto a = join("a");
  network->cut_between("a", "b");
  const Since since;
  const auto early =
      attempt("a call with a deadline of 2 s", [&] { a->call_with<int>(within(2s), "b", "record", 0).get(); });
  EXPECT_FALSE(early);
  EXPECT_THAT(early.message(), ::testing::HasSubstr(network->address("b")));
  EXPECT_LT(since.passed(), 10s);
  auto call = a->call_with<int>(within(30s), "b", "record", 1);
  std::this_thread::sleep_for(11s);
  network->cut_between("a", "b", false);
  EXPECT_TRUE(attempt("a call with a deadline of 30 s, 11 s after it was made", [&] { call.get(); }));
}

TEST_F(NetworkTest, AnInterfaceThatIsCutCostsAMomentIfThePeerHasAnother) {
  open({"a", "b"});
  network->add_unplugged_interface("b", "eth1", "10.98.0.2");
  for (const auto* order : {"eth1,eth0", "eth0,eth1"}) {
    ::setenv("TENSORFERRY_SOCKET_IFNAME", order, 1);
    const auto b = start("b");
    ::unsetenv("TENSORFERRY_SOCKET_IFNAME");
    const auto a = join("a", 5s, serve_here);
    const Since since;
    EXPECT_TRUE(attempt(std::string("the first call, ") + order,
                        [&] { a->call_with<int>(within(10s), "b", "record", 1).get(); }));
    EXPECT_LT(since.passed(), 3s);  // 300 ms on a machine that is not busy
    EXPECT_TRUE(attempt("1 MB", [&] { a->call<Tensor>("b", "echo", patterned_tensor(megabyte)).get(); }));
    network->reset_connections(store->port());
    EXPECT_TRUE(eventually([&] {
      return bool(attempt("a call after a reset", [&] { a->call_with<int>(within(10s), "b", "record", 2).get(); }));
    }));
    a->leave();
  }
}

TEST_F(NetworkTest, ConnectionsThatAFirewallHasForgottenAreReplaced) {
  open({"a", "b"});
  const auto b = start("b", 500ms);
  const auto a = join("a", 500ms, serve_here);
  const auto object = a->call<Object>("b", "make").get();
  EXPECT_EQ(a->call<std::int64_t>("b", "ask", "a", std::int64_t{megabyte}).get(), megabyte);
  EXPECT_TRUE(is_patterned(a->call<Tensor>("b", "echo", patterned_tensor(megabyte)).get()));
  network->forget_connections(store->port());
  std::this_thread::sleep_for(3s);
  // On a stalled machine the agents may not have found out yet.
  const auto call = [&] { return bool(attempt("a call", [&] { a->call<int>("b", "record", 1).get(); })); };
  EXPECT_TRUE(call() || call());
  EXPECT_TRUE(attempt("a tensor of 1 MB there and back",
                      [&] { a->call<Tensor>("b", "echo", patterned_tensor(megabyte)).get(); }));
  EXPECT_TRUE(
      attempt("a call back with 1 MB", [&] { a->call<std::int64_t>("b", "ask", "a", std::int64_t{megabyte}).get(); }));
  EXPECT_TRUE(attempt("the reference from before", [&] { object.call<int>("add", 1).get(); }));
}

TEST_F(NetworkTest, ANewPeerIsFoundWhenAFirewallHasForgottenTheStoresConnections) {
  open({"a", "b"});
  const auto b = start("b");
  const auto a = join("a");
  network->forget_connections();
  EXPECT_TRUE(attempt("the first call", [&] { a->call_with<int>(within(60s), "b", "record", 1).get(); }));
}

// ---- Resets

/// Objects of b that a and c hold, while connections are reset.
class References : public NetworkTest {
 protected:
  /// Makes an object at b, and then one of: c keeps it, c uses it, a uses it, a lets go of one. ConnectionLost of a
  /// single call is no failure.
  void play(Agent& agent, int number) {
    try {
      const auto object = agent.call<Object>("b", "make").get();
      {
        const std::lock_guard lock(mutex_);
        held_[number] = object;
      }
      switch (number % 4) {
        case 0:
          agent.call("c", "keep", number, object).get();
          break;
        case 1:
          agent.call<int>("c", "use", object).get();
          break;
        case 2:
          object.call<int>("add", 1).get();
          break;
        default: {
          const std::lock_guard lock(mutex_);
          if (!held_.empty()) held_.erase(held_.begin());
        }
      }
      ++worked_;
    } catch (...) {
      const std::lock_guard lock(mutex_);
      auto error = current_error();
      error.resize(std::min<std::size_t>(error.size(), 160));
      ++errors_[error];
    }
  }
  /// Returns the error of a call, or "". Makes the call again if it was the first to find a connection lost: that is no
  /// failure either.
  static std::string error_of(const std::function<std::string()>& call) {
    const auto once = [&] {
      try {
        return call();
      } catch (...) {
        return current_error();
      }
    };
    const auto error = once();
    return error.find("ConnectionLost") == std::string::npos ? error : once();
  }
  std::mutex mutex_;
  std::map<int, Object> held_;
  std::map<std::string, int> errors_;
  std::atomic<int> worked_{0};
};

TEST_F(References, ArePassedWhileConnectionsAreResetAndNoneIsLostOrFreedEarly) {
  open({"a", "b", "c"});
  set_paths({.delay = 1ms});
  const auto b = start("b"), c = start("c");
  const auto a = join("a");
  std::atomic<bool> stop{false};
  std::size_t resets = 0;
  std::thread resetter([&] {
    for (std::mt19937 random(1); !stop; ++resets) {
      std::this_thread::sleep_for(milliseconds(20 + random() % 100));
      network->reset_connections(store->port());
    }
  });
  const int many = is_soak ? 6000 : 600;
  std::atomic<int> next{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&] {
      for (int number; (number = next++) < many;) play(*a, number);  // about two calls each
    });
  for (auto& each : callers) each.join();
  stop = true;
  resetter.join();
  std::printf("    %zu resets; %d of %d rounds without an error\n", resets, worked_.load(), many);
  for (const auto& [error, count] : errors_) {
    std::printf("    %d x %s\n", count, error.c_str());
    EXPECT_THAT(error, ::testing::StartsWith("ConnectionLost"));
  }

  // A reset ends the few calls that are in flight.
  EXPECT_GT(worked_, many / 2);

  std::set<int> holders;
  std::map<std::string, int> lost;
  for (const auto& [number, object] : held_) {
    holders.insert(number);
    const auto error = error_of([&object = object] { return object.call<int>("add", 1).get(), std::string(); });
    if (!error.empty()) ++lost[error];
  }
  for (const auto& [error, count] : lost)
    ADD_FAILURE() << count << " of a's " << held_.size() << " references: " << error;
  lost.clear();
  std::vector<int> kept;
  EXPECT_EQ(error_of([&] { return kept = a->call<std::vector<int>>("c", "kept").get(), std::string(); }), "");
  for (const auto number : kept) {
    holders.insert(number);
    const auto error = error_of([&] { return a->call<std::string>("c", "use kept", number).get(); });
    if (!error.empty()) ++lost[error];
  }
  for (const auto& [error, count] : lost) ADD_FAILURE() << count << " of c's references: " << error;

  const auto alive = [&] { return a->call<int>("b", "alive").get(); };
  EXPECT_TRUE(eventually([&] { return alive() == static_cast<int>(holders.size()); }))
      << alive() << " objects live, " << holders.size() << " are held";
  for (const auto number : a->call<std::vector<int>>("c", "kept").get()) a->call("c", "drop", number).get();
  held_.clear();
  EXPECT_TRUE(eventually([&] { return alive() == 0; })) << alive() << " objects live, and none is held";
}

// ---- Only one side can dial

class Nat : public NetworkTest {
 protected:
  /// Both directions between a, of this process, and b.
  void expect_all_works(Agent& a) const {
    const auto ask = [&](std::size_t bytes) {
      return [&a, bytes] {
        a.call_with<std::int64_t>(within(20s), "b", "ask", "a", static_cast<std::int64_t>(bytes)).get();
      };
    };
    EXPECT_TRUE(attempt("a calls b", [&] { a.call_with<int>(within(20s), "b", "record", 1).get(); }));
    EXPECT_TRUE(attempt("b calls back", ask(100)));
    EXPECT_TRUE(attempt("1 MB to b", [&] {
      a.call_with(within(20s), "b", "count bytes", std::vector{patterned_tensor(megabyte)}).get();
    }));
    EXPECT_TRUE(attempt("1 MB as b's reply",
                        [&] { a.call_with<Tensor>(within(20s), "b", "make tensor", std::int64_t{megabyte}).get(); }));
    EXPECT_TRUE(attempt("1 MB from b in a call back, and as its reply", ask(megabyte)));
    EXPECT_TRUE(
        attempt("a reference", [&] { a.call_with<Object>(within(20s), "b", "make").get().call<int>("add", 1).get(); }));
  }
};

TEST_F(Nat, ACallerBehindItWorksInBothDirections) {
  open({{"a", true}, "b"});
  const auto b = start("b");
  expect_all_works(*join("a", 5s, serve_here));
}

TEST_F(Nat, ACalleeBehindItWorksOnceItHasDialled) {
  open({"a", {"b", true}});
  std::atomic<bool> greeted{false};
  const auto a = join("a", 5s, [&](Agent& agent) {
    serve_here(agent);
    agent.serve("hello", [&] { greeted = true; });
  });
  const auto b = start("b", 5s, "a");
  ASSERT_TRUE(eventually([&] { return greeted.load(); }));
  expect_all_works(*a);
}

TEST_F(NetworkTest, ALinkWorksOnWhenTheStoreIsDead) {
  open({"a", "b"});
  const auto b = start("b");
  const auto a = join("a", 5s, serve_here);
  const auto object = a->call<Object>("b", "make").get();
  auto under_way = a->call("b", "sleep", 5000);
  store.reset();
  EXPECT_TRUE(attempt("a small call", [&] { a->call<int>("b", "record", 1).get(); }));
  EXPECT_TRUE(attempt("the first 1 MB", [&] { a->call<Tensor>("b", "echo", patterned_tensor(megabyte)).get(); }));
  EXPECT_TRUE(attempt("the first call back",
                      [&] { a->call_with<std::int64_t>(within(30s), "b", "ask", "a", std::int64_t{megabyte}).get(); }));
  EXPECT_TRUE(attempt("the reference from before", [&] { object.call<int>("add", 1).get(); }));
  EXPECT_TRUE(attempt("the call that was under way", [&] { under_way.get(); }));
}

// ---- A slow path: 20 Mbit/s and 40 ms each way

TEST_F(NetworkTest, ManyTensorsInAListArriveOnASlowPathBesideSmallCalls) {
  open({"a", "b"});
  const auto heartbeat = is_soak ? 5000ms : 500ms;  // three heartbeats are a part of the transfer
  const auto b = start("b", heartbeat);
  const auto a = join("a", heartbeat);
  a->call<int>("b", "record", -1).get();
  set_paths({.bits_per_second = 20e6, .delay = 40ms});
  SteadyCalls calls(*a, "b", 60s, 6);
  const std::vector tensors(is_soak ? 300 : 50, patterned_tensor(200'000));
  EXPECT_TRUE(attempt(std::to_string(tensors.size()) + " x 200 KB",
                      [&] { a->call_with<std::int64_t>(within(300s), "b", "count bytes", tensors).get(); }));
  calls.stop();
  EXPECT_EQ(calls.failed(), 0U);
  EXPECT_LT(calls.percentile(99), 3200) << "four round trips, 320 ms, on a machine that is not busy";
}

// ---- A mass start

TEST_F(NetworkTest, AMassStartOfManyAgentsOnALongPathLosesNoCall) {
  open({"a", "b"});
  const auto b = start("b");
  set_paths({.delay = 400ms});
  const int many = under_sanitizer ? 60 : is_soak ? 300 : 100;  // 300 keep two CPUs busy for 15 s
  std::vector<std::shared_ptr<Agent>> agents;
  for (int i = 0; i < many; ++i) agents.push_back(join("a" + std::to_string(i)));
  std::vector<Future<int>> calls;
  for (int i = 0; i < many; ++i) calls.push_back(agents[static_cast<std::size_t>(i)]->call<int>("b", "record", i));
  std::map<std::string, int> errors;
  for (auto& each : calls) {
    try {
      each.get();
    } catch (...) {
      ++errors[current_error()];
    }
  }
  for (const auto& [error, count] : errors) ADD_FAILURE() << count << " x " << error;
  for (auto& each : agents) each->leave();
}

}  // namespace
}  // namespace tensorferry::testing
