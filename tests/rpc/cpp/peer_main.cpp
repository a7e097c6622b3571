// A C++ program in a job of Python processes. tests/python/test_cpp_peer.py calls it and is called by it.
//
//   cpp_peer NAME RENDEZVOUS RANK WORLD_SIZE
//
// Serves until its standard input closes, then shuts down.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tensorferry/agent.h"

namespace {

using namespace tensorferry;

struct Step {
  Tensor observation;
  double reward = 0;
  bool done = false;
};

class Counter {
 public:
  int add(int n) {
    const std::lock_guard lock(mutex_);
    return value_ += n;
  }
  Tensor history(int n) const {
    return Tensor::from_vector(std::vector<std::int64_t>(static_cast<std::size_t>(n), value_));
  }
  void fail() const { throw std::logic_error("counted wrongly"); }

 private:
  std::mutex mutex_;
  int value_ = 0;
};

}  // namespace

template <>
struct tensorferry::Value<Step> : tensorferry::Fields<"Step", &Step::observation, &Step::reward, &Step::done> {};

namespace {

/// Calls `name` of `peer`, which fails. Returns the exception's class, its text, and its traceback if it has one.
std::tuple<std::string, std::string, std::string> outcome_of(Agent& agent, const std::string& peer,
                                                             const std::string& name) {
  try {
    agent.call(peer, name).get();
    return {"nothing", "", ""};
  } catch (const RemoteError& error) {
    return {error.type_name(), error.message(), error.traceback()};
  } catch (const NotFound& error) {
    return {"NotFound", error.what(), ""};
  } catch (const Error& error) {
    return {"Error", error.what(), ""};
  }
}

void serve(Agent& agent) {
  agent.serve("add", [](int a, int b) { return a + b; }, {"a", "b"});
  agent.serve("step",
              [](const TensorOf<float>& action, int n, std::optional<std::string> how) {
                auto out = action.clone();
                for (auto& each : out.elements<float>()) each *= static_cast<float>(n);
                return Step{out, how ? 1.0 : 0.5, n > 2};
              },
              {"action", "n", "how"});
  agent.serve("echo", [](Tensor tensor) { return tensor; });
  agent.serve("sum", [](const std::vector<int>& a, const std::vector<int>& b) {
    int sum = 0;
    for (const auto each : a) sum += each;
    for (const auto each : b) sum += 10 * each;
    return sum;
  });
  agent.serve("values", [](const std::map<std::string, std::vector<std::tuple<int, double>>>& map,
                           std::optional<std::vector<std::byte>> bytes) { return std::tuple(map, bytes); });
  agent.serve("fail", []() -> int { throw std::out_of_range("no such level"); });
  agent.serve("later", [](int n, std::optional<double> seconds) {
    Promise<int> promise;
    auto future = promise.future();
    std::thread([promise = std::move(promise), n, seconds]() mutable {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds.value_or(0)));
      promise.set(n);
    }).detach();
    return future;
  });
  agent.serve("same", [](Object object) { return object; });
  agent.serve("counter", [&agent] {
    return agent.share_object("Counter", std::make_shared<Counter>(), method("add", &Counter::add, {"n"}),
                              method("history", &Counter::history), method("fail", &Counter::fail));
  });
  // The other direction: C++ calls Python, and returns the outcome.
  agent.serve("call_scale", [&agent](const std::string& peer, const Tensor& tensor) {
    return agent.call<Tensor>(peer, "scale", tensor, 3.0).get();
  });
  agent.serve("call_by_import", [&agent](const std::string& peer, double x) {
    return agent.call<double>(peer, "py:math:sqrt", x).get();
  });
  agent.serve("outcome",
              [&agent](const std::string& peer, const std::string& name) { return outcome_of(agent, peer, name); });
  // A group of agents in both languages: the sum, and what each rank gave.
  agent.serve("reduce_with", [&agent](const std::vector<std::string>& names, const Tensor& tensor) {
    const auto group = Group::form(agent, names, {.label = "both languages", .timeout = std::chrono::seconds(60)});
    const auto given = group->all_gather(tensor).get();
    return std::tuple(group->all_reduce(tensor.clone()).get(), given);
  });
  // A region of C++, which Python reads and writes, and one of Python's.
  const auto table = std::make_shared<OwnRegion>();
  agent.serve("make_table", [&agent, table](const Tensor& contents) {
    auto memory = mappable_tensor(contents.shape(), contents.dtype());
    memory.copy_from(contents);
    *table = agent.region(memory, {.name = "table", .write = true});
  });
  agent.serve("table_after", [table](std::uint64_t number) {
    const auto told = table->await_notification(number, std::chrono::seconds(60));
    return std::tuple(told.peer, table->tensor());
  });
  agent.serve("drop_table", [table] { *table = {}; });
  agent.serve("read_region", [&agent](const std::string& owner, const std::string& name) {
    return agent.find_region(owner, name).read();
  });
  // A publication of C++, and what one of Python's has.
  const auto policy = std::make_shared<OwnPublication>();
  agent.serve("publish", [&agent, policy](const Tensor& contents) {
    *policy = {};
    *policy = agent.publish("policy", {{"contents", contents.contiguous()}});
  });
  agent.serve("update", [policy](const Tensor& contents) {
    return policy->update({{"contents", contents.contiguous()}});
  });
  agent.serve("load", [&agent](const std::string& publisher, const std::string& name, const Tensor& like) {
    const auto into = Tensor::empty(like.shape(), like.dtype());
    const auto number = agent.subscribe(publisher, name).into({{"contents", into}}).load();
    return std::tuple(number, into);
  });
  agent.serve("use", [](const Object& object, int n) { return object.call<int>("add", n).get(); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    const auto agent = Agent::join({.name = argv[1],
                                    .rank = std::atoi(argv[3]),
                                    .world_size = std::atoi(argv[4]),
                                    .rendezvous = argv[2],
                                    .prepare = serve});
    std::cout << "ready" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
    }
    agent->shutdown(std::chrono::seconds(30));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
