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
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "agent/fair_queue.h"
#include "agent/transport/doorbell.h"
#include "agent/transport/spin.h"
#include "base/file_descriptor.h"
#include "base/fork.h"
#include "base/function.h"

namespace tensorferry {

class Executor;

/// The reader of one descriptor in the pool's epoll set. The leader calls it. Its calls may overlap when the lead
/// changes, or when a blocking one is armed again before it has returned: implementations must allow that.
class Readable {
 public:
  virtual ~Readable() = default;
  /// Runs when the descriptor is readable or has ended. Reads the available bytes and submits jobs for them. Must not
  /// block unless it was added as Watch::blocking.
  virtual void on_readable() = 0;
};

/// A ring that the pool's threads poll, because its requests (or answers) come through memory instead of a descriptor.
/// Thread-safe. The pool may still call it for a moment after its removal.
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  /// Returns whether the ring has no entry. The writer rings the pool's doorbell after it has put an entry in.
  [[nodiscard]] virtual bool empty() const = 0;
  /// Returns whether the front entry needs the executor. A hint; the pool asks only if the ring is not empty.
  [[nodiscard]] virtual bool needs_executor() = 0;
  /// Takes the front entry and submits a job for it; must not block. False: another thread has taken it.
  virtual bool serve_one() = 0;
  /// Returns the CPU on which the writer ran when it put in the last request that was taken; -1: not known.
  [[nodiscard]] virtual int peer_cpu() const { return -1; }
};

class Pool final : public std::enable_shared_from_this<Pool> {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    int least = 2;
    int most = 1024;  // handlers that run and do not wait for a peer; other threads read, dial and complete calls
    std::chrono::milliseconds idle{5000};  // threads beyond `least` end after they were not needed for this long
  };
  enum class Watch : std::uint8_t {
    always,    // level-triggered: reported until the bytes have been read; after disarm() only a full end is reported
    closing,   // edge-triggered: reported when the peer closes; between arm() and disarm() also when bytes come
    blocking,  // reported once per arm(), the first time armed by add(); a thread that does not lead runs on_readable,
               // which may therefore take long
  };

  /// `kick` starts the reactor's tick, which calls tick() about every millisecond while `busy()`.
  Pool(Limits limits, std::shared_ptr<Executor> executor, std::function<void()> kick);
  ~Pool();
  void start();

  /// Keeps `readable` until remove(). The descriptor must stay open until then.
  void add(int fd, std::shared_ptr<Readable> readable, Watch watch);
  void arm(int fd);
  void disarm(int fd);
  void remove(int fd);

  /// Adds a ring. The pool serves all rings in turn, one request each.
  void add(std::shared_ptr<RequestSource> source);
  void remove(const RequestSource* source);
  /// Returns the doorbell at which this pool's threads sleep.
  [[nodiscard]] Doorbell& doorbell() noexcept { return *doorbell_; }
  using Sources = std::vector<std::shared_ptr<RequestSource>>;
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
  [[nodiscard]] bool caught_up() const noexcept { return waiting_.load(std::memory_order_relaxed) == 0; }
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
  /// requests wait for slow handlers at two ticks running. Called by the reactor thread.
  void tick();
  /// Returns whether jobs wait or run.
  [[nodiscard]] bool busy() const noexcept { return busy_.load(std::memory_order_seq_cst) != 0; }
  [[nodiscard]] int threads() const;

  /// Stops taking jobs. Jobs that were taken still run; stop() waits for the threads up to `patience`. A thread ends
  /// when no job is left for it; the last one closes the pool's descriptors.
  void stop(std::chrono::milliseconds patience);
  [[nodiscard]] bool on_pool_thread() const noexcept;

 private:
  struct Job {
    UniqueFunction<void()> run;
    bool takes_long = false;  // the thread that runs it resigns first
    bool with_executor = false;
    bool handler = false;
    const void* sender = nullptr;  // of a handler's request
    std::optional<Clock::time_point> deadline = std::nullopt;
  };
  struct Queue {
    std::deque<Job> jobs;  // taken first
    FairQueue<Job> handlers;
  };
  struct Worker {
    void* runtime = nullptr;  // Executor::attach's
    bool attached = false;
    bool entered = false;
    bool polling = false;  // counted by the doorbell
    bool serving = false;  // inside serve_one()
    bool handling = false;
    int waits = 0;  // about_to_block() without unblocked()
    Job direct;     // submitted inside serve_one(): this thread runs it next
    std::shared_ptr<const Sources>
        sources;  // no_sources_ while the thread sleeps, so that it does not keep removed rings and their memory
    std::size_t turn = 0;
  };
  struct Entry {
    std::shared_ptr<Readable> readable;
    Watch watch;
  };

  void main();
  bool next(Worker& self, std::unique_lock<std::mutex>& lock);
  void poll(std::unique_lock<std::mutex>& lock);
  void report(std::uint64_t key, std::unique_lock<std::mutex>& lock);
  void run(Worker& self, Queue& queue, std::unique_lock<std::mutex>& lock);
  void run(Worker& self, Job job, std::unique_lock<std::mutex>& lock);
  void collect(Worker& self, std::unique_lock<std::mutex>& lock);
  bool serve(Worker& self, std::unique_lock<std::mutex>& lock);
  bool serve(Worker& self, RequestSource& source, std::unique_lock<std::mutex>& lock);
  bool park(Worker& self, std::unique_lock<std::mutex>& lock);
  bool leave_as_surplus();
  void begin_polling(Worker& self);
  void end_polling(Worker& self);
  void enter(Worker& self);
  bool keeps_executor(Worker& self);
  void leave(Worker& self);
  bool push(Job job, bool wake);
  void put(Job job);
  [[nodiscard]] std::size_t startable(const Queue& queue) const;
  void count_waiting();
  void start_expired();
  template <class Wanted>
  void start_if(const Wanted& wanted);
  [[nodiscard]] bool place_free() const { return handlers_ < limits_.most; }
  [[nodiscard]] std::size_t jobs_without_thread() const;
  bool short_of_threads(std::uint64_t finished);
  void wake_one();
  void resign(Worker& self);
  void watch(int fd, Watch kind, bool armed, bool fresh);

  const std::uint32_t forks_ = forks();
  const Limits limits_;
  const std::shared_ptr<Executor> executor_;
  const std::function<void()> kick_;
  FileDescriptor epoll_;
  FileDescriptor wake_;  // eventfd: wakes the leader out of epoll_wait
  const std::shared_ptr<Doorbell> doorbell_ = Doorbell::create();
  Spin spin_;
  std::atomic<bool> executor_is_dear_{false};  // the last enter() took longer than executor_is_dear_from
  std::atomic<bool> entering_{false};          // a thread is entering the executor, and will take work that needs it

  const std::shared_ptr<const Sources> no_sources_ = std::make_shared<Sources>();
  mutable std::mutex mutex_;  // guards everything below but the atomics
  std::shared_ptr<const Sources> sources_ = std::make_shared<Sources>();
  std::condition_variable ended_;
  Queue plain_;
  Queue in_executor_;
  int handlers_ = 0;  // running handlers, without those that are blocked
  int blocked_ = 0;   // threads between about_to_block() and unblocked(), and those of jobs that take long
  std::unordered_map<int, Entry> entries_;
  Worker* leader_ = nullptr;
  bool polling_ = false;  // the leader is inside epoll_wait
  int threads_ = 0;
  int parked_ = 0;  // threads that wait for work, at the doorbell or on their way there
  int wakes_ = 0;   // wake-ups sent to parked threads that have not left the doorbell yet
  int spare_ = 0;   // the fewest threads parked at a time since `spare_since_`: so many were not needed
  Clock::time_point spare_since_;
  int surplus_ = 0;   // threads that may end, from `spare_` of the last `Limits::idle` period
  int starting_ = 0;  // threads that were created but have not polled for work yet
  int ending_ = 0;    // threads that have left the work loop but have not ended
  std::uint64_t finished_ = 0;
  std::uint64_t finished_at_tick_ = 0;
  bool was_slow_ = false;  // at the last tick, see short_of_threads()
  Clock::time_point looked_for_expired_;
  bool stopping_ = false;
  std::atomic<int> busy_{0};             // jobs that wait or run
  std::atomic<std::size_t> waiting_{0};  // jobs that wait for a thread, without handlers that wait for a place
};

}  // namespace tensorferry
