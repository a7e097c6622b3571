/// The floor: 64 bytes there and 64 bytes back between two processes by blocking reads and writes, and nothing else.
/// No RPC over the same kind of socket can be faster than this.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "benchmarks/samples.h"
#include "benchmarks/socket_ends.h"

namespace tensorferry::benchmarks {
namespace {

using Message = std::array<char, 64>;

/// False at the end of the stream.
bool receive(int socket, Message& message) {
  std::size_t had = 0;
  while (had < message.size()) {
    const ssize_t n = read(socket, message.data() + had, message.size() - had);
    if (n == 0) return false;
    if (n < 0) die("read");
    had += static_cast<std::size_t>(n);
  }
  return true;
}

void send(int socket, const Message& message) {
  if (write(socket, message.data(), message.size()) != static_cast<ssize_t>(message.size())) die("write");
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix", "tcp"});
  const Ends ends = connected_ends(arguments.transport);
  const pid_t child = fork();
  if (child < 0) die("fork");
  Message message{};
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends.caller);
    pin(arguments.callee_cpu);
    while (receive(ends.callee, message)) send(ends.callee, message);
    return 0;
  }
  close(ends.callee);
  pin(arguments.caller_cpu);
  print(repeat(
      [&] {
        send(ends.caller, message);
        if (!receive(ends.caller, message)) die("the other process ended");
      },
      arguments.seconds));
  close(ends.caller);
  waitpid(child, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
