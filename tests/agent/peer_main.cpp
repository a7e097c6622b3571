// An agent in a process of its own, for tests that kill it:
//
//   agent_peer PORT|FOLDER NAME ring|unix|tcp CHANNELS READY_FD [HEARTBEAT_MS]
//
// Joins through the store at 127.0.0.1:PORT, or through the store in a shared folder. Then writes a line to READY_FD,
// and serves until a peer tells it to leave or a signal kills it.
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "agent/agent.h"
#include "agent/rendezvous/tcp_store.h"
#include "tests/agent/folder_store.h"
#include "tests/agent/patience.h"
#include "tests/channels/forbid_reading.h"

using namespace tensorferry;

namespace {

Message message_of(const std::string& text) {
  const auto view = view_of(text);
  return {{view.begin(), view.end()}, {}, {}, {}};
}

std::string payload_of(const Request& request) { return std::string(text_of(request.arguments.payload)); }

Buffer zeros(std::size_t bytes) {
  auto owner = std::make_shared<Bytes>(bytes);
  return {{}, owner->data(), bytes, nullptr, owner};
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  std::abort();
}

/// Counts of the events that this process's callers have caused.
std::atomic<int> running{0}, cancelled{0}, lost{0}, echoed{0};

void serve_plain(RawAgent& agent) {
  agent.serve("echo", [](Request request, Reply reply) {
    reply.send({std::move(request.arguments.payload), std::move(request.arguments.buffers), {}, {}});
    ++echoed;
  });
  agent.serve("hang", [](const Request&, Reply reply) {  // runs until its caller has gone
    ++running;
    while (!reply.cancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++cancelled;
  });
  agent.serve("seen", [](const Request&, Reply reply) {
    reply.send(message_of(std::to_string(running) + " " + std::to_string(cancelled) + " " + std::to_string(lost)));
  });
  agent.serve("holds", [](const Request&, Reply reply) {
    reply.send(message_of(std::to_string(testing::open_descriptors()) + " " + std::to_string(testing::threads())));
  });
  agent.serve("bytes", [](const Request& request, Reply reply) {
    auto message = message_of("");
    message.buffers = {zeros(std::stoul(payload_of(request)))};
    reply.send(std::move(message));
  });
  agent.serve("forbid reading", [](const Request&, Reply reply) {
    reply.send(message_of(testing::forbid_reading() ? "" : "not allowed"));
  });
  agent.on_peer_lost([](const PeerInfo&, const Status&) { ++lost; });
}

/// Serves functions by which this process calls, or describes, another peer.
void serve_asking(RawAgent& agent) {
  agent.serve("ask", [&agent](const Request& request, Reply reply) {  // "peer function", with the request's buffers
    std::istringstream in(payload_of(request));
    std::string peer, function;
    in >> peer >> function;
    Message message;
    message.buffers = request.arguments.buffers;
    auto call = agent.call(peer, function, std::move(message));
    call.wait();
    auto answer = call.take();
    if (!answer) return reply.fail(answer.status());
    reply.send({std::move(answer->payload), std::move(answer->buffers), {}, {}});
  });
  agent.serve("explain", [&agent](const Request& request, Reply reply) {  // "peer": the calls' transport, the channels
    const auto route = agent.explain(payload_of(request));
    if (!route) return reply.fail(route.status());
    auto text = route->transport + " " + route->no_ring + "\n";
    for (const auto& candidate : route->candidates)
      text += candidate.channel + " " + (candidate.usable ? "usable" : candidate.reason) + "\n";
    for (const auto& [channel, bytes] : agent.counters().bytes_sent)
      text += channel + " sent " + std::to_string(bytes) + "\n";
    reply.send(message_of(text));
  });
}

/// Serves functions that end this process, or that call from it.
void serve_endings(RawAgent& agent) {
  agent.serve("die", [](const Request&, const Reply&) { die(); });
  agent.serve("answer and die", [](const Request&, Reply reply) {
    auto message = message_of("");
    message.buffers = {zeros(64 << 20)};
    reply.send(std::move(message));
    die();
  });
  agent.serve("die soon", [](const Request& request, Reply reply) {
    const std::chrono::microseconds after(std::stoi(payload_of(request)));
    reply.send({});
    std::thread([after] {
      std::this_thread::sleep_for(after);
      die();
    }).detach();
  });
  agent.serve("fork", [](const Request&, Reply reply) {  // forks a child that keeps every socket open
    if (::fork() == 0) {
      ::prctl(PR_SET_PDEATHSIG, 0);
      for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) ::close(fd);  // else the reader of these pipes would wait
      ::sleep(30);
      ::_exit(0);
    }
    reply.send({});
  });
  agent.serve("call me",
              [&agent](const Request& request, Reply reply) {  // calls "function" of the caller, and does not wait
                agent.call(request.peer.name, payload_of(request), {}).on_done([](const Result<Received>&) {});
                reply.send({});
              });
}

std::shared_ptr<Store> store_at(const std::string& place) {
  if (place.front() == '/') return std::make_shared<testing::FolderStore>(place);
  auto store = connect_tcp_store("127.0.0.1", static_cast<std::uint16_t>(std::stoi(place)), "", testing::long_enough);
  return store ? std::shared_ptr<Store>(*store) : nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // this process dies with the test that started it
  const auto store = store_at(argv[1]);
  if (!store) return 3;
  RawAgentOptions options;
  options.name = argv[2];
  options.store = store;
  options.unix_sockets = std::string_view(argv[3]) != "tcp";
  options.shared_memory = std::string_view(argv[3]) == "ring";
  options.channels = argv[4];
  if (argc > 6) options.heartbeat = Milliseconds(std::stoi(argv[6]));
  std::atomic<int> leave_after{std::numeric_limits<int>::max()};  // leaves after this many echoes
  const auto agent = RawAgent::create(std::move(options));
  Status joined = agent.status();
  if (agent) {
    serve_plain(**agent);
    serve_endings(**agent);
    serve_asking(**agent);
    (*agent)->serve("leave", [&](const Request& request, Reply reply) {
      const auto echoes = payload_of(request);
      reply.send({});
      leave_after = echoes.empty() ? 0 : std::stoi(echoes);
    });
    joined = (*agent)->announce();
  }
  if (!joined) {
    std::fprintf(stderr, "%s\n", joined.text().c_str());
    return 4;
  }
  if (::write(std::stoi(argv[5]), "ready\n", 6) != 6) return 5;
  while (echoed < leave_after) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  (*agent)->leave();
  return 0;
}
