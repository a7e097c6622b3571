/// Signal masks of the threads that this library starts.
#pragma once

#include <pthread.h>

#include <csignal>

namespace tensorferry {

/// Blocks all signals in this thread and in the threads that it starts, because they belong to the program's threads.
/// Signals that report a fault of the thread itself stay open. If a thread blocked these too, their handlers (Python's
/// faulthandler, a sanitizer) would not run, and the kernel would end the process without a message. Returns the mask
/// from before the call.
inline sigset_t block_signals_of_others() noexcept {
  sigset_t set, before;
  ::sigfillset(&set);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&set, fault);
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
  return before;
}

}  // namespace tensorferry
