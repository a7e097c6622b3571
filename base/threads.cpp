#include "base/threads.h"

#include <pthread.h>
#include <sched.h>

#include <exception>

namespace tensorferry {
namespace {

thread_local bool preempts_none = false;

bool set_policy(int policy) noexcept {
  const sched_param none{};
  return ::pthread_setschedparam(::pthread_self(), policy, &none) == 0;
}

}  // namespace

ThreadStart::ThreadStart() noexcept {
  sigset_t blocked;
  ::sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&blocked, fault);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  if (preempts_none) (void)set_policy(SCHED_OTHER);  // a new thread inherits the policy
}

ThreadStart::~ThreadStart() {
  if (preempts_none) (void)set_policy(SCHED_BATCH);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void take_thread_locals() noexcept {
  // Each library has one block of such variables for each thread, so one variable stands for all of them.
  *const_cast<volatile bool*>(&preempts_none) = preempts_none;
  [[maybe_unused]] volatile int kept = std::uncaught_exceptions();  // a pure function: an unused result is no use
}

void preempt_no_thread() noexcept {
  int policy = 0;
  sched_param parameters{};
  if (::pthread_getschedparam(::pthread_self(), &policy, &parameters) != 0 || policy != SCHED_OTHER) return;
  preempts_none = set_policy(SCHED_BATCH);
}

}  // namespace tensorferry
