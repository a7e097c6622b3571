/// Children of a test's process that has threads.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "tests/agent/patience.h"

namespace tensorferry::testing {

/// The exit status of a child if the system forbids what the test needs.
inline constexpr int not_allowed = 77;

/// Waits until the child ends, and returns its exit status. If it still runs at the end of the time, kills it and
/// returns -1.
inline int end_of(pid_t child, std::chrono::seconds within) {
  int status = 0;
  const bool ended = eventually([&] { return ::waitpid(child, &status, WNOHANG) == child; }, within);
  if (!ended) {
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Forks until a child ends by itself, and returns its exit status, or -1 if none does. `body` is called in each child.
///
/// There is one child, except under a sanitizer: AddressSanitizer's allocator (clang 16) does nothing about forks, so a
/// child waits for ever if another thread was inside that allocator at the fork.
template <class Body>
int forked(Body body) {
  int status = -1;
  for (int left = under_sanitizer ? 4 : 1; status == -1 && left > 0; --left) {
    const auto child = ::fork();
    if (child == 0) {
      body();
      return 0;
    }
    status = end_of(child, std::chrono::seconds(under_sanitizer ? 10 : 30));
  }
  return status;
}

/// Runs `life` in a forked child, and returns its exit status, or -1 if the child does not end.
template <class Life>
int in_child(Life life) {
  return forked([&] { ::_exit(life()); });
}

}  // namespace tensorferry::testing
