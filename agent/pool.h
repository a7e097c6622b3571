/// The threads that read and run: one of them waits for sockets, the others for work; none hands a request to another
/// unless it has to.
///
/// The thread that finds a request runs it ("leader/follower"): it stays the leader while its handlers are short. The
/// housekeeping tick promotes another thread when a handler runs longer than a tick, and a handler that is about to
/// block says so itself. Threads are added while handlers block, and end when idle.
///
/// One thread leads: it waits for descriptors. The others sleep at the agent's doorbell, where peers on this host wake
/// them for requests in shared memory, and this process for jobs. A thread is counted as polling while it is certain to
/// look at the rings once more before it sleeps or runs anything; when it stops it looks, and wakes another for what it
/// sees (doorbell.h says why nothing is lost).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "agent/transport/doorbell.h"
#include "agent/transport/spin.h"
#include "channels/file_descriptor.h"
#include "channels/fork.h"
#include "channels/function.h"

namespace tensorferry {

class Executor;

/// Something with a descriptor that the leader reads. Called by one thread at a time, but for `blocking` ones.
class Readable {
 public:
  virtual ~Readable() = default;
  /// The descriptor can be read, or has ended. Reads what is there and submits what it finds as jobs; must not block,
  /// unless it was added as `blocking`.
  virtual void on_readable() = 0;
};

/// Requests that come through memory instead of a descriptor. Thread-safe; outlives its removal for a moment.
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  /// Whoever puts something in rings the pool's doorbell afterwards.
  [[nodiscard]] virtual bool empty() const = 0;
  /// What is in front needs the executor; a hint, asked where it is not empty.
  [[nodiscard]] virtual bool needs_executor() = 0;
  /// Takes what is in front and submits what is to be done about it; must not block. False: another thread was faster.
  virtual bool serve_one() = 0;
  /// The CPU from which its last request came; -1: not known.
  [[nodiscard]] virtual int peer_cpu() const { return -1; }
};

class Pool final : public std::enable_shared_from_this<Pool> {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    int least = 2;
    int most = 1024;  // handlers at once; a few threads more read, dial and complete calls meanwhile
    std::chrono::milliseconds idle{5000};  // threads beyond `least` that were not needed for so long end
  };
  enum class Watch : std::uint8_t {
    always,    // level-triggered: reported until it has been read
    closing,   // reported when the peer closes; between arm() and disarm() also whenever bytes come
    blocking,  // reported once per arm(); another thread leads meanwhile, so on_readable may take long
  };

  /// `kick` makes the housekeeping tick run (it calls tick() about every millisecond while `busy()`).
  Pool(Limits limits, std::shared_ptr<Executor> executor, std::function<void()> kick);
  ~Pool();
  void start();

  /// `readable` is kept until remove(). The descriptor must stay open until then.
  void add(int fd, std::shared_ptr<Readable> readable, Watch watch);
  void arm(int fd);
  void disarm(int fd);
  void remove(int fd);

  /// Its requests are served in turn with those of the others.
  void add(std::shared_ptr<RequestSource> source);
  void remove(const RequestSource* source);
  /// Where this pool's threads sleep.
  [[nodiscard]] Doorbell& doorbell() noexcept { return *doorbell_; }
  using Sources = std::vector<std::shared_ptr<RequestSource>>;
  [[nodiscard]] std::shared_ptr<const Sources> sources() const;
  /// A request waits in one of them, and no thread is on its way to take it.
  [[nodiscard]] bool unattended(const Sources& sources) const;

  /// Runs `job` on a thread of the pool; `with_executor`: inside Executor::enter. Jobs start in order of submission
  /// (each kind), side by side. False: stopped; the job is dropped.
  bool submit(UniqueFunction<void()> job, bool with_executor = false);
  /// The same for a job that may block for as long as it likes: waits where `Limits::most` of them run.
  bool submit_handler(UniqueFunction<void()> job, bool with_executor = false);
  /// A job that may wait for a peer; runs beside the others. A job that forks must not return in the child.
  bool submit_long(UniqueFunction<void()> job);
  /// No job waits for a thread (other than handlers beyond `Limits::most`).
  [[nodiscard]] bool caught_up() const noexcept { return waiting_.load(std::memory_order_relaxed) == 0; }
  /// From inside a job: this thread is going to wait, so another must read. No-op on other threads.
  void about_to_block();
  /// As many handlers run as may, as many wait, and for 50 ms none has begun or ended (a burst of short ones is no
  /// reason): new requests should be refused.
  [[nodiscard]] bool saturated() const;

  void tick();
  [[nodiscard]] bool busy() const noexcept { return busy_.load(std::memory_order_seq_cst) != 0; }
  [[nodiscard]] int threads() const;

  /// No job is taken any more. Those that were still run; waits for them up to `patience`. Threads end when nothing is
  /// left to run; the last one closes the pool's descriptors.
  void stop(std::chrono::milliseconds patience);
  [[nodiscard]] bool on_pool_thread() const noexcept;

 private:
  struct Job {
    UniqueFunction<void()> run;
    bool takes_long = false;  // the thread that runs it resigns first
    bool with_executor = false;
    bool handler = false;
  };
  struct Worker {
    void* runtime = nullptr;  // Executor::attach's
    bool attached = false;
    bool entered = false;
    bool polling = false;  // counted by the doorbell
    bool serving = false;  // inside serve_one(), which may leave what it submits here:
    Job direct;
    std::shared_ptr<const Sources>
        sources;  // no_sources_ while it sleeps: it would keep removed ones, and their memory
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
  void run(Worker& self, std::deque<Job>& queue, std::unique_lock<std::mutex>& lock);
  void run(Worker& self, Job job, std::unique_lock<std::mutex>& lock);
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
  [[nodiscard]] std::deque<Job>& queue_of(const Job& job) { return job.with_executor ? in_executor_ : plain_; }
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
  FileDescriptor wake_;  // eventfd: calls the leader out of epoll_wait
  const std::shared_ptr<Doorbell> doorbell_ = Doorbell::create();
  Spin spin_;
  std::atomic<bool> executor_is_dear_{false};  // it took long to enter it, last time
  std::atomic<bool> entering_{false};  // a thread waits for the executor, to run what needs it; changed under mutex_

  const std::shared_ptr<const Sources> no_sources_ = std::make_shared<Sources>();
  mutable std::mutex mutex_;  // guards all below
  std::shared_ptr<const Sources> sources_ = std::make_shared<Sources>();
  std::condition_variable ended_;
  std::deque<Job> plain_;
  std::deque<Job> in_executor_;
  std::deque<Job> held_;             // handlers that came to their turn while as many ran as may
  int handlers_ = 0;                 // that run
  Clock::time_point last_turnover_;  // one of them began or ended
  std::unordered_map<int, Entry> entries_;
  Worker* leader_ = nullptr;
  bool polling_ = false;  // the leader is inside epoll_wait
  int threads_ = 0;
  int parked_ = 0;  // threads that wait for work: at the doorbell, or on their way there
  int wakes_ = 0;   // of which so many have been woken
  int spare_ = 0;   // the fewest that were parked since `spare_since_`: fewer threads would have done
  Clock::time_point spare_since_;
  int surplus_ = 0;   // threads that may end, as the last look at `spare_` found
  int starting_ = 0;  // threads that have not come to look for work yet
  int ending_ = 0;    // threads that look for no more
  std::uint64_t finished_ = 0;
  std::uint64_t finished_at_tick_ = 0;
  bool was_slow_ = false;  // at the last tick, see short_of_threads()
  bool stopping_ = false;
  std::atomic<int> busy_{0};     // jobs that wait or run
  std::atomic<int> waiting_{0};  // of which wait
};

}  // namespace tensorferry
