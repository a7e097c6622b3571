/// A forked child at the other end of a link. A test may kill it.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <functional>
#include <utility>

#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {

/// A child process that runs `life` on the other set of sockets. The value that `life` returns becomes its exit status.
/// The destructor kills the child if it still runs, and the system does so if the thread that forked it ends.
class Child {
 public:
  enum class Begins : std::uint8_t { at_once, at_start };

  /// Forks. Call it before this process has any other thread. The child closes `parents`, the parent's sockets: if it
  /// kept them open, it could not see the parent end. With Begins::at_start, it sleeps until start().
  Child(WireEnd::Sockets sockets, WireEnd::Sockets& parents, const std::function<int(WireEnd::Sockets)>& life,
        Begins begins = Begins::at_once)
      : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    parents = {};
    if (begins == Begins::at_start) ::raise(SIGSTOP);
    ::_exit(life(std::move(sockets)));
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Wakes the child, once it sleeps.
  void start() {
    int status = 0;
    if (pid_ > 0 && ::waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status)) ::kill(pid_, SIGCONT);
  }
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
