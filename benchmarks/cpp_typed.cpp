/// Calls by the typed API of C++ programs between two processes: C++ to C++, C++ to Python, Python to C++.

#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "benchmarks/samples.h"
#include "tensorferry/agent.h"

namespace tensorferry::benchmarks {
namespace {

std::shared_ptr<Agent> join(const char* name, std::uint16_t port, const SampleArguments& arguments) {
  return Agent::join({.name = name,
                      .store = connect_store("127.0.0.1", port),
                      .unix_sockets = arguments.transport != "tcp",
                      .shared_memory = arguments.transport == "ring",
                      .prepare = [](Agent& self) {
                        self.serve("empty", [] {});
                        self.serve("text", [](std::string text) { return text; });
                        self.serve("tensor", [](Tensor tensor) { return tensor; });
                      }});
}

/// One call after another, or of `callers` at once.
void call(Agent& agent, const SampleArguments& arguments) {
  const std::string text(64, 'x');
  const auto tensor =
      Tensor::from_vector(std::vector<float>(arguments.kind == "tensor" ? arguments.bytes / sizeof(float) : 1));
  const auto once = [&] {
    if (arguments.kind == "empty") return agent.call("callee", "empty").get();
    if (arguments.kind == "tensor") return static_cast<void>(agent.call<Tensor>("callee", "tensor", tensor).get());
    static_cast<void>(agent.call<std::string>("callee", "text", text).get());
  };
  once();
  print(arguments.callers == 1 ? repeat(once, arguments.seconds)
                               : repeat_at_once(once, arguments.callers, arguments.seconds));
}

/// What the other process does: it gets the store's port through the socket, and sends a byte when it is there.
void serve(int socket, const SampleArguments& arguments) {
  std::uint16_t port = 0;
  if (read(socket, &port, sizeof port) != sizeof port) return;  // this side's parent failed, and has said so
  pin(arguments.callee_cpu);
  const auto agent = join("callee", port, arguments);
  char byte = 0;
  if (write(socket, &byte, 1) != 1) return;
  while (read(socket, &byte, 1) > 0) {
  }
}

/// The other process is Python: benchmarks/cpp_partner.py.
[[noreturn]] void become_python(int socket, const SampleArguments& arguments) {
  std::uint16_t port = 0;
  if (read(socket, &port, sizeof port) != sizeof port) std::exit(1);
  const bool calls = arguments.peer == "python-calls";
  pin(calls ? arguments.caller_cpu : arguments.callee_cpu);
  dup2(socket, STDIN_FILENO);  // which ends it when it closes
  execlp(arguments.python.c_str(), arguments.python.c_str(), "-m", "benchmarks.cpp_partner", calls ? "call" : "serve",
         std::to_string(port).c_str(), arguments.kind.c_str(), std::to_string(arguments.bytes).c_str(),
         std::to_string(arguments.seconds).c_str(), nullptr);
  std::perror(arguments.python.c_str());
  std::exit(1);
}

void run(int socket, pid_t child, const SampleArguments& arguments) {
  const StoreServer store;
  const std::uint16_t port = store.port();
  const bool python_calls = arguments.peer == "python-calls";
  if (!python_calls) pin(arguments.caller_cpu);
  if (python_calls) pin(arguments.callee_cpu);
  const auto agent = join(python_calls ? "callee" : "caller", port, arguments);
  if (write(socket, &port, sizeof port) != sizeof port) throw InternalError("the other process is gone");
  if (python_calls) {  // and prints; run_in_two_processes() looks at how it ended
    siginfo_t ended;
    waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT);
    return;
  }
  if (arguments.peer == "cpp") {
    char serving = 0;
    if (read(socket, &serving, 1) != 1) throw InternalError("the other process is gone");
  } else {
    const CallOptions patiently{.timeout = std::chrono::seconds(60), .wait_for_ready = true};
    agent->call_with(patiently, "callee", "empty").get();
  }
  call(*agent, arguments);
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"ring", "unix", "tcp"});
  const auto callee = [&](int socket) {
    if (arguments.peer != "cpp") become_python(socket, arguments);
    serve(socket, arguments);
  };
  try {
    return run_in_two_processes(unix_sockets(), callee,
                                [&](int socket, pid_t child) { run(socket, child, arguments); });
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
