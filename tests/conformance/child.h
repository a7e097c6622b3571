/// A forked child at the other end of a link. A test may kill it.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <utility>

#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {

/// A child process that runs `life` on the other set of sockets. The value that `life` returns becomes its exit status.
/// The destructor kills the child if it still runs.
class Child {
 public:
  /// Forks. Call it before this process has any other thread. The child closes `parents`, the parent's sockets: if it
  /// kept them open, it could not see the parent end.
  Child(WireEnd::Sockets sockets, WireEnd::Sockets& parents, const std::function<int(WireEnd::Sockets)>& life)
      : pid_(::fork()) {
    if (pid_ != 0) return;
    parents = {};
    ::_exit(life(std::move(sockets)));
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Kills the child and waits until it is dead.
  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    wait();
  }
  /// Waits for the child to end. Returns its exit status, or -1 if a signal ended it or if it was waited for before.
  int wait() {
    int status = -1;
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

}  // namespace tensorferry::conformance
