/// The floor: 64 bytes there and 64 bytes back between two processes by blocking reads and writes, and nothing else.
/// No RPC over the same kind of socket can be faster than this.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "benchmarks/samples.h"

namespace tensorferry::benchmarks {
namespace {

using Message = std::array<char, 64>;

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

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

struct Ends {
  int caller;
  int callee;
};

Ends unix_sockets() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) die("socketpair");
  return {ends[0], ends[1]};
}

Ends tcp_sockets() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, length) != 0 || listen(listener, 1) != 0) die("listen");
  if (getsockname(listener, generic, &length) != 0) die("getsockname");
  const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(caller, generic, length) != 0) die("connect");
  const int callee = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (callee < 0) die("accept");
  const int on = 1;
  for (const int end : {caller, callee}) setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  close(listener);
  return {caller, callee};
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {"unix", "tcp"});
  const Ends ends = arguments.transport == "tcp" ? tcp_sockets() : unix_sockets();
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
