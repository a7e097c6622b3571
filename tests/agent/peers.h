/// Agents in processes of their own (peer_main.cpp), which join through a store that the test serves.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <memory>
#include <string>
#include <utility>

#include "agent/rendezvous/tcp_store.h"
#include "agent/transport/blocking_io.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry::testing {

/// A process with an agent. The constructor waits until the agent has joined; the destructor kills and reaps the
/// process if it still runs.
class Peer {
 public:
  Peer(std::uint16_t port, const std::string& name, const Ways& ways, int heartbeat_ms = 5000) {
    int pipe[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pipe), 0);
    const auto text =
        std::array{std::to_string(port),        name, ways.transport, ways.channels, std::to_string(pipe[1]),
                   std::to_string(heartbeat_ms)};
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe[0]);
      ::execl(PEER_BINARY, PEER_BINARY, text[0].c_str(), text[1].c_str(), text[2].c_str(), text[3].c_str(),
              text[4].c_str(), text[5].c_str(), static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ::close(pipe[1]);
    Bytes ready(6);
    const auto status = read_exactly(pipe[0], ready, deadline_after(long_enough));
    EXPECT_TRUE(status.ok()) << name << ": " << status.text();
    ::close(pipe[0]);
  }
  ~Peer() {
    if (pid_ > 0) kill();
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void signal(int number) const { send_signal(pid_, number); }
  void kill() {
    signal(SIGKILL);
    reap();
  }
  /// Waits until the process ends, and returns its exit status as waitpid gives it.
  int reap() {
    int status = -1;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

/// A store, an agent "me" in this process, and the peers that a test starts.
class PeerTest : public ::testing::TestWithParam<Ways> {
 protected:
  std::unique_ptr<Peer> start(const std::string& name, int heartbeat_ms = 5000) {
    return std::make_unique<Peer>(server->port(), name, GetParam(), heartbeat_ms);
  }
  std::shared_ptr<RawAgent> join_as(const std::string& name, const std::function<void(RawAgentOptions&)>& change = {}) {
    auto store = connect_tcp_store("127.0.0.1", server->port(), "", long_enough);
    EXPECT_TRUE(store.ok());
    return join(*store, name, GetParam(), change);
  }
  std::unique_ptr<TcpStoreServer> server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
  std::shared_ptr<RawAgent> me = join_as("me");
};

}  // namespace tensorferry::testing
