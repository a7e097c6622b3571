/// The floor of tensors over sockets: `bytes` bytes there and as many back between two processes, by blocking writes
/// and reads of whole tensors, from and into memory that both have touched before. No RPC over one socket of that kind
/// can be faster than this, unless it copies less.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "benchmarks/samples.h"
#include "benchmarks/socket_ends.h"

namespace tensorferry::benchmarks {
namespace {

/// False at the end of the stream.
bool receive(int socket, std::vector<char>& tensor) {
  for (std::size_t had = 0; had < tensor.size();) {
    const ssize_t n = read(socket, tensor.data() + had, tensor.size() - had);
    if (n == 0) return false;
    if (n < 0) die("read");
    had += static_cast<std::size_t>(n);
  }
  return true;
}

void send(int socket, const std::vector<char>& tensor) {
  for (std::size_t sent = 0; sent < tensor.size();) {
    const ssize_t n = write(socket, tensor.data() + sent, tensor.size() - sent);
    if (n < 0) die("write");
    sent += static_cast<std::size_t>(n);
  }
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix", "tcp"});
  if (arguments.bytes == 0) usage(argv[0]);
  const Ends ends = connected_ends(arguments.transport);
  signal(SIGPIPE, SIG_IGN);
  const pid_t child = fork();
  if (child < 0) die("fork");
  std::vector<char> sent(arguments.bytes, 'x'), received(arguments.bytes, 'y');
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends.caller);
    pin(arguments.callee_cpu);
    while (receive(ends.callee, received)) send(ends.callee, received);
    return 0;
  }
  close(ends.callee);
  pin(arguments.caller_cpu);
  print(repeat(
      [&] {
        send(ends.caller, sent);
        if (!receive(ends.caller, received)) die("the other process ended");
      },
      arguments.seconds));
  close(ends.caller);
  waitpid(child, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
