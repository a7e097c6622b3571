/// The floor of tensors on one host: bytes there and back by one process_vm_readv each, by one thread, from and into
/// memory that both processes have touched before. A byte over a socket says whose turn it is.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "benchmarks/samples.h"

namespace tensorferry::benchmarks {
namespace {

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(errno == EPERM || errno == ENOSYS ? not_here : 1);
}

/// Another process's memory: the address is the same in both, for one is a fork of the other.
void read_peer(pid_t peer, std::vector<char>& into, const std::vector<char>& from) {
  for (std::size_t done = 0; done < into.size();) {
    iovec local{into.data() + done, into.size() - done};
    iovec remote{const_cast<char*>(from.data()) + done, into.size() - done};
    const ssize_t n = process_vm_readv(peer, &local, 1, &remote, 1, 0);
    if (n <= 0) die("process_vm_readv");
    done += static_cast<std::size_t>(n);
  }
}

bool receive_turn(int socket) {
  char byte = 0;
  return read(socket, &byte, 1) == 1;
}

void give_turn(int socket) {
  const char byte = 0;
  if (write(socket, &byte, 1) != 1) die("write");
}

int main(int argc, char** argv) {
  const SampleArguments arguments = parse(argc, argv, {});
  if (arguments.bytes == 0) usage(argv[0]);
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // where Yama is on, a child may not read its parent otherwise
  const pid_t caller = getpid();
  std::vector<char> sent(arguments.bytes), received(arguments.bytes);
  const auto fill = [&] {  // pages of this process's own, not those of before the fork
    std::fill(sent.begin(), sent.end(), 'x');
    std::fill(received.begin(), received.end(), 'y');
  };
  const auto serve = [&](int socket) {
    fill();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    pin(arguments.callee_cpu);
    while (receive_turn(socket)) {
      read_peer(caller, received, sent);
      give_turn(socket);
    }
  };
  const auto call = [&](int socket, pid_t child) {
    fill();
    pin(arguments.caller_cpu);
    print(repeat(
        [&] {
          give_turn(socket);
          if (!receive_turn(socket)) std::exit(not_here);  // the child has said why
          read_peer(child, received, received);
        },
        arguments.seconds));
  };
  return run_in_two_processes(unix_sockets(), serve, call);
}

}  // namespace
}  // namespace tensorferry::benchmarks

int main(int argc, char** argv) { return tensorferry::benchmarks::main(argc, argv); }
