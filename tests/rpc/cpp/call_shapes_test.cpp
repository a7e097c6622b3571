// Shapes of calls, drawn at random. A shape says which side calls, whether the link is new, how the caller waits, what
// the waiting thread does meanwhile, and the payload and transport. Every call must end soon after it can.
// tests/python/test_call_shapes.py is the same test for Python.
//
//   TENSORFERRY_SEED=7     draws the same shapes again
//   TENSORFERRY_SOAK=1     all pairs of two properties, and a hundred times as many draws
#include <spawn.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "tests/agent/patience.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using Clock = std::chrono::steady_clock;

enum Caller { main_thread, handler, callback, coroutine, four_threads };
enum Awaited { get, then, dropped_then, co_awaited, polled, dropped };
enum Meanwhile { nothing, waits_for_an_event, computes, sleeps };
enum Payload { empty, kilobyte, megabyte, structure, object, exception };

/// A property of a shape, and the names of its values.
struct Property {
  const char* name;
  std::vector<const char*> values;
};
const std::array properties{
    Property{"called by", {"the main thread", "a handler", "a callback", "a coroutine", "four threads"}},
    Property{"over", {"a new link", "a warm link"}},
    Property{"awaited by", {"get", "then", "a dropped then", "co_await", "wait_for", "dropping it"}},
    Property{"meanwhile the thread", {"does nothing", "waits for an event", "computes", "sleeps"}},
    Property{"with", {"nothing", "1 KB", "1 MB", "a structure sent again", "an object", "an exception"}},
    Property{"cores", {"free", "busy"}},
};
using Shape = std::array<int, properties.size()>;
Caller caller_of(const Shape& shape) { return static_cast<Caller>(shape[0]); }
bool over_new_link(const Shape& shape) { return shape[1] == 0; }
Awaited awaited(const Shape& shape) { return static_cast<Awaited>(shape[2]); }
Meanwhile meanwhile(const Shape& shape) { return static_cast<Meanwhile>(shape[3]); }
Payload payload_of(const Shape& shape) { return static_cast<Payload>(shape[4]); }
bool on_busy_cores(const Shape& shape) { return shape[5] == 1; }

std::string text_of(const Shape& shape) {
  std::string text;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += std::string(i == 0 ? "" : ", ") + properties[i].name + " " +
            properties[i].values[static_cast<std::size_t>(shape[i])];
  }
  return text;
}

std::string first_line_of(const std::filesystem::path& file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
}
/// What each thread of this process does: its name, its state, and where it sleeps.
std::string threads_text() {
  std::string text;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const auto stat = first_line_of(task.path() / "stat");
    const auto state = stat.rfind(") ");
    text += first_line_of(task.path() / "comm") + " " + (state == std::string::npos ? "?" : stat.substr(state + 2, 1)) +
            " " + first_line_of(task.path() / "wchan") + ", system call " + first_line_of(task.path() / "syscall") +
            "\n";
  }
  return text;
}

Shape drawn(std::mt19937& random) {
  Shape shape{};
  for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = static_cast<int>(random() % properties[i].values.size());
  return shape;
}

/// Returns shapes in which each value of a property occurs with each value of every other property.
std::vector<Shape> all_pairs(std::mt19937& random) {
  std::vector<std::array<std::size_t, 4>> missing;  // property, value, property, value
  for (std::size_t a = 0; a < properties.size(); ++a) {
    for (std::size_t b = a + 1; b < properties.size(); ++b) {
      for (std::size_t v = 0; v < properties[a].values.size(); ++v) {
        for (std::size_t w = 0; w < properties[b].values.size(); ++w) missing.push_back({a, v, b, w});
      }
    }
  }
  std::vector<Shape> shapes;
  while (!missing.empty()) {
    auto& shape = shapes.emplace_back(drawn(random));
    const auto [a, v, b, w] = missing.front();
    shape[a] = static_cast<int>(v);
    shape[b] = static_cast<int>(w);
    std::erase_if(missing, [&](const auto& pair) {
      return shape[pair[0]] == static_cast<int>(pair[1]) && shape[pair[2]] == static_cast<int>(pair[3]);
    });
  }
  return shapes;
}

/// Time limits of a call on busy cores. The test reports calls slower than `promised`, and fails after `limit`.
constexpr auto promised = 1s;
constexpr auto limit = 10s;

class Flag {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return set_; });
  }
  bool is_set() {
    const std::lock_guard lock(mutex_);
    return set_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

void compute(std::chrono::microseconds time) {
  const auto until = Clock::now() + time;
  while (Clock::now() < until) {
  }
}

/// Waits until `holds` returns true, as the shape says.
template <class Condition>
bool wait_meanwhile(const Shape& shape, const Condition& holds) {
  const auto until = Clock::now() + limit;
  while (!holds()) {
    if (Clock::now() > until) return false;
    if (meanwhile(shape) == computes)
      compute(100us);
    else
      std::this_thread::sleep_for(200us);
  }
  return true;
}

/// Processes that keep all cores busy as long as this object lives.
class Hogs {
 public:
  Hogs() {
    std::array<char*, 4> command{const_cast<char*>("sh"), const_cast<char*>("-c"),
                                 const_cast<char*>("while kill -0 $PPID; do :; done"), nullptr};  // until the test ends
    for (auto left = std::thread::hardware_concurrency(); left > 0; --left) {
      pid_t pid = -1;
      if (::posix_spawn(&pid, "/bin/sh", nullptr, nullptr, command.data(), environ) == 0) pids_.push_back(pid);
    }
  }
  ~Hogs() {
    for (const auto pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  Hogs(const Hogs&) = delete;
  Hogs& operator=(const Hogs&) = delete;

 private:
  std::vector<pid_t> pids_;
};

struct Adder {
  int add(int n) const { return base + n; }  // NOLINT(misc-non-private-member-variables-in-classes)
  int base = 40;
};

Tensor ones(std::size_t count) { return Tensor::from_vector(std::vector<float>(count, 1.0F)); }
using Structure = std::tuple<std::vector<Tensor>, std::map<std::string, int>, std::string>;

class CallShapes : public ::testing::TestWithParam<const char*> {
 protected:
  static std::shared_ptr<Agent> join_as(const std::shared_ptr<Store>& store, const std::string& name,
                                        std::function<void(Agent&)> prepare) {
    AgentOptions options;
    options.name = name;
    options.store = store;
    options.unix_sockets = std::string_view(GetParam()) != "tcp";
    options.shared_memory = std::string_view(GetParam()) == "ring";
    options.prepare = std::move(prepare);
    return Agent::join(std::move(options));
  }
  static void serve(Agent& agent) {
    agent.serve("seven", [] { return 7; });
    agent.serve("echo", [](Tensor tensor) { return tensor; });
    agent.serve("echo structure", [](Structure structure) { return structure; });
    agent.serve("use", [](const Object& object) { return object.call<int>("add", 2).get(); });
    agent.serve("fail", []() -> int { throw InvalidArgument("as asked"); });
  }

  /// Makes the shape's call to `peer` and waits for it. Returns an error text, or "" if the call was right.
  std::string run(const Shape& shape, const std::string& peer) {
    switch (payload_of(shape)) {
      case empty:
        return await<int>(shape, peer, caller->call<int>(peer, "seven"), [](int value) { return value == 7; });
      case kilobyte:
      case megabyte: {
        const std::size_t count = payload_of(shape) == kilobyte ? 256 : 1 << 18;
        return await<Tensor>(shape, peer, caller->call<Tensor>(peer, "echo", ones(count)), [count](const Tensor& got) {
          const auto elements = got.elements<float>();
          return elements.size() == count && elements.front() == 1 && elements.back() == 1;
        });
      }
      case structure: {
        const Structure sent{{ones(2000), ones(3000), ones(10)}, {{"a", 1}, {"b", 2}}, std::string(500, 'x')};
        const auto is_the_same = [](const Structure& got) {
          return std::get<0>(got).size() == 3 && std::get<0>(got)[1].elements<float>().size() == 3000 &&
                 std::get<1>(got).at("b") == 2 && std::get<2>(got).size() == 500;
        };
        auto again = await<Structure>(shape, peer, caller->call<Structure>(peer, "echo structure", sent), is_the_same);
        if (!again.empty()) return again;
        return await<Structure>(shape, peer, caller->call<Structure>(peer, "echo structure", sent), is_the_same);
      }
      case object: {  // the callee calls the object's method while it serves the call
        const auto shared = caller->share_object("Adder", std::make_shared<Adder>(), method("add", &Adder::add));
        return await<int>(shape, peer, caller->call<int>(peer, "use", shared), [](int value) { return value == 42; });
      }
      case exception:
        return await<int>(shape, peer, caller->call<int>(peer, "fail"), [](int) { return false; });
    }
    return "no such payload";
  }

  template <class T, class Check>
  static std::string verdict(Future<T> future, const Check& check, bool fails) {
    try {
      if (!future.wait_for(limit)) return "did not end";
      return check(future.get()) && !fails ? "" : "a wrong result";
    } catch (const InvalidArgument& error) {
      return fails ? "" : error.what();
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  /// Awaits `future` in a coroutine. Takes its arguments by value, as Future's documentation requires.
  template <class T, class Check>
  static Future<bool> awaiting(Future<T> future, Check check) {
    T value = co_await future;
    co_return check(value);
  }

  template <class T, class Check>
  std::string await(const Shape& shape, const std::string& peer, Future<T> future, const Check& check) {
    const bool fails = payload_of(shape) == exception;
    const auto is_true = [](bool right) { return right; };
    switch (awaited(shape)) {
      case get:
        if (meanwhile(shape) == waits_for_an_event) {  // another call's
          const auto flag = std::make_shared<Flag>();
          (void)caller->call<int>(peer, "seven").then([flag](int) { flag->set(); });
          if (!flag->wait()) return "a continuation did not run";
        } else if (meanwhile(shape) == computes) {
          compute(1ms);
        } else if (meanwhile(shape) == sleeps) {
          std::this_thread::sleep_for(1ms);
        }
        return verdict(std::move(future), check, fails);
      case polled:
        if (!wait_meanwhile(shape, [&] { return future.wait_for(1ms); })) return "did not end";
        return verdict(std::move(future), check, fails);
      case co_awaited:
      case then: {
        auto next = awaited(shape) == then ? future.then(check) : awaiting<T, Check>(std::move(future), check);
        if (meanwhile(shape) == waits_for_an_event && !fails) {
          const auto flag = std::make_shared<Flag>();
          auto last = next.then([flag](bool right) {
            flag->set();
            return right;
          });
          if (!flag->wait()) return "a continuation did not run";
          return verdict(std::move(last), is_true, fails);
        }
        if (meanwhile(shape) != nothing && !wait_meanwhile(shape, [&] { return next.done(); })) return "did not end";
        return verdict(std::move(next), is_true, fails);
      }
      case dropped_then:
        if (!fails) {
          const auto flag = std::make_shared<Flag>();
          const auto right = std::make_shared<std::atomic<bool>>(false);
          (void)future.then([flag, right, check](const T& value) {
            *right = check(value);
            flag->set();
          });
          const bool ran = meanwhile(shape) == waits_for_an_event || meanwhile(shape) == nothing
                               ? flag->wait()
                               : wait_meanwhile(shape, [&] { return flag->is_set(); });
          return !ran ? "a continuation did not run" : *right ? "" : "a wrong result";
        }
        [[fallthrough]];
      case dropped:
        future = {};
        return wait_meanwhile(shape, [&] { return caller->in_flight().first == 0; }) ? "" : "did not end";
    }
    return "no such way to wait";
  }

  std::string run_by_its_caller(const Shape& shape, const std::string& peer) {
    switch (caller_of(shape)) {
      case main_thread:
        return run(shape, peer);
      case handler: {
        run_in_handler = [&] { return run(shape, peer); };
        CallOptions options;
        options.timeout = 2 * limit;
        return outer->call_with<std::string>(options, "caller", "run").get();
      }
      case callback:
      case coroutine: {
        const auto done = std::make_shared<Flag>();
        std::string verdict = "its caller did not run";
        const auto body = [&] {
          verdict = run(shape, peer);
          done->set();
        };
        auto before = caller->call<int>("warm", "seven");
        auto after =
            caller_of(shape) == callback ? before.then([&](int) { body(); }) : after_another(std::move(before), body);
        (void)done->wait();
        after.wait();
        return verdict;
      }
      case four_threads: {
        std::array<std::string, 4> verdicts;
        std::vector<std::thread> threads;
        threads.reserve(verdicts.size());
        for (auto& verdict : verdicts) threads.emplace_back([&] { verdict = run(shape, peer); });
        for (auto& thread : threads) thread.join();
        for (const auto& verdict : verdicts) {
          if (!verdict.empty()) return verdict;
        }
        return "";
      }
    }
    return "no such caller";
  }
  static Future<void> after_another(Future<int> before, std::function<void()> body) {
    co_await before;
    body();
  }

  void check(const Shape& shape) {
    std::shared_ptr<Agent> fresh;
    std::string peer = "warm";
    if (over_new_link(shape)) {
      peer = "new" + std::to_string(++made);
      fresh = join_as(store, peer, &serve);
    }
    const auto began = Clock::now();
    const auto verdict = run_by_its_caller(shape, peer);
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
    if (took > promised) ++slow;
    if (verdict.empty() && took < limit) return;
    ADD_FAILURE() << text_of(shape) << "\n"
                  << (verdict.empty() ? "took too long" : verdict) << ", after " << took.count() << " ms\n"
                  << caller->link_state(peer) << "\n"
                  << outer->link_state("caller") << "\n"
                  << threads_text();
  }

  const std::shared_ptr<Store> store = local_store();
  std::function<std::string()> run_in_handler;
  std::shared_ptr<Agent> warm = join_as(store, "warm", &serve);
  std::shared_ptr<Agent> caller =
      join_as(store, "caller", [this](Agent& agent) { agent.serve("run", [this] { return run_in_handler(); }); });
  std::shared_ptr<Agent> outer = join_as(store, "outer", {});
  int made = 0, slow = 0;
};

INSTANTIATE_TEST_SUITE_P(Over, CallShapes, ::testing::Values("ring", "unix", "tcp"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(CallShapes, EveryCallEnds) {
  const char* given = std::getenv("TENSORFERRY_SEED");
  const auto seed = given != nullptr ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
  std::cout << "seed " << seed << ": TENSORFERRY_SEED=" << seed << " draws these shapes again\n";
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, "seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<Shape> shapes;
  if (is_soak) shapes = all_pairs(random);
  for (int left = rounds(200'000) / 3; left >= 0; --left) shapes.push_back(drawn(random));
  ASSERT_EQ(caller->call<int>("warm", "seven").get(), 7);
  for (const bool busy : {false, true}) {
    std::optional<Hogs> hogs;
    if (busy) hogs.emplace();
    for (const auto& shape : shapes) {
      if (on_busy_cores(shape) == busy) check(shape);
      if (HasFailure()) return;
    }
  }
  std::cout << shapes.size() << " shapes, " << slow << " of them took more than a second\n";
}

}  // namespace
