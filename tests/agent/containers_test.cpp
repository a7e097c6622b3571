/// Containers: processes that share a folder of unix sockets and the user, but no pid, IPC, network or mount namespace.
/// Calls still go by rings and tensors by shared blocks, and agents notice the death of a peer.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "agent/handshake/auth.h"
#include "agent/transport/blocking_io.h"
#include "tests/agent/agents.h"
#include "tests/agent/folder_store.h"
#include "tests/agent/forked.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

// The documented time for a death on this host is 0.1 s. A stalled machine adds seconds; heartbeats would take 15 s.
constexpr milliseconds promised{5000};

/// An agent (peer_main.cpp) in a container (container_main.cpp). The constructor waits until the agent has joined; the
/// destructor ends the container with all its processes.
class Container {
 public:
  Container(const std::string& store, const std::string& sockets, const std::string& name) {
    int pipe[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pipe), 0);
    const auto ready_fd = std::to_string(pipe[1]);
    outside_ = ::fork();
    if (outside_ == 0) {  // nothing here may allocate: another thread of the parent may hold the allocator's lock
      ::close(pipe[0]);
      ::execl(CONTAINER_BINARY, CONTAINER_BINARY, store.c_str(), sockets.c_str(), name.c_str(), ready_fd.c_str(),
              static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ::close(pipe[1]);
    Bytes ready(6);
    ready_ = read_exactly(pipe[0], ready, deadline_after(long_enough)).ok();
    ::close(pipe[0]);
    if (!ready_) exit_status_ = end_of(std::exchange(outside_, -1), seconds(5));
  }
  ~Container() {
    if (outside_ <= 0) return;
    ::kill(outside_, SIGKILL);  // the init ends with it, and every process of the container ends with the init
    ::waitpid(outside_, nullptr, 0);
  }
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  [[nodiscard]] bool ready() const { return ready_; }
  /// Returns whether the system forbids this process to make namespaces.
  [[nodiscard]] bool not_permitted() const { return exit_status_ == not_allowed; }

 private:
  pid_t outside_ = -1;
  bool ready_ = false;
  int exit_status_ = 0;
};

/// Agents "p" and "q" in a container each, and "me" outside of both.
class Containers : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    store = folder + "/store";
    sockets = folder + "/sockets";
    for (const auto& each : {store, sockets}) ASSERT_EQ(::mkdir(each.c_str(), 0700), 0);
    p = std::make_unique<Container>(store, sockets, "p");
    if (p->not_permitted()) GTEST_SKIP() << "this process may not make pid, IPC, network and mount namespaces";
    q = std::make_unique<Container>(store, sockets, "q");
    ASSERT_TRUE(p->ready() && q->ready());
    me = join(std::make_shared<FolderStore>(store), "me", {},
              [&](RawAgentOptions& options) { options.socket_dir = sockets; });
    ASSERT_NE(me, nullptr);
  }
  void TearDown() override {
    if (me) me->leave();
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }
  std::string ask(const std::string& peer, const std::string& function, const std::string& about,
                  std::vector<Buffer> buffers = {}) {
    auto message = message_of(about);
    message.buffers = std::move(buffers);
    const auto reply = call_sync(*me, peer, function, std::move(message), within(long_enough));
    if (!reply.ok()) return reply.status().text();
    return std::string(text_of(reply->payload)) + (reply->buffers.empty() ? "" : " and buffers");
  }

  std::string folder = "/tmp/tensorferry-containers-XXXXXX";
  std::string store, sockets;
  std::unique_ptr<Container> p, q;
  std::shared_ptr<RawAgent> me;
};

TEST_F(Containers, CallsUseRingsAndTensorsUseSharedBlocks) {
  constexpr std::size_t bytes = 3 << 20;
  // Pairs of one agent inside a container and one outside, and of two inside, of which neither sees the other's pid.
  const auto explained = [&](const std::string& from, const std::string& to) {
    if (from != "me") return ask(from, "explain", to);
    const auto route = me->explain(to);
    if (!route.ok()) return route.status().text();
    auto text = route->transport + " " + route->no_ring + "\n";
    for (const auto& each : route->candidates)
      text += each.channel + " " + (each.usable ? "usable" : each.reason) + "\n";
    for (const auto& [channel, count] : me->counters().bytes_sent)
      text += channel + " sent " + std::to_string(count) + "\n";
    return text;
  };
  const auto echoes = [&](const std::string& from, const std::string& to) {
    if (from == "me") return ask(to, "echo", "", {patterned(bytes)});
    return ask(from, "ask", to + " echo", {patterned(bytes)});
  };
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"me", "q"}, {"p", "q"}, {"q", "p"}}) {
    SCOPED_TRACE(from + " -> " + to);
    EXPECT_TRUE(eventually([&] {  // the first buffers of each size go by socket
      EXPECT_EQ(echoes(from, to), " and buffers");
      return explained(from, to).find("shm sent ") != std::string::npos;
    }));
    const auto text = explained(from, to);
    EXPECT_TRUE(text.starts_with("ring \n")) << text;
    EXPECT_THAT(text, HasSubstr("shm usable"));
    EXPECT_THAT(text, HasSubstr("cma another pid namespace"));
    EXPECT_THAT(text, Not(HasSubstr("cma sent ")));
  }
}

bool kernel_gives_pidfds_of_peers() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return false;
  int pidfd = -1;
  socklen_t size = sizeof pidfd;
  const bool has = ::getsockopt(pair[0], SOL_SOCKET, 77, &pidfd, &size) == 0;  // SO_PEERPIDFD
  for (const int fd : {pair[0], pair[1], pidfd}) {
    if (fd >= 0) ::close(fd);
  }
  return has;
}

TEST_F(Containers, ADeathInAnotherPidNamespaceIsDetectedWhileAForkHoldsTheSockets) {
  for (const bool forked : {false, true}) {
    SCOPED_TRACE(forked);
    if (forked && !kernel_gives_pidfds_of_peers()) GTEST_SKIP() << "this kernel has no SO_PEERPIDFD";
    ASSERT_EQ(ask("p", "ask", "q echo"), "");
    if (forked) {
      ASSERT_EQ(ask("q", "fork", ""), "");
    }
    auto outside = me->call("q", "hang", {});
    auto inside = me->call("p", "ask", message_of("q hang"));
    ASSERT_TRUE(eventually([&] { return ask("q", "seen", "").substr(0, 1) == "2"; }));
    auto killing = me->call("q", "die", {});
    const Since since;
    for (auto* call : {&outside, &inside}) {
      ASSERT_TRUE(call->wait(Clock().now() + long_enough));
      const auto status = call->take().status();
      EXPECT_EQ(status.code(), Code::connection_lost) << status.text();
      EXPECT_THAT(std::string(status.what()), HasSubstr("\"hang\": the link to \"q\" has ended"));
      if (forked) {
        EXPECT_THAT(std::string(status.what()), HasSubstr("its process has ended"));
      }
    }
    EXPECT_LT(since.passed(), promised);
    killing.wait();
    q = std::make_unique<Container>(store, sockets, "q");
    ASSERT_TRUE(q->ready());
  }
}

}  // namespace
}  // namespace tensorferry
