/// The threads that this library starts: the signals that they take, and whom they preempt.
#pragma once

#include <csignal>
#include <thread>
#include <utility>

namespace tensorferry {

/// While it lives, threads that the calling thread starts
/// - take no signals, because those belong to the program's threads. Signals that report a fault of the thread itself
///   stay open. If a thread blocked these too, their handlers (Python's faulthandler, a sanitizer) would not run, and
///   the kernel would end the process without a message.
/// - preempt other threads as the program's do, also if the calling thread preempts none.
class ThreadStart final {
 public:
  ThreadStart() noexcept;
  ~ThreadStart();
  ThreadStart(const ThreadStart&) = delete;
  ThreadStart& operator=(const ThreadStart&) = delete;

 private:
  sigset_t before_{};
};

/// Takes the memory of the calling thread's own variables, of this library and of the C++ runtime. glibc allocates it
/// at the first use in each thread, and ends the process if it cannot. Without this call the first use may be the
/// exception which says that memory has run out.
void take_thread_locals() noexcept;

/// Starts a thread as ThreadStart says. Throws std::system_error if the system gives none.
template <class Run>
std::thread start_thread(Run run) {
  const ThreadStart scope;
  return std::thread([run = std::move(run)]() mutable {
    take_thread_locals();
    run();
  });
}

/// Lets the calling thread wait for its turn when it wakes up (SCHED_BATCH), unless the program has chosen a scheduling
/// policy.
void preempt_no_thread() noexcept;

}  // namespace tensorferry
