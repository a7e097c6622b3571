#include "agent/pool/pool.h"

#include <openssl/crypto.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/threads.h"

namespace tensorferry {
namespace {

// The pool and worker that the calling thread belongs to.
thread_local Pool* current_pool = nullptr;
thread_local void* current_worker = nullptr;

constexpr int most_woken_per_tick = 8;
// Per running handler. If fewer end in a tick of 1 ms, each takes some 60 us or longer, as those that copy to GPUs do.
constexpr std::uint64_t few_in_a_tick = 16;
constexpr int ticks_until_quiet = 50;

/// Ends a forked child that has returned from the job in which it was forked: the child has none of the pool's threads
/// and must not use its locks.
[[noreturn]] void end_child() {
  log_warning(
      "a child process returned from the called function that forked it, and was terminated: end the child by "
      "os._exit()");
  ::_exit(EXIT_FAILURE);
}

/// Runs work of a link that ends its own calls and links when there is no memory: what it holds is destroyed, and a
/// Reply answers then.
template <class Work>
void run_or_drop(const Work& work) {
  out_of_memory::run_or(work, [] { log_warning("out of memory: work for a peer was dropped"); });
}

}  // namespace

Pool::Pool(Limits limits, std::shared_ptr<Executor> executor, std::function<void()> kick, Clock clock)
    : kick_(std::move(kick)),
      clock_(std::move(clock)),
      executor_(std::move(executor)),
      jobs_(limits.most),
      threads_(limits) {}

Pool::~Pool() = default;

void Pool::start() {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < threads_.limits().least; ++i) wake_one();
}

void Pool::add(int fd, std::shared_ptr<Readable> readable, Watch watch) {
  const std::lock_guard lock(mutex_);
  if (!stopping_) readables_.add(fd, std::move(readable), watch);
}

void Pool::arm(int fd) {
  const std::lock_guard lock(mutex_);
  readables_.arm(fd);
}

void Pool::disarm(int fd) {
  const std::lock_guard lock(mutex_);
  readables_.disarm(fd);
}

void Pool::remove(int fd) {
  std::shared_ptr<Readable> dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  dropped = readables_.remove(fd);
}

bool Pool::submit(UniqueFunction<void()> job, bool with_executor) {
  return push({.run = std::move(job), .with_executor = with_executor && executor_.exists()}, false);
}

bool Pool::submit_handler(UniqueFunction<void()> job, bool with_executor, const void* sender,
                          std::optional<Clock::time_point> deadline) {
  return push({.run = std::move(job),
               .with_executor = with_executor && executor_.exists(),
               .handler = true,
               .sender = sender,
               .deadline = deadline},
              false);
}

bool Pool::submit_long(UniqueFunction<void()> job) { return push({.run = std::move(job), .takes_long = true}, true); }

bool Pool::push(Job&& job, bool wake) {
  auto* worker = current_pool == this ? static_cast<Worker*>(current_worker) : nullptr;
  const bool serving = worker != nullptr && worker->serving;
  if (serving && !worker->direct.run && !job.takes_long && job.with_executor == worker->executor.entered) {
    worker->direct = std::move(job);  // the thread that took the request runs its job at once
    return true;
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    // The leader runs the jobs that it submits, after it returns from on_readable. A thread that serves a ring does the
    // same. Jobs from other threads need a thread.
    const bool by_leader = worker != nullptr && (serving || worker == leader_);
    const bool taken_care_of = by_leader || (job.with_executor && executor_.entering()) ||
                               (job.handler && !jobs_.place_free());  // the next free place takes it
    jobs_.add(std::move(job));
    if (wake || (!taken_care_of && threads_.any_parked()))
      wake_one();
    else if (!taken_care_of && readables_.waits())
      readables_.interrupt();
  }
  kick_();
  return true;
}

void Pool::about_to_block() {
  if (current_pool != this) return;
  const std::lock_guard lock(mutex_);
  auto& self = *static_cast<Worker*>(current_worker);
  if (++self.waits == 1) {
    threads_.block();
    if (self.handling) jobs_.free_place();
  }
  if (leader_ == &self)
    resign(self);
  else
    wake_for_jobs();
}

void Pool::unblocked() {
  if (current_pool != this) return;
  auto& self = *static_cast<Worker*>(current_worker);
  if (--self.waits != 0) return;
  const std::lock_guard lock(mutex_);
  threads_.unblock();
  if (self.handling) jobs_.retake_place();
}

Pool* Pool::current() noexcept {
  return current_pool != nullptr && current_pool->forks_ == forks() ? current_pool : nullptr;
}

void Pool::pause(const void* sender) {
  const std::lock_guard lock(mutex_);
  jobs_.pause(sender);
}

void Pool::resume(const void* sender) {
  const std::lock_guard lock(mutex_);
  jobs_.resume(sender);
  wake_for_jobs();
}

void Pool::start_waiting(const void* sender) {
  const std::lock_guard lock(mutex_);
  jobs_.start_waiting(sender);
  wake_for_jobs();
}

/// Returns the number of jobs that may start and that no thread is on its way to take. While a thread enters the
/// executor, jobs that need the executor do not count.
std::size_t Pool::jobs_without_thread() const {
  return jobs_.startable(false) + (executor_.entering() ? 0 : jobs_.startable(true));
}

void Pool::add(std::shared_ptr<RequestSource> source) {
  const std::lock_guard lock(mutex_);
  rings_.add(std::move(source));
  wake_one();  // requests may be there already
}

void Pool::remove(const RequestSource* source) {
  std::shared_ptr<const Sources> dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  dropped = rings_.remove(source);
}

std::shared_ptr<const Pool::Sources> Pool::sources() const {
  const std::lock_guard lock(mutex_);
  return rings_.all();
}

bool Pool::unattended(const Sources& sources) const {
  return std::any_of(sources.begin(), sources.end(), [this](const auto& source) {
    return !source->empty() && !(executor_.exists() && executor_.entering() && source->needs_executor());
  });
}

void Pool::begin_polling(Worker& self) {
  if (!std::exchange(self.polling, true)) rings_.doorbell().begin_polling();
}

/// Called before the thread sleeps or runs a job. A request that came while this thread counted as polling is seen by
/// this last poll, or by another polling thread.
void Pool::end_polling(Worker& self) {
  if (!std::exchange(self.polling, false)) return;
  rings_.doorbell().end_polling();
  if (unattended(*self.sources)) rings_.doorbell().ring();
}

Pool::Load Pool::load() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<std::uint32_t>(jobs_.running()), static_cast<std::uint32_t>(threads_.limits().most),
          static_cast<std::uint32_t>(jobs_.waiting())};
}

int Pool::threads() const {
  const std::lock_guard lock(mutex_);
  return threads_.count();
}

bool Pool::on_pool_thread() const noexcept { return current_pool == this; }

/// Returns whether requests or jobs wait, at this tick and the one before, for handlers that take longer than waking a
/// thread does. Such handlers probably sleep or wait for a GPU, so another thread could run the waiting work. One tick
/// alone says little.
bool Pool::short_of_threads(std::uint64_t finished) {
  const bool slow = threads_.may_add_for_speed() &&
                    finished < few_in_a_tick * static_cast<std::uint64_t>(jobs_.running()) &&
                    (jobs_without_thread() != 0 || unattended(*rings_.all()));
  return std::exchange(was_slow_, slow) && slow;
}

Pace Pool::tick() {
  const std::lock_guard lock(mutex_);
  const auto wanted = look();
  return busy() ? wanted : Pace::rest;
}

/// Also while the pool is not busy: the leader may be held up by a reader, which is no job.
Pace Pool::look() {
  const auto finished = jobs_.finished_since_last();
  quiet_ticks_ = finished == 0 ? quiet_ticks_ + 1 : 0;
  if (stopping_) return Pace::run;
  if (jobs_.start_expired(clock_.now())) wake_for_jobs();
  const bool more = short_of_threads(finished);
  if (finished != 0) {
    if (more) wake_one();
    return Pace::run;
  }
  // No job has ended for a tick, so every running job takes longer: other threads must read and take the waiting work.
  if (leader_ != nullptr && !readables_.waits()) leader_ = nullptr;
  auto needed = std::min<std::size_t>(jobs_without_thread() + (unattended(*rings_.all()) ? 1 : 0), most_woken_per_tick);
  if (leader_ == nullptr) needed = std::max<std::size_t>(needed, 1);
  if (needed == 0 && quiet_ticks_ > ticks_until_quiet && jobs_.waiting() == 0 && busy()) {
    if (rings_.all()->empty() || threads_.any_parked()) return Pace::stroll;
    needed = 1;  // else a request in a ring would wait for a tick
  }
  // Woken and starting threads count: on a busy machine a thread may take many ticks to run.
  for (auto coming = threads_.coming(); coming < static_cast<int>(needed); ++coming) wake_one();
  return Pace::run;
}

void Pool::stop(std::chrono::milliseconds patience) {
  std::unordered_map<int, ReadableSet::Entry> dropped;  // destroyed after the lock is released
  std::unique_lock lock(mutex_);
  if (!stopping_) {
    // All existing threads may be stuck in handlers, and the jobs that were taken must still run.
    const auto left = std::min<std::size_t>(jobs_without_thread(), most_woken_per_tick);
    for (std::size_t i = 0; i < left; ++i) wake_one();
  }
  stopping_ = true;
  dropped = readables_.clear();
  rings_.doorbell().wake_all();
  readables_.interrupt();
  if (!threads_.limits().threads) {
    lock.unlock();
    while (run_one()) {
    }
    return;
  }
  const int mine = on_pool_thread() ? 1 : 0;
  clock_.wait_for(ended_, lock, patience, [&] { return threads_.count() <= mine; });
  lock.unlock();
}

/// Wakes a parked thread, or starts a new one. Under mutex_.
void Pool::wake_one() {
  if (stopping_ || !threads_.limits().threads) return;
  if (threads_.wake()) return rings_.doorbell().wake();
  if (!threads_.start()) return;
  try {
    start_thread([pool = shared_from_this()] { pool->main(); }).detach();
  } catch (const std::system_error&) {
    threads_.start_failed();  // a running thread takes the work later
  } catch (const std::bad_alloc&) {
    threads_.start_failed();
  }
}

/// Does so if jobs may start that no thread is on its way to take. Under mutex_.
void Pool::wake_for_jobs() {
  if (jobs_without_thread() != 0) wake_one();
}

void Pool::resign(Worker& self) {
  if (leader_ == &self) leader_ = nullptr;
  wake_one();
}

void Pool::main() {
  ::pthread_setname_np(::pthread_self(), "tf-pool");
  Worker self;
  current_pool = this;
  current_worker = &self;
  std::unique_lock lock(mutex_);
  threads_.started();
  bool more = true;
  while (more) {
    run_or_drop([&] { more = next(self, lock); });
    if (!lock.owns_lock()) lock.lock();
  }
  if (leader_ == &self) leader_ = nullptr;
  threads_.ending();
  lock.unlock();
  end_polling(self);
  if (unattended(*sources())) rings_.doorbell().ring();  // a ring may have been added since this thread last polled
  executor_.leave(self.executor);
  executor_.detach(self.executor);
  current_pool = nullptr;
  // Frees OpenSSL's memory of this thread now, while stop() still waits for it: nothing joins a detached thread.
  ::OPENSSL_thread_stop();
  lock.lock();
  threads_.ended();
  if (stopping_ && threads_.count() == 0) readables_.close();
  ended_.notify_all();
}

bool Pool::run_one() {
  auto* const pool_before = std::exchange(current_pool, this);
  auto* const worker_before = std::exchange(current_worker, &driven_);
  bool any = true;
  {
    std::unique_lock lock(mutex_);
    leader_ = &driven_;
    driven_.sources = rings_.none();
    if (jobs_.startable(false) != 0) {
      run_or_drop([&] { run(driven_, jobs_.take(false), lock); });
    } else {
      const auto ready = readables_.poll();
      any = ready.count != 0 && !stopping_;
      for (std::size_t i = 0; i < ready.count && !stopping_; ++i) report(ready.fds[i], lock);
    }
    if (!lock.owns_lock()) lock.lock();
    leader_ = nullptr;
  }
  current_pool = pool_before;
  current_worker = worker_before;
  return any;
}

/// Takes one step of a thread's life: runs a job, serves the rings, leads, or sleeps. False ends the thread.
bool Pool::next(Worker& self, std::unique_lock<std::mutex>& lock) {
  self.sources = rings_.all();
  if (jobs_.any_handler_waits()) collect(self, lock);
  if (jobs_.startable(false) != 0) {
    if (self.executor.entered) {
      lock.unlock();
      executor_.leave(self.executor);
      lock.lock();
    }
    if (jobs_.startable(false) != 0) run(self, jobs_.take(false), lock);
    return true;
  }
  if (jobs_.startable(true) != 0 && (self.executor.entered || executor_.begin_entering())) {
    if (!self.executor.entered) {
      lock.unlock();
      begin_polling(self);  // once inside the executor, this thread also polls the rings
      executor_.enter(self.executor);
      lock.lock();
      executor_.end_entering();
    }
    if (jobs_.startable(true) != 0) run(self, jobs_.take(true), lock);
    return true;
  }
  if (!stopping_ && !self.sources->empty()) {
    // serve() releases the lock. A job that came meanwhile has woken no thread if none slept, so check for jobs again.
    if (serve(self, lock) || jobs_without_thread() != 0) return true;
  }
  if (self.executor.entered) {
    lock.unlock();
    if (!keeps_executor(self)) executor_.leave(self.executor);
    lock.lock();
    return true;
  }
  if (stopping_) return false;
  if (leader_ == nullptr || leader_ == &self) {
    if (self.polling) {
      lock.unlock();
      end_polling(self);
      lock.lock();
      return true;  // start over: work may have come meanwhile
    }
    lead(self, lock);
    return true;
  }
  return park(self, lock);
}

/// While handlers wait for their turns, puts one request of each ring among them. Else rings would wait until no
/// handler does.
void Pool::collect(Worker& self, std::unique_lock<std::mutex>& lock) {
  const auto sources = self.sources;
  if (sources->empty()) return;
  lock.unlock();
  for (const auto& source : *sources) {
    if (!source->empty()) source->serve_one();
  }
  lock.lock();
}

/// Takes one request of each ring in turn. False: this thread took none. Returns with the lock held.
bool Pool::serve(Worker& self, std::unique_lock<std::mutex>& lock) {
  const auto sources = self.sources;
  lock.unlock();
  bool any = false;
  const auto first = self.turn++;
  for (std::size_t i = 0; i < sources->size(); ++i) {
    auto& source = *(*sources)[(first + i) % sources->size()];
    if (!source.empty()) any = serve(self, source, lock) || any;
  }
  lock.lock();
  return any;
}

/// Takes one request of one ring, and runs its job. Called, and returns, without the lock.
bool Pool::serve(Worker& self, RequestSource& source, std::unique_lock<std::mutex>& lock) {
  const bool in_executor = executor_.exists() && source.needs_executor();
  if (in_executor && !self.executor.entered) {
    if (!executor_.begin_entering()) return false;
    // Keeps the tick running, which wakes another thread for requests that need no executor.
    jobs_.begin_work();
    kick_();
    begin_polling(self);  // other threads now leave such requests to this one, so it must poll before it runs a job
    executor_.enter(self.executor);
    executor_.end_entering();
    jobs_.end_work();
  } else if (!in_executor && self.executor.entered) {
    executor_.leave(self.executor);
  }
  self.serving = true;
  const bool served = source.serve_one();
  self.serving = false;
  rings_.spin().met(source.peer_cpu());
  if (!self.direct.run) return served;
  auto job = std::exchange(self.direct, {});
  jobs_.begin_work();
  kick_();
  lock.lock();
  run(self, std::move(job), lock);
  lock.unlock();
  begin_polling(self);
  return true;
}

/// Runs a job that has been taken, or puts a handler back that may not start now.
void Pool::run(Worker& self, Job job, std::unique_lock<std::mutex>& lock) {
  if (!jobs_.may_begin(job)) {
    const bool put_back = out_of_memory::with_reserve([&] { jobs_.put(std::move(job)); });
    if (put_back) return;
    jobs_.end_work();
    lock.unlock();
    job = {};  // a Reply in it answers, and may lock the pool
    return lock.lock();
  }
  self.handling = job.handler;
  jobs_.begin(job);
  if (job.takes_long) threads_.block();
  if (job.takes_long && (leader_ == &self || leader_ == nullptr)) resign(self);
  lock.unlock();
  end_polling(self);
  run_or_drop([&] {
    const auto running = std::move(job.run);  // destroyed while std::bad_alloc unwinds: a Reply in it sees that
    running();
    if (forks() != forks_) end_child();
  });
  lock.lock();
  if (job.takes_long) threads_.unblock();
  self.handling = false;
  jobs_.end(job);
}

/// Sleeps until there may be work. False: the thread is to end.
bool Pool::park(Worker& self, std::unique_lock<std::mutex>& lock) {
  if (!threads_.at_minimum(jobs_.running()) && threads_.leave_as_surplus(clock_.now())) return false;
  auto& doorbell = rings_.doorbell();
  const auto ticket = doorbell.ticket();
  self.sources = rings_.all();  // read after the doorbell's ticket: add() wakes this thread for a ring that comes later
  threads_.park();
  lock.unlock();
  begin_polling(self);
  bool woken = rings_.spin().until([&] { return doorbell.rung_since(ticket) || unattended(*self.sources); });
  if (!woken) {
    doorbell.park();
    woken = unattended(*self.sources);
    self.sources = rings_.none();
    woken = woken || doorbell.sleep(ticket, threads_.limits().idle);
    doorbell.unpark();
  }
  lock.lock();
  threads_.unpark();
  return woken || threads_.at_minimum(jobs_.running());
}

/// Takes the lead: sleeps until descriptors are ready, and runs their readers.
void Pool::lead(Worker& self, std::unique_lock<std::mutex>& lock) {
  leader_ = &self;
  self.sources = rings_.none();
  const auto ready = readables_.wait(lock);
  for (std::size_t i = 0; i < ready.count && !stopping_; ++i) report(ready.fds[i], lock);
}

void Pool::report(int fd, std::unique_lock<std::mutex>& lock) {
  const auto* const entry = readables_.find(fd);
  if (entry == nullptr) return;
  auto readable = entry->readable;
  if (entry->watch == Watch::blocking) {
    const bool added = out_of_memory::with_reserve(
        [&] { jobs_.add({.run = [readable] { readable->on_readable(); }, .takes_long = true}); });
    if (!added) readables_.arm(fd);  // it was reported once, and is again
    return;
  }
  lock.unlock();
  run_or_drop([&] { readable->on_readable(); });
  readable.reset();
  lock.lock();
}

/// Spins inside the executor for the next request, if entering the executor took long the last time: other threads of
/// the runtime compute then, and a thread that leaves would be without the executor for milliseconds. True: work has
/// come.
bool Pool::keeps_executor(Worker& self) {
  if (!executor_.is_expensive() || self.sources->empty()) return false;
  begin_polling(self);
  return rings_.spin().until([&] { return unattended(*self.sources) || !jobs_.caught_up(); }, executor_patience);
}

}  // namespace tensorferry
