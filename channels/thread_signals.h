/// Which signals reach threads of ours.
#pragma once

#include <pthread.h>

#include <csignal>

namespace tensorferry {

/// Blocks, in this thread and in those that it starts, all signals but those by which a thread is told of a fault of
/// its own: the others belong to the program's threads. Where a thread blocks faults too, whoever handles them
/// (Python's faulthandler, a sanitizer) is not asked, and the kernel ends the process without a word. Returns what was
/// blocked before.
inline sigset_t block_signals_of_others() noexcept {
  sigset_t set, before;
  ::sigfillset(&set);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&set, fault);
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
  return before;
}

}  // namespace tensorferry
