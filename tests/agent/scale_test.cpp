// What an idle peer costs an agent: memory, descriptors and threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent/rendezvous/tcp_store.h"
#include "agent/transport/blocking_io.h"
#include "tests/agent/agents.h"
#include "tests/agent/descriptor_limit.h"
#include "tests/agent/patience.h"

namespace tensorferry::testing {
namespace {

/// Agents in a process of its own (crowd_main.cpp). The destructor kills and reaps the process.
class Crowd {
 public:
  Crowd(std::uint16_t port, const std::string& prefix, int count, const std::string& transport) {
    int pipe[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pipe), 0);
    const auto texts =
        std::vector{std::to_string(port), prefix, std::to_string(count), transport, std::to_string(pipe[1])};
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe[0]);
      ::execl(CROWD_BINARY, CROWD_BINARY, texts[0].c_str(), texts[1].c_str(), texts[2].c_str(), texts[3].c_str(),
              texts[4].c_str(), static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ::close(pipe[1]);
    ready_ = pipe[0];
  }
  ~Crowd() {
    ::close(ready_);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

  void wait() const {
    Bytes line(6);
    const auto status = read_exactly(ready_, line, deadline_after(std::chrono::minutes(5)));
    ASSERT_TRUE(status.ok()) << status.text();
  }

 private:
  pid_t pid_ = -1;
  int ready_ = -1;
};

struct Cost {
  double kilobytes = 0, descriptors = 0, threads = 0;
};

Cost cost_now() {
  Cost cost;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> cost.kilobytes;
  }
  cost.descriptors = static_cast<double>(open_descriptors());
  cost.threads = static_cast<double>(threads());
  return cost;
}

class ManyPeers : public ::testing::TestWithParam<const char*> {};

TEST_P(ManyPeers, CostLittleWhileTheyAreIdle) {
  raise_descriptor_limit();
  const std::string transport = GetParam();
  const int crowds = is_soak ? 4 : 1, each = is_soak ? 250 : 100;
  auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
  auto store = *connect_tcp_store("127.0.0.1", server->port(), "", long_enough);
  const auto hub = join(store, "hub", Ways{transport, "basic"});
  serve_echo(*hub);
  const auto call_all = [&](const std::string& prefix, int count) {
    for (int i = 0; i < count; ++i) {
      const auto reply = call_sync(*hub, prefix + std::to_string(i), "echo", message_of("m"), within(long_enough));
      ASSERT_TRUE(reply.ok()) << reply.status().text();
    }
  };
  const Crowd first(server->port(), "first", 10, transport);  // takes what an agent needs once
  first.wait();
  call_all("first", 10);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  const auto before = cost_now();

  std::vector<std::unique_ptr<Crowd>> peers;
  for (int i = 0; i < crowds; ++i)
    peers.push_back(std::make_unique<Crowd>(server->port(), "crowd" + std::to_string(i) + "_", each, transport));
  for (int i = 0; i < crowds; ++i) {
    peers[static_cast<std::size_t>(i)]->wait();
    call_all("crowd" + std::to_string(i) + "_", each);
  }
  constexpr double most_descriptors = 3.05;  // a connection in each direction, and on one host the peer's process
  Cost cost;
  const auto is_small = [&] {  // memory is given back, and threads end, after a while
    const auto now = cost_now();
    const double count = crowds * each;
    // A client of the store keeps a connection to the server in this process.
    const double stores = 2.0 * crowds;
    cost = {(now.kilobytes - before.kilobytes) / count, (now.descriptors - before.descriptors - stores) / count,
            (now.threads - before.threads) / count};
    return (under_sanitizer || cost.kilobytes < 64) && cost.descriptors < most_descriptors && cost.threads < 0.1;
  };
  EXPECT_TRUE(eventually(is_small));
  std::printf("%d idle peers by %s: %.1f KiB, %.2f descriptors, %.2f threads each\n", crowds * each, transport.c_str(),
              cost.kilobytes, cost.descriptors, cost.threads);

  call_all("crowd0_", 10);  // they still answer
  EXPECT_EQ(hub->counters().calls_failed, 0U);
}

INSTANTIATE_TEST_SUITE_P(Over, ManyPeers, ::testing::Values("tcp", "ring"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace tensorferry::testing
