#include "base/threads.h"

#include <pthread.h>
#include <sched.h>

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

void preempt_no_thread() noexcept {
  int policy = 0;
  sched_param parameters{};
  if (::pthread_getschedparam(::pthread_self(), &policy, &parameters) != 0 || policy != SCHED_OTHER) return;
  preempts_none = set_policy(SCHED_BATCH);
}

}  // namespace tensorferry
