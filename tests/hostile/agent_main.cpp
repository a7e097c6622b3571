// The agents of hostile_test.cpp: one that is attacked, and an honest peer of it.
//
//   hostile_agent target KEY            prints "PORT UNIX TCP"; serves until its standard input closes
//   hostile_agent honest KEY PORT       calls the target; for each line of its input, prints what has happened since
//                                       the line before: "CALLS FAILED P50_US P99_US"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/rendezvous/directory.h"
#include "agent/rendezvous/tcp_store.h"
#include "tensorferry/agent.h"

namespace {

using namespace tensorferry;
using std::chrono::steady_clock;

class Counter {
 public:
  int add(int n) { return value_ += n; }

 private:
  std::atomic<int> value_{0};
};

void serve(Agent& agent) {
  agent.serve("echo", [](Tensor tensor) { return tensor; });
  agent.serve("text", [](const std::string& text) { return text; });
  agent.serve("numbers", [](std::int64_t count) {
    return Tensor::empty({std::clamp<std::int64_t>(count, 0, 100'000)}, DType::uint8);
  });
  agent.serve("fail", [](int n) -> int { throw std::runtime_error("as it was told " + std::to_string(n)); });
  agent.serve("make", [&agent] {
    return agent.share_object("Counter", std::make_shared<Counter>(), method("add", &Counter::add));
  });
  agent.serve("call back", [&agent](const CallContext& context) {
    CallOptions options;
    options.timeout = std::chrono::milliseconds(200);
    return agent.call_with<std::string>(options, context.peer(), "anything", 1);
  });
}

int be_the_target(const std::string& key) {
  StoreServer store("127.0.0.1", 0, key);
  AgentOptions options;
  options.name = "target";
  options.key = key;
  options.store = connect_store("127.0.0.1", store.port(), key);
  options.max_queued_bytes = std::size_t{64} << 20;
  options.max_bytes_in_flight = std::size_t{64} << 20;
  options.threads = 64;
  options.prepare = [](Agent& agent) { serve(agent); };
  const auto agent = Agent::join(options);
  Directory directory(options.store, "tensorferry", *Key::from_text(key));
  const auto record = directory.find("target", std::chrono::seconds(60));
  if (!record) return 1;
  std::cout << store.port() << ' ' << record->unix_address << ' ' << record->tcp_addresses.at(0) << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
  }
  return 0;
}

/// Calls the target with buffers of all sizes, and compares every byte of the answers.
class HonestCalls {
 public:
  explicit HonestCalls(Agent& agent) : agent_(agent), thread_([this] { run(); }) {}
  ~HonestCalls() {
    ends_ = true;
    thread_.join();
  }

  std::string since_last_time() {
    const std::lock_guard lock(mutex_);
    auto times = std::exchange(times_, {});
    std::sort(times.begin(), times.end());
    const auto at = [&](double part) {
      return times.empty() ? 0 : times[static_cast<std::size_t>(part * static_cast<double>(times.size() - 1))];
    };
    return std::to_string(times.size()) + " " + std::to_string(std::exchange(failed_, 0)) + " " +
           std::to_string(at(0.5)) + " " + std::to_string(at(0.99));
  }

 private:
  void run() {
    constexpr std::int64_t sizes[] = {1, 100, 4000, 5000, 20'000, 100'000, 400'000};
    for (std::size_t call = 0; !ends_; ++call) {
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(sizes[call % std::size(sizes)]));
      for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(call + i * 7);
      const auto began = steady_clock::now();
      bool right = false;
      try {
        const auto echoed = agent_.call<TensorOf<std::uint8_t>>("target", "echo", Tensor::from_vector(bytes)).get();
        right = std::equal(bytes.begin(), bytes.end(), echoed.elements().begin(), echoed.elements().end());
        if (!right) std::cerr << "call " << call << ": other bytes" << std::endl;
      } catch (const std::exception& error) {
        std::cerr << "call " << call << ": " << error.what() << std::endl;
      }
      const auto took = std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - began).count();
      const std::lock_guard lock(mutex_);
      times_.push_back(took);
      if (!right) ++failed_;
    }
  }

  Agent& agent_;
  std::mutex mutex_;
  std::vector<std::int64_t> times_;
  int failed_ = 0;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

int be_honest(const std::string& key, std::uint16_t port) {
  AgentOptions options;
  options.name = "honest";
  options.key = key;
  options.store = connect_store("127.0.0.1", port, key);
  const auto agent = Agent::join(options);
  HonestCalls calls(*agent);
  for (std::string line; std::getline(std::cin, line);) std::cout << calls.since_last_time() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  if (given.size() == 2 && given[0] == "target") return be_the_target(given[1]);
  if (given.size() == 3 && given[0] == "honest")
    return be_honest(given[1], static_cast<std::uint16_t>(std::stoi(given[2])));
  return 2;
}
