// An agent in a process of its own, for tests of the network:
//
//   network_peer READY_FD NAME RENDEZVOUS HEARTBEAT_MS PEER_TIMEOUT_MS GREETS
//
// Joins, writes a line to READY_FD, and serves until a signal kills it. If GREETS is not "", it then calls the function
// "hello" of the agent of that name, so that this side is the first to dial.
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tensorferry/agent.h"

namespace {

using namespace tensorferry;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::atomic<int> alive{0};

class Counter {
 public:
  Counter() { ++alive; }
  ~Counter() { --alive; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  int add(int n) { return value_ += n; }

 private:
  std::atomic<int> value_{0};
};

/// What this process has run and what it holds.
struct State {
  std::mutex mutex;
  std::map<int, int> runs;  // of "record", by the number that the caller gave
  std::map<int, Object> held;
};

Tensor tensor_of(std::int64_t bytes) {
  return Tensor::from_vector(std::vector<std::uint8_t>(static_cast<std::size_t>(bytes)));
}

void serve_values(Agent& agent, State& state) {
  agent.serve("echo", [](Tensor tensor) { return tensor; });
  agent.serve("make tensor", tensor_of);
  agent.serve("count bytes", [](const std::vector<Tensor>& tensors) {
    std::int64_t bytes = 0;
    for (const auto& each : tensors) bytes += static_cast<std::int64_t>(each.bytes());
    return bytes;
  });
  agent.serve("record", [&state](int number) {
    const std::lock_guard lock(state.mutex);
    ++state.runs[number];
    return number;
  });
  agent.serve("runs", [&state] {
    const std::lock_guard lock(state.mutex);
    return std::vector<std::pair<int, int>>(state.runs.begin(), state.runs.end());
  });
  agent.serve("sleep", [](int milliseconds_) { std::this_thread::sleep_for(milliseconds(milliseconds_)); });
  // Calls "echo" of `peer` with a tensor, and returns the bytes that came back.
  agent.serve("ask", [&agent](const std::string& peer, std::int64_t bytes) {
    CallOptions options;
    options.timeout = seconds(20);
    return static_cast<std::int64_t>(agent.call_with<Tensor>(options, peer, "echo", tensor_of(bytes)).get().bytes());
  });
}

void serve_objects(Agent& agent, State& state) {
  agent.serve("make", [&agent] {
    return agent.share_object("Counter", std::make_shared<Counter>(), method("add", &Counter::add));
  });
  agent.serve("alive", [] { return alive.load(); });
  agent.serve("use", [](const Object& object) { return object.call<int>("add", 1).get(); });
  agent.serve("keep", [&state](int number, Object object) {
    const std::lock_guard lock(state.mutex);
    state.held[number] = std::move(object);
  });
  agent.serve("kept", [&state] {
    const std::lock_guard lock(state.mutex);
    std::vector<int> numbers;
    for (const auto& [number, object] : state.held) numbers.push_back(number);
    return numbers;
  });
  // Uses an object that "keep" has kept. Returns the error's text, or "".
  agent.serve("use kept", [&state](int number) -> std::string {
    Object object;
    {
      const std::lock_guard lock(state.mutex);
      object = state.held.at(number);
    }
    try {
      object.call<int>("add", 1).get();
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  });
  agent.serve("drop", [&state](int number) {
    const std::lock_guard lock(state.mutex);
    state.held.erase(number);
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // this process dies with the test that started it
  State state;
  try {
    AgentOptions options;
    options.name = argv[2];
    options.rendezvous = argv[3];
    options.heartbeat = milliseconds(std::atoi(argv[4]));
    options.peer_timeout = milliseconds(std::atoi(argv[5]));
    options.prepare = [&](Agent& agent) {
      serve_values(agent, state);
      serve_objects(agent, state);
    };
    const auto agent = Agent::join(std::move(options));
    if (::write(std::atoi(argv[1]), "ready\n", 6) != 6) return 3;
    if (const std::string greets = argv[6]; !greets.empty()) agent->call(greets, "hello").get();
    while (true) ::pause();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[2], error.what());
    return 1;
  }
}
