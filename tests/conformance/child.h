/// A forked child at the other end of a link, which a test may kill.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <utility>

#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {

/// A child that runs `life` on the other set of sockets, and whose exit status says what it saw. Killed at the latest
/// when the test lets go of it.
class Child {
 public:
  /// Fork before any thread is there. `parents`: what the child must not keep open, or nobody would see the parent end.
  Child(WireEnd::Sockets sockets, WireEnd::Sockets& parents, const std::function<int(WireEnd::Sockets)>& life)
      : pid_(::fork()) {
    if (pid_ != 0) return;
    parents = {};
    ::_exit(life(std::move(sockets)));
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Returns when it is dead.
  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    wait();
  }
  /// Its exit status; -1: killed, or waited for already.
  int wait() {
    int status = -1;
    if (pid_ > 0) ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

}  // namespace tensorferry::conformance
