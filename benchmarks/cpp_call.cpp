/// Empty calls between two agents of two processes: what our agent costs without Python and without torch.

#include <unistd.h>

#include <memory>
#include <utility>

#include "agent/agent.h"
#include "agent/rendezvous/tcp_store.h"
#include "benchmarks/samples.h"

namespace tensorferry::benchmarks {
namespace {

constexpr Milliseconds patience{20000};

[[noreturn]] void die(std::string_view what, const Status& status) {
  std::fprintf(stderr, "%.*s: %s\n", static_cast<int>(what.size()), what.data(), status.text().c_str());
  std::exit(1);
}

template <class T>
T value_or_die(std::string_view what, Result<T> result) {
  if (!result) die(what, result.status());
  return *std::move(result);
}

std::shared_ptr<RawAgent> join(const char* name, std::uint16_t port, const SampleArguments& arguments) {
  RawAgentOptions options;
  options.name = name;
  options.store = value_or_die("connect_tcp_store", connect_tcp_store("127.0.0.1", port, "", patience));
  options.unix_sockets = arguments.transport != "tcp";
  options.shared_memory = arguments.transport == "ring";
  return value_or_die("RawAgent::join", RawAgent::join(std::move(options)));
}

/// Serves until the caller's end of the socket closes. The socket carries the port of the store to the callee, and a
/// byte back when it serves: a name is registered before its functions are.
void serve(int socket, const SampleArguments& arguments) {
  std::uint16_t port = 0;
  if (read(socket, &port, sizeof port) != sizeof port) return;  // the caller failed, and has said so
  pin(arguments.callee_cpu);
  const auto agent = join("callee", port, arguments);
  agent->serve("noop", [](Request, Reply reply) { reply.send({}); });
  char byte = 0;
  if (write(socket, &byte, 1) != 1) return;
  while (read(socket, &byte, 1) > 0) {
  }
  agent->leave();
}

void call(int socket, const SampleArguments& arguments) {
  const auto store = value_or_die("TcpStoreServer::listen", TcpStoreServer::listen("127.0.0.1", 0, ""));
  const std::uint16_t port = store->port();
  if (write(socket, &port, sizeof port) != sizeof port) die("write", Status(Code::internal, "the callee is gone"));
  pin(arguments.caller_cpu);
  const auto agent = join("caller", port, arguments);
  char serving = 0;
  if (read(socket, &serving, 1) != 1) die("read", Status(Code::internal, "the callee is gone"));
  const auto once = [&] {
    Call call = agent->call("callee", "noop", {});
    call.wait();
    if (const auto reply = call.take(); !reply) die("call", reply.status());
  };
  once();
  print(repeat(once, arguments.seconds));
  agent->leave();
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"ring", "unix", "tcp"});
  return run_in_two_processes(
      unix_sockets(), [&](int socket) { serve(socket, arguments); },
      [&](int socket, pid_t /*child*/) { call(socket, arguments); });
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
