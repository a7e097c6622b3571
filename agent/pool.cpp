#include "agent/pool.h"

#include <openssl/crypto.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <thread>
#include <utility>

#include "agent/agent.h"
#include "base/log.h"
#include "base/thread_signals.h"

namespace tensorferry {
namespace {

// The pool and worker that the calling thread belongs to.
thread_local Pool* current_pool = nullptr;
thread_local void* current_worker = nullptr;

constexpr std::uint64_t wake_key = ~std::uint64_t{0};
constexpr int most_woken_per_tick = 8;
// Per running handler. If fewer end in a tick of 1 ms, each takes some 60 us or longer, as those that copy to GPUs do.
constexpr std::uint64_t few_in_a_tick = 16;
const int most_added_for_speed = static_cast<int>(std::max(8U, std::thread::hardware_concurrency()));
constexpr int own_threads =
    16;  // threads beyond those for handlers, so that a full pool still reads, dials and completes calls

/// Ends a forked child that has returned from the job in which it was forked: the child has none of the pool's threads
/// and must not use its locks.
[[noreturn]] void end_child() {
  log_warning(
      "a child process returned from the called function that forked it, and was terminated: end the child by "
      "os._exit()");
  ::_exit(EXIT_FAILURE);
}

}  // namespace

Pool::Pool(Limits limits, std::shared_ptr<Executor> executor, std::function<void()> kick)
    : limits_(limits),
      executor_(std::move(executor)),
      kick_(std::move(kick)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;  // the eventfd is never read: each write to it is an edge
  event.data.u64 = wake_key;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
}

Pool::~Pool() = default;

void Pool::start() {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < limits_.least; ++i) wake_one();
}

void Pool::watch(int fd, Watch kind, bool armed, bool fresh) {
  epoll_event event{};
  event.data.u64 = static_cast<std::uint64_t>(fd);
  switch (kind) {
    case Watch::always:
      event.events = armed ? EPOLLIN | EPOLLRDHUP : 0U;
      break;
    case Watch::closing:
      event.events = EPOLLRDHUP | EPOLLET | (armed ? std::uint32_t{EPOLLIN} : 0U);
      break;
    case Watch::blocking:
      event.events = EPOLLONESHOT | (armed ? EPOLLIN | EPOLLRDHUP : 0U);
      break;
  }
  ::epoll_ctl(epoll_.get(), fresh ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void Pool::add(int fd, std::shared_ptr<Readable> readable, Watch kind) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  entries_[fd] = {std::move(readable), kind};
  watch(fd, kind, kind != Watch::closing, true);
}

void Pool::arm(int fd) {
  const std::lock_guard lock(mutex_);
  if (const auto it = entries_.find(fd); it != entries_.end()) watch(fd, it->second.watch, true, false);
}

void Pool::disarm(int fd) {
  const std::lock_guard lock(mutex_);
  if (const auto it = entries_.find(fd); it != entries_.end()) watch(fd, it->second.watch, false, false);
}

void Pool::remove(int fd) {
  std::shared_ptr<Readable> dropped;  // may be the last reference: destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(fd);
  if (it == entries_.end()) return;
  dropped = std::move(it->second.readable);
  entries_.erase(it);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

bool Pool::submit(UniqueFunction<void()> job, bool with_executor) {
  return push({.run = std::move(job), .with_executor = with_executor && executor_ != nullptr}, false);
}

bool Pool::submit_handler(UniqueFunction<void()> job, bool with_executor, const void* sender,
                          std::optional<Clock::time_point> deadline) {
  return push({.run = std::move(job),
               .with_executor = with_executor && executor_ != nullptr,
               .handler = true,
               .sender = sender,
               .deadline = deadline},
              false);
}

bool Pool::submit_long(UniqueFunction<void()> job) { return push({.run = std::move(job), .takes_long = true}, true); }

bool Pool::push(Job job, bool wake) {
  auto* worker = current_pool == this ? static_cast<Worker*>(current_worker) : nullptr;
  const bool serving = worker != nullptr && worker->serving;
  if (serving && !worker->direct.run && !job.takes_long && job.with_executor == worker->entered) {
    worker->direct = std::move(job);  // the thread that took the request runs its job at once
    return true;
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    busy_.fetch_add(1, std::memory_order_seq_cst);
    // The leader runs the jobs that it submits, after it returns from on_readable. A thread that serves a ring does the
    // same. Jobs from other threads need a thread.
    const bool by_leader = worker != nullptr && (serving || worker == leader_);
    const bool taken_care_of = by_leader || (job.with_executor && entering_) ||
                               (job.handler && !place_free());  // the next free place takes it
    put(std::move(job));
    count_waiting();
    if (wake || (!taken_care_of && parked_ > wakes_)) {
      wake_one();
    } else if (!taken_care_of && polling_) {
      const std::uint64_t one = 1;
      (void)!::write(wake_.get(), &one, sizeof one);
    }
  }
  kick_();
  return true;
}

void Pool::about_to_block() {
  if (current_pool != this) return;
  const std::lock_guard lock(mutex_);
  auto& self = *static_cast<Worker*>(current_worker);
  if (++self.waits == 1) {
    ++blocked_;
    if (self.handling) --handlers_;
    count_waiting();
  }
  if (leader_ == &self)
    resign(self);
  else if (jobs_without_thread() != 0)
    wake_one();
}

void Pool::unblocked() {
  if (current_pool != this) return;
  auto& self = *static_cast<Worker*>(current_worker);
  if (--self.waits != 0) return;
  const std::lock_guard lock(mutex_);
  --blocked_;
  if (self.handling) ++handlers_;
  count_waiting();
}

Pool* Pool::current() noexcept {
  return current_pool != nullptr && current_pool->forks_ == forks() ? current_pool : nullptr;
}

void Pool::put(Job job) {
  auto& queue = job.with_executor ? in_executor_ : plain_;
  if (!job.handler) return queue.jobs.push_back(std::move(job));
  const auto* sender = job.sender;
  queue.handlers.push(sender, std::move(job));
}

/// Returns how many of the queue's jobs may start now.
std::size_t Pool::startable(const Queue& queue) const {
  const auto places = static_cast<std::size_t>(std::max(0, limits_.most - handlers_));
  return queue.jobs.size() + std::min(places, queue.handlers.ready());
}

void Pool::pause(const void* sender) {
  const std::lock_guard lock(mutex_);
  for (auto* queue : {&plain_, &in_executor_}) queue->handlers.pause(sender);
  count_waiting();
}

void Pool::resume(const void* sender) {
  const std::lock_guard lock(mutex_);
  for (auto* queue : {&plain_, &in_executor_}) queue->handlers.resume(sender);
  count_waiting();
  if (jobs_without_thread() != 0) wake_one();
}

void Pool::start_waiting(const void* sender) {
  const std::lock_guard lock(mutex_);
  start_if([sender](const void* of, const Job&) { return of == sender; });
}

/// Makes waiting handlers jobs that need no place. Under mutex_.
template <class Wanted>
void Pool::start_if(const Wanted& wanted) {
  for (auto* queue : {&plain_, &in_executor_}) {
    for (auto& job : queue->handlers.take_if(wanted)) {
      job.handler = false;
      queue->jobs.push_back(std::move(job));
    }
  }
  count_waiting();
  if (jobs_without_thread() != 0) wake_one();
}

/// Looks ten times a second whether waiting handlers have expired. Under mutex_.
void Pool::start_expired() {
  if (plain_.handlers.empty() && in_executor_.handlers.empty()) return;
  const auto now = Clock::now();
  if (now - looked_for_expired_ < std::chrono::milliseconds(100)) return;
  looked_for_expired_ = now;
  start_if([now](const void*, const Job& job) { return job.deadline && *job.deadline <= now; });
}

void Pool::count_waiting() { waiting_.store(startable(plain_) + startable(in_executor_), std::memory_order_relaxed); }

/// Returns the number of jobs that may start and that no thread is on its way to take. While a thread enters the
/// executor, jobs that need the executor do not count.
std::size_t Pool::jobs_without_thread() const { return startable(plain_) + (entering_ ? 0 : startable(in_executor_)); }

void Pool::add(std::shared_ptr<RequestSource> source) {
  const std::lock_guard lock(mutex_);
  auto sources = std::make_shared<Sources>(*sources_);
  sources->push_back(std::move(source));
  sources_ = std::move(sources);
  wake_one();  // requests may be there already
}

void Pool::remove(const RequestSource* source) {
  std::shared_ptr<const Sources> dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  auto sources = std::make_shared<Sources>(*sources_);
  std::erase_if(*sources, [&](const auto& one) { return one.get() == source; });
  dropped = std::exchange(sources_, std::move(sources));
}

std::shared_ptr<const Pool::Sources> Pool::sources() const {
  const std::lock_guard lock(mutex_);
  return sources_;
}

bool Pool::unattended(const Sources& sources) const {
  return std::any_of(sources.begin(), sources.end(), [this](const auto& source) {
    return !source->empty() && !(executor_ && entering_ && source->needs_executor());
  });
}

void Pool::begin_polling(Worker& self) {
  if (!std::exchange(self.polling, true)) doorbell_->begin_polling();
}

/// Called before the thread sleeps or runs a job. A request that came while this thread counted as polling is seen by
/// this last poll, or by another polling thread.
void Pool::end_polling(Worker& self) {
  if (!std::exchange(self.polling, false)) return;
  doorbell_->end_polling();
  if (unattended(*self.sources)) doorbell_->ring();
}

Pool::Load Pool::load() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<std::uint32_t>(handlers_), static_cast<std::uint32_t>(limits_.most),
          static_cast<std::uint32_t>(plain_.handlers.size() + in_executor_.handlers.size())};
}

int Pool::threads() const {
  const std::lock_guard lock(mutex_);
  return threads_;
}

bool Pool::on_pool_thread() const noexcept { return current_pool == this; }

/// Returns whether requests or jobs wait, at this tick and the one before, for handlers that take longer than waking a
/// thread does. Such handlers probably sleep or wait for a GPU, so another thread could run the waiting work. One tick
/// alone says little.
bool Pool::short_of_threads(std::uint64_t finished) {
  const bool few = parked_ == 0 && starting_ == 0 && threads_ < limits_.least + most_added_for_speed;
  const bool slow = few && finished < few_in_a_tick * static_cast<std::uint64_t>(handlers_) &&
                    (jobs_without_thread() != 0 || unattended(*sources_));
  return std::exchange(was_slow_, slow) && slow;
}

void Pool::tick() {
  const std::lock_guard lock(mutex_);
  const auto finished = finished_ - std::exchange(finished_at_tick_, finished_);
  if (stopping_) return;
  start_expired();
  const bool more = short_of_threads(finished);
  if (finished != 0) return more ? wake_one() : void();
  // No job has ended for a tick, so every running job takes longer: other threads must read and take the waiting work.
  if (leader_ != nullptr && !polling_) leader_ = nullptr;
  auto needed = std::min<std::size_t>(jobs_without_thread() + (unattended(*sources_) ? 1 : 0), most_woken_per_tick);
  if (leader_ == nullptr) needed = std::max<std::size_t>(needed, 1);
  // Woken and starting threads count: on a busy machine a thread may take many ticks to run.
  for (auto coming = wakes_ + starting_; coming < static_cast<int>(needed); ++coming) wake_one();
}

void Pool::stop(std::chrono::milliseconds patience) {
  std::unordered_map<int, Entry> entries;
  std::unique_lock lock(mutex_);
  if (!stopping_) {
    // All existing threads may be stuck in handlers, and the jobs that were taken must still run.
    const auto left = std::min<std::size_t>(jobs_without_thread(), most_woken_per_tick);
    for (std::size_t i = 0; i < left; ++i) wake_one();
  }
  stopping_ = true;
  entries.swap(entries_);
  doorbell_->wake_all();
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  const int mine = on_pool_thread() ? 1 : 0;
  ended_.wait_for(lock, patience, [&] { return threads_ <= mine; });
  lock.unlock();
}

/// Wakes a parked thread, or starts a new one. Under mutex_.
void Pool::wake_one() {
  if (stopping_) return;
  if (parked_ > wakes_) {
    ++wakes_;
    doorbell_->wake();
    return;
  }
  if (threads_ >= limits_.most + own_threads + blocked_) return;
  ++threads_;
  ++starting_;
  try {
    std::thread([pool = shared_from_this()] { pool->main(); }).detach();
  } catch (const std::system_error&) {
    --threads_;  // the system gives no thread: a running thread takes the work later
    --starting_;
  }
}

void Pool::resign(Worker& self) {
  if (leader_ == &self) leader_ = nullptr;
  wake_one();
}

void Pool::main() {
  block_signals_of_others();
  ::pthread_setname_np(::pthread_self(), "tf-pool");
  Worker self;
  current_pool = this;
  current_worker = &self;
  std::unique_lock lock(mutex_);
  --starting_;
  while (next(self, lock)) {
  }
  if (leader_ == &self) leader_ = nullptr;
  ++ending_;
  lock.unlock();
  end_polling(self);
  if (unattended(*sources())) doorbell_->ring();  // a ring may have been added since this thread last polled
  leave(self);
  if (self.attached) executor_->detach(self.runtime);
  current_pool = nullptr;
  // Frees OpenSSL's memory of this thread now, while stop() still waits for it: nothing joins a detached thread.
  ::OPENSSL_thread_stop();
  lock.lock();
  --threads_;
  --ending_;
  if (stopping_ && threads_ == 0) {
    epoll_.reset();
    wake_.reset();
  }
  ended_.notify_all();
}

/// Takes one step of a thread's life: runs a job, serves the rings, leads, or sleeps. False ends the thread.
bool Pool::next(Worker& self, std::unique_lock<std::mutex>& lock) {
  self.sources = sources_;
  if (plain_.handlers.ready() + in_executor_.handlers.ready() != 0) collect(self, lock);
  if (startable(plain_) != 0) {
    if (self.entered) {
      lock.unlock();
      leave(self);
      lock.lock();
    }
    if (startable(plain_) != 0) run(self, plain_, lock);
    return true;
  }
  if (startable(in_executor_) != 0 && (self.entered || !entering_.exchange(true))) {
    if (!self.entered) {
      // Enters the executor before it takes the job: a handler that releases the executor then hands over by itself,
      // and a thread that is stuck here has taken no job that another thread could run.
      lock.unlock();
      begin_polling(self);  // once inside the executor, this thread also polls the rings
      enter(self);
      lock.lock();
      entering_ = false;
    }
    if (startable(in_executor_) != 0) run(self, in_executor_, lock);
    return true;
  }
  if (!stopping_ && !self.sources->empty()) {
    // serve() releases the lock. A job that came meanwhile has woken no thread if none slept, so check for jobs again.
    if (serve(self, lock) || jobs_without_thread() != 0) return true;
  }
  if (self.entered) {
    lock.unlock();
    if (!keeps_executor(self)) leave(self);
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
    leader_ = &self;
    self.sources = no_sources_;
    poll(lock);
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
  const bool in_executor = executor_ && source.needs_executor();
  if (in_executor && !self.entered) {
    // Enters the executor before it takes the request, for the same reasons as in next().
    if (entering_.exchange(true)) return false;
    // Keeps the tick running, which wakes another thread for requests that need no executor.
    busy_.fetch_add(1, std::memory_order_seq_cst);
    kick_();
    begin_polling(self);  // other threads now leave such requests to this one, so it must poll before it runs a job
    enter(self);
    entering_ = false;
    busy_.fetch_sub(1, std::memory_order_seq_cst);
  } else if (!in_executor && self.entered) {
    leave(self);
  }
  self.serving = true;
  const bool served = source.serve_one();
  self.serving = false;
  spin_.met(source.peer_cpu());
  if (!self.direct.run) return served;
  auto job = std::exchange(self.direct, {});
  busy_.fetch_add(1, std::memory_order_seq_cst);
  kick_();
  lock.lock();
  run(self, std::move(job), lock);
  lock.unlock();
  begin_polling(self);
  return true;
}

/// Runs a job of the queue, which has one that may start.
void Pool::run(Worker& self, Queue& queue, std::unique_lock<std::mutex>& lock) {
  if (queue.jobs.empty()) return run(self, queue.handlers.pop(), lock);
  auto job = std::move(queue.jobs.front());
  queue.jobs.pop_front();
  run(self, std::move(job), lock);
}

void Pool::run(Worker& self, Job job, std::unique_lock<std::mutex>& lock) {
  if (job.handler && (!place_free() || in_executor_.handlers.paused(job.sender))) return put(std::move(job));
  self.handling = job.handler;
  if (job.handler) ++handlers_;
  if (job.takes_long) ++blocked_;
  count_waiting();
  if (job.takes_long && (leader_ == &self || leader_ == nullptr)) resign(self);
  lock.unlock();
  end_polling(self);
  job.run();
  if (forks() != forks_) end_child();
  job.run = nullptr;
  lock.lock();
  ++finished_;
  busy_.fetch_sub(1, std::memory_order_seq_cst);
  if (job.takes_long) --blocked_;
  if (!std::exchange(self.handling, false)) return;
  --handlers_;
  count_waiting();
}

/// Returns whether this thread is to end, and takes it off `surplus_` then. The time that one thread has slept does not
/// tell: sleepers are woken in turn, so under a trickle of work none of them is idle for long.
bool Pool::leave_as_surplus() {
  if (threads_ - ending_ <= limits_.least) return false;
  if (const auto now = Clock::now(); now - spare_since_ >= limits_.idle) {
    surplus_ = std::exchange(spare_, parked_);
    spare_since_ = now;
  }
  surplus_ = std::min(surplus_, spare_);
  if (surplus_ == 0) return false;
  --surplus_;
  return true;
}

bool Pool::park(Worker& self, std::unique_lock<std::mutex>& lock) {
  if (leave_as_surplus()) return false;
  const auto ticket = doorbell_->ticket();
  self.sources = sources_;  // read after the doorbell's ticket: add() wakes this thread for a ring that comes later
  ++parked_;
  lock.unlock();
  begin_polling(self);
  bool woken = spin_.until([&] { return doorbell_->rung_since(ticket) || unattended(*self.sources); });
  if (!woken) {
    doorbell_->park();
    woken = unattended(*self.sources);
    self.sources = no_sources_;
    woken = woken || doorbell_->sleep(ticket, limits_.idle);
    doorbell_->unpark();
  }
  lock.lock();
  spare_ = std::min(spare_, --parked_);
  if (wakes_ > 0) --wakes_;
  return woken || threads_ - ending_ <= limits_.least;
}

void Pool::poll(std::unique_lock<std::mutex>& lock) {
  polling_ = true;
  lock.unlock();
  std::array<epoll_event, 16> events{};
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
  lock.lock();
  polling_ = false;
  for (int i = 0; i < count && !stopping_; ++i) {
    if (events[static_cast<std::size_t>(i)].data.u64 != wake_key)
      report(events[static_cast<std::size_t>(i)].data.u64, lock);
  }
}

void Pool::report(std::uint64_t key, std::unique_lock<std::mutex>& lock) {
  const auto it = entries_.find(static_cast<int>(key));
  if (it == entries_.end()) return;
  auto readable = it->second.readable;
  if (it->second.watch == Watch::blocking) {
    busy_.fetch_add(1, std::memory_order_seq_cst);
    put({.run = [readable = std::move(readable)] { readable->on_readable(); }, .takes_long = true});
    count_waiting();
    return;
  }
  lock.unlock();
  readable->on_readable();
  readable.reset();
  lock.lock();
}

void Pool::enter(Worker& self) {
  if (!self.attached) {
    self.runtime = executor_->attach();
    self.attached = true;
  }
  const auto begin = Clock::now();
  executor_->enter(self.runtime);
  executor_is_dear_.store(Clock::now() - begin > executor_is_dear_from, std::memory_order_relaxed);
  self.entered = true;
}

/// Spins inside the executor for the next request, if entering the executor took long the last time: other threads of
/// the runtime compute then, and a thread that leaves would be without the executor for milliseconds. True: work has
/// come.
bool Pool::keeps_executor(Worker& self) {
  if (!executor_is_dear_.load(std::memory_order_relaxed) || self.sources->empty()) return false;
  begin_polling(self);
  return spin_.until([&] { return unattended(*self.sources) || waiting_.load(std::memory_order_relaxed) != 0; },
                     executor_patience);
}

void Pool::leave(Worker& self) {
  if (!std::exchange(self.entered, false)) return;
  executor_->leave(self.runtime);
}

}  // namespace tensorferry
