/// Tests with agents on the hosts of an emulated network: the test's own agent, and agents in processes of their own
/// (peer_main.cpp).
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/transport/blocking_io.h"
#include "tensorferry/agent.h"
#include "tests/agent/patience.h"
#include "tests/network/emulated_network.h"

namespace tensorferry::testing {

using namespace std::chrono_literals;

/// An agent in a process of its own, on one of the hosts. The destructor kills and reaps the process if it still runs.
class HostPeer {
 public:
  /// Starts the process. `arguments` are those of peer_main.cpp. Waits until the agent has joined.
  HostPeer(const NetworkNamespace& host, const std::vector<std::string>& arguments) {
    int pipe[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pipe), 0);
    const auto ready_fd = std::to_string(pipe[1]);
    std::vector<char*> argv{const_cast<char*>(PEER_BINARY), const_cast<char*>(ready_fd.c_str())};
    for (const auto& each : arguments) argv.push_back(const_cast<char*>(each.c_str()));
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe[0]);
      if (::setns(host.fd(), CLONE_NEWNET) == 0) ::execv(PEER_BINARY, argv.data());
      ::_exit(127);
    }
    ::close(pipe[1]);
    Bytes ready(6);
    const auto status = read_exactly(pipe[0], ready, deadline_after(30s));
    EXPECT_TRUE(status.ok()) << arguments.at(0) << ": " << status.text();
    ::close(pipe[0]);
  }
  ~HostPeer() {
    if (pid_ > 0) kill();
  }
  HostPeer(const HostPeer&) = delete;
  HostPeer& operator=(const HostPeer&) = delete;

  void signal(int number) const { send_signal(pid_, number); }
  /// Kills the process at once, as SIGKILL does, and reaps it.
  void kill() {
    signal(SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
  }

 private:
  pid_t pid_ = -1;
};

/// Returns a tensor of `bytes` bytes. Each depends on its position.
inline Tensor patterned_tensor(std::size_t bytes) {
  auto tensor = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::uint8);
  auto* data = tensor.data<std::uint8_t>();
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::uint8_t>(i * 31 + (i >> 12));
  return tensor;
}

inline bool is_patterned(const Tensor& tensor) {
  const auto* data = tensor.data<std::uint8_t>();
  for (std::size_t i = 0; i < tensor.bytes(); ++i)
    if (data[i] != static_cast<std::uint8_t>(i * 31 + (i >> 12))) return false;
  return true;
}

inline CallOptions within(std::chrono::milliseconds timeout) {
  CallOptions options;
  options.timeout = timeout;
  return options;
}

/// A network with the hosts of the test and one more, "store", where a store is served. The test's thread, and the
/// threads that it starts, are on the first of its hosts. All paths are perfect at first.
class NetworkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = cannot_emulate(); !reason.empty()) GTEST_SKIP() << reason;
    ::setenv("TENSORFERRY_KEY", "the key of the tests of the network", 1);
    ::setenv("TENSORFERRY_CHANNELS", "basic", 1);  // all processes are on one machine, where others work too
  }
  void open(std::vector<HostOptions> hosts) {
    const auto first = hosts.at(0).name;
    hosts.emplace_back("store");
    network = std::make_unique<EmulatedNetwork>(std::move(hosts));
    {
      const NetworkNamespace::Inside inside(network->host("store"));
      store = std::make_unique<StoreServer>(network->address("store"));
    }
    rendezvous = "store://" + network->address("store") + ":" + std::to_string(store->port());
    here_.emplace(network->host(first));
  }
  /// Joins as an agent of this process, on the first host.
  [[nodiscard]] std::shared_ptr<Agent> join(const std::string& name, std::chrono::milliseconds heartbeat = 5s,
                                            std::function<void(Agent&)> prepare = {}) const {
    AgentOptions options;
    options.name = name;
    options.rendezvous = rendezvous;
    options.heartbeat = heartbeat;
    options.peer_timeout = peer_timeout;
    options.prepare = std::move(prepare);
    return Agent::join(std::move(options));
  }
  /// Starts an agent with the name of its host there. `greets`: the name of an agent that it calls first.
  [[nodiscard]] std::unique_ptr<HostPeer> start(const std::string& name, std::chrono::milliseconds heartbeat = 5s,
                                                const std::string& greets = {}) const {
    return std::make_unique<HostPeer>(network->host(name),
                                      std::vector<std::string>{name, rendezvous, std::to_string(heartbeat.count()),
                                                               std::to_string(peer_timeout.count()), greets});
  }
  /// Sets all paths between hosts of the test; those of the store stay as they are.
  void set_paths(const Path& path) const {
    for (const auto& from : network->names())
      for (const auto& to : network->names())
        if (from != to && from != "store" && to != "store") network->set_path(from, to, path);
  }

  std::unique_ptr<EmulatedNetwork> network;
  std::unique_ptr<StoreServer> store;
  std::string rendezvous;
  std::chrono::milliseconds peer_timeout = 60s;  // of all agents that join or start from here on

 private:
  std::optional<NetworkNamespace::Inside> here_;
};

}  // namespace tensorferry::testing
