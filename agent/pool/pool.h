/// A leader/follower thread pool that reads requests from sockets and rings, and runs their handlers.
///
/// The thread that reads a request runs its handler; the pool hands it to another thread only if it must. One thread
/// leads: it sleeps in epoll for all descriptors. It stays the leader while its handlers are short. The reactor's
/// tick promotes another thread when a handler runs longer than a tick. A handler that is about to wait for a peer
/// calls about_to_block(), which hands the lead on at once. The pool adds threads while handlers block; surplus threads
/// end.
///
/// At most `Limits::most` handlers run at once. The others wait, and start in turn by sender. A handler that waits for
/// a peer holds no place. So a call that the peer makes back always finds one, however deep the calls are nested. The
/// pool has a thread more for each job that waits for a peer, so the jobs of stopped peers do not use up the threads.
///
/// The other threads sleep at the agent's doorbell. Peers on this host wake them for requests in rings, and this
/// process wakes them for jobs. The doorbell counts a thread as polling as long as the thread is certain to poll the
/// rings again before it sleeps or runs a job. A thread that stops polling polls once more, and wakes another thread if
/// it sees a request. doorbell.h explains why no wake-up is lost.
///
/// The pool joins five parts: the descriptors that the leader watches (ReadableSet), the rings (PolledRings), the jobs
/// (PoolJobs), the number of threads (PoolThreads), and the way into the executor (ExecutorUse).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "agent/pool/executor_use.h"
#include "agent/pool/pace.h"
#include "agent/pool/polled_rings.h"
#include "agent/pool/pool_jobs.h"
#include "agent/pool/pool_threads.h"
#include "agent/pool/readable_set.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/function.h"

namespace tensorferry {

class Pool final : public std::enable_shared_from_this<Pool> {
 public:
  using Limits = PoolLimits;
  using Watch = ReadableSet::Watch;

  /// `kick` starts the reactor's tick, which calls tick() as often as that wants.
  Pool(Limits limits, std::shared_ptr<Executor> executor, std::function<void()> kick, Clock clock = {});
  ~Pool();
  void start();

  /// See ReadableSet. A stopped pool adds nothing.
  void add(int fd, std::shared_ptr<Readable> readable, Watch watch);
  void arm(int fd);
  void disarm(int fd);
  void remove(int fd);

  /// Adds a ring. The pool serves all rings in turn, one request each.
  void add(std::shared_ptr<RequestSource> source);
  void remove(const RequestSource* source);
  /// Returns the doorbell at which this pool's threads sleep.
  [[nodiscard]] Doorbell& doorbell() noexcept { return rings_.doorbell(); }
  using Sources = PolledRings::List;
  [[nodiscard]] std::shared_ptr<const Sources> sources() const;
  /// Returns whether a request waits in one of `sources` and no thread is on its way to take it.
  [[nodiscard]] bool unattended(const Sources& sources) const;

  /// Runs `job` on a thread of the pool, inside the executor if `with_executor`. Jobs with the executor start in the
  /// order of submission, and so do jobs without it; started jobs run concurrently. False: the pool has been stopped,
  /// and drops the job.
  bool submit(UniqueFunction<void()> job, bool with_executor = false);
  /// Like submit(), for a handler, which may block without bound. The job waits while `Limits::most` handlers run.
  /// Waiting handlers of different `sender`s start in turn, those of one sender in the order of submission.
  /// One whose `deadline` has passed needs no place: it starts soon, to be answered with an error.
  bool submit_handler(UniqueFunction<void()> job, bool with_executor = false, const void* sender = nullptr,
                      std::optional<Clock::time_point> deadline = std::nullopt);
  /// Lets no waiting handler of `sender` start until as many resume(); both may be called under locks.
  void pause(const void* sender);
  void resume(const void* sender);
  /// Starts the waiting handlers of `sender` without places for them. They are to end at once: their link has ended.
  void start_waiting(const void* sender);
  /// Like submit(), for a job that may wait for a peer. The thread that runs it gives the lead up first, and another
  /// thread is woken. A job that forks must not return in the child (this holds for every job).
  bool submit_long(UniqueFunction<void()> job);
  /// Returns whether no job waits for a thread (apart from handlers beyond `Limits::most`).
  [[nodiscard]] bool caught_up() const noexcept { return jobs_.caught_up(); }
  /// Called inside a job whose thread is going to wait for a peer: hands the lead to another thread, or wakes one for
  /// waiting jobs. If the job is a handler, gives its place to a waiting handler until unblocked(). Each call needs its
  /// unblocked(); calls may be nested. Does nothing on other threads.
  void about_to_block();
  /// The thread's wait has ended. The handler counts again, even if `Limits::most` others run by now.
  void unblocked();
  /// Returns the pool that the calling thread belongs to; null: none, also in a forked child.
  [[nodiscard]] static Pool* current() noexcept;
  /// Handlers that run, that may run at once, and that wait for a place.
  struct Load {
    std::uint32_t busy = 0, most = 0, waiting = 0;
  };
  [[nodiscard]] Load load() const;

  /// Promotes a new leader and wakes or adds threads, if no job has ended since the last tick. Adds a thread too if
  /// requests wait for slow handlers at two ticks running. If handlers run for long, sees to it that as many other
  /// threads wait for work as in an idle pool. Then it wants few ticks, because a thread that starts a job kicks.
  /// Called by the reactor thread.
  Pace tick();
  /// Runs one job, or else the readers of the descriptors that are ready, on the calling thread, for a pool without
  /// threads. False: there was nothing to do.
  bool run_one();
  /// Returns whether jobs wait or run.
  [[nodiscard]] bool busy() const noexcept { return jobs_.busy(); }
  [[nodiscard]] int threads() const;

  /// Stops taking jobs. Jobs that were taken still run; stop() waits for the threads up to `patience`. A thread ends
  /// when no job is left for it; the last one closes the pool's descriptors.
  void stop(std::chrono::milliseconds patience);
  [[nodiscard]] bool on_pool_thread() const noexcept;

 private:
  using Job = PoolJobs::Job;
  struct Worker {
    ExecutorUse::Hold executor;
    bool polling = false;  // counted by the doorbell
    bool serving = false;  // inside serve_one()
    bool handling = false;
    int waits = 0;                           // about_to_block() without unblocked()
    Job direct;                              // submitted inside serve_one(): this thread runs it next
    std::shared_ptr<const Sources> sources;  // those that this thread polls; none while it sleeps
    std::size_t turn = 0;
  };

  void main();
  bool next(Worker& self, std::unique_lock<std::mutex>& lock);
  void lead(Worker& self, std::unique_lock<std::mutex>& lock);
  void report(int fd, std::unique_lock<std::mutex>& lock);
  void run(Worker& self, Job job, std::unique_lock<std::mutex>& lock);
  void collect(Worker& self, std::unique_lock<std::mutex>& lock);
  bool serve(Worker& self, std::unique_lock<std::mutex>& lock);
  bool serve(Worker& self, RequestSource& source, std::unique_lock<std::mutex>& lock);
  bool park(Worker& self, std::unique_lock<std::mutex>& lock);
  void begin_polling(Worker& self);
  void end_polling(Worker& self);
  bool keeps_executor(Worker& self);
  bool push(Job&& job, bool wake);
  [[nodiscard]] std::size_t jobs_without_thread() const;
  bool short_of_threads(std::uint64_t finished);
  Pace look();
  void wake_one();
  void wake_for_jobs();
  void resign(Worker& self);

  const std::uint32_t forks_ = forks();
  const std::function<void()> kick_;
  const Clock clock_;
  ExecutorUse executor_;

  mutable std::mutex mutex_;  // guards the members below, except for what their classes say
  PolledRings rings_;
  ReadableSet readables_;
  PoolJobs jobs_;
  PoolThreads threads_;
  Worker* leader_ = nullptr;
  Worker driven_;          // the caller of run_one()
  bool was_slow_ = false;  // at the last tick, see short_of_threads()
  int quiet_ticks_ = 0;    // in a row at which no job had ended
  bool stopping_ = false;
  std::condition_variable ended_;  // a thread has
};

}  // namespace tensorferry
