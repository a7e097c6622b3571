// The signals and the scheduling of the threads that the library starts.
#include "base/threads.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

namespace tensorferry {
namespace {

int policy_here() {
  int policy = -1;
  sched_param ignored{};
  return ::pthread_getschedparam(::pthread_self(), &policy, &ignored) == 0 ? policy : -1;
}

bool blocks(int signal) {
  sigset_t set;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &set);
  return ::sigismember(&set, signal) == 1;
}

TEST(Threads, TakeNoSignalsButThoseOfTheirFaults) {
  bool program = false, fault = true;
  start_thread([&] {
    program = blocks(SIGINT) && blocks(SIGTERM) && blocks(SIGUSR1) && blocks(SIGCHLD);
    fault = blocks(SIGSEGV) || blocks(SIGBUS) || blocks(SIGFPE) || blocks(SIGILL) || blocks(SIGABRT);
  }).join();
  EXPECT_TRUE(program);
  EXPECT_FALSE(fault);
  EXPECT_FALSE(blocks(SIGUSR1)) << "the thread that starts them goes on as before";
}

TEST(Threads, OfAThreadThatPreemptsNonePreemptOthers) {
  if (policy_here() != SCHED_OTHER) GTEST_SKIP() << "this program was started with a scheduling policy";
  int own = -1, started = -1, afterwards = -1;
  start_thread([&] {
    preempt_no_thread();
    own = policy_here();
    start_thread([&] { started = policy_here(); }).join();
    afterwards = policy_here();
  }).join();
  EXPECT_EQ(own, SCHED_BATCH);
  EXPECT_EQ(started, SCHED_OTHER);
  EXPECT_EQ(afterwards, SCHED_BATCH);
}

TEST(Threads, KeepThePolicyThatTheProgramHasChosen) {
  if (policy_here() != SCHED_OTHER) GTEST_SKIP() << "this program was started with a scheduling policy";
  int own = -1, started = -1;
  std::thread([&] {
    const sched_param none{};
    ASSERT_EQ(::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &none), 0);
    preempt_no_thread();
    own = policy_here();
    start_thread([&] { started = policy_here(); }).join();
  }).join();
  EXPECT_EQ(own, SCHED_BATCH);
  EXPECT_EQ(started, SCHED_BATCH);
}

}  // namespace
}  // namespace tensorferry
